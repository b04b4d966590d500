"""Several devices and every single-machine store, against the oracle."""

import os
import subprocess
import sys

import mxnet as mx
import numpy as np
import oracle
import pytest
from cluster import PACKAGE
from loops import split_at
from problems import Dense, contexts, distance, parameters, values

from gluon_svrg import SARAHTrainer, SVRGTrainer

PROBLEM = Dense("classification", hidden=(5,), seed=4)
SETTINGS = {"learning_rate": 0.05, "momentum": 0.9, "wd": 0.01}


def train(net, where, trainer, split=None, epochs=6):
    loss_of = PROBLEM.closure(net, "float64", where, split)
    for epoch in range(epochs):
        if epoch % 3 == 0:
            trainer.update_full_grads(loss_of, PROBLEM.batches(7))
        for index in PROBLEM.batches(5):
            trainer.step(len(index), closure=lambda: loss_of(index))


@pytest.fixture(scope="module")
def expected():
    reference = oracle.SVRG(PROBLEM.gradient, PROBLEM.initial)
    optimizer = oracle.SGD(**SETTINGS)
    for epoch in range(6):
        if epoch % 3 == 0:
            reference.refresh(PROBLEM.batches(7))
        for index in PROBLEM.batches(5):
            optimizer.step(reference.weights, reference.estimate(index), len(index))
    return reference.weights


@pytest.mark.parametrize("update_on_kvstore", [None, True, False])
@pytest.mark.parametrize("split", [None, split_at([0.8]), split_at([0.0]), split_at([1.0])])
@pytest.mark.parametrize("store", ["local", "device", "instance"])
def test_two_devices(store, split, update_on_kvstore, expected):
    where = contexts(2)
    net = PROBLEM.network("float64", where)
    kvstore = mx.kv.create("device") if store == "instance" else store
    trainer = SVRGTrainer(
        net.collect_params(),
        "sgd",
        SETTINGS,
        kvstore=kvstore,
        update_on_kvstore=update_on_kvstore,
    )
    train(net, where, trainer, split)
    for device in where:
        assert distance(values(net, device), expected) < 1e-10


@pytest.mark.parametrize(
    ("kvstore", "update_on_kvstore"),
    [
        (None, None),
        (None, False),
        ("local", None),
        ("device", False),
        ("instance", None),  # a store given as it is updates, even with one device
        ("instance", True),
        ("instance", False),
    ],
)
def test_one_device(kvstore, update_on_kvstore, expected):
    net = PROBLEM.network()
    if kvstore == "instance":
        kvstore = mx.kv.create("local")
    trainer = SVRGTrainer(
        net.collect_params(),
        "sgd",
        SETTINGS,
        kvstore=kvstore,
        update_on_kvstore=update_on_kvstore,
    )
    train(net, [mx.cpu()], trainer)
    assert distance(values(net), expected) < 1e-10


def test_the_first_device_leads_when_devices_start_apart():
    """As `gluon.Trainer` does at its first step, but before the snapshot is taken."""
    where = contexts(2)
    net = PROBLEM.network("float64", where)
    for p in parameters(net):
        p.list_data()[1][:] += 1
    trainer = SVRGTrainer(net.collect_params(), "sgd", SETTINGS)
    trainer.update_full_grads(PROBLEM.closure(net, "float64", where), PROBLEM.batches(7))
    for p, initial in zip(parameters(net), PROBLEM.initial):
        for copy in trainer.snapshot[p] + p.list_data():
            np.testing.assert_array_equal(copy.asnumpy(), initial)


def test_several_devices_without_a_store_are_refused():
    net = PROBLEM.network("float64", contexts(2))
    with pytest.raises(ValueError, match=r"kvstore=None with 2 devices.*drift apart"):
        SVRGTrainer(net.collect_params(), "sgd", SETTINGS, kvstore=None)


def test_update_on_kvstore_without_a_store_is_refused():
    net = PROBLEM.network()
    with pytest.raises(ValueError, match=r"update_on_kvstore=True with one device"):
        SVRGTrainer(net.collect_params(), "sgd", SETTINGS, update_on_kvstore=True)


def test_refused_arguments_leave_the_parameters_alone():
    """A parameter knows its trainer: a refused one must not have taken it over."""
    where = contexts(2)
    net = PROBLEM.network("float64", where)
    trainer = SVRGTrainer(net.collect_params(), "sgd", SETTINGS, update_on_kvstore=True)
    train(net, where, trainer, epochs=1)
    with pytest.raises(ValueError, match="coefficient"):
        SVRGTrainer(net.collect_params(), "sgd", SETTINGS, coefficient=-1)
    with pytest.raises(ValueError, match="kvstore=None"):
        SVRGTrainer(net.collect_params(), "sgd", SETTINGS, kvstore=None)
    # set_data resets the store of the trainer that the parameter knows
    parameters(net)[0].set_data(parameters(net)[0].list_data()[0] * 2)
    train(net, where, trainer, epochs=1)
    np.testing.assert_array_equal(values(net, where[0])[0], values(net, where[1])[0])


