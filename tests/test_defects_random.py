"""What is compared at the snapshot: rare randomness, late comparisons, NaN and overflow."""

import importlib
import importlib.util
import warnings
from contextlib import contextmanager

import mxnet as mx
import numpy as np
import pytest
from loops import plain_step
from mxnet import gluon
from problems import Dense, array, parameters, values

from gluon_svrg import SVRGTrainer

IS_2 = importlib.util.find_spec("mxnet.amp") is not None
amp = importlib.import_module("mxnet.amp" if IS_2 else "mxnet.contrib.amp")
LossScaler = importlib.import_module(f"{amp.__name__}.loss_scaler").LossScaler
PROBLEM = Dense("regression", hidden=(8,), samples=20, seed=35)
BATCHES = PROBLEM.batches(5)


def make(wrap=None, cls=SVRGTrainer, **kwargs):
    with mx.name.NameManager():
        net = PROBLEM.network("float32")
    trainer = cls(net.collect_params(), "sgd", {"learning_rate": 0.1}, **kwargs)
    loss_of = PROBLEM.closure(net, "float32")
    return net, wrap(net) if wrap else loss_of, trainer


def with_dropout(net, rate=0.5):
    drop = gluon.nn.Dropout(rate)
    loss_function = gluon.loss.L2Loss()

    def loss_of(index):
        X, y = array(PROBLEM.X[index], "float32"), array(PROBLEM.y[index], "float32")
        return loss_function(net[1](drop(net[0](X))), y)

    return loss_of


def with_dropped_layer(net):
    """Stochastic depth: half of the calls leave a layer out."""
    skip = gluon.nn.Dense(1, in_units=4)
    skip.initialize()
    loss_function = gluon.loss.L2Loss()

    def loss_of(index):
        X, y = array(PROBLEM.X[index], "float32"), array(PROBLEM.y[index], "float32")
        out = net(X)
        if mx.nd.random.uniform().asscalar() < 0.5:
            out = out + skip(X)
        return loss_function(out, y)

    return loss_of


