"""Dtypes, and mixed precision (AMP), on CPU.

MXNet's Dense and convolutions have no float16. MXNet 2.0 computes in no narrower type than float32,
so AMP's scaler is tested there, with overflows from the loss; 1.9.1 also runs in bfloat16.
"""

import sys
from pathlib import Path

import kit
import mxnet as mx
import numpy as np
import pytest
from jobs import run
from kit import amp, assert_unchanged
from mxnet import gluon
from plays import TWO
from problems import IS_NUMPY_LIKE, Dense, array, distance, values

from gluon_svrg import MARSTrainer, STORMTrainer, SVRGTrainer

PROBLEM = Dense("classification", hidden=(5,), seed=19)
BATCHES = PROBLEM.batches(5)
RNG = np.random.RandomState(0)
X = RNG.randn(30, 4).round(2)
Y = X.sum(axis=1) + RNG.randn(30).round(1)


@pytest.mark.parametrize("layer", ["BatchNorm", "Embedding"])
def test_layers_in_float16(layer):
    """The full gradient is in float32."""
    net = gluon.nn.Embedding(4, 3) if layer == "Embedding" else gluon.nn.BatchNorm(in_channels=4)
    net.initialize()
    net.cast("float16")
    x = array(X[:5] % 4, "float32") if layer == "Embedding" else array(X[:5], "float16")
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"multi_precision": True})

    def closure():
        return (net(x) ** 2).reshape((5, -1)).sum(axis=1)

    for _ in range(2):
        trainer.update_full_grads(closure, [()])
        assert np.isfinite(float(trainer.step(5, closure=closure).sum().asnumpy()))
    assert {np.dtype(mean.dtype).name for (mean,) in trainer.full_grads.values()} == {"float32"}


def elementwise(dtype, scale=1.0, devices=None):
    weight = gluon.Parameter("weight", shape=(4,), dtype=dtype, init=mx.init.One())
    weight.initialize(ctx=devices)

    def loss_of(index):
        losses, where = [], devices or [None]
        for part, device in zip(np.array_split(index, len(where)), where):
            x, y = array(X[part], dtype, device), array(Y[part], dtype, device)
            losses.append(((x * weight.data(device)).sum(axis=1) - y) ** 2 * scale)
        return losses

    return weight, loss_of


def gradient(w, index):
    return (2 * (X[index] @ w - Y[index])[:, None] * X[index]).sum(axis=0)


