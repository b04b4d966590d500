"""What must hold for the methods in NumPy alone: other tests lean on them."""

from itertools import chain

import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import Dense, distance

PROBLEM = Dense("classification", hidden=(4,), seed=30)
ALL = np.arange(len(PROBLEM.X))
BATCHES = PROBLEM.batches(5)  # the last has 3 entries
RATES = {"learning_rate": 0.2, "momentum": 0.5, "wd": 0.01}


def make(method, *args, **kwargs):
    return method(PROBLEM.gradient, PROBLEM.initial, *args, **kwargs), oracle.SGD(**RATES)


def plain(batches, **kwargs):
    """The weights after steps of the plain optimizer."""
    twin, optimizer = make(oracle.Method)
    for batch in batches:
        twin.step(optimizer, batch, **kwargs)
    return twin.weights


def mean_gradient(weights):
    grads, count = PROBLEM.gradient(weights, ALL)
    return [g / count for g in grads]


def assert_equal(these, those):
    for this, that in zip(these, those):
        np.testing.assert_array_equal(this, that)


# --- the plain optimizer is inside ---------------------------------------------------------------


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("refresh", [False, True])
def test_mars_with_gamma_0_and_without_clip_is_the_plain_optimizer(exact, refresh):
    twin, optimizer = make(oracle.MARS, gamma=0, clip=None, exact=exact, include_vectors=True)
    for number, batch in enumerate(BATCHES):
        if refresh and number == 2:
            twin.refresh(BATCHES)
        twin.step(optimizer, batch)
    assert_equal(twin.weights, plain(BATCHES))


def test_storm_with_mixing_1_is_the_plain_optimizer():
    twin, optimizer = make(oracle.STORM, mixing=1)
    for batch in BATCHES:
        twin.step(optimizer, batch)
    assert_equal(twin.weights, plain(BATCHES))


@pytest.mark.parametrize("method", [oracle.SVRG, oracle.SARAH])
def test_without_a_refresh_it_is_the_plain_optimizer(method):
    twin, optimizer = make(method)
    for batch in BATCHES:
        twin.step(optimizer, batch)
    assert_equal(twin.weights, plain(BATCHES))


@pytest.mark.parametrize("method", [oracle.STORM, oracle.MARS, oracle.SAGA, oracle.SAG])
def test_the_first_step_of_all_is_a_plain_one(method):
    kwargs = {"clip": None} if method is oracle.MARS else {}
    twin, optimizer = make(method, **kwargs)
    twin.step(optimizer, BATCHES[0], rows=[0])
    assert distance(twin.weights, plain(BATCHES[:1])) < 1e-15


# --- gradient descent is inside ------------------------------------------------------------------


def test_sarah_with_full_minibatches_is_gradient_descent():
    twin, optimizer = make(oracle.SARAH)
    twin.refresh(BATCHES)
    for _ in range(6):
        twin.step(optimizer, ALL)
    assert distance(twin.weights, plain([ALL] * 6)) < 1e-13


@pytest.mark.parametrize("method", [oracle.SVRG, oracle.SARAH, oracle.SAGA])
def test_with_a_refresh_at_each_step_it_is_gradient_descent(method):
    """PAGE with probability 1 among them."""
    twin, optimizer = make(method)
    batches = PROBLEM.batches(4)  # a batch size whose inverse float32 holds exactly
    weights, descent = oracle.copied(PROBLEM.initial), oracle.SGD(**RATES)
    for i in range(5):
        twin.refresh(batches)
        twin.step(optimizer, batches[i], rows=[i])
        descent.step(weights, mean_gradient(weights), 1)
    assert distance(twin.weights, weights) < 1e-13


@given(
    steps=st.lists(st.integers(0, 4), max_size=6),
    method=st.sampled_from([oracle.SVRG, oracle.SAGA]),
)
def test_unbiased(steps, method):
    """The mean estimate over all minibatches is the gradient."""
    twin, optimizer = make(method)
    twin.refresh(BATCHES)
    for i in steps:
        twin.step(optimizer, BATCHES[i], rows=[i])
    estimates = [twin.estimate(batch, i) for i, batch in enumerate(BATCHES)]
    total = [sum(parts) for parts in zip(*estimates)]
    assert distance(total, PROBLEM.gradient(twin.weights, ALL)[0]) < 1e-13


# --- what moves ----------------------------------------------------------------------------------


