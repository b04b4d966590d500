"""Workers of Horovod: real processes, against one process over the union of the data."""

import importlib.util
import json
import os
import subprocess
import sys

import mxnet as mx
import numpy as np
import oracle
import pytest
import test_barzilai_borwein
import test_prox
import test_recursive
import test_saga
from cluster import PACKAGE, WORKER, horovodrun, run_horovod
from mxnet import gluon
from problems import distance
from union import (
    COUNT,
    EVALUATIONS,
    assert_close,
    assert_identical,
    reference,
    run_alone,
    tied_alone,
    weights,
)
from worker import PROBLEM, minibatches

from gluon_svrg import SVRGTrainer

HAS_HOROVOD = importlib.util.find_spec("horovod") is not None
needs_horovod = pytest.mark.skipif(
    not HAS_HOROVOD, reason="Horovod is not installed: .ci/horovod builds it"
)
#: All in one job, for a start takes longer than most of them.
TASKS = {
    "sgd": ("trajectory", {"rates": (0.1, 0.05, 0.2)}),
    "two devices": ("trajectory", {"devices": 2}),
    "adam": ("trajectory", {"optimizer": "adam"}),
    "apart": ("trajectory", {"seed": 5, "epochs": 1}),
    "first step apart": ("start_up", {"seed": 5}),
    "MXNet's own": ("trajectory", {"kvstore": "MXNet's own horovod", "epochs": 2}),
    "closure fails": ("failing", {"where": "closure"}),
    "data fail": ("failing", {"where": "data"}),
    "closure fails first": ("failing", {"where": "closure", "first": True}),
    "data fail first": ("failing", {"where": "data", "first": True}),
    "tied": ("tied", {}),
    "tied, two devices": ("tied", {"devices": 2}),
    "convolutions": ("convolutions", {}),
    "deferred": ("convolutions", {"deferred": True, "evaluate": True}),
    "scaled": ("scaled", {}),
    "overflow": ("scaled", {"overflow": 6}),
    "two trainers": ("two_trainers", {}),
    "Barzilai-Borwein": ("trajectory", {"barzilai_borwein": True}),
    "proximal": ("worker_methods.proximal", {"strength": 0.3}),
    **{
        name: ("worker_recursive.recursive", {"trainer": cls.__name__, "own": own})
        for name, (cls, _, own) in test_recursive.METHODS.items()
    },
    **{
        cls.__name__: ("worker_methods.tables", {"cls": cls.__name__, "refresh": True})
        for cls in test_saga.TRAINERS
    },
}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two workers find, by task."""
    return run_horovod(tmp_path_factory.mktemp("two"), TASKS)


@needs_horovod
@pytest.mark.parametrize("name", TASKS)
def test_all_ranks_are_identical(name, two):
    own = ("message", "share0", "share1", "share2", "share3")
    common = [{k: v for k, v in found.items() if k not in own} for found in two[name]]
    assert_identical(common)
    assert all(np.isfinite(value).all() for value in common[0].values())


def check_trajectory(found, rates=()):
    """The union of all workers' data in one process, in NumPy."""
    expected = reference(rates=rates)
    assert distance(weights(found[0]), expected.weights) < 1e-12
    assert distance(weights(found[0], "mu"), expected.full_grad) < 1e-12
    evaluations = sum(int(f["evaluations"]) for f in found)
    assert evaluations == EVALUATIONS
    count = len(found)
    shares = [sum(map(len, minibatches(r, count, True)[0])) for r in range(count)]
    assert len(set(shares)) > 1


@needs_horovod
def test_two_workers_are_one_process_over_the_union_of_the_data(two):
    check_trajectory(two["sgd"], rates=(0.1, 0.05, 0.2))
    check_trajectory(two["two devices"])


@needs_horovod
def test_three_workers_are_one_process_over_the_union_of_the_data(tmp_path):
    found = run_horovod(tmp_path, {"sgd": TASKS["sgd"]}, workers=3)["sgd"]
    assert_identical(found)
    check_trajectory(found, rates=(0.1, 0.05, 0.2))


@needs_horovod
def test_adam(two):
    assert distance(weights(two["adam"][0]), run_alone("adam")) < 1e-6


@needs_horovod
def test_every_method_is_one_process_over_the_union_of_the_data(two):
    for name, method in test_recursive.METHODS.items():
        tolerance = 1e-8 if "MARS" in name else 1e-12  # MXNet 2.0 is as far off in one process
        test_recursive.check_workers(two[name], method, tolerance, tolerance)
    for cls in test_saga.TRAINERS:
        test_saga.check_workers(two[cls.__name__], cls, True, 1e-12)
    test_prox.check_workers(two["proximal"], 1e-12)
    test_barzilai_borwein.check_workers(two["Barzilai-Borwein"], 1e-7)  # rates are float32


