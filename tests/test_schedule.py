"""Schedules and samplers: against their formulas, in plain loops, saved with the trainer."""

import math
from functools import partial

import kit
import numpy as np
import pytest
from mxnet import gluon
from problems import Dense

from gluon_svrg import SVRGTrainer, schedule
from gluon_svrg.schedule import Cosine, EveryEpochs, EverySteps, Linear, Loopless, Until

PROBLEM = Dense("classification", seed=21)
BATCHES = PROBLEM.batches(5)
make = partial(kit.make, PROBLEM, "float32")
sampler = schedule.PartialSampler


@kit.table(
    "coefficient, expected",
    (Linear(0.75, 5), [0.75, 0.6, 0.45, 0.3, 0.15, 0, 0, 0]),
    (Linear(1.0, 4, final=0.2), [1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2, 0.2]),
    (Cosine(1.0, 4), [(1 + math.cos(math.pi * s / 4)) / 2 for s in range(5)] + [0] * 3),
    (Cosine(1.0, 2, final=0.5), [1, 0.75, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]),
    (Until(3), [1, 1, 1, 0, 0, 0, 0, 0]),
    (Until(2, 0.5), [0.5, 0.5, 0, 0, 0, 0, 0, 0]),
)
def test_coefficients(coefficient, expected):
    assert [coefficient(index) for index in range(8)] == pytest.approx(expected, abs=1e-12)


def test_until_has_the_cost_of_the_plain_optimizer_afterwards():
    _, loss_of, trainer = make(coefficient=Until(2))
    costs, coefficients = [0], []
    for _ in range(4):
        mean_loss = trainer.update_full_grads(loss_of, BATCHES)
        coefficients.append(trainer.coefficient)
        kit.one_epoch(trainer, loss_of, BATCHES)
        costs.append(trainer.grad_evaluations / len(PROBLEM.X))
    assert coefficients[:2] == [1, 1]
    assert np.diff(costs) == pytest.approx([3, 3, 1, 1])
    assert math.isnan(mean_loss) and trainer.snapshot is None


def test_a_schedule_that_is_set_begins_with_the_snapshot_in_force():
    _, loss_of, trainer = make()
    for falling in (Linear(1, 4), Linear(0.8, 4)):
        trainer.update_full_grads(loss_of, BATCHES)
        trainer.coefficient = falling
        assert trainer.coefficient == falling(trainer.num_snapshots - 1)


def test_schedules_can_be_keys():
    assert len({Linear(1, 3), Cosine(1, 3), Until(3), EveryEpochs(2), sampler(5, 3)}) == 5


def run(refresh, epochs):
    """The steps at which a refresh was made."""
    _, loss_of, trainer = make()
    made = []
    for step in range(epochs * len(BATCHES)):
        if refresh.due(trainer):
            trainer.update_full_grads(loss_of, BATCHES)
            made.append(step)
        kit.one_epoch(trainer, loss_of, [BATCHES[step % len(BATCHES)]])
    return made


def test_refreshes():
    """Asked once per step; so `EveryEpochs` takes steps for epochs."""
    assert run(EverySteps(7), 6) == [0, 7, 14, 21, 28]
    assert run(EverySteps(3, factor=2), 10) == [0, 3, 9, 21, 45]
    assert run(EveryEpochs(4), 2) == [0, 4, 8]
    assert run(Loopless(1.0), 1) == [0, 1, 2, 3, 4]


def test_the_coins_of_loopless():
    made, again, other = (run(Loopless(0.2, seed=seed), 40) for seed in (3, 3, 4))
    assert made == again != other and made[0] == 0
    assert 0.1 < len(made) / 200 < 0.3


@pytest.mark.parametrize("by", ["discard", "a file without a snapshot", "a file of gluon.Trainer"])
@pytest.mark.parametrize("refresh", [EverySteps(5), EverySteps(5, factor=2), Loopless(1e-9)])
def test_a_trainer_without_a_snapshot_is_asked_for_one(refresh, by, tmp_path):
    _, loss_of, trainer = make(data=BATCHES)
    assert not refresh.due(trainer)
    if by == "discard":
        trainer.discard_snapshot()
    else:
        is_plain = by == "a file of gluon.Trainer"
        _, other_loss_of, other = make(cls=gluon.Trainer if is_plain else SVRGTrainer)
        kit.plain_step(other, lambda: other_loss_of(BATCHES[0]), 5)
        other.save_states(str(tmp_path / "states"))
        trainer.load_states(tmp_path / "states")
    for _ in range(2):
        assert refresh.due(trainer)
        trainer.step(5, closure=lambda: loss_of(BATCHES[0]))
    trainer.update_full_grads(loss_of, BATCHES)
    assert not refresh.due(trainer)


def ask(thing, trainer, count):
    """Draws of a sampler, or coins of a schedule."""
    if isinstance(thing, sampler):
        return [list(thing) for _ in range(count)]
    return [thing.due(trainer) for _ in range(17 * count)]


#: What remembers something: for the trainer that saves it, and for the one that resumes.
REMEMBERING = {
    "epochs": lambda resumes: [EveryEpochs(5)],
    "settings": lambda resumes: [Loopless(0.3, seed=99 if resumes else 0)],
    "seeds": lambda resumes: [Loopless(0.5, seed=n) for n in ((2, 1) if resumes else (1, 2))],
    "an order": lambda resumes: [Loopless(0.5), Loopless(0.5)],
    "draws": lambda resumes: [sampler(100, lambda draw: 5 * 2**draw, seed=n) for n in (3, 4)],
}


