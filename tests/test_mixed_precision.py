"""AMP: the losses that the trainer differentiates are scaled; overflows skip a step once.

MXNet 2.0's CPU build computes in no narrower type, so its scaler is tested on float32, with
overflows from the loss; 1.9.1 also runs in bfloat16, in a process of its own.
"""

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import kit
import numpy as np
import oracle
import pytest
from mxnet import autograd, gluon
from problems import Dense, contexts, distance, parameters, values

from gluon_svrg import SVRGTrainer

IS_2 = importlib.util.find_spec("mxnet.amp") is not None
amp = importlib.import_module("mxnet.amp" if IS_2 else "mxnet.contrib.amp")
PROBLEM = Dense("classification", hidden=(5,), seed=19)
BATCHES = PROBLEM.batches(5)
TWO = contexts(2)


def make(devices=None, **kwargs):
    settings = {"learning_rate": 0.1, "momentum": 0.9}
    made = kit.make(PROBLEM, "float32", devices, settings=settings, **kwargs)
    return (*made, kit.scale_losses(made[2]))


def with_overflow(closure):
    """The loss, so large that its scaled gradient is infinite."""

    def bad(*args):
        loss = closure(*args)
        if isinstance(loss, list):
            return [*loss[:-1], loss[-1] * 1e38]
        return loss * 1e38

    return bad


@pytest.mark.parametrize("devices", [None, TWO])
@pytest.mark.parametrize("update_on_kvstore", [None, False])
def test_the_trajectory_is_that_without_scaling(devices, update_on_kvstore):
    """mu is kept unscaled, and the scale may change in the middle."""
    net, loss_of, trainer, scaler = make(devices, update_on_kvstore=update_on_kvstore)
    reference, optimizer = oracle.SVRG(PROBLEM.gradient, PROBLEM.initial), oracle.SGD(0.1, 0.9)
    for epoch in range(4):
        if epoch % 2 == 0:
            trainer.update_full_grads(loss_of, BATCHES)
            reference.refresh(BATCHES)
            mean = [trainer.full_grads[p][0].asnumpy() for p in parameters(net)]
            assert distance(mean, reference.full_grad) < 1e-5
        for index in BATCHES:
            trainer.step(len(index), closure=lambda: loss_of(index))
            optimizer.step(reference.weights, reference.estimate(index), len(index))
        scaler._loss_scale = scaler._next_loss_scale = 2.0 ** (epoch + 3)
    assert distance(values(net, devices and TWO[1]), reference.weights) < 1e-5


@pytest.mark.parametrize("snapshot", [False, True])
def test_without_variance_reduction_it_is_gluon_trainer(snapshot):
    found = []
    for cls in (gluon.Trainer, SVRGTrainer):
        kwargs = {"coefficient": 0.0} if cls is SVRGTrainer else {}
        net, loss_of, trainer, scaler = make(cls=cls, **kwargs)
        scaler._scale_seq_len = 3  # the scale grows every three steps
        if cls is SVRGTrainer and snapshot:
            trainer.update_full_grads(loss_of, BATCHES)
        for _ in range(2):
            for index in BATCHES:
                if cls is SVRGTrainer:
                    trainer.step(len(index), closure=lambda: loss_of(index))
                else:
                    with autograd.record():
                        loss = loss_of(index)
                        with amp.scale_loss(loss, trainer) as scaled:
                            autograd.backward(scaled)
                    trainer.step(len(index))
        found.append([*values(net), np.array(scaler.loss_scale)])
    for these, those in zip(*found):
        np.testing.assert_array_equal(these, those)
    assert found[0][-1] > 2**16


