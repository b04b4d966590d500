"""Rounding is no reason to end a training, and no excuse for a closure that changes."""

import os
import re
import subprocess
import sys
import warnings
from functools import lru_cache, partial

import mxnet as mx
import numpy as np
import pytest
import refreshes
from mxnet import gluon
from mxnet.gluon import nn, rnn
from problems import array

from gluon_svrg import SAGATrainer, STORMTrainer, SVRGTrainer
from gluon_svrg.passes import sketch, sums

LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
RNG = np.random.RandomState(3)


@pytest.fixture(autouse=True)
def same_orders():
    """Each test draws the same orders of samples, whichever tests ran before."""
    RNG.seed(3)


def network(*blocks):
    net = nn.HybridSequential()
    net.add(*blocks)
    net.initialize(mx.init.Xavier())
    return net


def caught(work):
    """The warnings and the error of some work, in words."""
    messages = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        try:
            work()
        except RuntimeError as error:
            messages.append(str(error))
    return [str(w.message) for w in found if w.category is UserWarning] + messages


# --- no false alarm ------------------------------------------------------------------------------


@pytest.mark.parametrize("coefficient", [0.75, 0.3])
def test_gradients_that_are_mostly_rounding(coefficient):
    """Biases before BatchNorm, at a minimum: MXNet rounds r times 0.75 in another way than g."""
    assert refreshes.alarms("three convolutions", "float32", 5, [coefficient]) == []


ALL = [(name, "float32") for name in refreshes.NETWORKS] + [
    (name, "float16") for name in refreshes.FLOAT16
]


@pytest.mark.slow
@pytest.mark.parametrize("onednn", ["1", "0"])
@pytest.mark.parametrize(("name", "dtype"), ALL)
def test_no_refresh_of_a_thousand_finds_rounding(name, dtype, onednn):
    """50 refreshes of each network, in a process of its own."""
    variables = {"MXNET_ONEDNN_ENABLED": onednn, "MXNET_MKLDNN_ENABLED": onednn}
    done = subprocess.run(
        [sys.executable, refreshes.__file__, name, dtype, "50"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.stdout.splitlines()[-1:] == ["0 alarms"], done.stdout + done.stderr


def images(values=None):
    """A network with biases before BatchNorm, at given values, and its closure over images."""
    net, shape = refreshes.convolutions(nn.BatchNorm, channels=(8, 8))
    X, y = refreshes.images(shape)
    net.initialize(mx.init.Xavier())
    net(array(X[:2], "float32"))
    for parameter, value in zip(net.collect_params().values(), values or ()):
        parameter.set_data(array(value, "float32"))
    net.hybridize()

    def loss_of(index):
        return LOSS(net(array(X[index], "float32")), array(y[index], "float32")).mean()

    return net, loss_of, np.arange(len(X))


@lru_cache(maxsize=None)
def minimum():
    """Values where the gradients of all images cancel out: what is left is mostly rounding."""
    net, loss_of, every = images()
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.003})
    for _ in range(150):
        with mx.autograd.record():
            loss = loss_of(every)
        loss.backward()
        trainer.step(1)
    return [parameter.data().asnumpy() for parameter in net.collect_params().values()]


def at_a_minimum(**kwargs):
    """A trainer, and a closure that takes its samples in another order each time."""
    net, loss_of, every = images(minimum())
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 1e-3}, **kwargs)
    return trainer, every, lambda index: loss_of(RNG.permutation(index))


@pytest.mark.parametrize("coefficient", [1.0, 0.75])
def test_a_difference_that_other_roundings_make_too(coefficient):
    """Another order changes this gradient by 1%: other factors change it as much."""
    trainer, every, loss_of = at_a_minimum(coefficient=coefficient)

    def work():
        for _ in range(40):
            trainer.update_full_grads(loss_of, [every])
            trainer.step(1, closure=lambda: loss_of(every))

    assert caught(work) == []


