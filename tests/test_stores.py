"""Several devices and every single-machine store, against the oracle."""

import mxnet as mx
import numpy as np
import oracle
import pytest
from loops import split_at
from problems import Dense, contexts, distance, parameters, values

from gluon_svrg import SVRGTrainer

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
