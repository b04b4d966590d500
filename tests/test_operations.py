"""The operations on many arrays at once, beside their readable twins."""

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import array

from gluon_svrg import control_variate, operations

SHAPES = [(), (1,), (3,), (2, 3), (40_000,), (130, 140), (2, 1, 3, 1)]
if not mx.util.is_np_array():
    SHAPES.remove(())  # 1.9.1 has no arrays without dimensions unless NumPy-like ones are asked for
arrays = st.lists(
    st.tuples(st.sampled_from(SHAPES), st.sampled_from(["float32", "float64"])),
    min_size=1,
    max_size=6,
)


def random(specification, seed):
    rng = np.random.RandomState(seed)
    return [array(rng.standard_normal(shape), dtype) for shape, dtype in specification]


def numpy_of(these):
    return [a.asnumpy() for a in these]


def close(these, those):
    for a, b in zip(these, those):
        scale = max(np.abs(b).max(), 1e-30)
        assert np.abs(a - b).max() <= 4 * np.finfo(a.dtype).eps * scale


@given(
    specification=arrays,
    coefficient=st.sampled_from([1.0, 0.5, 0.1]),
    count=st.sampled_from([1, 7, 1000]),
    times=st.integers(1, 4),
)
def test_scaled_subtract_is_the_formula(specification, coefficient, count, times):
    """Called at once, then compiled: the same to the last bit, and what the formula says."""
    grads, kept, full = (random(specification, seed) for seed in range(3))
    twins, kept_twins, _ = (random(specification, seed) for seed in range(3))
    by_formula, kept_by_formula, _ = (random(specification, seed) for seed in range(3))
    at_once = operations.ScaledSubtract(grads, kept, full, coefficient, count)
    compiled = operations.ScaledSubtract(twins, kept_twins, full, coefficient, count)
    compiled.compile()
    at_once()
    for _ in range(times):
        compiled()
        control_variate.subtract(by_formula, kept_by_formula, full, count, np.float32(coefficient))
    if times == 1:
        for a, b in zip(numpy_of(grads), numpy_of(twins)):
            np.testing.assert_array_equal(a, b)
    scales = [np.abs(a).max() + times * count for a in numpy_of(by_formula)]
    for a, b, scale in zip(numpy_of(twins), numpy_of(by_formula), scales):
        assert np.abs(a - b).max() <= 8 * times * np.finfo(a.dtype).eps * scale


@given(specification=arrays, times=st.integers(1, 5))
def test_sum(specification, times):
    total, addend = random(specification, 0), random(specification, 1)
    expected = [a + times * b for a, b in zip(numpy_of(total), numpy_of(addend))]
    summation = operations.Sum(total, addend)
    for _ in range(times):
        summation.add()
        operations.copy(random(specification, 1), addend)  # written between two additions
    summation.finish()
    for a, b in zip(numpy_of(total), expected):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@given(specification=arrays, again=st.booleans())
def test_copy(specification, again):
    sources, targets = random(specification, 0), random(specification, 1)
    for target in targets:
        target *= np.nan  # what was there must not matter
    copy = operations.Copy(sources, targets, again=again)
    for seed in (0, 2):
        for source, value in zip(sources, random(specification, seed)):
            value.copyto(source)
        copy()
        for a, b in zip(numpy_of(targets), numpy_of(sources)):
            np.testing.assert_array_equal(a, b)


@given(specification=arrays, divisor=st.integers(1, 10**9))
def test_divide(specification, divisor):
    these = random(specification, 0)
    expected = [a / a.dtype.type(divisor) for a in numpy_of(these)]
    operations.divide(these, divisor)
    close(numpy_of(these), expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_all_finite(dtype, bad):
    good = [array(np.ones((3, 4)), "float32"), array(np.full(5, 1e300), "float64")]
    assert operations.all_finite(good)
    values = np.ones((300, 4))
    values[211, 2] = bad
    assert not operations.all_finite([*good, array(values, dtype)])


def test_what_reads_next_waits_for_what_was_updated_in_place():
    """A static graph does not say what it updates: without more it is read too early, sometimes."""
    specification = [((64,), "float32")] * 40
    for seed in range(60):
        grads, kept, full = (random(specification, seed + i) for i in range(3))
        expected = [g - (k - 3 * f) for g, k, f in zip(*map(numpy_of, (grads, kept, full)))]
        subtract = operations.ScaledSubtract(grads, kept, full, 1.0, 3)
        subtract.compile()
        subtract()
        copies = [grad.copy() for grad in grads]
        for a, b in zip(numpy_of(copies), expected):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_compiled_operations_hold_no_memory_of_the_size_of_the_arrays():
    def resident():
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096

    size = 4 * 4_000_000
    grads, kept, full = ([mx.nd.ones((4_000_000,))] for _ in range(3))
    mx.nd.waitall()
    before, held = resident(), []
    for count in range(8):
        held.append(operations.ScaledSubtract(grads, kept, full, 1.0, count))
        held[-1].compile()
        held[-1]()
    mx.nd.waitall()
    assert resident() - before < size