def test_the_estimate_after_a_second_look(monkeypatch):
    """It is as without, and running statistics have moved once."""
    monkeypatch.setattr(sketch, "TOLERANCE", {**sketch.TOLERANCE, "float32": 1e-6})
    monkeypatch.setattr(sums, "_SUM_ROUNDING", 0)
    found = []
    for lock_random in ("auto", False):
        mx.random.seed(0)
        net, loss_of, every = images()
        trainer = SVRGTrainer(net.collect_params(), "sgd", lock_random=lock_random)
        trainer.update_full_grads(loss_of, [every, every[:40]])
        before = trainer.grad_evaluations
        trainer.correct_grads(lambda: loss_of(RNG.permutation(every[:40])))
        looked = trainer.grad_evaluations - before > 2
        assert looked == (lock_random == "auto")  # otherwise this shows nothing
        statistics = [p for name, p in net.collect_params().items() if "running" in name]
        found.append(
            [p.grad().asnumpy() for p in trainer.full_grads]
            + [p.data().asnumpy() for p in statistics]
        )
    for first, second in zip(*found):
        np.testing.assert_allclose(first, second, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("coefficient", [1.0, 0.75, 0.5])
def test_both_gradients_are_taken_with_the_same_factor(coefficient):
    """Or with a power of two: then no second look is needed, and r is taken alone for 0.75."""
    net, loss_of, every = images(minimum())
    trainer = SVRGTrainer(net.collect_params(), "sgd", coefficient=coefficient)
    trainer.update_full_grads(loss_of, [every])
    before = trainer.grad_evaluations
    assert caught(lambda: trainer.step(1, closure=lambda: loss_of(every))) == []
    assert trainer.grad_evaluations - before == (3 if coefficient == 0.75 else 2)


def test_rows_that_are_mostly_rounding():
    trainer, every, loss_of = at_a_minimum()

    def work():
        for _ in range(3):
            trainer.update_full_grads(loss_of, [every], store_grads=True)
            trainer.step(1, closure=lambda: loss_of(every), batch_index=0)

    assert caught(work) == []
    assert trainer.grad_evaluations > 3 * (2 + 1 + 1)  # it was looked at a second time


# --- no closure that changes gets away ------------------------------------------------------------


def carries_a_state(loss_of):
    state = [1.0]

    def closure(index):
        state[0] *= 1.5
        return loss_of(index) * state[0]

    return closure


def draws_data(loss_of):
    return lambda index: loss_of(RNG.choice(index, 20))


def comes_to_rest(loss_of):
    calls = []

    def closure(index):
        calls.append(index)
        return loss_of(index) * (1 + 1e-3 * 0.6 ** len(calls))

    return closure


def test_a_small_difference_that_stays_after_the_lock():
    """By 0.02% without it, by 0.005% with it."""
    net = network(nn.Dense(5, in_units=20))
    trainer = SVRGTrainer(net.collect_params(), "sgd")
    X, y = array(RNG.rand(32, 20), "float32"), array(RNG.randint(0, 5, 32), "float32")

    def loss_of(index):
        return LOSS(net(X[index]), y[index])

    every = slice(0, 32)
    trainer.update_full_grads(loss_of, [every])
    messages = caught(lambda: trainer.step(1, closure=partial(comes_to_rest(loss_of), every)))
    assert ["although" in message for message in messages] == [False, True]


@pytest.mark.parametrize("wrap", [carries_a_state, draws_data])
@pytest.mark.parametrize("coefficient", [1.0, 0.75])
def test_it_is_found_where_gradients_are_mostly_rounding(wrap, coefficient):
    trainer, every, loss_of = at_a_minimum(coefficient=coefficient)
    trainer.update_full_grads(loss_of, [every])
    messages = caught(lambda: trainer.step(1, closure=partial(wrap(loss_of), every)))
    assert ["although" in message for message in messages] == [False, True]
    assert re.search("lock_random=True and lock_random=False omit this check", messages[1])


def test_another_minibatch_is_found_where_gradients_are_mostly_rounding():
    trainer, every, loss_of = at_a_minimum()
    trainer.update_full_grads(loss_of, [every, every[:40]], store_grads=True)
    (message,) = caught(lambda: trainer.step(1, closure=lambda: loss_of(every[40:]), batch_index=1))
    assert "was the data reshuffled" in message


def test_another_minibatch_is_found_where_an_operator_takes_no_factor():
    """SoftmaxOutput has the same gradient for each factor: that is no rounding."""
    net = network(nn.Dense(5, in_units=20))
    trainer = SVRGTrainer(net.collect_params(), "sgd")
    X, y = array(RNG.rand(32, 20), "float32"), array(RNG.randint(0, 5, 32), "float32")

    def loss_of(index):
        scores = net(X[index]).as_nd_ndarray()
        return mx.nd.SoftmaxOutput(scores, y[index].as_nd_ndarray())

    first, second = slice(0, 16), slice(16, 32)
    trainer.update_full_grads(loss_of, [first, second], store_grads=True)
    (message,) = caught(lambda: trainer.step(16, closure=lambda: loss_of(first), batch_index=1))
    assert "was the data reshuffled" in message


@pytest.mark.parametrize("coefficient", [1.0, 0.75])
def test_dropout_at_a_small_rate(coefficient):
    net = network(nn.Dense(200, activation="relu"), nn.Dropout(0.01), nn.Dense(5))
    trainer = SVRGTrainer(net.collect_params(), "sgd", coefficient=coefficient)
    X, y = array(RNG.rand(32, 20), "float32"), array(RNG.randint(0, 5, 32), "float32")
    is_awake = []

    def loss_of(X, y):
        with mx.autograd.train_mode() if is_awake else mx.autograd.predict_mode():
            return LOSS(net(X), y)

    trainer.update_full_grads(loss_of, [(X, y)])  # which finds nothing yet
    is_awake.append(True)
    messages = caught(lambda: trainer.correct_grads(lambda: loss_of(X, y)))
    assert ["network draws random numbers" in message for message in messages] == [True]
    assert caught(lambda: trainer.update_full_grads(loss_of, [(X, y)])) == []
    assert caught(lambda: trainer.step(32, closure=lambda: loss_of(X, y))) == []


def recurrent(trainer_of, scale, carried, length=35):
    """A trainer of a recurrent network, its closure, and minibatches."""
    cell, head = rnn.LSTM(8, input_size=3), nn.Dense(2, flatten=False, in_units=8)
    drop = nn.Dropout(0.0 if carried else 0.5)
    for block in (cell, head):
        block.initialize(mx.init.Normal(scale))
    parameters = [*cell.collect_params().values(), *head.collect_params().values()]
    rng, state, loss_function = (
        np.random.RandomState(0),
        [cell.begin_state(batch_size=4)],
        gluon.loss.L2Loss(),
    )

    def loss_of(X, y):
        out, new = cell(X, state[0])
        if carried:
            state[0] = [each.detach() for each in new]
        return loss_function(head(drop(out)), y)

    shapes = (length, 4, 3), (length, 4, 2)
    batches = [[array(rng.randn(*shape), "float32") for shape in shapes] for _ in range(4)]
    return trainer_of(parameters, "sgd", {"learning_rate": 0.01}), loss_of, batches


@pytest.mark.parametrize("scale", [0.01, 0.03, 0.3, 1.0])
@pytest.mark.parametrize("length", [3, 10, 35])
@pytest.mark.parametrize("carried", [True, False])
def test_a_state_that_a_recurrent_network_carries(scale, length, carried):
    """It comes to rest when the closure is called again and again: after the lock, it agrees."""
    trainer, loss_of, batches = recurrent(SVRGTrainer, scale, carried, length)

    def work():
        trainer.update_full_grads(loss_of, batches)
        trainer.step(4, closure=lambda: loss_of(*batches[0]))

    expected = [False, True] if carried else [False]
    assert ["although" in message for message in caught(work)] == expected


@pytest.mark.parametrize("carried", [True, False])
def test_a_state_that_is_carried_where_a_method_begins_without_refresh(carried):
    trainer, loss_of, batches = recurrent(STORMTrainer, 1.0, carried, length=3)

    def work():
        for X, y in batches:
            trainer.step(4, closure=lambda: loss_of(X, y))

    assert ["although" in message for message in caught(work)] == [False, True][: 1 + carried]


@pytest.mark.parametrize("carried", [True, False])
def test_a_state_that_is_carried_while_gradients_are_stored(carried):
    trainer, loss_of, batches = recurrent(SAGATrainer, 1.0, carried)
    found = caught(lambda: trainer.update_full_grads(loss_of, batches))
    assert ["although" in message for message in found] == [False, True][: 1 + carried]
