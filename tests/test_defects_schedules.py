"""Refresh schedules, samplers and epochs: they go on asking, and what they remember is saved."""

import logging

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon.contrib.estimator import Estimator
from problems import Dense, array

from gluon_svrg import SVRGTrainer
from gluon_svrg.estimator import FullGradHandler, SVRGBatchProcessor
from gluon_svrg.schedule import EverySteps, Loopless, PartialSampler
from gluon_svrg.variance import variance

PROBLEM = Dense("regression", samples=12, seed=34)
BATCHES = PROBLEM.batches(4)
metric = gluon.metric if hasattr(gluon, "metric") else mx.metric


def make(deferred=False, cls=SVRGTrainer, **kwargs):
    with mx.name.NameManager():
        net = PROBLEM.network(deferred=deferred)
    settings = {"learning_rate": 0.1, "momentum": 0.9}
    trainer = cls(net.collect_params(), "sgd", settings, **kwargs)
    return net, PROBLEM.closure(net), trainer


def step(trainer, loss_of, index=BATCHES[0]):
    trainer.step(len(index), closure=lambda: loss_of(index))


# --- a trainer without a snapshot is asked for one -----------------------------------------------

SCHEDULES = {
    "EverySteps": lambda: EverySteps(5),
    "SVRG++": lambda: EverySteps(5, factor=2),
    "Loopless": lambda: Loopless(1e-9),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_refresh_is_due_after_the_snapshot_was_discarded(name):
    _, loss_of, trainer = make()
    schedule = SCHEDULES[name]()
    assert schedule.due(trainer)
    trainer.update_full_grads(loss_of, BATCHES)
    assert not schedule.due(trainer)
    trainer.discard_snapshot()
    assert schedule.due(trainer)
    step(trainer, loss_of)
    assert schedule.due(trainer)
    trainer.update_full_grads(loss_of, BATCHES)
    assert not schedule.due(trainer)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_refresh_is_due_after_a_file_without_a_snapshot(name, tmp_path):
    _, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, BATCHES)
    trainer.discard_snapshot()
    trainer.save_states(str(tmp_path / "states"))
    _, loss_of, trainer = make()
    trainer.load_states(str(tmp_path / "states"))
    schedule = SCHEDULES[name]()
    assert schedule.due(trainer)
    trainer.update_full_grads(loss_of, BATCHES)
    assert not schedule.due(trainer)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_refresh_is_due_after_a_file_of_gluon(name, tmp_path):
    _, loss_of, plain = make(cls=gluon.Trainer)
    with mx.autograd.record():
        loss = loss_of(BATCHES[0])
    loss.backward()
    plain.step(4)
    plain.save_states(str(tmp_path / "states"))
    _, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, BATCHES)
    schedule = SCHEDULES[name]()
    assert not schedule.due(trainer)
    trainer.load_states(str(tmp_path / "states"))
    assert schedule.due(trainer)


# --- what they remember ------------------------------------------------------------------------


def growing(draw):
    return 5 * 2**draw


def test_the_draws_of_a_sampler_are_saved(tmp_path):
    _, _, trainer = make()
    sampler = PartialSampler(100, growing, seed=3)
    trainer.register(sampler)
    drawn = [list(sampler) for _ in range(2)]
    assert [len(draw) for draw in drawn] == [5, 10]
    trainer.save_states(str(tmp_path / "states"))
    expected = [list(sampler) for _ in range(2)]
    for register_first in (True, False):
        _, _, trainer = make()
        sampler = PartialSampler(100, growing, seed=3)
        if register_first:
            trainer.register(sampler)
            trainer.load_states(str(tmp_path / "states"))
        else:
            trainer.load_states(str(tmp_path / "states"))
            trainer.register(sampler)
        assert [list(sampler) for _ in range(2)] == expected


def coins(schedule, trainer, count=40):
    return [schedule.due(trainer) for _ in range(count)]


def test_two_loopless_do_not_swap_after_a_resume(tmp_path):
    _, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, BATCHES)
    first, second = Loopless(0.5, seed=1), Loopless(0.5, seed=2)
    coins(first, trainer, 7)
    coins(second, trainer, 3)
    trainer.save_states(str(tmp_path / "states"))
    expected = coins(first, trainer), coins(second, trainer)
    _, _, trainer = make()
    trainer.load_states(str(tmp_path / "states"))
    first, second = Loopless(0.5, seed=1), Loopless(0.5, seed=2)
    found = coins(second, trainer), coins(first, trainer)  # the other way round
    assert found[::-1] == expected