@pytest.mark.parametrize("kvstore", ["local", "device", "instance"])
def test_who_needs_the_reduced_gradient_updates_itself(kvstore):
    where = contexts(2)
    net = PROBLEM.network("float64", where)
    instance = mx.kv.create("device") if kvstore == "instance" else kvstore
    trainer = SARAHTrainer(net.collect_params(), "sgd", SETTINGS, kvstore=instance)
    train(net, where, trainer, epochs=1)
    assert trainer._updates_on_kvstore is False
    np.testing.assert_array_equal(values(net, where[0])[0], values(net, where[1])[0])


@pytest.mark.parametrize(
    ("kvstore", "update_on_kvstore", "message"),
    [
        ("dist_async", None, "SARAHTrainer needs .* never reduces gradients"),
        ("dist_async", True, "SARAHTrainer needs .* never reduces gradients"),
        ("device", True, "SARAHTrainer needs .* the kvstore keeps it"),
        ("dist_sync", True, "SARAHTrainer needs .* the kvstore keeps it"),
    ],
)
def test_where_the_reduced_gradient_does_not_come_back(kvstore, update_on_kvstore, message):
    net = PROBLEM.network("float64", contexts(2))
    settings = {"kvstore": kvstore, "update_on_kvstore": update_on_kvstore}
    with pytest.raises(ValueError, match=message):
        SARAHTrainer(net.collect_params(), "sgd", SETTINGS, **settings)


def test_update_on_the_workers_with_dist_async_is_refused():
    net = PROBLEM.network()
    with pytest.raises(ValueError, match="update_on_kvstore=False with kvstore='dist_async'"):
        SVRGTrainer(
            net.collect_params(), "sgd", SETTINGS, kvstore="dist_async", update_on_kvstore=False
        )


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", ["devise", "dist-sync", "dist_synch", "horovood", ""])
def test_unknown_names_are_refused(name, devices):
    """MXNet takes them for another kvstore, or for none."""
    net = PROBLEM.network("float64", contexts(devices))
    known = r"MXNet has no kvstore '.*Known are .*'dist_async'.*'dist_sync'.*'horovod'.*'local'"
    with pytest.raises(ValueError, match=known):
        SVRGTrainer(net.collect_params(), "sgd", SETTINGS, kvstore=name)


def test_a_kvstore_that_was_made_from_an_unknown_name_is_refused():
    net = PROBLEM.network()
    with pytest.raises(ValueError, match="MXNet has no kvstore 'devise'"):
        SVRGTrainer(net.collect_params(), "sgd", SETTINGS, kvstore=mx.kv.create("devise"))


@pytest.mark.parametrize("name", ["dist_sync", "dist_async"])
def test_parameter_servers_need_a_job(name, monkeypatch):
    monkeypatch.delenv("DMLC_NUM_WORKER", raising=False)
    net = PROBLEM.network()
    with pytest.raises(RuntimeError, match=f"kvstore='{name}' needs a job.*gluon-svrg launch"):
        SVRGTrainer(net.collect_params(), "sgd", SETTINGS, kvstore=name)


def test_what_is_no_kvstore_is_refused():
    net = PROBLEM.network()
    with pytest.raises(TypeError, match="kvstore must be a kvstore, the name of one, or None"):
        SVRGTrainer(net.collect_params(), "sgd", SETTINGS, kvstore=2)


def test_names_are_the_same_in_capitals(expected):
    where = contexts(2)
    net = PROBLEM.network("float64", where)
    trainer = SVRGTrainer(net.collect_params(), "sgd", SETTINGS, kvstore="Device")
    train(net, where, trainer)
    assert distance(values(net, where[1]), expected) < 1e-10


@pytest.mark.parametrize("by", ["name", "instance"])
def test_a_kvstore_in_python_with_one_worker(by, expected):
    """MXNet's own, for tests. With one device, `gluon.Trainer` would drop the name."""
    where = contexts(2)
    net = PROBLEM.network("float64", where)
    kvstore = "teststore" if by == "name" else mx.kv.create("teststore")
    trainer = SVRGTrainer(net.collect_params(), "sgd", SETTINGS, kvstore=kvstore)
    train(net, where, trainer)
    assert distance(values(net, where[0]), expected) < 1e-10


IN_A_SERVER = """
import importlib.abc, os, sys

class NoGluon(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("mxnet.gluon"):
            raise AssertionError(f"{name} is not there yet")

import mxnet.optimizer  # as far as a server has come when it unpickles
for name in [n for n in sys.modules if n.startswith("mxnet.gluon")]:
    del sys.modules[name]
sys.modules["mxnet"].__dict__.pop("gluon", None)
os.environ["DMLC_ROLE"] = "server"  # before, MXNet would serve until the end
sys.meta_path.insert(0, NoGluon())
import gluon_svrg.kvstore.server_optimizer
print(*(name for name in sys.modules if name.startswith("gluon_svrg")), sep=",")
"""


def test_what_servers_unpickle_imports_nothing_of_gluon():
    """They do inside ``import mxnet``; a server process never gets further than that."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IN_A_SERVER],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()[-1].split(",")) == {
        "gluon_svrg",
        "gluon_svrg._version",
        "gluon_svrg.kvstore",
        "gluon_svrg.kvstore.job",  # which imports nothing but Python's own
        "gluon_svrg.kvstore.server_optimizer",
    }
