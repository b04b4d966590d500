"""Curvature in NumPy, without a trainer: P, probes, the controller, penalties in P's metric."""

from functools import partial
from itertools import cycle

import mxnet as mx
import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import Asymmetric, counted, table
from mxnet import gluon
from oracle import group_lasso, multiplied

from gluon_svrg.curvature.nystrom import NystromApproximation, inverse_of, nystrom
from gluon_svrg.curvature.probe import Probe
from gluon_svrg.curvature.proximal import TOLERANCE, Penalty, ProximalPoint
from gluon_svrg.curvature.step_size import StepSizeController, Sums
from gluon_svrg.prox import L1, Box, ElasticNet, GroupLasso

EPS = float(np.finfo("float64").eps)
seeds = st.integers(0, 1000)


def orthonormal(rng, count, size):
    """Vectors in rows."""
    return np.linalg.qr(rng.randn(size, count))[0].T


def hessian(eigenvalues, seed=0):
    """With these eigenvalues, in random directions."""
    V = orthonormal(np.random.RandomState(seed), len(eigenvalues), len(eigenvalues))
    return V.T * eigenvalues @ V


def random_metric(rng, size, rank):
    S = np.sort(10.0 ** rng.uniform(-2, 2, rank))[::-1]
    return NystromApproximation(orthonormal(rng, rank, size), S, 10.0 ** rng.uniform(-1, 1))


# --- P -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("decay", [1e-3, 0.3])
@pytest.mark.parametrize("entries", [20.0, 1e3, 1e9])
@pytest.mark.parametrize("rank, known", [(8, 8), (4, 4), (4, 2), (4, 8), (1, 8)])
def test_nystrom(rank, known, entries, decay):
    """A sketch of rank r of a Hessian with so many eigenvalues that are not 0."""
    H = hessian(np.where(np.arange(8) < known, 10.0 ** -np.arange(8), 0))
    Q = orthonormal(np.random.RandomState(1), rank, 8)
    P, is_limited = nystrom(Q, Q @ H, entries, decay, EPS)
    dense = H if known <= rank else H @ Q.T @ np.linalg.inv(Q @ H @ Q.T) @ Q @ H
    np.testing.assert_allclose(P.S, np.linalg.eigvalsh(dense)[::-1][:rank], atol=1e-12)
    np.testing.assert_allclose(P.U @ P.U.T, np.eye(rank), atol=1e-12)
    for e in np.eye(8):
        np.testing.assert_allclose(multiplied(P, e), dense @ e + P.rho * e, atol=1e-10)
        half = inverse_of(P, 0.5)(e)
        for inverse in (inverse_of(P)(e), inverse_of(P, 0.5)(half)):
            np.testing.assert_allclose(multiplied(P, inverse), e, atol=1e-10)
    floor = P.rho - decay
    if rank < 8:  # the curvature that an entry adds stands for all directions that are not known
        np.testing.assert_allclose(floor, max(P.S[-1], P.S.sum() / entries), atol=1e-12)
    elif known > entries / 10:  # as many effective directions as the entries can tell
        np.testing.assert_allclose((P.S / (P.S + floor)).sum(), entries / 10)
    else:
        assert abs(floor) < 1e-15
    assert not is_limited


@table(
    "curvature, decay, entries, rho, is_limited",
    ([1.0, 1e-9], 0.0, 1e9, 1e-6, True),
    ([1.0, 1e-9], 1e-5, 1e9, 1e-5, False),
    ([1.0, 1e-3], 0.0, 10, 1e-3**0.5, False),
    ([1.0, 0.0], 0.0, 10, 1e-6, False),  # in float32 it may be rounding
    ([1.0, -0.5], 0.0, 1e9, 0.55, False),  # what curves downward counts as 0
)
def test_least_curvature(curvature, decay, entries, rho, is_limited):
    P, found = nystrom(np.eye(2), np.diag(curvature), entries, decay, 1e-7)
    np.testing.assert_allclose([P.rho, *P.S], [rho, *np.maximum(curvature, 0)], 1e-6, atol=1e-8)
    assert found == is_limited


