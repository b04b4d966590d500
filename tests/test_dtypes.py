"""What can be trained in which dtype, on CPU.

float16: Dense and convolutions have no operators there, in MXNet itself. What has, trains, with
the full gradient in float32.
"""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from problems import array, contexts

from gluon_svrg import SVRGTrainer

RNG = np.random.RandomState(0)
X = RNG.randn(30, 4).round(2)
Y = X.sum(axis=1) + RNG.randn(30).round(1)
LAYERS = {
    "Dense": lambda: gluon.nn.Dense(3, in_units=4),
    "Conv1D": lambda: gluon.nn.Conv1D(2, 2, in_channels=1),
    "BatchNorm": lambda: gluon.nn.BatchNorm(in_channels=4),
    "Embedding": lambda: gluon.nn.Embedding(4, 3),
}
#: What MXNet's CPU build computes; the table in the README.
WORKS = {
    (layer, dtype): dtype != "float16" or layer in ("BatchNorm", "Embedding")
    for layer in LAYERS
    for dtype in ("float16", "float32", "float64")
}


def inputs(layer, dtype):
    if layer == "Embedding":
        return array(RNG.randint(0, 4, (5, 2)), "float32")
    return array(X[:5].reshape(5, 1, 4) if layer == "Conv1D" else X[:5], dtype)


@pytest.mark.parametrize("layer, dtype", WORKS)
def test_layers(layer, dtype):
    net = LAYERS[layer]()
    net.initialize()
    net.cast(dtype)
    x = inputs(layer, dtype)
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"multi_precision": True})

    def closure():
        return (net(x) ** 2).reshape((5, -1)).sum(axis=1)

    if WORKS[layer, dtype]:
        for _ in range(2):
            trainer.update_full_grads(closure, [()])
            assert np.isfinite(float(trainer.step(5, closure=closure).sum().asnumpy()))
        for p, (mean, *_) in trainer.full_grads.items():
            assert np.dtype(mean.dtype) == ("float32" if p.dtype == "float16" else p.dtype)
    else:
        with pytest.raises(mx.MXNetError):  # as with gluon.Trainer:
            with autograd.record():
                loss = closure()
            loss.backward()
            mx.nd.waitall()
        with pytest.raises(mx.MXNetError):
            trainer.update_full_grads(closure, [()])
        assert trainer.snapshot is None


def elementwise(dtype, scale=1.0, devices=None):
    weight = gluon.Parameter("weight", shape=(4,), dtype=dtype, init=mx.init.One())
    weight.initialize(ctx=devices)

    def loss_of(index):
        parts = np.array_split(index, len(devices or [None]))
        losses = []
        for part, device in zip(parts, devices or [None]):
            x, y = array(X[part], dtype, device), array(Y[part], dtype, device)
            losses.append(((x * weight.data(device)).sum(axis=1) - y) ** 2 * scale)
        return losses

    return weight, loss_of


def gradient(w, index):
    return (2 * (X[index] @ w - Y[index])[:, None] * X[index]).sum(axis=0)


@pytest.mark.parametrize("coefficient", [0.5, 1.0])
@pytest.mark.parametrize("devices", [None, contexts(2)])
def test_the_estimate_in_float16(devices, coefficient):
    weight, loss_of = elementwise("float16", devices=devices)
    trainer = SVRGTrainer([weight], "sgd", {"multi_precision": True}, coefficient=coefficient)
    everything, w0, w1 = np.arange(30), np.ones(4), np.array([0.5, 0.75, 1.25, 1.5])
    trainer.update_full_grads(loss_of, np.array_split(everything, 4))
    mean = trainer.full_grads[weight][0]
    assert np.dtype(mean.dtype) == "float32"
    mu = gradient(w0, everything) / 30
    np.testing.assert_allclose(mean.asnumpy(), mu, rtol=2e-3, atol=2e-3)
    weight.set_data(array(w1, "float16"))
    for index in np.array_split(everything, 3):
        trainer.correct_grads(lambda: loss_of(index))
        v = gradient(w1, index) - coefficient * (gradient(w0, index) - len(index) * mu)
        found = sum(g.asnumpy().astype("float64") for g in weight.list_grad())
        np.testing.assert_allclose(found, v, rtol=1e-2, atol=1e-1)


def test_a_sum_that_float16_cannot_hold():
    """The full gradient is the mean of many: their sum, in float16, would be infinite."""
    weight, loss_of = elementwise("float16", scale=100.0)
    trainer = SVRGTrainer([weight], "sgd", {"learning_rate": 0.0})
    batches = [np.arange(10, 20)] * 200
    trainer.update_full_grads(loss_of, batches)
    total = 200 * 100 * np.abs(gradient(np.ones(4), batches[0])).max()
    assert total > np.finfo("float16").max
    mean = 100 * gradient(np.ones(4), batches[0]) / 10
    np.testing.assert_allclose(trainer.full_grads[weight][0].asnumpy(), mean, rtol=1e-2)


def test_float16_beside_float32():
    half, loss_of_half = elementwise("float16")
    whole, loss_of_whole = elementwise("float32")
    trainer = SVRGTrainer([half, whole], "sgd", {"learning_rate": 0.01, "multi_precision": True})

    def loss_of(index):
        return loss_of_half(index) + loss_of_whole(index)

    for _ in range(2):
        trainer.update_full_grads(loss_of, np.array_split(np.arange(30), 4))
        for index in np.array_split(np.arange(30), 3):
            trainer.step(len(index), closure=lambda: loss_of(index))
    np.testing.assert_allclose(half.data().asnumpy(), whole.data().asnumpy(), rtol=2e-2)


def test_a_large_float16_parameter_is_compared():
    """The gradients of the first step are equal, whatever the dtypes of their sums."""
    weight = gluon.Parameter("weight", shape=(40_000,), dtype="float16")
    weight.initialize(init=mx.init.One())
    trainer = SVRGTrainer([weight], "sgd", {"learning_rate": 0.01, "multi_precision": True})
    x = array(RNG.randn(40_000), "float16")

    def closure():
        return (weight.data() * x * weight.data()).reshape((-1,))

    trainer.update_full_grads(closure, [()])
    trainer.step(40_000, closure=closure)


@pytest.mark.parametrize("store", [False, True])
def test_other_dtypes_are_refused(store):
    weight = gluon.Parameter("weight", shape=(3,), dtype="int32")
    weight.initialize(init=mx.init.One())
    trainer = SVRGTrainer([weight], "sgd")
    with pytest.raises(
        TypeError, match="weight is int32, and gradients can be corrected in float16"
    ):
        trainer.update_full_grads(lambda: weight.data().sum(), [()], store_grads=store)
    assert trainer.snapshot is None
