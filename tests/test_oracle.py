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
METHODS = [oracle.SVRG, oracle.SARAH, oracle.STORM, oracle.MARS, oracle.SAGA, oracle.SAG]


def make(method, **kwargs):
    return method(PROBLEM.gradient, PROBLEM.initial, **kwargs), oracle.SGD(**RATES)


def mean_gradient(weights, index):
    grads, count = PROBLEM.gradient(weights, index)
    return [g / count for g in grads]


@given(
    visits=st.lists(st.integers(0, 4), min_size=1, max_size=9),
    refresh=st.booleans(),
    method=st.sampled_from([oracle.SVRG, oracle.SAGA, oracle.SAG]),
)
def test_estimates_and_tables(visits, refresh, method):
    """The mean estimate over all data is the gradient, the mean of a table that of its rows."""
    twin, optimizer = make(method)
    if refresh or method is oracle.SVRG:
        twin.refresh(BATCHES)
    for i in visits:
        expected = PROBLEM.gradient(twin.weights, BATCHES[i])[0]
        twin.step(optimizer, BATCHES[i], rows=[i])
        if method is not oracle.SVRG:
            assert distance(twin.table[i], expected) == 0
    if method is not oracle.SVRG:
        visited = range(5) if refresh else set(visits)
        entries = sum(len(BATCHES[i]) for i in visited)
        assert (set(twin.table), twin.seen) == (set(visited), entries)
        total = [sum(parts) / entries for parts in zip(*twin.table.values())]
        assert distance(twin.mean, total) < 1e-13
    if refresh:
        estimates = [twin.estimate(batch, i) for i, batch in enumerate(BATCHES)]
        total = [sum(parts) for parts in zip(*estimates)]
        assert distance(total, PROBLEM.gradient(twin.weights, ALL)[0]) < 1e-13


@pytest.mark.parametrize("method", METHODS)
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
    assert max(distance(other, found[0]) for other in found[1:]) < 1e-13
    assert distance(found[0], PROBLEM.initial) > 0.01


def follow(twin, optimizer, formula):
    """A formula of the gradients now and before, and of the last estimate, beside the twin."""
    before = last = None
    for batch in BATCHES:
        x = oracle.copied(twin.weights)
        grads = mean_gradient(x, batch)
        total = twin.advance(twin.estimate(batch), [batch], [None])
        last = formula(grads, mean_gradient(before or x, batch), last)
        assert distance([v / len(batch) for v in total], last) < 1e-13
        optimizer.step(twin.weights, total, len(batch))
        before = x


@pytest.mark.parametrize("mixing", [0.25, 0.0])
def test_storm_is_the_papers_formula(mixing):
    """d = g(x) + (1 - a) (d - g(x before)); with a = 0 it is that of SARAH."""

    def formula(grads, old, last):
        return [g + (1 - mixing) * (d - o) for g, o, d in zip(grads, old, last or old)]

    follow(*make(oracle.STORM, mixing=mixing), formula)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("clip", [None, 0.02])
def test_mars_is_the_papers_formula(exact, vectors, clip):
    """c = g(x) + gamma beta / (1 - beta) (g(x) - g before), clipped; bias vectors stay plain."""
    seen, clipped = [], []

    def formula(grads, old, _):
        old = old if exact else (seen or [grads])[-1]
        seen.append(grads)
        corrected = [g + 1.5 * (g - o) for g, o in zip(grads, old)]
        for n, c in enumerate(corrected):
            if clip and np.linalg.norm(c) > clip:
                clipped.append(n)
                corrected[n] = c * clip / np.linalg.norm(c)
        return [c if vectors or g.ndim > 1 else g for c, g in zip(corrected, grads)]

    kwargs = {"clip": clip, "exact": exact, "include_vectors": vectors}
    follow(*make(oracle.MARS, gamma=0.5, beta=0.75, **kwargs), formula)
    assert bool(clipped) == (clip is not None)


@given(
    numbers=st.lists(st.integers(-200, 200), min_size=6, max_size=6),
    rate=st.floats(0.05, 1),
    strength=st.floats(0.01, 2),
    ridge=st.floats(0, 2),
    axis=st.sampled_from([None, 0, 1]),
)
def test_proximal_operators_find_the_minimum(numbers, rate, strength, ridge, axis):
    """There, a subgradient of the objective is zero."""
    w, reach = np.array(numbers).reshape(2, 3) / 100, rate * strength
    for size, x in [
        (np.abs(w), oracle.elastic_net(w, rate, strength, ridge) * (1 + rate * ridge)),
        (np.sqrt((w * w).sum(axis, keepdims=True)), oracle.group_lasso(w, rate, strength, axis)),
    ]:
        np.testing.assert_array_equal(x[np.broadcast_to(size <= reach, w.shape)], 0)
        expected = w - reach * w / np.where(size > 0, size, 1)
        np.testing.assert_allclose(x, np.where(size > reach, expected, 0), atol=1e-12)
    np.testing.assert_array_equal(oracle.box(w, rate, -0.5, ridge), np.clip(w, -0.5, ridge))