@table(
    "category, direction, curvature",
    ([0, 0, 0, 0], [0, 0, 1], 2 / 1000),  # the mean that an entry adds
    ([-0.1, -0.1, -0.1, -0.1], [0.1, 0, 1], 0.02 / 1.01),  # standardized: that of its weights
    ([1e-6, 1e-6, -1e-6, -1e-6], [0, 0, 1], 1e-12),  # seen, in units of its own
)
def test_a_category_that_no_entry_has(category, direction, curvature):
    X = np.stack([np.ones(4), [1, -1, 1, -1], category], axis=1)
    Q = orthonormal(np.random.RandomState(1), 3, 3)
    P, _ = nystrom(Q, Q @ X.T @ X / 4, 1000.0, 0.0, EPS)
    u = np.array(direction) / np.linalg.norm(direction)
    np.testing.assert_allclose(u @ multiplied(P, u) - P.rho, curvature, rtol=1e-2)


def test_inverse_root_and_rounding():
    """The factor of the largest curvature is 0, or negative in some of a thousand cases."""
    for S in 10 ** np.random.RandomState(0).uniform(-2, 2, (20_000, 1)):
        assert NystromApproximation(np.eye(1), S, 0.0).inverse_root()[1] < 1e-7


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 8), seeds)
def test_rows_are_added(size, rank, count, seed):
    """Their outer products, whether or not U has room for more directions."""
    rng = np.random.RandomState(seed)
    P, rows = random_metric(rng, size, min(rank, size)), rng.randn(count, size)
    new = P.with_rows(rows, EPS)
    for e in np.eye(size):
        np.testing.assert_allclose(
            multiplied(new, e), multiplied(P, e) + rows.T @ (rows @ e), atol=1e-8
        )
    assert len(new.S) == min(len(P.S) + count, size)


@pytest.mark.parametrize("size, rho", [(3, 1e-6), (2, 1e-9)])
def test_rows_and_rounding(size, rho):
    """A rho that rounding cannot tell from the largest curvature is raised, if it is needed."""
    P = NystromApproximation(np.eye(size)[:1], np.ones(1), 1e-9).with_rows(np.eye(size)[1:2], 1e-7)
    np.testing.assert_allclose(P.rho, rho)


# --- probes --------------------------------------------------------------------------------------
def measured(found, Hessians, entries=16.0, decays=0.0, size=None):
    """Measure to the end, each mini-batch with the next Hessian; arrays of the state on the way."""
    size, arrays = size or len(Hessians[0]), []
    for H in cycle(Hessians):
        if found.probe is None:
            return arrays
        gradient = lambda w: (H @ w + 1.0, entries)  # noqa: E731
        found.measure(gradient, np.ones(size), decays * np.ones(size), EPS)
        state = [vars(found), *(x._asdict() for x in (found.P, found.probe) if x is not None)]
        arrays += [x for each in state for x in each.values() if isinstance(x, np.ndarray)]


@table("size, rank, entries", (5, 50, 1000), (40, 4, 1000), (40, 50, 100), (5, 50, 9))
def test_arrays_have_the_layout_of_a_file(size, rank, entries):
    """C's: with another one, BLAS would sum differently after a file than before it."""
    # A sketch has four entries for each vector in a quarter of the data, if it can.
    Q = Probe.begin(1, size, rank, entries, 0.0).Q
    assert Q.flags.c_contiguous and len(Q) == min(rank, size, max(1, int((entries / 16) ** 0.5)))
    np.testing.assert_allclose(Q @ Q.T, np.eye(len(Q)), atol=1e-12)
    found = StepSizeController(rank)
    found.begin(size, entries)
    arrays = measured(found, [hessian(np.arange(1.0, size + 1))])
    found.learn(np.ones(size), Sums(1.0, along=1.0), EPS)
    arrays += [found.rows, found.P.U, found.P.S]
    assert len(arrays) > 9 and all(array.flags.c_contiguous for array in arrays)