@pytest.mark.parametrize("register_first", [True, False])
@pytest.mark.parametrize("make_all", REMEMBERING.values(), ids=REMEMBERING)
def test_what_is_remembered_is_saved_with_the_trainer(make_all, register_first, tmp_path):
    """Two of a kind are known by their seeds, or by their order."""
    saved, resumed = make_all(False), make_all(True)
    same = sorted(resumed, key=lambda one: one.seed) if len(resumed) > 1 else resumed
    _, _, trainer = make(data=BATCHES)
    for count, one in enumerate(saved, 1):
        if isinstance(one, sampler):  # schedules register themselves
            trainer.register(one)
        ask(one, trainer, count)
    trainer.save_states(tmp_path / "states")
    expected = [ask(one, trainer, 2) for one in saved]
    _, _, trainer = make()
    if not register_first:
        trainer.load_states(tmp_path / "states")
    for one in resumed:
        trainer.register(one)
    if register_first:
        trainer.load_states(tmp_path / "states")
    assert [ask(one, trainer, 2) for one in same[::-1]] == expected[::-1]


class Asked:
    def __init__(self, every):
        self.every, self.asked = every, 0


@kit.table(
    "make_all",
    lambda: [Asked(5), Asked(9)],
    lambda: [sampler(9, 3, seed=1), sampler(9, 3, seed=2)],
    lambda: [Loopless(0.5, seed=1), Loopless(0.5, seed=2)],
)
@pytest.mark.parametrize("register_first", [True, False])
def test_counters_that_are_zero(make_all, register_first, tmp_path):
    """A counter is no setting, and goes back to zero."""
    pairs = []
    for number in range(2):
        _, _, trainer = make()
        one, other = make_all()
        counter = next(name for name in ("asked", "draws") if name in vars(one))
        pairs.append((one, other))
        if number and not register_first:
            trainer.load_states(tmp_path / "states")
        setattr(one, counter, 0 if number else 3)
        setattr(other, counter, 7 if number and register_first else 0)
        for each in (one, other) if number else (other, one):
            trainer.register(each)
        if number and register_first:
            trainer.load_states(tmp_path / "states")
        trainer.save_states(tmp_path / "states")
    for then, now in zip(*pairs):
        assert vars(now) == vars(then)


test_bad_arguments = kit.refusals(
    (lambda: Until(2, -1), ValueError, "value must be finite, at least 0, got -1"),
    (lambda: Until(0), ValueError, "num_snapshots must be 1 or more, got 0"),
    (lambda: Linear(float("nan"), 3), ValueError, "initial must be finite"),
    (lambda: Linear(1, 3, "x"), TypeError, "final must be a number, got str"),
    (lambda: Cosine(1, 2.5), TypeError, "num_snapshots must be a whole number, got float"),
    (lambda: EveryEpochs(True), TypeError, "epochs must be a whole number, got bool"),
    (lambda: EveryEpochs(2).due(None), TypeError, "due needs a trainer .*, got NoneType"),
    (lambda: EverySteps(-3), ValueError, "steps must be 1 or more"),
    (lambda: EverySteps(5, 0), ValueError, "factor must be 1 or more, got 0"),
    (lambda: Loopless(0), ValueError, "probability must be finite, above 0"),
    (lambda: Loopless(1.1), ValueError, "above 0 and at most 1, got 1.1"),
    (lambda: Loopless(0.5, -1), ValueError, "seed must be 0 or more, got -1"),
    (lambda: sampler(0, 3), ValueError, "length must be 1 or more, got 0"),
    (lambda: sampler(10, 0), ValueError, "num_samples must be 1 or more"),
    (lambda: sampler(10, 3, "a"), TypeError, "seed must be a whole number, got str"),
    (lambda: sampler(10, 3, replacement="no"), TypeError, "must be True or False, got 'no'"),
)


@pytest.mark.parametrize("replacement", [False, True])
def test_partial_sampler(replacement):
    ones = [sampler(50, 20, seed=seed, replacement=replacement) for seed in (2, 2, 3)]
    draws, again, other = ([list(one) for _ in range(30)] for one in ones)
    assert draws == again and draws[0] not in (draws[1], other[0])
    assert all(len(draw) == 20 for draw in draws)
    assert any(len(set(draw)) < 20 for draw in draws) == replacement
    assert {i for draw in draws for i in draw} == set(range(50))
    assert len(sampler(50, lambda draw: 10 * 1.5**draw)) == 10


@pytest.mark.parametrize("refresh", [lambda: Loopless(0.3), lambda: EveryEpochs(5)])
def test_what_waits_for_its_schedule_is_saved_again(refresh, tmp_path):
    asked, again = refresh(), refresh()
    _, _, trainer = make(data=BATCHES)
    ask(asked, trainer, 1)
    trainer.save_states(tmp_path / "0")
    for number in range(2):  # saved before the schedule is asked
        _, _, resumed = make()
        resumed.load_states(tmp_path / f"{number}")
        resumed.save_states(tmp_path / f"{number + 1}")
    assert ask(again, resumed, 2) == ask(asked, trainer, 2)


def test_arrays_of_a_sampler_can_be_changed_after_loading(tmp_path):
    class Shuffled:
        def __init__(self):
            self.order = np.arange(9)

    (_, _, first), (_, _, second) = make(), make()
    saved, loaded = Shuffled(), Shuffled()
    saved.order[:] = saved.order[::-1]
    first.register(saved)
    first.save_states(tmp_path / "states")
    second.register(loaded)
    second.load_states(tmp_path / "states")
    assert (loaded.order == saved.order).all()
    np.random.shuffle(loaded.order)
