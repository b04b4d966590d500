"""Real clusters of real processes on this machine, started by `gluon-svrg launch`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
from jobs import PACKAGE, environment  # noqa: F401

WORKER = Path(__file__).with_name("worker.py")
DEADLINE = int(os.environ.get("GLUON_SVRG_TEST_DEADLINE", 120))  # seconds for a cluster


def run_cluster(
    folder, task, workers=2, servers=1, deadline=DEADLINE, worker="worker.py", **settings
):
    """Run a task of `worker.py`, or of a file beside it, on a cluster.

    Returns
    -------
    list of dict
        What each worker has found, in the order of MXNet's ranks.
    """
    folder = Path(folder)
    command = [
        sys.executable,
        str(WORKER.with_name(worker)),
        task,
        str(folder),
        json.dumps(settings),
    ]
    status, output = launch(["-n", workers, "-s", servers, "--", *command], deadline)
    assert status == 0, output
    return found_by(folder, workers)


def found_by(folder, workers):
    """What each worker has written, in the order of ranks."""
    found = []
    for rank in range(workers):
        with np.load(folder / f"{rank}.npz") as file:
            found.append({name: file[name] for name in file.files})
    return found


def run_horovod(folder, tasks, workers=2, deadline=240):
    """Run tasks of `worker.py`, one after the other, on workers that `horovodrun` starts.

    Parameters
    ----------
    tasks : dict of tuple
        By a name, the task and its settings.

    Returns
    -------
    dict of list of dict
        By the name of the task, what each worker has found, in the order of ranks.
    """
    tasks = {
        name: (task, {"kvstore": "horovod", **settings}) for name, (task, settings) in tasks.items()
    }
    status, output = horovodrun(workers, [WORKER, "many", folder, json.dumps(tasks)], deadline)
    assert status == 0, output
    return {name: found_by(Path(folder) / name, workers) for name in tasks}


def horovodrun(workers, arguments, deadline=120):
    """Start Horovod's workers; the exit status, and what they print."""
    launcher = Path(sys.executable).with_name("horovodrun")  # it calls programs beside it by name
    path = {"PATH": os.pathsep.join([str(launcher.parent), os.environ["PATH"]])}
    start = [launcher, "--gloo", "--network-interface", "lo", "-np", workers, sys.executable]
    return run([*start, *arguments], deadline, path)


def launch(arguments, deadline=DEADLINE, wait=True):
    """Run `gluon-svrg launch`, in a process group of its own, until a deadline."""
    return run([sys.executable, "-m", "gluon_svrg", "launch", *arguments], deadline, wait=wait)


def run(command, deadline, variables=(), wait=True):
    """Run a program in a process group of its own, until a deadline."""
    process = subprocess.Popen(
        list(map(str, command)),
        env={**os.environ, **environment(), **dict(variables)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    if not wait:
        return process
    try:
        output, _ = process.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # it ends all that it has started
        output, _ = process.communicate(timeout=30)
        raise AssertionError(f"not done within {deadline} s:\n{output}") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output
