"""Schedules and samplers with a trainer: when they ask, and what a file remembers of them."""

from functools import partial

import kit
import numpy as np
import pytest
from loops import plain_step
from mxnet import gluon
from problems import Dense, array

from gluon_svrg import SVRGTrainer
from gluon_svrg.estimator import FullGradHandler, SVRGBatchProcessor
from gluon_svrg.schedule import EverySteps, Loopless, PartialSampler

PROBLEM = Dense("regression", samples=12, seed=34)
BATCHES = PROBLEM.batches(4)


def begun(refreshed=True, cls=SVRGTrainer, **kwargs):
    _, loss_of, trainer = kit.make(PROBLEM, cls=cls, **kwargs)
    if refreshed:
        trainer.update_full_grads(loss_of, BATCHES)
    return loss_of, trainer


def growing(draw):
    return 5 * 2**draw


@pytest.mark.parametrize("by", ["discard", "a file without a snapshot", "a file of gluon.Trainer"])
@pytest.mark.parametrize(
    "make_one",
    [partial(EverySteps, 5), partial(EverySteps, 5, factor=2), partial(Loopless, 1e-9)],
)
def test_a_trainer_without_a_snapshot_is_asked_for_one(make_one, by, tmp_path):
    loss_of, trainer = begun()
    schedule = make_one()
    assert not schedule.due(trainer)
    if by == "discard":
        trainer.discard_snapshot()
    else:
        is_plain = by == "a file of gluon.Trainer"
        other_loss_of, other = begun(False, gluon.Trainer if is_plain else SVRGTrainer)
        plain_step(other, lambda: other_loss_of(BATCHES[0]), 4)
        other.save_states(str(tmp_path / "states"))
        trainer.load_states(tmp_path / "states")
    for _ in range(2):
        assert schedule.due(trainer)
        trainer.step(4, closure=lambda: loss_of(BATCHES[0]))
    trainer.update_full_grads(loss_of, BATCHES)
    assert not schedule.due(trainer)


def ask(thing, trainer, count):
    """Coins of a schedule, or draws of a sampler."""
    if isinstance(thing, PartialSampler):
        return [list(thing) for _ in range(count)]
    return [thing.due(trainer) for _ in range(20 * count)]


@pytest.mark.parametrize("register_first", [True, False])
@pytest.mark.parametrize(
    "make_two",
    [
        lambda: [Loopless(0.5, seed=1), Loopless(0.5, seed=2)],  # known by their seeds
        lambda: [Loopless(0.5), Loopless(0.5)],  # known by their order
        lambda: [PartialSampler(100, growing, seed=seed) for seed in (3, 4)],
    ],
)
def test_what_two_of_a_kind_remember(make_two, register_first, tmp_path):
    _, trainer = begun()
    two = make_two()
    for one in two:
        trainer.register(one)
    ask(two[0], trainer, 2), ask(two[1], trainer, 1)
    trainer.save_states(tmp_path / "states")
    expected = [ask(one, trainer, 2) for one in two]
    _, trainer = begun(False)
    again = make_two()
    if not register_first:
        trainer.load_states(tmp_path / "states")
    for one in again:
        trainer.register(one)
    if register_first:
        trainer.load_states(tmp_path / "states")
    assert [ask(one, trainer, 2) for one in again[::-1]] == expected[::-1]


@pytest.mark.parametrize("is_new", [True, False])
def test_epochs_are_counted_over_several_fits(is_new):
    net, _, trainer = kit.make(PROBLEM)
    dataset = gluon.data.ArrayDataset(array(PROBLEM.X), array(PROBLEM.y))
    data, taken = gluon.data.DataLoader(dataset, batch_size=4), []
    options = {"trainer": trainer, "batch_processor": SVRGBatchProcessor()}
    estimator = gluon.contrib.estimator.Estimator(net, gluon.loss.L2Loss(), **options)
    estimator.logger.setLevel("ERROR")
    handler = FullGradHandler(data, 3)
    for epochs in (1, 1, 1, 1, 2, 1):
        before = trainer.num_snapshots
        handler = FullGradHandler(data, 3) if is_new else handler
        estimator.fit(data, epochs=epochs, event_handlers=[handler])
        taken.append(trainer.num_snapshots - before)
    assert taken == [1, 0, 0, 1, 0, 1]


@pytest.mark.parametrize(
    "name, value", [("learning_rate", 0.025), ("coefficient", 0.25), ("lock_random", True)]
)
def test_what_was_set_between_a_load_and_the_initialization_is_saved(name, value, tmp_path):
    loss_of, trainer = begun()
    trainer.step(4, closure=lambda: loss_of(BATCHES[0]))
    trainer.save_states(tmp_path / "first")
    net = PROBLEM.network(deferred=True)
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    trainer.load_states(tmp_path / "first")
    setattr(trainer, name, value)
    trainer.save_states(tmp_path / "second")
    _, trainer = begun(False)
    trainer.load_states(tmp_path / "second")
    assert np.isclose(getattr(trainer, name), value) and trainer.snapshot is not None