@pytest.mark.parametrize("a, c, noise", [(2.0, 5.0, 9 / 9), (3.0, 3.0, 0.0), (7.0, -5.0, 2 * 8.0)])
def test_what_two_minibatches_tell(a, c, noise):
    """Of Hessians a and c times 1 and decay 1: N = (a - c)^2 / (a + 1 + c + 1), at most 2 L."""
    found = StepSizeController(0)
    found.begin(3)
    measured(found, [a * np.eye(3), c * np.eye(3)], decays=1.0)
    np.testing.assert_allclose([found.L, found.N], [max(a, c) + 1, noise], rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(found.rate, min(0.5 / found.L, 0.3 / max(noise, 1e-9)), rtol=1e-8)
    damping = np.clip(found.rate * noise / 0.3, 0.02, 1 - 1e-6)
    np.testing.assert_allclose(found.momentum, 1 - damping, rtol=1e-8)


def test_flat_minibatches_after_a_sketch():
    """L follows from what is known: the largest curvature in the old metric, of rho in the new."""
    found = started(L=2.0, rank=4, entries=64.0)
    found.learn(np.arange(4.0), Sums(9.0, 1.0, 1.0), EPS)
    P = [multiplied(found.P, e) for e in np.eye(4)]
    found.begin(4, 64.0)
    measured(found, [np.diag([1.0, 2, 3, 4]), *[np.zeros((4, 4))] * 20])
    np.testing.assert_allclose(found.L, 2 * np.linalg.eigvalsh(P)[-1] / found.P.rho)


def test_gradients_that_are_not_finite_between_others():
    """A measurement leaves them out; two in a row end the first ones."""
    H, nan, ends = np.diag([1.0, 2, 3, 4]), np.full((4, 4), np.nan), []
    for between in ([], [nan]):
        found = StepSizeController(4)
        found.begin(4, 64.0)
        measured(found, [H, *between], entries=2.0)  # three for a sketch, two for L and N
        ends.append([found.L, found.N, found.P.S, found.P.rho])
    for this, that in zip(*ends):
        np.testing.assert_array_equal(this, that)
    found.begin(4, 64.0)
    with pytest.raises(FloatingPointError, match="cannot be measured"):
        measured(found, [H, nan, nan])
    found.refreshes = 2
    measured(found, [H, nan, nan], entries=2.0)
    assert found.probe is None


# --- the controller ------------------------------------------------------------------------------
def started(L=1.0, N=0.0, rank=0, entries=0.0):
    """After refreshes, at a loss of 0 where the first one was above; P is known, with entries."""
    found = StepSizeController(rank)
    found.begin(4)
    found.entries = entries
    for _ in range(2):
        measured(found, [np.eye(4)])
        found.refresh(4, None)
    found.L, found.N, found.first_loss, found.loss = L, N, 1.0, 0.0
    found.refresh(4, None)
    return found


def read(found, steps):
    """Steps with a secant and a length, of one weight without P; L after each."""
    last, after = 0.0, []
    for secant, move in steps:
        d = secant * move
        found.read(Sums(d**2, d * move, move**2, 0.0, d * last), 0.0)
        last, after = d, [*after, found.L]
    return after


numbers = st.floats(-3, 3).map(lambda x: 10.0**x)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=30))
def test_what_steps_tell(steps):
    """Secants raise L by 4 at most, at a refresh L falls by 4 at most, and N is at most 2 L."""
    found, secants = started(N=0.3), [secant for secant, _ in steps]
    (L, N), after, beside, along = (found.L, found.N), read(found, steps), 0.0, 0.0
    before, last = [L, *after], None
    for (secant, move), low, high in zip(steps, before, after):
        np.testing.assert_allclose(high, min(max(secant, low), 4 * low))
        d = None if secant > 4 * low else secant * move  # the device has shortened its step
        if d is not None and last is not None:
            beside, along = beside + (d - last) ** 2 / 2, along + d * move
        last = d
    assert found.N == N and found.rate <= 0.5 / found.L * (1 + 1e-12)
    found.refresh(4, None)
    np.testing.assert_allclose(found.L, max(np.quantile(secants, 0.9), after[-1] / 4))
    expected = min(beside / along, 2 * found.L) if along else N
    np.testing.assert_allclose(found.N, expected, atol=1e-6 * max(secants))
    np.testing.assert_allclose(found.rate, min(0.5 / found.L, 0.3 / max(found.N, 1e-300)))