def test_registered_schedules_keep_their_order(tmp_path):
    """Two that are alike are told apart by the order in which they were registered."""
    _, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, BATCHES)
    both = [Loopless(0.5), Loopless(0.5)]
    for schedule in both:
        trainer.register(schedule)
    coins(both[0], trainer, 7)
    coins(both[1], trainer, 3)
    trainer.save_states(str(tmp_path / "states"))
    expected = [coins(schedule, trainer) for schedule in both]
    _, _, trainer = make()
    trainer.load_states(str(tmp_path / "states"))
    both = [Loopless(0.5), Loopless(0.5)]
    for schedule in both:
        trainer.register(schedule)
    found = [coins(schedule, trainer) for schedule in reversed(both)]
    assert found[::-1] == expected


def estimator_of(net, trainer):
    estimator = Estimator(
        net,
        gluon.loss.L2Loss(),
        train_metrics=metric.Loss(),
        trainer=trainer,
        batch_processor=SVRGBatchProcessor(),
    )
    estimator.logger.setLevel(logging.ERROR)
    return estimator


class Refreshes(FullGradHandler):
    """Notes in which epochs of all fits the snapshot was taken."""

    def __init__(self, *args):
        super().__init__(*args)
        self.taken = []

    def epoch_begin(self, estimator, *args, **kwargs):
        before = estimator.trainer.num_snapshots
        super().epoch_begin(estimator, *args, **kwargs)
        self.taken.append(estimator.trainer.num_snapshots > before)


@pytest.mark.parametrize(
    "again",
    [
        "same handler",
        pytest.param(
            "new handler",
        ),
    ],
)
def test_epochs_are_counted_over_two_fits(again):
    net, _, trainer = make()
    data = gluon.data.DataLoader(
        gluon.data.ArrayDataset(array(PROBLEM.X), array(PROBLEM.y)), batch_size=4
    )
    estimator, handler = estimator_of(net, trainer), Refreshes(data, 3)
    taken = []
    for epochs in (2, 3, 2):
        estimator.fit(data, epochs=epochs, event_handlers=[handler])
        taken += handler.taken[-epochs:]
        if again == "new handler":
            handler = Refreshes(data, 3)
    assert taken == [True, False, False, True, False, False, True]


CHANGES = {
    "learning_rate": (0.025, lambda trainer: trainer.learning_rate),
    "coefficient": (0.25, lambda trainer: trainer.coefficient),
    "lock_random": (True, lambda trainer: trainer.lock_random),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_set_between_a_load_and_the_initialization_is_saved(name, tmp_path):
    _, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, BATCHES)
    step(trainer, loss_of)
    trainer.save_states(str(tmp_path / "first"))
    value, get = CHANGES[name]
    _, _, trainer = make(deferred=True)
    trainer.load_states(str(tmp_path / "first"))
    setattr(trainer, name, value)
    trainer.save_states(str(tmp_path / "second"))
    _, _, trainer = make()
    trainer.load_states(str(tmp_path / "second"))
    assert get(trainer) == value
    assert trainer.snapshot is not None


# --- random numbers after `variance` -----------------------------------------------------------


def drawn_after(seed, call):
    mx.random.seed(seed)
    call()
    return mx.nd.random.uniform(shape=(5,)).asnumpy().tolist()


@pytest.mark.parametrize(
    "lock_random",
    [
        False,
        pytest.param(
            True,
        ),
    ],
)
def test_what_mxnet_draws_after_variance_follows_from_what_it_had_drawn(lock_random):
    """MXNet cannot save the state of its generator; but it must not begin anew each time."""
    _, loss_of, trainer = make(lock_random=lock_random)
    trainer.update_full_grads(loss_of, BATCHES)
    step(trainer, loss_of)

    def call():
        variance(trainer, loss_of, BATCHES)

    assert drawn_after(1, call) == drawn_after(1, call)
    assert drawn_after(1, call) != drawn_after(2, call)
    if not lock_random:
        assert drawn_after(1, call) == drawn_after(1, lambda: None)


@pytest.mark.parametrize("lock_random", [False, True])
def test_training_goes_on_as_without_variance(lock_random):
    weights = []
    for with_variance in (False, True):
        mx.random.seed(7)
        net, loss_of, trainer = make(lock_random=lock_random)
        trainer.update_full_grads(loss_of, BATCHES)
        for index in BATCHES:
            if with_variance:
                variance(trainer, loss_of, BATCHES)
            step(trainer, loss_of, index)
        weights.append([p.data().asnumpy() for p in net.collect_params().values()])
    for these, those in zip(*weights):
        np.testing.assert_array_equal(these, those)
