"""Real jobs of real processes on this machine, whose workers run tasks of `worker`."""

import json
import os
import sys
from pathlib import Path

import numpy as np
from jobs import DEADLINE, GLUON_SVRG, end, finish, run, start

WORKER = Path(__file__).with_name("worker.py")


def run_cluster(folder, task, workers=2, servers=1, **settings):
    """Run a task on a cluster of MXNet's parameter servers; what each worker has found."""
    words = [sys.executable, WORKER, folder, json.dumps({"": [task, settings]})]
    status, output = launch(["-n", workers, "-s", servers, "--", *words])
    assert status == 0, output
    return found_by(folder, workers)


def run_tasks(folder, kvstore, tasks, workers=2):
    """Run tasks in workers without servers; by the name of each, what each worker has found.

    The kvstore is 'sharedfolder' or 'horovod'; tasks have settings.
    """
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


def launch(arguments):
    """Run `gluon-svrg launch` until a deadline; its exit status and its output."""
    return run([*GLUON_SVRG, "launch", *arguments])


def assert_identical(found):
    """All ranks end with the same bits."""
    for other in found[1:]:
        for name in found[0].keys() - {"evaluations", "message", "given"}:
            np.testing.assert_array_equal(found[0][name], other[name], err_msg=name)


def assert_close(found, expected, tolerance):
    assert set(found) == set(expected)
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], atol=tolerance, err_msg=name)
