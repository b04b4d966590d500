"""What was wrong with `mxnet.contrib.svrg_optimization.SVRGModule`: each would be caught here."""

from functools import partial

import kit
import mxnet as mx
import numpy as np
import oracle
import pytest
from mxnet import gluon
from problems import IS_NUMPY_LIKE, Dense, array, contexts, distance, values

from gluon_svrg import SVRGTrainer

PROBLEM = Dense("regression", seed=15)
ALL = np.arange(len(PROBLEM.X))
TWO = contexts(2)
make = partial(kit.make, PROBLEM, rate=0.05)


def test_the_full_gradient_does_not_grow_from_refresh_to_refresh():
    """It was never set to zero: 1, 2, 3, 4 times too large on one minibatch."""
    net, loss_of, trainer = make()
    expected = [g / len(ALL) for g in PROBLEM.gradient(PROBLEM.initial, ALL)[0]]
    for _ in range(4):
        trainer.update_full_grads(loss_of, [ALL])
        assert distance(kit.full_gradients(trainer, net), expected) < 1e-12


def test_a_parameter_whose_name_contains_full_is_updated():
    """It was overwritten by its gradient; the default name fullyconnected0_weight contains it."""
    if IS_NUMPY_LIKE:
        weight = gluon.Parameter("fullyconnected0_full_weight", shape=(1, 4), dtype="float64")
    else:
        weight = gluon.ParameterDict("fullyconnected0_").get(
            "full_weight", shape=(1, 4), dtype="float64"
        )
    weight.initialize(init=mx.init.One())
    trainer = SVRGTrainer([weight], "sgd", {"learning_rate": 0.05}, kvstore=mx.kv.create("local"))

    def loss_of(index):
        X, y = array(PROBLEM.X[index]), array(PROBLEM.y[index][:, 0])
        return ((X * weight.data()).sum(axis=1) - y) ** 2 / 2

    def gradient(weights, index):
        residual = PROBLEM.X[index] @ weights[0][0] - PROBLEM.y[index][:, 0]
        return [(residual @ PROBLEM.X[index])[None]], len(index)

    reference, optimizer = oracle.SVRG(gradient, [np.ones((1, 4))]), oracle.SGD(0.05)
    for _ in range(2):
        trainer.update_full_grads(loss_of, PROBLEM.batches(6))
        reference.refresh(PROBLEM.batches(6))
        for index in PROBLEM.batches(5):
            trainer.step(len(index), closure=lambda: loss_of(index))
            optimizer.step(reference.weights, reference.estimate(index), len(index))
    assert distance([weight.data().asnumpy()], reference.weights) < 1e-10


@pytest.mark.parametrize("devices", [None, TWO])
def test_weights_survive_the_start_with_an_update_on_the_store(devices):
    """They were set to zero on the devices."""
    store = mx.kv.create("local")
    net, loss_of, trainer = make(devices=devices, kvstore=store, update_on_kvstore=True)
    trainer.update_full_grads(loss_of, PROBLEM.batches(6))
    for device in devices or [None]:
        assert distance(values(net, device), PROBLEM.initial) == 0


def test_entries_are_weighed_not_batches():
    """Batches of unequal sizes: the full gradient is the mean over samples."""
    net, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, [ALL[:20], ALL[20:]])
    expected = [g / len(ALL) for g in PROBLEM.gradient(PROBLEM.initial, ALL)[0]]
    assert distance(kit.full_gradients(trainer, net), expected) < 1e-12


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_both_dtypes(dtype):
    """There was no float64."""
    _, loss_of, trainer = make(dtype)
    trainer.update_full_grads(loss_of, PROBLEM.batches(6))
    trainer.step(5, closure=lambda: loss_of(ALL[:5]))
    assert all(np.dtype(row[0].dtype) == dtype for row in trainer.full_grads.values())


def test_a_frozen_parameter_stays():
    """There were none: whatever was frozen had no full gradient, and that was an error."""
    net, loss_of, trainer = make()
    net[0].bias.grad_req = "null"
    trainer.update_full_grads(loss_of, PROBLEM.batches(6))
    trainer.step(5, closure=lambda: loss_of(ALL[:5]))
    np.testing.assert_array_equal(net[0].bias.data().asnumpy(), PROBLEM.initial[1])
    assert distance([net[0].weight.data().asnumpy()], [PROBLEM.initial[0]]) > 0


@pytest.mark.parametrize("devices", [None, TWO])
def test_the_learning_rate_takes_effect(devices):
    """`set_learning_rate` had none."""
    steps = []
    for rate in (0.01, 0.02):
        net, loss_of, trainer = make(devices=devices, rate=0.5)
        trainer.update_full_grads(loss_of, PROBLEM.batches(6))
        trainer.set_learning_rate(rate)
        trainer.step(5, closure=lambda: loss_of(ALL[:5]))
        steps.append([w - w0 for w, w0 in zip(values(net), PROBLEM.initial)])
    assert distance([2 * s for s in steps[0]], steps[1]) < 1e-5


# Elsewhere: padding in test_interface.py, dropout in test_random_numbers.py, grad_req='add' in
# test_accumulation.py.