@contextmanager
def noticed():
    """The warnings of the block that are meant for the user; not those of MXNet about NumPy."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        yield caught


def nudge(net, amount=0.1):
    for parameter in parameters(net):
        parameter.data()[:] = parameter.data() + amount


def step(trainer, loss_of, index=BATCHES[0]):
    return trainer.step(len(index), closure=lambda: loss_of(index))


# --- comparisons that were left out --------------------------------------------------------------


def with_late_dropout(net):
    """A closure that draws random numbers once it is awake: no refresh before finds that out."""
    calm, wild = PROBLEM.closure(net, "float32"), with_dropout(net)

    def loss_of(index):
        return (wild if loss_of.is_awake else calm)(index)

    loss_of.is_awake = False
    return loss_of


def awake(first):
    """Refresh, then wake the closure up, take a first step, and a second; the warnings."""
    net, loss_of, trainer = make(with_late_dropout)
    with noticed() as caught:
        trainer.update_full_grads(loss_of, BATCHES)
        loss_of.is_awake = True
        first(net, loss_of, trainer)
        assert not caught
        step(trainer, loss_of)
    return ["random" in str(w.message) for w in caught]


def test_randomness_is_found_where_the_first_step_has_coefficient_0():
    def first(net, loss_of, trainer):
        trainer.coefficient, rate = 0.0, trainer.learning_rate
        trainer.set_learning_rate(0.0)
        step(trainer, loss_of)
        trainer.coefficient = 1.0
        trainer.set_learning_rate(rate)

    assert awake(first) == [True]


@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_randomness_is_found_where_the_first_estimate_is_not_finite(bad):
    def first(net, loss_of, trainer):
        trainer.correct_grads(lambda: spoiled(loss_of, float(bad))(BATCHES[0]))

    assert awake(first) == [True]


def test_randomness_is_found_after_the_next_refresh_where_the_first_step_was_elsewhere():
    def first(net, loss_of, trainer):
        nudge(net)
        step(trainer, loss_of)
        loss_of.is_awake = False
        trainer.update_full_grads(loss_of, BATCHES)
        loss_of.is_awake = True

    assert awake(first) == [True]


def test_randomness_of_some_calls_is_found_by_most():
    """Three repeats at the refresh find it in 7 of 8 trainings, the first step in half the rest."""
    found = 0
    for seed in range(40):
        mx.random.seed(seed)
        _, loss_of, trainer = make(with_dropped_layer)
        with noticed() as caught:
            trainer.update_full_grads(loss_of, BATCHES)
            step(trainer, loss_of)
        found += bool(caught)
    assert found >= 36


def test_a_refresh_finds_randomness():
    _, loss_of, trainer = make(with_dropout)
    with noticed() as caught:
        trainer.update_full_grads(loss_of, BATCHES)
    assert ["random" in str(w.message) for w in caught] == [True]


CALLS = {
    "step": lambda trainer, loss_of: trainer.step(5, closure=lambda: loss_of(BATCHES[0])),
    "correct_grads": lambda trainer, loss_of: trainer.correct_grads(lambda: loss_of(BATCHES[0])),
}


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(
            "step",
        ),
        "correct_grads",
    ],
)
def test_the_warning_points_at_the_line_of_the_user(call):
    _, loss_of, trainer = make(with_dropout)
    with noticed() as caught:
        trainer.update_full_grads(loss_of, BATCHES)
        CALLS[call](trainer, loss_of)
    assert [w.filename for w in caught] == [__file__]


# --- small differences ---------------------------------------------------------------------------


@pytest.mark.parametrize("change", [2e-4, 4e-4])
def test_a_difference_is_never_called_zero(change):
    """A closure that computes a little more at each call."""
    _, loss_of, trainer = make()
    calls = []

    def drifting(index):
        calls.append(0)
        return loss_of(index) * (1 + change * len(calls))

    messages = []
    with noticed() as caught:
        try:
            trainer.update_full_grads(drifting, BATCHES)
            step(trainer, drifting)
        except RuntimeError as error:
            messages.append(str(error))
    messages += [str(w.message) for w in caught]
    assert messages
    assert not [message for message in messages if " 0.0%" in message]


# --- what is not finite ------------------------------------------------------------------------


def spoiled(loss_of, value):
    return lambda index: loss_of(index) * value


@pytest.mark.parametrize("bad", ["nan", "inf"])
@pytest.mark.parametrize(
    "lock_random",
    [
        False,
        pytest.param(
            "auto",
        ),
    ],
)
def test_a_loss_that_is_not_finite_at_the_first_step(lock_random, bad):
    """It steps as `gluon.Trainer` does: the weights are not finite either."""
    net, loss_of, trainer = make(lock_random=lock_random)
    trainer.update_full_grads(loss_of, BATCHES)
    loss = step(trainer, spoiled(loss_of, float(bad)))
    plain_net, plain_loss_of, plain = make(cls=gluon.Trainer)
    plain_step(plain, lambda: spoiled(plain_loss_of, float(bad))(BATCHES[0]), 5)
    assert not np.isfinite(loss.asnumpy()).any()
    for these, those in zip(values(net), values(plain_net)):
        assert (np.isfinite(these) == np.isfinite(those)).all()
    assert trainer.inner_steps == 1


@pytest.mark.parametrize("bad", ["nan", "inf", "overflow"])
@pytest.mark.parametrize(
    "lock_random",
    [
        False,
        pytest.param(
            "auto",
        ),
    ],
)
def test_amp_skips_an_overflow_at_the_first_step(lock_random, bad):
    net, loss_of, trainer = make(lock_random=lock_random)
    trainer._amp_loss_scaler = scaler = LossScaler()  # as amp.init_trainer does
    trainer._amp_original_scale = trainer._scale
    trainer.update_full_grads(loss_of, BATCHES)
    before, scale = values(net), scaler.loss_scale
    step(trainer, spoiled(loss_of, 1e38 if bad == "overflow" else float(bad)))
    for these, those in zip(values(net), before):
        np.testing.assert_array_equal(these, those)
    assert scaler._next_loss_scale == scale / 2
    for index in BATCHES:  # goes on, at the lower scale
        step(trainer, loss_of, index)
    assert scaler.loss_scale == scale / 2
    assert all(np.isfinite(value).all() for value in values(net))
