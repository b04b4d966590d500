"""Random numbers in both passes of a step: locked, unlocked, and found out."""

import itertools
from contextlib import nullcontext
from functools import partial

import kit
import mxnet as mx
import numpy as np
import pytest
from kit import HYBRIDIZE, assert_unchanged, noticed
from mxnet import gluon
from mxnet.gluon import nn, rnn
from problems import Dense, array, contexts, distance

from gluon_svrg import SAGATrainer, STORMTrainer, SVRGTrainer

PROBLEM = Dense("classification", hidden=(5,), seed=11, samples=40)
BATCHES = PROBLEM.batches(8)
make = partial(kit.make, PROBLEM, "float32")  # by itself, a network that draws none


def is_full_gradient(trainer):
    """Whether v is mu on each of two devices, to 1e-6."""
    mx.nd.waitall()
    rows = [(p.list_grad(), means) for p, means in trainer.full_grads.items()]
    pairs = [(v.asnumpy() / 4, mean.asnumpy()) for row in rows for v, mean in zip(*row)]
    return distance(*zip(*pairs)) < 1e-6


@pytest.mark.parametrize("hybridize", HYBRIDIZE)
@pytest.mark.parametrize("lock_random", [True, "auto"])
def test_under_the_lock_the_first_estimates_are_the_full_gradient(lock_random, hybridize):
    """With dropout; ``'auto'`` finds it at the first refresh, and says so once."""
    devices = contexts(2)
    net = kit.with_dropout(devices, hybridize)
    _, loss_of, trainer = make(devices, net=net, lock_random=lock_random)
    for refresh in range(2):
        with noticed() as texts:
            trainer.update_full_grads(loss_of, BATCHES)
        expected = lock_random == "auto" and refresh == 0
        assert ["lock_random=True" in text for text in texts] == [True] * expected
        for index in BATCHES[:2]:
            trainer.correct_grads(lambda: loss_of(index))
            assert is_full_gradient(trainer)
        trainer.step(8)
    for value in (False, True):  # it can be set
        trainer.lock_random = value
        trainer.update_full_grads(loss_of, BATCHES)
        trainer.correct_grads(lambda: loss_of(BATCHES[0]))
        assert is_full_gradient(trainer) == value == trainer.lock_random


def test_setting_the_lock_compares_once_more():
    _, loss_of, trainer = make(rate=0.0)
    trainer.update_full_grads(loss_of, BATCHES)
    for calls in (4, 2, 4):
        counted = kit.counted(loss_of)
        trainer.step(8, closure=lambda: counted(BATCHES[0]))
        assert len(counted.calls) == calls
        if calls == 2:
            trainer.lock_random = "auto"


def masks(seed, fails=False):
    """What dropout keeps in both passes of some steps, perhaps after a refresh that fails."""
    _, loss_of, trainer = make(net=kit.with_dropout(), lock_random=True)
    drop, found = gluon.nn.Dropout(0.5), []
    mx.random.seed(seed)
    if fails:
        with pytest.raises(KeyError):
            trainer.update_full_grads(kit.failing(loss_of, 3), BATCHES)
    trainer.update_full_grads(loss_of, BATCHES)
    weight = next(iter(trainer.full_grads))

    def closure():
        mask = drop(array(np.ones(64), "float32"))
        found.append(mask.asnumpy())
        return weight.data().sum() + 0 * mask.sum()

    for _ in range(3):
        trainer.step(1, ignore_stale_grad=True, closure=closure)
    return found


def test_both_passes_draw_the_same_and_every_step_another():
    first, again, other = map(masks, (1, 1, 2))
    assert_unchanged(first, again)  # mx.random.seed makes it repeatable
    assert_unchanged(first, masks(1, fails=True))
    assert_unchanged(first[::2], first[1::2])
    different = [*first[::2], *other[::2]]
    assert not any(itertools.starmap(np.array_equal, itertools.combinations(different, 2)))


def test_where_nothing_is_random_the_random_stream_is_not_touched():
    (_, loss_of, trainer), found = make(), []
    for epochs in (0, 1):
        mx.random.seed(5)
        kit.train(trainer, loss_of, BATCHES, epochs)
        found.append(mx.nd.random.uniform(shape=(3,)).asnumpy())
    assert_unchanged(*found)


@pytest.mark.parametrize("change", ["weights", "statistics"])
def test_what_has_changed_since_the_refresh_is_no_difference(change):
    net = kit.sequence(nn.BatchNorm(in_channels=4, use_global_stats=True), nn.Dense(3, in_units=4))
    _, loss_of, trainer = make(net=net)

    def noise():
        return loss_of(BATCHES[0]) * array(np.random.rand(8), "float32")

    trainer.update_full_grads(loss_of, BATCHES)
    parameter = net[1].bias if change == "weights" else net[0].running_mean
    parameter.set_data(parameter.data() + 1)
    trainer.step(8, closure=noise)  # nothing to compare
    trainer.update_full_grads(loss_of, BATCHES)
    with noticed(), pytest.raises(RuntimeError, match="numbers from outside MXNet"):
        trainer.step(8, closure=noise)


@pytest.mark.parametrize("cls", [SVRGTrainer, STORMTrainer, SAGATrainer])
@pytest.mark.parametrize("carried", [True, False])
def test_a_state_that_a_recurrent_network_carries(cls, carried):
    """It comes to rest when the closure is called again and again; dropout needs only the lock."""
    cell, head = rnn.LSTM(8, input_size=3), nn.Dense(2, flatten=False, in_units=8)
    drop = nn.Dropout(0.0 if carried else 0.5)
    for block in (cell, head):
        block.initialize(mx.init.Normal(1.0))
    params = [*cell.collect_params().values(), *head.collect_params().values()]
    trainer, state = cls(params, "sgd", {"learning_rate": 0.01}), [cell.begin_state(batch_size=4)]

    def loss_of(X, y):
        out, new = cell(X, state[0])
        if carried:
            state[0] = [each.detach() for each in new]
        return gluon.loss.L2Loss()(head(drop(out)), y)

    rng = np.random.RandomState(0)
    batches = [[array(rng.randn(5, 4, k), "float32") for k in (3, 2)] for _ in range(3)]
    refused = pytest.raises(RuntimeError, match="although") if carried else nullcontext()
    with noticed() as texts, refused:
        if cls is STORMTrainer:
            for X, y in batches:
                trainer.step(4, closure=lambda: loss_of(X, y))
        else:
            trainer.update_full_grads(loss_of, batches)
    assert carried or len(texts) == 1
