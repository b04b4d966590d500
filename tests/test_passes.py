"""What passes are made of: operations on arrays, sketches, work that is not interrupted."""

import copy as copy_module
import signal
import threading

import mxnet as mx
import numpy as np
import pytest
from gluon_svrg.passes.entries import all_finite, finite_on_device, finite_on_host
from gluon_svrg.passes.interrupts import is_uninterrupted, uninterrupted
from gluon_svrg.passes.multiples import Combination, assign_in_turn, combine
from hypothesis import given
from hypothesis import strategies as st
from problems import array

from gluon_svrg._mxnet import classic
from gluon_svrg.passes import sketch
from gluon_svrg.passes.arrays import Column, copy, zero

SHAPES = [(), (1,), (3,), (2, 3), (40_000,), (130, 140), (2, 1, 3, 1)]
if not mx.util.is_np_array():
    SHAPES.remove(())  # 1.9.1 has no arrays without dimensions unless NumPy-like ones are asked for
specifications = st.lists(
    st.tuples(st.sampled_from(SHAPES), st.sampled_from(["float32", "float64"])),
    min_size=1,
    max_size=6,
)


def random(specification, seed):
    rng = np.random.RandomState(seed)
    return [array(rng.standard_normal(shape), dtype) for shape, dtype in specification]


def assert_close(these, those):
    for a, b in zip(these, those):
        scale = max(np.abs(b).max(), 1e-30)
        assert np.abs(a.asnumpy() - b).max() <= 8 * np.finfo(a.dtype).eps * scale


@given(specification=specifications)
def test_copies_of_uninterrupted_work(specification):
    """MXNet would keep 5 MB for the thread, if one operator copied all."""
    sources, targets = random(specification, 0), random(specification, 1)
    found = []

    def work():
        found.append(is_uninterrupted())
        copy(sources, targets)

    uninterrupted(work)
    assert found == [True]
    assert not is_uninterrupted()
    for a, b in zip(sources, targets):
        np.testing.assert_array_equal(a.asnumpy(), b.asnumpy())


@given(
    specification=specifications,
    factors=st.lists(st.sampled_from([1.0, -1.0, 0.1, 1000.0]), min_size=1, max_size=3),
    in_place=st.booleans(),
)
def test_combine(specification, factors, in_place):
    sources = [random(specification, seed) for seed in range(len(factors))]
    expected = [
        sum(np.float64(f) * a.asnumpy().astype("float64") for f, a in zip(factors, row))
        for row in zip(*sources)
    ]
    scale = sum(map(abs, factors)) * 8
    for _ in range(2):  # at once, then by a compiled operator
        first = [a.copy() for a in sources[0]]
        targets = first if in_place else random(specification, 99)
        combine(factors, [first, *sources[1:]], targets)
        for target, value in zip(targets, expected):
            error = np.abs(target.asnumpy() - value).max()
            assert error <= 16 * np.finfo(target.dtype).eps * scale


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shapes", [[(7, 3), (11,)], [(130, 140), (40_000,)]])
def test_sums_are_the_same_to_the_last_bit_each_time(shapes, dtype):
    """At once, and by an operator that is compiled when they come again: states resume exactly."""
    sources = [random([(shape, dtype) for shape in shapes], seed) for seed in range(3)]
    found = []
    for _ in range(3):
        targets = [a.copy() for a in sources[0]]
        combine((1.0, 0.3, -0.7), [targets, *sources[1:]], targets)
        found.append([target.asnumpy() for target in targets])
    for again in found[1:]:
        for a, b in zip(found[0], again):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("copied", [copy_module.copy, copy_module.deepcopy, lambda c: Column(c)])
@pytest.mark.parametrize("shape", [(7, 3), (300, 200)])
def test_a_copy_of_a_column_is_of_its_own_arrays(shape, copied):
    arrays = [random([(shape, "float32")] * 2, seed) for seed in range(2)]
    columns = [Column(map(classic, each)) for each in arrays]
    step = ((0, ((1.0, 0), (-1.0, 1))),)
    assign_in_turn(columns, step)
    first = [copied(column) for column in columns]
    before = [a.asnumpy() for column in columns for a in column]
    assign_in_turn(first, step)
    is_shared = first[0][0] is columns[0][0]
    for a, b, c, d in zip(columns[0], first[0], before, columns[1]):
        expected = c - d.asnumpy()
        np.testing.assert_array_equal(b.asnumpy(), expected)
        np.testing.assert_array_equal(a.asnumpy(), expected if is_shared else c)


@given(specification=specifications)
def test_copy_and_zero(specification):
    sources, targets = random(specification, 0), random(specification, 1)
    copy(sources, targets)
    for a, b in zip(sources, targets):
        np.testing.assert_array_equal(a.asnumpy(), b.asnumpy())
    zero(targets)
    assert not any(np.any(target.asnumpy()) for target in targets)


@given(
    specification=specifications,
    factors=st.lists(st.sampled_from([1.0, 3.0, -0.5]), min_size=1, max_size=2),
)
def test_a_combination_is_the_same_at_once_and_compiled(specification, factors):
    sources = [random(specification, seed) for seed in range(len(factors))]
    targets = random(specification, 99)
    combination = Combination(tuple(factors), sources, targets, None)
    for _ in range(3):
        zero(targets)
        combination()
        rows = zip(*([f * a.asnumpy() for a in row] for f, row in zip(factors, sources)))
        assert_close(targets, [sum(row) for row in rows])