@given(
    visits=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    refresh=st.booleans(),
    method=st.sampled_from([oracle.SAGA, oracle.SAG]),
)
def test_the_mean_of_the_table_is_exact_after_any_order_of_visits(visits, refresh, method):
    twin, optimizer = make(method)
    if refresh:
        twin.refresh(BATCHES)
    for i in visits:
        twin.step(optimizer, BATCHES[i], rows=[i])
    visited = range(5) if refresh else set(visits)
    entries = sum(len(BATCHES[i]) for i in visited)
    assert set(twin.table) == set(visited)
    assert twin.seen == entries
    total = [sum(parts) / entries for parts in zip(*twin.table.values())]
    assert distance(twin.mean, total) < 1e-13


def test_a_row_is_the_gradient_of_its_last_visit():
    twin, optimizer = make(oracle.SAGA)
    twin.refresh(BATCHES)
    expected = PROBLEM.gradient(twin.weights, BATCHES[3])[0]
    twin.step(optimizer, BATCHES[3], rows=[3])
    twin.step(optimizer, BATCHES[1], rows=[1])
    assert_equal(twin.table[3], expected)


def test_sag_hands_on_the_mean_of_the_new_table():
    twin, optimizer = make(oracle.SAG)
    twin.refresh(BATCHES)
    twin.step(optimizer, BATCHES[0], rows=[0])
    total = twin.estimate(BATCHES[4], 4)
    grads = twin.advance(total, [BATCHES[4]], [4])
    mean = [sum(parts) / len(ALL) for parts in zip(*twin.table.values())]
    assert distance(grads, [len(BATCHES[4]) * m for m in mean]) < 1e-13


@pytest.mark.parametrize("method", [oracle.SARAH, oracle.STORM])
def test_the_mean_is_the_last_estimate(method):
    twin, optimizer = make(method)
    twin.refresh(BATCHES)
    twin.step(optimizer, BATCHES[0])
    before, v = oracle.copied(twin.weights), twin.estimate(BATCHES[4])
    twin.step(optimizer, BATCHES[4])
    assert distance(twin.mean, [part / 3 for part in v]) < 1e-15
    assert_equal(twin.reference, before)


def test_storm_with_mixing_0_is_sarah():
    found = []
    for method, kwargs in [(oracle.STORM, {"mixing": 0}), (oracle.SARAH, {})]:
        twin, optimizer = make(method, **kwargs)
        twin.refresh(BATCHES)
        for batch in BATCHES:
            twin.step(optimizer, batch)
        found.append(twin.weights)
    assert distance(*found) < 1e-14


def test_storm_is_the_papers_formula():
    """d = g(x) + (1 - a) (d - g(x before)), on means."""
    twin, optimizer = make(oracle.STORM, mixing=0.25)
    d = x_before = None
    for batch in BATCHES:
        x = oracle.copied(twin.weights)
        grads = [g / len(batch) for g in PROBLEM.gradient(x, batch)[0]]
        if d is not None:
            old = [g / len(batch) for g in PROBLEM.gradient(x_before, batch)[0]]
            grads = [g + 0.75 * (e - o) for g, e, o in zip(grads, d, old)]
        d, x_before = grads, x
        twin.step(optimizer, batch)
        assert distance(twin.mean, d) < 1e-13


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("clip", [None, 0.02])
def test_mars_is_the_papers_formula(exact, vectors, clip):
    """c = g(x) + gamma beta / (1 - beta) (g(x) - g before), clipped; bias vectors stay plain."""
    kwargs = {"clip": clip, "exact": exact, "include_vectors": vectors}
    twin, optimizer = make(oracle.MARS, gamma=0.5, beta=0.75, **kwargs)
    x_before = last = None
    clipped = 0
    for batch in BATCHES:
        x = oracle.copied(twin.weights)
        grads = [g / len(batch) for g in PROBLEM.gradient(x, batch)[0]]
        old = [g / len(batch) for g in PROBLEM.gradient(x_before or x, batch)[0]]
        if not exact:
            old = last or grads
        expected = []
        for g, o in zip(grads, old):
            c = g + 1.5 * (g - o)
            if clip and np.linalg.norm(c) > clip:
                clipped, c = clipped + 1, c * clip / np.linalg.norm(c)
            expected.append(c if vectors or g.ndim > 1 else g)
        total = twin.advance(twin.estimate(batch), [batch], [None])
        assert distance([v / len(batch) for v in total], expected) < 1e-13
        optimizer.step(twin.weights, total, len(batch))
        x_before, last = x, grads
    assert (clipped > 0) == (clip is not None)


