"""Workers of Horovod: real processes, against one process over the union of the data."""

import importlib.util
import os
import re
import subprocess
import sys

import mxnet as mx
import numpy as np
import oracle
import pytest
from cluster import PACKAGE, run_horovod
from mxnet import gluon
from problems import distance
from test_distributed import (
    COUNT,
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
pytestmark = pytest.mark.xdist_group("clusters")
__all__ = ["tied_alone"]  # a fixture


@needs_horovod
@pytest.mark.parametrize("workers, devices", [(2, 1), (3, 1), (2, 2)])
def test_workers_are_one_process_over_the_union_of_the_data(workers, devices, tmp_path):
    rates = (0.1, 0.05, 0.2)
    found = run_horovod(tmp_path, "trajectory", workers, devices=devices, rates=rates)
    assert_identical(found)
    expected, _ = reference(rates=rates)
    assert distance(weights(found[0]), expected.weights) < 1e-12
    assert distance(weights(found[0], "mu"), expected.full_grad) < 1e-12
    evaluations = sum(int(f["evaluations"]) for f in found)
    assert evaluations == (2 + 2 * 4) * len(PROBLEM.X)
    shares = [sum(map(len, minibatches(r, workers, True)[0])) for r in range(workers)]
    assert len(set(shares)) > 1


@needs_horovod
def test_adam(tmp_path):
    found = run_horovod(tmp_path, "trajectory", 2, optimizer="adam")
    assert_identical(found)
    assert distance(weights(found[0]), run_alone("adam")) < 1e-6


@needs_horovod
def test_workers_that_start_apart_share_one_snapshot(tmp_path):
    found = run_horovod(tmp_path, "trajectory", 2, seed=5, epochs=1)
    assert_identical(found)
    svrg = oracle.SVRG(PROBLEM.gradient, weights(found[0], "there"))
    svrg.refresh(np.array_split(np.arange(len(PROBLEM.X)), 4))
    assert distance(weights(found[0], "mu"), svrg.full_grad) < 1e-12


@needs_horovod
def test_workers_that_start_apart_take_one_first_step(tmp_path):
    found = run_horovod(tmp_path, "start_up", 2, seed=5)
    assert_identical(found)
    there = weights(found[0], "there")
    batch = np.array_split(np.arange(len(PROBLEM.X)), 4)[0]
    oracle.SGD(0.1, 0.9).step(there, PROBLEM.gradient(there, batch)[0], len(batch))
    assert distance(weights(found[0]), there) < 1e-5


@needs_horovod
@pytest.mark.parametrize("first", [False, True], ids=["later", "first, deferred"])
@pytest.mark.parametrize("where", ["closure", "data"])
def test_a_worker_that_fails_in_the_full_gradient(where, first, tmp_path):
    found = run_horovod(tmp_path, "failing", 2, where=where, first=first)
    assert [str(f["message"])[:12] for f in found] == ["RuntimeError", "KeyError: 'm"]
    assert "Another worker has failed" in str(found[0]["message"])
    assert all(f["unchanged"] for f in found)
    for i in range(COUNT):
        np.testing.assert_array_equal(found[0][f"w{i}"], found[1][f"w{i}"])


@needs_horovod
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_worker_that_ends_in_the_middle(how, tmp_path):
    """Horovod ends the job: no rank waits for ever."""
    output = run_horovod(tmp_path, "dying", 2, expected=1, how=how)
    assert re.search("KeyError: .mine" if how == "raise" else "exit(ed)?.*(code|status)", output)


@needs_horovod
@pytest.mark.parametrize("devices", [1, 2])
def test_shared_parameters(devices, tied_alone, tmp_path):
    found = run_horovod(tmp_path, "tied", 2, devices=devices)
    assert_identical(found)
    assert_close(found[0], tied_alone, 1e-12)


@needs_horovod
@pytest.mark.parametrize("settings", [{}, {"deferred": True, "evaluate": True}], ids=str)
def test_convolutions(settings, tmp_path):
    found = run_horovod(tmp_path, "convolutions", 2, **settings)
    assert_identical(found)
    assert all(np.isfinite(value).all() for value in found[0].values())


@needs_horovod
def test_mixed_precision(tmp_path):
    """An overflow on one rank skips the step on all of them."""
    found = run_horovod(tmp_path, "scaled", 2)
    assert_identical(found)
    expected, _ = reference()
    assert distance(weights(found[0]), expected.weights) < 1e-5
    skipped = run_horovod(tmp_path, "scaled", 2, overflow=6)
    assert_identical(skipped)
    assert skipped[0]["scale"] == found[0]["scale"] / 2
    assert np.isfinite(skipped[0]["w0"]).all()


@needs_horovod
def test_two_trainers(tmp_path):
    found = run_horovod(tmp_path, "two_trainers", 2)
    assert_identical(found)
    for i in range(COUNT):
        np.testing.assert_array_equal(found[0][f"w{i}"], found[0][f"v{i}"])
    expected, _ = reference(epochs=1)
    assert distance(weights(found[0]), expected.weights) < 1e-12


@needs_horovod
def test_one_process(tmp_path):
    """Without a launcher, Horovod has one process, and trains as without Horovod."""
    (found,) = run_horovod(tmp_path, "trajectory", 1, epochs=2)
    expected, _ = reference(epochs=2)
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
    with pytest.raises(ImportError, match=r"needs Horovod.*pip install.*gluon-svrg\[horovod\]"):
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
