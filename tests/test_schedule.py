"""Schedules: against their formulas, in plain loops, saved with the trainer."""

import math
from functools import partial

import kit
import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from problems import Dense, array
from sklearn.datasets import load_breast_cancer

from gluon_svrg import SVRGTrainer, schedule

PROBLEM = Dense("classification", seed=21)
BATCHES = PROBLEM.batches(5)
make = partial(kit.make, PROBLEM, "float32")


@pytest.mark.parametrize(
    "coefficient, expected",
    [
        (schedule.Linear(0.75, 5), [0.75, 0.6, 0.45, 0.3, 0.15, 0, 0, 0]),
        (schedule.Linear(1.0, 4, final=0.2), [1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2, 0.2]),
        (
            schedule.Cosine(1.0, 4),
            [(1 + math.cos(math.pi * s / 4)) / 2 for s in range(5)] + [0] * 3,
        ),
        (schedule.Cosine(1.0, 2, final=0.5), [1, 0.75, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]),
        (schedule.Until(3), [1, 1, 1, 0, 0, 0, 0, 0]),
        (schedule.Until(2, 0.5), [0.5, 0.5, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_coefficients(coefficient, expected):
    assert [coefficient(index) for index in range(8)] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "shown",
    [
        "Linear(initial=0.75, num_snapshots=10, final=0.0)",
        "Cosine(initial=1.0, num_snapshots=4, final=0.25)",
        "Until(num_snapshots=2, value=0.5)",
        "EveryEpochs(epochs=2)",
        "EverySteps(steps=100, factor=1)",
        "EverySteps(steps=3, factor=2)",
        "Loopless(probability=0.02, seed=1)",
        "PartialSampler(length=100, num_samples=10, seed=3, replacement=True)",
    ],
)
def test_a_schedule_is_shown_as_the_call_that_makes_it(shown):
    made = eval(shown, vars(schedule))
    assert repr(made) == shown


@pytest.mark.parametrize(
    "made",
    [
        schedule.EveryEpochs(2),
        schedule.EverySteps(2),
        schedule.Loopless(0.5),
        schedule.EverySteps(2, factor=2),
    ],
)
def test_a_refresh_schedule_needs_a_trainer(made):
    message = rf"{type(made).__name__}\.due must be called with a trainer with snapshots, got "
    for value in ("epoch", 3.0, None, 3):
        with pytest.raises(TypeError, match=message + type(value).__name__):
            made.due(value)


def test_a_coefficient_schedule_in_the_trainer():
    _, loss_of, trainer = make(coefficient=schedule.Linear(0.75, 3))
    found = []
    for _ in range(4):
        trainer.update_full_grads(loss_of, BATCHES)
        found.append(trainer.coefficient)
        trainer.step(5, closure=lambda: loss_of(BATCHES[0]))
    assert found == pytest.approx([0.75, 0.5, 0.25, 0])


def test_until_has_the_cost_of_the_plain_optimizer_afterwards():
    _, loss_of, trainer = make(coefficient=schedule.Until(2))
    samples, costs = len(PROBLEM.X), []
    for _ in range(4):
        before = trainer.grad_evaluations
        mean_loss = trainer.update_full_grads(loss_of, BATCHES)
        for index in BATCHES:
            trainer.step(len(index), closure=lambda: loss_of(index))
        costs.append((trainer.grad_evaluations - before) / samples)
    sizes = [len(batch) for batch in BATCHES]
    refresh = sum(sizes) / samples
    assert costs == pytest.approx([2 + refresh, 2 + refresh, 1, 1])
    assert math.isnan(mean_loss)
    assert trainer.snapshot is None


def run(refresh, epochs=40):
    """The steps at which a refresh was made."""
    _, loss_of, trainer = make()
    steps, made = 0, []
    for _ in range(epochs):
        for index in BATCHES:
            if refresh.due(trainer):
                trainer.update_full_grads(loss_of, BATCHES)
                made.append(steps)
            trainer.step(len(index), closure=lambda: loss_of(index))
            steps += 1
    return made, steps


def test_every_epochs():
    _, loss_of, trainer = make()
    refresh, made = schedule.EveryEpochs(3), []
    for epoch in range(7):
        if refresh.due(trainer):
            trainer.update_full_grads(loss_of, BATCHES)
            made.append(epoch)
    assert made == [0, 3, 6]


def test_every_steps():
    assert run(schedule.EverySteps(7), epochs=6)[0] == [0, 7, 14, 21, 28]


def test_doubling():
    assert run(schedule.EverySteps(3, factor=2), epochs=10)[0] == [0, 3, 9, 21, 45]


def test_loopless():
    made, steps = run(schedule.Loopless(0.2, seed=3))
    again, _ = run(schedule.Loopless(0.2, seed=3))
    other, _ = run(schedule.Loopless(0.2, seed=4))
    assert made == again != other
    assert made[0] == 0
    assert 0.1 < len(made) / steps < 0.3
    assert run(schedule.Loopless(1.0), epochs=1)[0] == list(range(len(BATCHES)))


def test_the_coins_are_saved_with_the_trainer(tmp_path):
    _, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, BATCHES)
    straight = schedule.Loopless(0.3, seed=1)
    for _ in range(17):
        straight.due(trainer)
    trainer.save_states(tmp_path / "states")
    expected = [straight.due(trainer) for _ in range(30)]
    for order in ("schedule first", "states first"):
        other = make()[2]
        resumed = schedule.Loopless(0.3, seed=99)
        if order == "schedule first":
            resumed.due(other)
        other.load_states(tmp_path / "states")
        assert [resumed.due(other) for _ in range(30)] == expected


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: schedule.Until(2, -1), ValueError, "value must be finite, at least 0, got -1"),
        (lambda: schedule.Until(2, True), TypeError, "value must be a number, got bool"),
        (lambda: schedule.Until(2, "x"), TypeError, "value must be a number, got str"),
        (lambda: schedule.Linear(float("nan"), 3), ValueError, "initial must be finite"),
        (lambda: schedule.Linear(1, 0), ValueError, "snapshots must be 1 or more, got 0"),
        (lambda: schedule.Cosine(1, 2.5), TypeError, "snapshots must be a whole number, got float"),
        (lambda: schedule.EveryEpochs(True), TypeError, "epochs must be a whole number, got bool"),
        (lambda: schedule.EverySteps(-3), ValueError, "steps must be 1 or more"),
        (
            lambda: schedule.Loopless(0),
            ValueError,
            "probability must be finite, above 0",
        ),
        (lambda: schedule.Loopless(1.1), ValueError, "above 0 and at most 1, got 1.1"),
        (lambda: schedule.Loopless(0.5, -1), ValueError, "seed must be 0 or more, got -1"),
        (lambda: schedule.Loopless(0.5, None), TypeError, "seed must be a whole number, got NoneT"),
        (lambda: schedule.Loopless(0.5, "a"), TypeError, "seed must be a whole number, got str"),
        (lambda: schedule.EverySteps(0, factor=2), ValueError, "steps must be 1 or more"),
        (lambda: schedule.EverySteps(5, 0), ValueError, "factor must be 1 or more, got 0"),
        (lambda: schedule.EverySteps(3, "x"), TypeError, "factor must be a whole number, got str"),
        (lambda: schedule.PartialSampler(10, 0), ValueError, "num_samples must be 1 or more"),
        (lambda: schedule.PartialSampler(10, 3, -1), ValueError, "seed must be 0 or more, got -1"),
        (
            lambda: schedule.PartialSampler(10, 3, replacement="no"),
            TypeError,
            "replacement must be True or False, got 'no'",
        ),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


# --- part of the data --------------------------------------------------------------------------


@pytest.mark.parametrize("replacement", [False, True])
def test_partial_sampler(replacement):
    draws = []
    for _ in range(2):
        sampler = schedule.PartialSampler(50, 20, seed=2, replacement=replacement)
        draws.append([list(sampler) for _ in range(30)])
    assert draws[0] == draws[1]
    assert draws[0][0] != draws[0][1]
    assert all(len(draw) == 20 for draw in draws[0])
    repeats = any(len(set(draw)) < 20 for draw in draws[0])
    assert repeats == replacement
    assert {i for draw in draws[0] for i in draw} == set(range(50))


def test_growing():
    sampler = schedule.PartialSampler(100, lambda draw: round(8 * 1.5**draw))
    assert [len(list(sampler)) for _ in range(8)] == [8, 12, 18, 27, 40, 61, 91, 100]


def test_a_full_gradient_over_part_of_the_data():
    net, _, trainer = make()
    X, y = PROBLEM.X.astype("float32"), PROBLEM.y.astype("float32")
    data = gluon.data.ArrayDataset(X, y)
    sampler = schedule.PartialSampler(len(X), 9, seed=5)
    loader = gluon.data.DataLoader(data, batch_size=4, sampler=sampler)
    loss_function = PROBLEM.loss_function()
    trainer.update_full_grads(lambda X, y: loss_function(net(X), y), loader)
    chosen = list(schedule.PartialSampler(len(X), 9, seed=5))
    expected = PROBLEM.gradient(PROBLEM.initial, np.array(chosen))[0]
    for p, g in zip((net[0].weight, net[0].bias), expected):
        np.testing.assert_allclose(trainer.full_grads[p][0].asnumpy(), g / 9, atol=1e-5)
    assert trainer.grad_evaluations == sum([4, 4, 1])


# --- the rate of the loopless method -----------------------------------------------------------


def logistic():
    """Rows of unit norm, labels +-1, lambda 1/n, no intercept."""
    X, labels = load_breast_cancer(return_X_y=True)
    X = X / np.linalg.norm(X, axis=1, keepdims=True)
    return X, 2.0 * labels - 1


def newton(X, y):
    """The optimum, in float64."""
    n, w = len(X), np.zeros(X.shape[1])
    for _ in range(50):
        margin = y * (X @ w)
        p = 1 / (1 + np.exp(margin))
        gradient = -(X * (y * p)[:, None]).mean(axis=0) + w / n
        hessian = (X * (p * (1 - p))[:, None]).T @ X / n + np.eye(len(w)) / n
        w = w - np.linalg.solve(hessian, gradient)
    return w


def objective(X, y, w):
    return np.logaddexp(0, -y * (X @ w)).mean() + w @ w / (2 * len(X))


def passes_until(gap, seed, X, y, best, most=40):
    """Data passes that loopless SVRG takes to a gap of the objective."""
    n = len(X)
    L_max = 0.25 + 1 / n
    weight = gluon.Parameter("weight", shape=(X.shape[1],), dtype="float64")
    weight.initialize(mx.init.Zero())
    trainer = SVRGTrainer([weight], "sgd", {"learning_rate": 1 / (3 * L_max)})
    samples, labels = array(X), array(y)

    def loss_of(index):
        w = weight.data()
        x = samples[index : index + 1] if isinstance(index, int) else samples
        label = labels[index : index + 1] if isinstance(index, int) else labels
        margin = label * (x * w).sum(axis=1)
        log, exp = (mx.np.log, mx.np.exp) if mx.util.is_np_array() else (mx.nd.log, mx.nd.exp)
        return log(1 + exp(-margin)) + (w * w).sum() / (2 * n)

    refresh = schedule.Loopless(1 / n, seed)
    random = np.random.RandomState(seed)
    value = objective(X, y, np.zeros(X.shape[1]))
    while trainer.grad_evaluations < most * n:
        if refresh.due(trainer):
            trainer.update_full_grads(loss_of, [None])
            value = objective(X, y, weight.data().asnumpy())
            if value - best < gap:
                break
        index = int(random.randint(n))
        trainer.step(1, closure=lambda: loss_of(index))
    return trainer.grad_evaluations / n, value - best


@pytest.mark.convergence
def test_loopless_reaches_1e_9_within_30_data_passes():
    X, y = logistic()
    best = objective(X, y, newton(X, y))
    found = [passes_until(1e-9, seed, X, y, best) for seed in range(5)]
    assert np.median([passes for passes, _ in found]) <= 30, found
