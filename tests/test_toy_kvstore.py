"""A user's kvstore, in this file alone: processes that exchange the files of a folder.

They are real processes, and must find what one process finds over the union of their data. Nothing
in the package knows this kvstore: it says what it can do, and the trainers ask no more.
"""

import json
import os
import signal
import sys
import time
from itertools import count
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
import test_prox
import test_recursive
import test_saga
import worker
from cluster import found_by
from jobs import finish, start
from plays import HOWS, WITH_STORED
from problems import contexts, distance
from union import EVALUATIONS, assert_close, assert_identical, reference, tied_alone, weights

from gluon_svrg import SAGATrainer, SVRGTrainer

FOLDER, RANK, SIZE = "TOY_FOLDER", "TOY_RANK", "TOY_SIZE"
RATES = (0.1, 0.05, 0.2)

TASKS = {
    "sgd": ("trajectory", {"rates": RATES}),
    "two devices": ("trajectory", {"devices": 2, "rates": RATES}),
    "first step apart": ("start_up", {"seed": 5}),
    "closure fails": ("failing", {"where": "closure"}),
    "data fail first": ("failing", {"where": "data", "first": True}),
    "tied": ("tied", {}),
    "two trainers": ("two_trainers", {}),
    "proximal": ("worker_methods.proximal", {"strength": 0.3}),
    "SAGATrainer": ("worker_methods.tables", {"cls": "SAGATrainer", "refresh": True}),
    **{
        name: ("worker_recursive.recursive", {"trainer": cls.__name__, "own": own})
        for name, (cls, _, own) in test_recursive.METHODS.items()
    },
    **{
        f"{name}, {how}": ("worker_methods.method", {"name": name, "how": how})
        for name in WITH_STORED
        for how in HOWS
    },
}


@mx.kvstore.KVStoreBase.register
class SharedFolder(mx.kvstore.KVStoreBase):
    """Each exchange is a file of each process, which all others wait for."""

    type = "sharedfolder"
    rank = property(lambda self: int(os.environ[RANK]))
    num_workers = property(lambda self: int(os.environ[SIZE]))
    numbers = count()  # of the kvstores in a process, in the same order in all

    def __init__(self):
        self._prefix = Path(os.environ[FOLDER]) / f"kvstore{next(self.numbers)}"
        self._exchanges = count()
        self._shapes = {}

    @staticmethod
    def is_capable(capability):
        return False

    def broadcast(self, key, value, out, priority=0):
        assign(out, self._exchange(key, as_list(value)[0].asnumpy())[0])

    def pushpull(self, key, value, out=None, priority=0):
        own = sum(array.asnumpy() for array in as_list(value))
        assign(value if out is None else out, sum(self._exchange(key, own)))

    def _exchange(self, key, array, deadline=60):
        """The arrays of all processes, in the order of their ranks."""
        assert self._shapes.setdefault(key, array.shape) == array.shape
        number = next(self._exchanges)
        place = f"{self._prefix}.{number}"
        np.save(f"{place}.new{self.rank}.npy", array)
        os.rename(f"{place}.new{self.rank}.npy", f"{place}.{self.rank}.npy")
        end = time.monotonic() + deadline
        files = [Path(f"{place}.{rank}.npy") for rank in range(self.num_workers)]
        while not all(file.exists() for file in files):
            assert time.monotonic() < end, f"some of {files} are missing after {deadline} s"
            time.sleep(0.0005)
        found = [np.load(file) for file in files]
        if number:  # all have read it: they have begun this exchange
            Path(f"{self._prefix}.{number - 1}.{self.rank}.npy").unlink()
        return found


def as_list(value):
    return value if isinstance(value, (list, tuple)) else [value]


def assign(arrays, value):
    for array in as_list(arrays):
        array[:] = value


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes find, by task."""
    folder = tmp_path_factory.mktemp("two")
    tasks = {
        name: (task, {"kvstore": "sharedfolder", **own}) for name, (task, own) in TASKS.items()
    }
    command = [sys.executable, "-W", "ignore", __file__, "many", folder, json.dumps(tasks)]
    variables = [{FOLDER: str(folder), RANK: str(rank), SIZE: "2"} for rank in range(2)]
    processes = [start(command, **each) for each in variables]
    try:
        for process in processes:
            output = finish(process)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return {name: found_by(folder / name, 2) for name in TASKS}


@pytest.mark.parametrize("name", ["sgd", "two devices"])
def test_two_workers_are_one_process_over_the_union_of_the_data(name, two):
    found, expected = two[name], reference(rates=RATES)
    assert_identical(found)
    assert distance(weights(found[0]), expected.weights) < 1e-12
    assert distance(weights(found[0], "mu"), expected.full_grad) < 1e-12
    assert sum(int(f["evaluations"]) for f in found) == EVALUATIONS


@pytest.mark.parametrize("name", test_recursive.METHODS)
def test_recursive_methods(name, two):
    tolerance = 1e-8 if "MARS" in name else 1e-12  # MXNet 2.0 is as far off in one process
    test_recursive.check_workers(two[name], test_recursive.METHODS[name], tolerance, tolerance)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", WITH_STORED)
def test_each_method_in_each_way(name, how, two):
    """By `step`, in halves, and with micro-batches: V and C are those of all workers."""
    found = two[f"{name}, {how}"]
    assert_identical(found)
    assert found[0]["distances"].max() < 1e-10


def test_tables_and_proximal_operators(two):
    test_saga.check_workers(two["SAGATrainer"], SAGATrainer, True, 1e-12)
    test_prox.check_workers(two["proximal"], 1e-12)


def test_workers_that_start_apart(two):
    assert_identical(two["first step apart"])


@pytest.mark.parametrize("name", ["closure fails", "data fail first"])
def test_a_worker_that_fails_in_the_full_gradient(name, two):
    assert [str(f["message"])[:12] for f in two[name]] == ["RuntimeError", "KeyError: 'm"]
    assert "Another worker has failed" in str(two[name][0]["message"])
    assert all(f["unchanged"] for f in two[name])


def test_shared_parameters_and_two_trainers(two):
    assert_close(two["tied"][0], tied_alone(), 1e-12)
    found = two["two trainers"][0]
    for i in range(len(worker.PROBLEM.initial)):
        np.testing.assert_array_equal(found[f"w{i}"], found[f"v{i}"])


@pytest.mark.parametrize("devices", [1, 2])
def test_it_cannot_update(devices, monkeypatch, tmp_path):
    for name, value in [(FOLDER, str(tmp_path)), (RANK, "0"), (SIZE, "2")]:
        monkeypatch.setenv(name, value)
    net = worker.PROBLEM.network("float64", contexts(devices))
    with pytest.raises(ValueError, match="update_on_kvstore=True with kvstore='sharedfolder'"):
        SVRGTrainer(net.collect_params(), "sgd", kvstore="sharedfolder", update_on_kvstore=True)


if __name__ == "__main__":
    worker.main(vars(worker))