@pytest.mark.parametrize("sums", [Sums(1e4, 1, 1), Sums(100, -1, 1)])
def test_steps_that_tell_nothing(sums):
    """Before the first refresh; shorter than rounding; where the curvature is downward."""
    found = started()
    before = vars(found).copy()
    rounding = 1.0 if sums.along > 0 else 0.0
    found.read(sums, rounding)
    assert (found.L, found.secants, found.secant_sum) == (before["L"], [], 0.0)
    fresh = StepSizeController(0)
    fresh.L = 1.0
    read(fresh, [(100.0, 1.0)] * 9)
    assert (fresh.L, fresh.secants, fresh.loss_increases) == (1.0, [], [])


@given(st.lists(st.floats(-0.5, 1.5), max_size=12))
def test_noise_budget(ratios):
    """It rises where a part of the slope remains, and falls where none does, inside its limits."""
    found, budget = started(N=0.5), 0.3
    for ratio in ratios:
        found.refresh(4, ratio)
        budget = min(3 * budget, 3.0) if ratio > 0.05 else max(budget / 2, 0.1)
        np.testing.assert_allclose(found.noise_budget, budget)
        np.testing.assert_allclose(found.rate, min(0.5 / found.L, budget / found.N))
        damping = np.clip(found.rate * found.N / budget, 0.02, 1 - 1e-6)
        np.testing.assert_allclose(found.momentum, 1 - damping)


@table("ratio, at_start, refreshes", (0.8, 0, [0, 1, 3, 7]), (0.8, 2, [0, 2, 5]), (0.7, 2, [0, 2]))
def test_new_sketches(ratio, at_start, refreshes):
    """Where most of the slope remains; later ones take more than a quarter of the data."""
    found, sketches = StepSizeController(50), []
    found.entries, found.resketch_at = 160, at_start
    for number in range(10):
        found.probe = None
        found.refresh(9, ratio if number else None)
        if found.probe is not None:
            sketches.append(number)
            rank = min(9, int((10 * max(number, 1)) ** 0.5))
            assert found.probe.Q.shape == (rank, 9)
            np.testing.assert_allclose(found.probe.wanted, 40 * max(number, 1) / (rank + 1))
    assert sketches == refreshes


@given(st.integers(1, 3), st.integers(1, 6), st.sampled_from([2.1, 3.9, 4.1, 1e6]), seeds)
def test_outliers_are_learned(rank, count, ratio, seed):
    """A secant of r L falls to r L / (1 + r), or by a factor of 5; L and N stay."""
    rng, found = np.random.RandomState(seed), started(rank=rank, entries=1000.0)
    before = found.L, found.N, found.rate, found.momentum
    for number in range(count):
        d = rng.randn(4)
        squared = d @ inverse_of(found.P)(d)
        alongs = [squared / (found.L * r) for r in (0.9, 1.9, ratio)]
        usual, quiet, outlier = (Sums(squared, x, 1, -x / 2) for x in alongs)
        has_room = len(found.P.U) < 2 * rank or len(found.P.U) == 4
        assert (found.is_outlier(quiet), found.is_outlier(outlier)) == (False, has_room)
        if not has_room:
            break
        found.read(usual, 0.0)
        found.failures = 3
        found.learn(d, outlier, EPS)
        secant = d @ inverse_of(found.P)(d) / outlier.along
        np.testing.assert_allclose(secant, ratio * found.L / (1 + min(ratio, 4)))
        assert (found.squared, found.failures, len(found.rows)) == (None, 0, min(number + 1, rank))
    assert (found.L, found.N, found.rate, found.momentum) == before
    assert not started().is_outlier(outlier)  # without P


def test_divergence_by_gradients_that_are_not_finite():
    found = started()
    for count in (3, 2, 3, 4):
        for _ in range(count):
            found.read(Sums(np.inf), 0.0)
        assert found.has_diverged == (count == 4)
        read(found, [(1.0, 0.1)])


# --- penalties -----------------------------------------------------------------------------------
def rows(z):
    return tuple(range(1, z.ndim))