@pytest.mark.parametrize(("norm", "after"), [(0.0, 0.0), (0.4, 0.4), (0.6, 0.5), (7.0, 0.5)])
def test_the_clip_is_of_the_mean(norm, after):
    twin, _ = make(oracle.MARS, clip=0.5)
    total = 3 * norm * np.full((2, 2), 0.5)
    assert np.linalg.norm(twin.clipped(total, 3)) == pytest.approx(3 * after)


@pytest.mark.parametrize(
    "method", [oracle.SVRG, oracle.SARAH, oracle.STORM, oracle.MARS, oracle.SAGA, oracle.SAG]
)
@pytest.mark.parametrize("refresh", [True, False])
def test_micro_batches_are_one_minibatch(method, refresh):
    """For tables as well, as long as the parts visit their rows together."""
    found = []
    for cuts in ([], [2], [1, 3]):
        twin, optimizer = make(method)
        parts = [[p for p in np.split(batch, cuts) if len(p)] for batch in BATCHES]
        rows = [[(i, j) for j in range(len(parts[i]))] for i in range(5)]
        if refresh:
            kwargs = {"rows": [*chain(*rows)]} if isinstance(twin, oracle.SAGA) else {}
            twin.refresh([*chain(*parts)], **kwargs)
        for i in (0, 4, 1, 4, 0, 2):
            twin.step(optimizer, *parts[i], rows=rows[i])
        found.append(twin.weights)
    for other in found[1:]:
        assert distance(other, found[0]) < 1e-13
    assert distance(found[0], PROBLEM.initial) > 0.01


def test_a_row_moves_once_an_update():
    twin, optimizer = make(oracle.SAGA)
    with pytest.raises(AssertionError, match="once an update"):
        twin.step(optimizer, BATCHES[0], BATCHES[0], rows=[0, 0])


def test_factors_are_rounded_to_float32():
    twin, _ = make(oracle.MARS, gamma=0.025, beta=0.95)
    assert twin.scale != 0.025 * 0.95 / (1 - 0.95)
    assert twin.scale == pytest.approx(0.475, rel=1e-5)
    assert isinstance(make(oracle.STORM, mixing=0.1)[0].mixing, np.float64)
    assert make(oracle.SVRG, 0.7)[0].coefficient == np.float32(0.7) != 0.7


# --- Barzilai and Borwein ------------------------------------------------------------------------


def quadratic(curvature):
    return lambda w, _: ([curvature @ w[0]], 1)


@given(curvature=st.floats(0.1, 10), wd=st.sampled_from([0, 0.5]), steps=st.integers(1, 20))
def test_the_rate_is_the_inverse_of_the_curvature(curvature, wd, steps):
    twin = oracle.SVRG(quadratic(curvature * np.eye(3)), [np.arange(1.0, 4.0)])
    rate = oracle.BarzilaiBorwein(0.01, wd)
    for shift in (0, 0.3, 0.4):
        twin.weights[0] += shift
        twin.refresh([0])
        found = rate.refresh(twin.snapshot, twin.full_grad, steps)
    assert found == pytest.approx(1 / (steps * (curvature + wd)))


def test_the_users_rate_and_the_last_one():
    rate = oracle.BarzilaiBorwein(0.25)
    w = [np.ones(2)]
    assert rate.refresh(w, [np.ones(2)], 1) == 0.25  # one snapshot
    assert rate.refresh([w[0] + 1], [np.ones(2) * 3], 2) == 0.25  # dw dw / (2 dw dmu) = 2 / 8
    assert rate.refresh([w[0] + 2], [np.ones(2) * 13], 1) == 0.1
    assert rate.refresh([w[0] + 3], [np.ones(2) * 12], 1) == 0.1  # negative curvature
    assert rate.refresh([w[0] + 3], [np.ones(2) * 12], 1) == 0.1  # nothing moved