@needs_horovod
def test_workers_that_start_apart_share_one_snapshot(two):
    found = two["apart"][0]
    svrg = oracle.SVRG(PROBLEM.gradient, weights(found, "there"))
    svrg.refresh(np.array_split(np.arange(len(PROBLEM.X)), 4))
    assert distance(weights(found, "mu"), svrg.full_grad) < 1e-12


@needs_horovod
def test_workers_that_start_apart_take_one_first_step(two):
    found = two["first step apart"][0]
    there = weights(found, "there")
    batch = np.array_split(np.arange(len(PROBLEM.X)), 4)[0]
    oracle.SGD(0.1, 0.9).step(there, PROBLEM.gradient(there, batch)[0], len(batch))
    assert distance(weights(found), there) < 1e-5


@needs_horovod
@pytest.mark.parametrize("name", [name for name in TASKS if "fail" in name])
def test_a_worker_that_fails_in_the_full_gradient(name, two):
    found = two[name]
    assert [str(f["message"])[:12] for f in found] == ["RuntimeError", "KeyError: 'm"]
    assert "Another worker has failed" in str(found[0]["message"])
    assert all(f["unchanged"] for f in found)


@needs_horovod
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_worker_that_ends_in_the_middle(how, tmp_path):
    """Horovod ends the job: no rank waits for ever."""
    settings = json.dumps({"kvstore": "horovod", "how": how})
    status, output = horovodrun(2, [WORKER, "dying", tmp_path, settings])
    assert status != 0
    assert ("KeyError: 'mine'" if how == "raise" else "Horovod has been shut down") in output


@needs_horovod
@pytest.mark.parametrize("name", ["tied", "tied, two devices"])
def test_shared_parameters(name, two):
    assert_close(two[name][0], tied_alone(), 1e-12)


@needs_horovod
def test_mixed_precision(two):
    """An overflow on one rank skips the step on all of them."""
    expected = reference()
    assert distance(weights(two["scaled"][0]), expected.weights) < 1e-5
    assert two["overflow"][0]["scale"] == two["scaled"][0]["scale"] / 2


@needs_horovod
def test_two_trainers(two):
    found = two["two trainers"][0]
    for i in range(COUNT):
        np.testing.assert_array_equal(found[f"w{i}"], found[f"v{i}"])
    expected = reference(epochs=1)
    assert distance(weights(found), expected.weights) < 1e-12


@needs_horovod
def test_the_kvstore_that_mxnet_makes_of_the_name_is_replaced(two):
    """It is a local one on 1.9.1, and on 2.0 its broadcast is a TypeError."""
    expected = reference(epochs=2)
    assert distance(weights(two["MXNet's own"][0]), expected.weights) < 1e-12


@needs_horovod
def test_one_process(tmp_path):
    (found,) = run_horovod(tmp_path, {"sgd": TASKS["two devices"]}, workers=1)["sgd"]
    expected = reference()
    assert distance(weights(found), expected.weights) < 1e-12


ALONE = """
import mxnet as mx
from mxnet import gluon
from gluon_svrg import SVRGTrainer
net = gluon.nn.Dense(1, in_units=2)
net.initialize()
SVRGTrainer(net.collect_params(), "sgd", kvstore="horovod")
"""


@needs_horovod
@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"])
def test_processes_that_do_not_know_each_other(name):
    done = run_alone_under({name: "3"})
    assert done.returncode == 1
    assert f"Horovod sees one process, but {name} is 3" in done.stderr
    assert "horovodrun --gloo -np 3" in done.stderr


@needs_horovod
def test_a_job_of_one_process():
    assert run_alone_under({"SLURM_NTASKS": "1"}).returncode == 0


def run_alone_under(variables):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALONE],
        env={**os.environ, "PYTHONPATH": str(PACKAGE), **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.skipif(HAS_HOROVOD, reason="Horovod is installed")
def test_without_horovod():
    net = PROBLEM.network()
    with pytest.raises(ImportError, match=r"needs Horovod.*pip install.*\.\[horovod\]"):
        SVRGTrainer(net.collect_params(), "sgd", kvstore="horovod")


@pytest.mark.skipif(mx.util.is_np_array(), reason="MXNet 2.0 has no sparse arrays in Gluon")
@pytest.mark.parametrize("kind", ["gradient", "weight"])
def test_sparse_parameters_are_refused(kind):
    weight = kind == "weight"
    layer = gluon.contrib.nn.SparseEmbedding(5, 2) if weight else None
    layer = layer or gluon.nn.Embedding(5, 2, sparse_grad=True)
    layer.initialize()
    with pytest.raises(ValueError, match="is sparse, and kvstore='horovod' exchanges dense"):
        SVRGTrainer(layer.collect_params(), "sgd", kvstore="horovod")


def test_the_update_is_never_on_the_kvstore():
    net = PROBLEM.network()
    with pytest.raises(ValueError, match="update_on_kvstore=True with kvstore='horovod'"):
        SVRGTrainer(net.collect_params(), "sgd", kvstore="horovod", update_on_kvstore=True)