#: For each operator a twin of (z, step), and the penalty.
OPERATORS = {
    L1(0.5): (lambda z, t: oracle.l1(z, t, 0.5), lambda z: 0.5 * np.abs(z).sum()),
    ElasticNet(0.3, 2.0): (lambda z, t: oracle.elastic_net(z, t, 0.3, 2.0),
                           lambda z: 0.3 * np.abs(z).sum() + (z**2).sum()),
    GroupLasso(0.6): (lambda z, t: group_lasso(z, t, 0.6, rows(z)),
                      lambda z: 0.6 * np.sqrt((z**2).sum(rows(z))).sum()),
    GroupLasso(0.6, None): (partial(group_lasso, strength=0.6), lambda z: 0.6 * np.linalg.norm(z)),
    Box(-0.2, 0.7): (lambda z, t: oracle.box(z, t, -0.2, 0.7), lambda z: 0.0),
    Box(0, np.inf): (lambda z, t: oracle.box(z, t, 0, np.inf), lambda z: 0.0),
    Asymmetric(0.4): (lambda z, t: z - np.clip(z, 0, 0.4 * t), lambda z: 0.4 * z[z > 0].sum()),
}  # fmt: skip
each_operator = pytest.mark.parametrize("operator", OPERATORS, ids=repr)


def penalty_of(operator, *shapes, factor=1.0):
    """With an operator for the second parameter alone."""
    parameters = [gluon.Parameter(f"p{n}", shape=x, dtype="float64") for n, x in enumerate(shapes)]
    for parameter in parameters:
        parameter.initialize()
    found = Penalty({parameters[1]: operator}, parameters)
    found.factor = factor
    return found


@each_operator
@given(st.sampled_from([(1,), (6,), (2, 3), (4, 1)]), st.integers(1, 8), st.floats(-3, 1), seeds)
def test_proximal_point(operator, shape, rank, step, seed):
    """Beside many small steps of the proximal gradient in the plain metric."""
    rng, size, step = np.random.RandomState(seed), 2 + np.prod(shape), 10.0**step
    twin, penalty = OPERATORS[operator][0], penalty_of(operator, (2,), shape, factor=0.5)
    P, x, guess = random_metric(rng, size, min(rank, size)), rng.randn(size), rng.randn(size)
    most, least = P.S[0] + P.rho, P.rho
    momentum = (most**0.5 - least**0.5) / (most**0.5 + least**0.5)

    def plain(w, t):
        return np.concatenate([w[:2], twin(w[2:].reshape(shape), 0.5 * t).ravel()])

    z = last = x
    for _ in range(100_000):
        y = z + momentum * (z - last)
        last, z = z, plain(y - multiplied(P, y - x) / most, step / most)
        if np.abs(z - last).max() < 1e-14:
            break
    found = ProximalPoint(P.root(), penalty)(x, step / P.least, guess)
    b = (P.S**0.5) * (P.U @ (found - x))
    error = found - z
    first = (P.S**0.5) * (P.U @ (guess - x))
    # Where the error of the last equations is e, that of the result is at most |e| in P's norm.
    size = max(np.linalg.norm(b), np.linalg.norm(first))
    bound = TOLERANCE / (1 - TOLERANCE) * size
    assert (error @ multiplied(P, error)) ** 0.5 <= bound + 1e-10
    np.testing.assert_allclose(ProximalPoint(None, penalty)(x, step, guess), plain(x, step))


def test_proximal_point_with_all_directions():
    """It depends on P alone, not on what of it is rho."""
    rng, penalty, found = np.random.RandomState(0), penalty_of(L1(2.0), (2,), (6,)), []
    P, x = random_metric(rng, 8, 8), rng.randn(8)
    for rho in (0.5, 1e-14):
        same = P._replace(S=np.linspace(2, 1, 8) - rho, rho=rho)
        found.append(ProximalPoint(same.root(), penalty)(x, 0.5 / same.least, 0 * x))
    np.testing.assert_allclose(*found, rtol=1e-9, atol=1e-12)
    assert (found[0] == 0).any()


@each_operator
@given(seeds)
def test_proximal_points_in_turn(operator, seed):
    """What is kept of the one before changes no bit of the next."""
    rng, penalty = np.random.RandomState(seed), penalty_of(operator, (2,), (2, 3), factor=0.5)
    root, x = random_metric(rng, 8, 5).root(), rng.randn(8)
    kept = ProximalPoint(root, penalty)
    for step in (0.5, 0.5, 0.1, 0.1, 0.5):
        x = x + rng.choice([0.0, 0.01, 1.0]) * rng.randn(8)
        each = [point(x, step, 0 * x) for point in (kept, ProximalPoint(root, penalty))]
        np.testing.assert_array_equal(*each)