def test_svrg_with_its_rate_solves_least_squares():
    problem = Dense("regression", seed=31)
    twin = oracle.SVRG(problem.gradient, problem.initial)
    optimizer, rate = oracle.SGD(1e-3), oracle.BarzilaiBorwein(1e-3)
    for epoch in range(25):
        twin.refresh(problem.batches(5))
        optimizer.learning_rate = rate.refresh(twin.snapshot, twin.full_grad, 10)
        for index in 2 * problem.batches(5, np.random.RandomState(epoch).permutation(23)):
            twin.step(optimizer, index)
    X = np.hstack([problem.X, np.ones((23, 1))])
    solution = np.linalg.lstsq(X, problem.y, rcond=None)[0][:, 0]
    assert distance([np.append(*twin.weights)], [solution]) < 1e-6


# --- proximal operators --------------------------------------------------------------------------


def check_minimum(objective, found):
    """No point nearby is lower, which suffices where an objective is strictly convex."""
    lowest, rng = objective(found), np.random.RandomState(0)
    for scale in (1e-6, 1e-4, 1e-2, 1):
        for _ in range(25):
            assert objective(found + scale * rng.standard_normal(found.shape)) >= lowest


weights = st.lists(st.integers(-200, 200), min_size=6, max_size=6).map(
    lambda numbers: np.array(numbers).reshape(2, 3) / 100
)
rates = st.floats(0.05, 1)


@given(w=weights, rate=rates, strength=st.floats(0, 2), ridge=st.floats(0, 2))
def test_l1_and_elastic_net(w, rate, strength, ridge):
    def objective(x, ridge):
        penalty = strength * np.sum(np.abs(x)) + ridge / 2 * np.sum(x * x)
        return np.sum((x - w) ** 2) / 2 + rate * penalty

    check_minimum(lambda x: objective(x, 0), oracle.l1(w, rate, strength))
    found = oracle.elastic_net(w, rate, strength, ridge)
    check_minimum(lambda x: objective(x, ridge), found)
    np.testing.assert_array_equal(found[np.abs(w) <= rate * strength], 0)


@given(w=weights, rate=rates, strength=st.floats(0.01, 2), axis=st.sampled_from([None, 0, 1]))
def test_group_lasso(w, rate, strength, axis):
    def objective(x):
        norms = np.sqrt(np.sum(x * x, axis=axis))
        return np.sum((x - w) ** 2) / 2 + rate * strength * np.sum(norms)

    found = oracle.group_lasso(w, rate, strength, axis)
    check_minimum(objective, found)
    norms = np.sqrt(np.sum(w * w, axis=axis, keepdims=True)) + np.zeros_like(w)
    np.testing.assert_array_equal(found[norms <= rate * strength], 0)


@given(w=weights, rate=rates, low=st.floats(-1, 0), width=st.floats(0, 2))
def test_box_and_non_negative(w, rate, low, width):
    grid = np.linspace(low, low + width, 10001)
    nearest = grid[np.abs(w[..., None] - grid).argmin(axis=-1)]
    np.testing.assert_allclose(oracle.box(w, rate, low, low + width), nearest, atol=1e-3)
    found = oracle.non_negative(w, rate)
    np.testing.assert_array_equal(found, oracle.box(w, rate, 0, np.inf))
    assert (found >= 0).all()
    np.testing.assert_array_equal(found[w >= 0], w[w >= 0])


def test_a_group_of_one_is_l1():
    w = np.array([[-2.0, 0.0, 0.3]])
    np.testing.assert_allclose(oracle.group_lasso(w, 0.5, 0.8, axis=0), oracle.l1(w, 0.5, 0.8))


def test_proximal_svrg_solves_the_lasso():
    """At the solution the subgradient is zero: |gradient| <= strength, equal where w is not 0."""
    problem, strength = Dense("regression", seed=32, features=6), 0.9
    twin, optimizer = oracle.SVRG(problem.gradient, problem.initial), oracle.SGD(0.1)
    for _ in range(300):
        twin.refresh(problem.batches(5))
        for index in problem.batches(5):
            twin.step(optimizer, index)
            twin.weights[0][:] = oracle.l1(twin.weights[0], oracle.rounded(0.1), strength)
    w = twin.weights[0]
    grads, count = problem.gradient(twin.weights, np.arange(23))
    grad = grads[0] / count
    assert 0 < np.count_nonzero(w) < w.size
    np.testing.assert_allclose(grad[w != 0], -strength * np.sign(w[w != 0]), atol=1e-9)
    assert (np.abs(grad[w == 0]) <= strength + 1e-9).all()