@pytest.mark.parametrize("coefficient", [0.5, 1.0])
@pytest.mark.parametrize("devices", [None, TWO])
def test_the_estimate_in_float16(devices, coefficient):
    weight, loss_of = elementwise("float16", devices=devices)
    trainer = SVRGTrainer([weight], "sgd", {"multi_precision": True}, coefficient=coefficient)
    everything, w0, w1 = np.arange(30), np.ones(4), np.array([0.5, 0.75, 1.25, 1.5])
    trainer.update_full_grads(loss_of, np.array_split(everything, 4))
    mu, mean = gradient(w0, everything) / 30, trainer.full_grads[weight][0]
    np.testing.assert_allclose(mean.asnumpy(), mu, rtol=2e-3, atol=2e-3)
    weight.set_data(array(w1, "float16"))
    for index in np.array_split(everything, 3):
        trainer.correct_grads(lambda: loss_of(index))
        v = gradient(w1, index) - coefficient * (gradient(w0, index) - len(index) * mu)
        found = sum(g.asnumpy().astype("float64") for g in weight.list_grad())
        np.testing.assert_allclose(found, v, rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_clip_in_each_dtype(dtype):
    weight, loss_of = elementwise(dtype)
    trainer = MARSTrainer([weight], "sgd", clip=0.01, include_vectors=True)
    trainer.correct_grads(lambda: loss_of(np.arange(5)))
    trainer.allreduce_grads()
    expected = gradient(np.ones(4), np.arange(5))
    expected *= 5 * 0.01 / np.linalg.norm(expected)
    np.testing.assert_allclose(weight.grad().asnumpy(), expected, rtol=1e-2)


def test_large_micro_batches_in_float16():
    """Where they cancel, what is left is as wrong as float16 rounds the largest."""
    weight, _ = elementwise("float16")
    weight.grad_req = "add"
    trainer = MARSTrainer([weight], "sgd", {"multi_precision": True}, include_vectors=True)
    for factor in (1.1, 1000, -1000):
        trainer.correct_grads(lambda: weight.data() * factor)
    assert weight.grad().asnumpy().tolist() == [1.0] * 4  # and not 1.1
    trainer.step(1)


def test_many_micro_batches_in_float16():
    """V is a difference of large sums, each rounded, and close to zero at the minimum."""
    weight, loss_of = elementwise("float16")
    weight.grad_req = "add"
    settings = {"learning_rate": 0.1, "multi_precision": True}
    trainer = MARSTrainer([weight], "sgd", settings, clip=None, include_vectors=True)
    for _ in range(60):
        for index in np.array_split(np.arange(30), 6):
            trainer.correct_grads(lambda: loss_of(index))
        trainer.step(30)
        weight.grad()[:] = 0
    minimum = np.linalg.lstsq(X, Y, rcond=None)[0]
    np.testing.assert_allclose(weight.data().asnumpy(), minimum, atol=0.01)


def test_a_sum_that_float16_cannot_hold():
    """The full gradient is the mean of many: their sum, in float16, would be infinite."""
    weight, loss_of = elementwise("float16", scale=100.0)
    trainer = SVRGTrainer([weight], "sgd")
    index = np.arange(10, 20)
    trainer.update_full_grads(loss_of, [index] * 200)
    total = 100 * gradient(np.ones(4), index)
    assert 200 * np.abs(total).max() > np.finfo("float16").max
    np.testing.assert_allclose(trainer.full_grads[weight][0].asnumpy(), total / 10, rtol=1e-2)
    with pytest.raises(TypeError, match="weight is int32, and gradients can be corrected in float"):
        SVRGTrainer([elementwise("int32")[0]], "sgd").update_full_grads(loss_of, [index])


def make(devices=None, **kwargs):
    settings = {"learning_rate": 0.1, "momentum": 0.9}
    made = kit.make(PROBLEM, "float32", devices, settings=settings, **kwargs)
    return (*made, kit.scale_losses(made[2]))


def overflowing(loss_of, when=lambda: True):
    """The loss, on the last device so large that its scaled gradient is infinite."""

    def closure(index):
        loss = loss_of(index)
        if not when():
            return loss
        return [*loss[:-1], loss[-1] * 1e38] if isinstance(loss, list) else loss * 1e38

    return closure


@pytest.mark.parametrize("bad_call", [0, 1])
@pytest.mark.parametrize("devices, update_on_kvstore", [(None, None), (TWO, None), (TWO, False)])
def test_an_overflow_in_either_pass_skips_the_step_once(bad_call, devices, update_on_kvstore):
    kwargs = {"update_on_kvstore": update_on_kvstore, "lock_random": False}
    net, loss_of, trainer, scaler = make(devices, **kwargs)
    trainer.update_full_grads(loss_of, BATCHES)
    trainer.step(5, closure=lambda: loss_of(BATCHES[0]))
    before, scale, calls = values(net), scaler.loss_scale, iter(range(2))
    bad = overflowing(loss_of, lambda: next(calls) == bad_call)
    trainer.step(5, closure=lambda: bad(BATCHES[1]))
    for device in devices or [None]:
        assert_unchanged(before, values(net, device))
    assert scaler._next_loss_scale == scale / 2
    with pytest.raises(RuntimeError, match="needs SVRG gradients"):  # it has dropped them
        trainer.step(5)
    kit.one_epoch(trainer, loss_of, BATCHES[1:3])  # goes on, at the lower scale
    assert scaler.loss_scale == scale / 2
    assert np.isfinite(values(net)[0]).all() and distance(values(net), before) > 0


def test_an_overflow_in_the_full_pass():
    """It repeats the pass at a lower scale, if the data can be read again."""
    net, loss_of, trainer, scaler = make()
    before = kit.everything(trainer, net)
    for limit, data, message in (
        (2**13, iter(BATCHES), "cannot be repeated .* data is a list_iterator"),
        (0, BATCHES, "not finite"),
    ):
        bad = overflowing(loss_of, lambda limit=limit: scaler.loss_scale > limit)
        with pytest.raises(FloatingPointError, match=message):
            trainer.update_full_grads(bad, data)
        assert scaler.loss_scale == 2**16
        assert_unchanged(before, kit.everything(trainer, net))
    calls = []

    def undefined(index):
        calls.append(index)
        return loss_of(index) * np.nan

    with pytest.raises(FloatingPointError, match="data not finite"):  # at once: no scale helps
        trainer.update_full_grads(undefined, iter(BATCHES))
    assert len(calls) == 2 * len(BATCHES[:3]) + len(BATCHES[3:])
    bad = overflowing(loss_of, lambda: scaler.loss_scale > 2**13)
    trainer.update_full_grads(bad, BATCHES)
    assert (scaler.loss_scale, trainer.num_snapshots, trainer.grad_evaluations) == (2**13, 1, 23)
    expected = [g / 23 for g in PROBLEM.gradient(PROBLEM.initial, np.arange(23))[0]]
    assert distance(kit.full_gradients(trainer, net), expected) < 1e-5


@pytest.mark.parametrize("cls", [STORMTrainer, MARSTrainer])
def test_a_step_after_unscale(cls):
    """It is that of scaled gradients, and no change of them by the user."""
    ends = []
    for unscales in (False, True):
        net, loss_of, trainer, _ = make(cls=cls, update_on_kvstore=False)
        trainer.update_full_grads(loss_of, BATCHES)
        for index in BATCHES[:2]:
            trainer.correct_grads(lambda: loss_of(index))
            if unscales:
                amp.unscale(trainer)
            trainer.step(5)
        ends.append(values(net))
    assert distance(*ends) < 1e-5


def test_the_scaler_is_saved(tmp_path):
    _, loss_of, trainer, scaler = make()
    trainer.update_full_grads(loss_of, BATCHES)
    scaler._loss_scale, scaler._unskipped = 512.0, 7
    trainer.save_states(tmp_path / "states")
    _, _, other, restored = make()
    other.load_states(tmp_path / "states")
    assert (restored.loss_scale, restored._unskipped) == (512.0, 7)
    del other._amp_loss_scaler
    with pytest.raises(ValueError, match=r"call amp.init_trainer\(trainer\) first"):
        other.load_states(tmp_path / "states")


@pytest.mark.skipif(IS_NUMPY_LIKE, reason="MXNet 2.0: amp.init('bfloat16') is a KeyError")
def test_bfloat16_from_end_to_end():
    status, output = run([sys.executable, Path(__file__).with_name("bfloat16.py")])
    if "could not create a primitive descriptor" in output:
        pytest.skip("oneDNN, of MXNet, has no bfloat16 on this processor")
    assert status == 0, output[-2000:]
    first, last, scale = map(float, output.split()[-3:])
    assert last < first / 2 and scale > 0


#: A direction v of one weight, 1.001, times T'T, which is 1. In 16 bits it would be 1.
UNDER_AMP = """
import kit
import mxnet as mx

from gluon_svrg.curvature.direction import _compiled

kit.amp.init()
assert "amp_cast" in mx.sym.FullyConnected(mx.sym.Variable("x"), num_hidden=1).tojson(False)
operator, names = _compiled((1,), "float32", 0.0, 1, False, False, False)
arrays = {name: mx.nd.ones((1, 1)) for name in names}
arrays.update(g0=mx.nd.array([[1.001]]), scale=mx.nd.ones(1), bound=mx.nd.array([9.0]))
print(operator(*map(arrays.get, names))[0].asnumpy().item())
"""


def test_the_direction_is_not_cast():
    """AMP casts the inputs of products to 16 bits, also where Python composes symbols."""
    status, output = run([sys.executable, "-c", UNDER_AMP])
    assert status == 0, output
    assert abs(float(output.split()[-1]) - 1.001) < 1e-6
