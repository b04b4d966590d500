"""Real jobs of real processes: tests start, disturb and end them, and read what they found."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import gluon_svrg

PACKAGE = Path(gluon_svrg.__file__).parents[1]  # the code under test, installed or not
DEADLINE = int(os.environ.get("GLUON_SVRG_TEST_DEADLINE", 180))  # seconds for a job
WORKER = Path(__file__).with_name("worker.py")  # runs tasks
GLUON_SVRG = [sys.executable, "-m", "gluon_svrg"]


def start(command, folder=None, **variables):
    """Start a command in a process group of its own; its output goes to a pipe."""
    common = {
        "PYTHONPATH": os.pathsep.join(map(str, [PACKAGE, Path(__file__).parent])),
        "PYTHONWARNINGS": "ignore",  # MXNet's own, at import
        "MXNET_STORAGE_FALLBACK_LOG_VERBOSE": "0",
    }
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    env, words = {**os.environ, **common, **variables}, [*map(str, command)]
    return subprocess.Popen(words, cwd=folder, env=env, text=True, start_new_session=True, **pipes)


def finish(process, deadline=DEADLINE):
    """Wait for a command; return its output."""
    try:
        return process.communicate(timeout=deadline)[0]
    except subprocess.TimeoutExpired:
        raise AssertionError(f"not done within {deadline} s:\n{end(process)}") from None
    finally:
        end(process)


def run(command, folder=None, deadline=DEADLINE, **variables):
    """Run a command until a deadline; its exit status and its output."""
    process = start(command, folder, **variables)
    output = finish(process, deadline)
    return process.returncode, output


def end(process):
    """Kill a command, and all processes of its job, unless it has ended; return its output."""
    if process.poll() is not None:
        return ""
    os.killpg(process.pid, signal.SIGKILL)
    kill_all(os.environ.get("MARKER", "none"))
    return process.communicate(timeout=30)[0]


def kill_all(marker):
    """Kill the processes that have a marker, but for this one."""
    for left in {*processes_of(marker)} - {os.getpid()}:
        with suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)


def wait_for(path, process, deadline=DEADLINE):
    end = time.monotonic() + deadline
    while True:
        has_ended = process.poll() is not None  # before the look: what it wrote last is there
        if path.exists():
            return
        assert not has_ended, process.communicate()[0]
        assert time.monotonic() < end, "the job does not get there"
        time.sleep(0.02)


def variables_of(process):
    try:
        items = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(item.split("=", 1) for item in items if "=" in item)


def processes_of(marker):
    """Processes, by id, that have a marker in their variables, on all machines of a test."""
    ids = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
    return [process for process in ids if variables_of(process).get("MARKER") == marker]


def assert_nothing_left(marker, seconds=5):
    """List processes; those of the job must be gone."""
    deadline = time.monotonic() + seconds
    while processes_of(marker) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = processes_of(marker)
    assert left == [], [Path(f"/proc/{p}/cmdline").read_bytes() for p in left]


def words_of(folder, task, /, **settings):
    """The command of a worker with one task."""
    return [sys.executable, WORKER, folder, json.dumps({"": [task, settings]})]


def run_cluster(folder, task, workers=2, servers=1, **settings):
    """Run a task on a cluster of MXNet's parameter servers; what each worker has found."""
    words = words_of(folder, task, **settings)
    status, output = run([*GLUON_SVRG, "launch", "-n", workers, "-s", servers, "--", *words])
    assert status == 0, output
    return found_by(folder, workers)


def run_tasks(folder, kvstore, tasks, workers=2):
    """Run tasks in workers of 'sharedfolder' or 'horovod'; what each has found, by their names."""
    own = {name: [task, {"kvstore": kvstore, **more}] for name, (task, more) in tasks.items()}
    command = [sys.executable, WORKER, folder, json.dumps(own)]
    if kvstore == "horovod":
        processes = [start_horovod(workers, command)]
    else:
        common = {"TOY_FOLDER": str(folder), "TOY_SIZE": str(workers)}
        processes = [start(command, TOY_RANK=str(rank), **common) for rank in range(workers)]
    try:
        outputs = [finish(process, 5 * DEADLINE) for process in processes]
    finally:
        for process in processes:
            end(process)
    assert not any(process.returncode for process in processes), "\n".join(outputs)
    return {name: found_by(Path(folder) / name, workers) for name in tasks}


def start_horovod(workers, command, folder=None, **variables):
    beside = Path(sys.executable).parent  # horovodrun calls programs beside it by name
    variables["PATH"] = os.pathsep.join([str(beside), os.environ["PATH"]])
    words = ["horovodrun", "--gloo", "--network-interface", "lo", "-np", workers]
    return start([beside / words[0], *words[1:], *command], folder, **variables)


def found_by(folder, workers):
    """What each worker has written, in the order of ranks."""
    found = []
    for rank in range(workers):
        with np.load(Path(folder) / f"{rank}.npz") as file:
            found.append({name: file[name] for name in file.files})
    return found


def contained(*options):
    """Words before a command that make it the first process of a container; or a skip."""
    words = ["unshare", *options, "--pid", "--fork", "--kill-child", "--mount-proc"]
    words += [] if os.geteuid() == 0 else ["--map-root-user"]
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a container needs Linux, and root or user namespaces")
    return words


def assert_identical(found):
    for other in found[1:]:
        for name in found[0].keys() - {"evaluations", "message", "given"}:
            np.testing.assert_array_equal(found[0][name], other[name], err_msg=name)


def assert_close(found, expected, tolerance):
    assert set(found) == set(expected)
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], atol=tolerance, err_msg=name)