@pytest.mark.parametrize("check", [all_finite, finite_on_host, finite_on_device])
@pytest.mark.parametrize("count", [1, 199, 250])  # MXNet's operator takes 200
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_many_arrays_are_finite_or_not(check, count, bad):
    arrays = [mx.nd.ones((3,)) for _ in range(count)] + [mx.nd.zeros((2, 2), dtype="float64")]
    arrays.append(mx.nd.ones((100, 1000)))
    assert check(arrays)
    for chosen, place in (arrays[count - 1], 2), (arrays[-1], 99):
        chosen[place] = bad
        assert not check(arrays)
        chosen[place] = 1
    assert check(arrays)


@pytest.mark.parametrize("k", [8192.0, 70_000.0])  # of a loss scale
def test_sums_for_float16_are_computed_in_float32(k):
    target = mx.nd.array([100.0, 0.0], dtype="float16")
    mean, row = (mx.nd.array(values) for values in ([1e-7, 1e-8], [1.001, 0.0]))
    for _ in range(2):  # at once, then again
        v = target.copy()
        combine((1.0, k, -k), ([v], [mean], [row * 1e-3]), [v])
        exact = 100 + k * 1e-7 - k * 1.001e-3
        np.testing.assert_allclose(v.asnumpy(), [exact, k * 1e-8], rtol=2e-3)


def test_sketches_depend_on_values_and_shapes_alone():
    """One is taken of float32 sums, the next of live gradients, which may be float16 or sparse."""
    whole = [array(np.round(a, 2), "float16") for a in map(rounded, [(40_000,), (7,), (300, 4)])]
    expected = sketch.sketch([[a.astype("float32") for a in whole]])
    np.testing.assert_array_equal(sketch.sketch([whole]), expected)
    mixed = [whole[0], whole[1].astype("float32"), whole[2]]
    np.testing.assert_array_equal(sketch.sketch([mixed]), expected)
    if not mx.util.is_np_array():
        mixed[2] = whole[2].astype("float32").tostype("row_sparse")
        np.testing.assert_array_equal(sketch.sketch([mixed]), expected)


def rounded(shape):
    return np.random.RandomState(len(shape)).standard_normal(shape)


@given(specification=specifications, part=st.sampled_from([1e-3, 0.1, 1.0]))
def test_sketches_tell_how_much_gradients_differ(specification, part):
    gradient, noise = random(specification, 0), random(specification, 1)
    other = [g + part * e for g, e in zip(gradient, noise)]
    norm = np.sqrt(sum(float((g.asnumpy() ** 2).sum()) for g in gradient))
    distance = np.sqrt(sum(float((part * e.asnumpy() ** 2 * part).sum()) for e in noise))
    first, second = sketch.sketch([gradient]), sketch.sketch([other])
    assert sketch.difference(first, first) == 0
    found = sketch.difference(first, second)
    assert distance / norm / 4 < found < 4 * distance / norm


PIECE = 1 << 24  # entries that are summed up at once


@pytest.mark.parametrize(
    "entries", [np.s_[1::512], np.s_[510::512], np.s_[7:9], np.s_[PIECE : PIECE + 9], np.s_[-3:]]
)
def test_no_entry_of_a_large_array_is_left_out_of_its_sketch(entries):
    gradient = np.random.standard_normal(PIECE + 515).astype("float32") / 100
    other = gradient.copy()
    other[entries] += 100
    first, second = (sketch.sketch([[mx.nd.array(values)]]) for values in (gradient, other))
    assert sketch.difference(first, first) == 0
    assert sketch.difference(first, second) > 0.1


@pytest.mark.parametrize("size", [1 << 9, 1 << 16])
def test_entries_in_another_order_have_another_sketch(size):
    gradient = np.random.standard_normal(size).astype("float32")
    moved = np.roll(gradient, 256)  # which adds up to the same in all buckets
    first, second = (sketch.sketch([[mx.nd.array(values)]]) for values in (gradient, moved))
    assert sketch.difference(first, second) > 0.1


def test_a_sketch_is_linear():
    first, second = random([((300, 7), "float64")], 0), random([((300, 7), "float64")], 1)
    total = [a + b for a, b in zip(first, second)]
    difference = sketch.sketch([total]) - sketch.sketch([first])
    np.testing.assert_allclose(difference, sketch.sketch([second]), atol=1e-10)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_proves_nothing(bad):
    first = np.ones(4)
    assert np.isnan(sketch.difference(first, np.array([1, 2, 3, bad])))
    assert np.isnan(sketch.difference(first * bad, first))


@pytest.mark.parametrize("relative", [1e-9, 1e-4, 0.5])
def test_a_difference_is_never_shown_as_zero(relative):
    assert sketch.in_words(relative).strip("0.%")


def test_uninterrupted_work_is_done_whole():
    """An alarm that comes while it runs is handled when it is done."""
    seen = []

    def work():
        for number in range(20):
            seen.append((number, threading.current_thread() is threading.main_thread()))
            mx.nd.ones((100, 100)).sum().wait_to_read()
            threading.Event().wait(0.002)

    def alarm(*_):
        raise InterruptedError("alarm")

    before = signal.signal(signal.SIGALRM, alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(InterruptedError, match="alarm"):
            uninterrupted(work)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen == [(number, False) for number in range(20)]


def test_an_error_of_uninterrupted_work_is_raised():
    with pytest.raises(ZeroDivisionError):
        uninterrupted(lambda: 1 / 0)