@pytest.mark.parametrize("which", ["snapshot", "current"])
@pytest.mark.parametrize("devices", [None, TWO])
@pytest.mark.parametrize("update_on_kvstore", [None, False])
def test_an_overflow_in_either_pass_skips_the_step_once(which, devices, update_on_kvstore):
    net, loss_of, trainer, scaler = make(
        devices, update_on_kvstore=update_on_kvstore, lock_random=False
    )
    trainer.update_full_grads(loss_of, BATCHES)
    trainer.step(5, closure=lambda: loss_of(BATCHES[0]))
    before, scale, calls = values(net), scaler.loss_scale, []

    def closure():
        calls.append(0)
        is_bad = len(calls) == (1 if which == "snapshot" else 2)
        return (with_overflow(loss_of) if is_bad else loss_of)(BATCHES[1])

    trainer.step(5, closure=closure)
    for device in devices or [None]:
        for these, those in zip(values(net, device), before):
            np.testing.assert_array_equal(these, those)
    assert scaler._next_loss_scale == scale / 2
    trainer.step(5, closure=lambda: loss_of(BATCHES[1]))  # goes on, at the lower scale
    trainer.step(5, closure=lambda: loss_of(BATCHES[2]))
    assert scaler.loss_scale == scale / 2
    assert np.isfinite(values(net)[0]).all()
    assert distance(values(net), before) > 0


def overflows_above(scale, loss_of, scaler):
    """A loss whose gradient is infinite where the scale is above a limit."""

    def closure(index):
        return with_overflow(loss_of)(index) if scaler.loss_scale > scale else loss_of(index)

    return closure


def test_an_overflow_in_the_full_pass_repeats_it_at_a_lower_scale():
    net, loss_of, trainer, scaler = make()
    assert scaler.loss_scale == 2**16
    trainer.update_full_grads(overflows_above(2**13, loss_of, scaler), BATCHES)
    assert scaler.loss_scale == 2**13
    expected = PROBLEM.gradient(PROBLEM.initial, np.arange(len(PROBLEM.X)))[0]
    mean = [trainer.full_grads[p][0].asnumpy() * len(PROBLEM.X) for p in parameters(net)]
    assert distance(mean, expected) < 1e-5
    assert trainer.num_snapshots == 1
    assert trainer.grad_evaluations == sum([len(b) for b in BATCHES])


def test_an_overflow_in_a_pass_that_cannot_be_repeated():
    _, loss_of, trainer, scaler = make()
    closure = overflows_above(2**13, loss_of, scaler)
    with pytest.raises(FloatingPointError, match=r"cannot be repeated .* data is a generator"):
        trainer.update_full_grads(closure, (index for index in BATCHES))
    assert scaler.loss_scale == 2**16
    assert trainer.snapshot is None


def test_a_full_gradient_that_is_never_finite():
    _, loss_of, trainer, scaler = make()
    with pytest.raises(FloatingPointError, match="not finite"):
        trainer.update_full_grads(overflows_above(0, loss_of, scaler), BATCHES)
    assert scaler.loss_scale == 2**16
    assert trainer.snapshot is None


def test_unscale():
    net, loss_of, trainer, _ = make(update_on_kvstore=False)
    trainer.update_full_grads(loss_of, BATCHES)
    trainer.correct_grads(lambda: loss_of(BATCHES[0]))
    amp.unscale(trainer)
    grads = [p.grad().asnumpy() for p in parameters(net)]
    reference = oracle.SVRG(PROBLEM.gradient, PROBLEM.initial)
    reference.refresh(BATCHES)
    assert distance(grads, reference.estimate(BATCHES[0])) < 1e-4
    trainer.step(5)
    expected = [w - 0.1 / 5 * g for w, g in zip(PROBLEM.initial, grads)]
    assert distance(values(net), expected) < 1e-5


def test_the_scaler_is_saved(tmp_path):
    _, loss_of, trainer, scaler = make()
    trainer.update_full_grads(loss_of, BATCHES)
    scaler._loss_scale, scaler._unskipped = 512.0, 7
    trainer.save_states(tmp_path / "states")
    _, _, other, restored = make()
    other.load_states(tmp_path / "states")
    assert (restored.loss_scale, restored._unskipped) == (512.0, 7)
    net = PROBLEM.network("float32")
    settings = {"learning_rate": 0.1, "momentum": 0.9}
    plain = SVRGTrainer(net.collect_params(), "sgd", settings)
    with pytest.raises(ValueError, match=r"call amp.init_trainer\(trainer\) first"):
        plain.load_states(tmp_path / "states")


BFLOAT16 = Path(__file__).with_name("bfloat16.py")


@pytest.mark.skipif(IS_2, reason="MXNet 2.0: amp.init('bfloat16') is a KeyError")
def test_bfloat16_from_end_to_end():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(BFLOAT16)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    first, last, rate = map(float, done.stdout.split()[-3:])
    assert last < first / 2
    assert rate > 0