def test_groups_with_the_same_zeros():
    """The derivative is another one all the same."""
    penalty, found = penalty_of(GroupLasso(1.0), (1,), (1, 3)), []
    point = ProximalPoint(np.eye(4), penalty)
    for v in (np.array([0.0, 2, 1, 2]), np.array([0.0, 2, 2, 1])):
        found.append(point._newton_step(v, penalty.apply(v, 0.5), 0.5, np.ones(4)))
    assert not np.array_equal(*found)


@pytest.mark.parametrize("low, high", [(-9, 9), (0, np.inf), (-0.5, 0.5)])
def test_bounds_that_few_weights_reach(low, high):
    """Where none does, nothing is left of the equations, and that is seen at once."""
    rng, penalty = np.random.RandomState(0), penalty_of(Box(low, high), (2,), (6,))
    P, x, penalty.apply = random_metric(rng, 8, 5), abs(rng.randn(8)), counted(penalty.apply)
    found = ProximalPoint(P.root(), penalty)(x, 0.5 / P.least, np.full(8, 0.2))
    assert len(penalty.apply.calls) < 6
    if high > 1:
        np.testing.assert_allclose(found, x)


@each_operator
@pytest.mark.parametrize("step", [0.2, 0.9])
def test_derivative_and_value(operator, step):
    """Beside differences, at weights that are no corner of the operator."""
    rng, shape = np.random.RandomState(3), (4, 3)
    penalty, value = penalty_of(operator, (2,), shape, factor=0.5), OPERATORS[operator][1]
    w, directions, h = rng.randn(14), rng.randn(3, 14), 1e-6
    found = penalty.derivative(w, penalty.apply(w, step), step, directions)
    for direction, row in zip(directions, found):
        ends = (penalty.apply(w + sign * h * direction, step) for sign in (1, -1))
        np.testing.assert_allclose(row, (next(ends) - next(ends)) / (2 * h), atol=1e-6)
    np.testing.assert_allclose(penalty.value(w), 0.5 * value(w[2:].reshape(shape)))
    on_device = operator.value(mx.nd.array(w[2:].reshape(shape), dtype="float64"))
    on_device = on_device if isinstance(on_device, float) else on_device.asscalar()
    np.testing.assert_allclose(on_device, value(w[2:].reshape(shape)), atol=1e-12)


def group_subgradient(w, g, strength):
    norm, slope = np.linalg.norm(w), np.linalg.norm(g)
    return g + strength * w / norm if norm else g * max(1 - strength / slope, 0)


@table(
    "operator, w, expected",
    (L1(0.5), [2.0, -1.0, 0.0], oracle.L1InMetric(np.full(3, 0.5)).least),
    (ElasticNet(0.5, 2.0), [2.0, -1.0, 0.0],
     lambda w, g: oracle.L1InMetric(np.full(3, 0.5)).least(w, g + 2 * w)),
    (GroupLasso(0.5, None), [2.0, -1.0, 0.0], lambda w, g: group_subgradient(w, g, 0.5)),
    (GroupLasso(0.5, None), [0.0, 0.0, 0.0], lambda w, g: group_subgradient(w, g, 0.5)),
    (Box(-1, 2), [2.0, -1.0, 0.0],
     lambda w, g: np.where((w == 2) & (g < 0) | (w == -1) & (g > 0), 0, g)),
    (Asymmetric(0.4), [2.0, -1.0, 0.0],
     lambda w, g: np.where(w, g + 0.4 * (w > 0), g - np.clip(g, -0.4, 0))),
)  # fmt: skip
def test_least_subgradient(operator, w, expected):
    """The slope in the steepest direction down, 0 at a minimum."""
    penalty = penalty_of(operator, (1,), (3,))
    for seed in range(9):
        g, w = np.random.RandomState(seed).randn(4), np.array([1.0, *w[-3:]])
        found = penalty.least_subgradient(w, g)
        np.testing.assert_allclose(found, [g[0], *expected(w[1:], g[1:])], atol=1e-6)
