"""Real clusters of real processes on this machine, started by `gluon-svrg launch`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

import gluon_svrg

PACKAGE = Path(gluon_svrg.__file__).parents[1]  # the code under test, installed or not
WORKER = Path(__file__).with_name("worker.py")


def run_cluster(folder, task, workers=2, servers=1, deadline=120, worker="worker.py", **settings):
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
    found = []
    for rank in range(workers):
        with np.load(folder / f"{rank}.npz") as file:
            found.append({name: file[name] for name in file.files})
    return found


def launch(arguments, deadline=120, wait=True):
    """Run `gluon-svrg launch`, in a process group of its own, until a deadline."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [PACKAGE, WORKER.parent])),
        "PYTHONWARNINGS": "ignore",  # MXNet's own, at import
        "MXNET_STORAGE_FALLBACK_LOG_VERBOSE": "0",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "gluon_svrg", "launch", *map(str, arguments)],
        env=environment,
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
