"""Sums of multiples of arrays, of many arrays at once.

A network has hundreds of parameters, most of them small; an engine operation for each would cost
more than its arithmetic. All arrays of a list are on one device.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from .. import _mxnet
from .._mxnet import classic
from .arrays import LARGE, SUMMED_IN, assign, common_dtype, dense, rows_by_dtype

#: Arrays, and what to assign to them: the sum of terms, each a factor times arrays.
Assignment = Tuple[Sequence[NDArray], Sequence[Tuple[Any, Sequence[NDArray]]]]


def combine(
    factors: Sequence[float | NDArray],
    sources: Sequence[Sequence[NDArray]],
    targets: Sequence[NDArray],
) -> None:
    """Assign ``factors[0] * sources[0] + factors[1] * sources[1] + ...`` to targets.

    Parameters
    ----------
    factors : sequence of float or NDArray
        One for each of the sources; an array holds one number, and stays on its device.
    sources : sequence of sequence of NDArray
        Arrays like the targets. The first of the sources may be the targets.
    targets : sequence of NDArray
        The arrays that get the sums.
    """
    assign_in_turn((targets, list(zip(factors, sources))))


def assign_in_turn(*assignments: Assignment) -> None:
    """Assign sums of multiples of arrays, as `combine`, where each sum sees the earlier ones.

    Without sums in between, which would need memory, large arrays are added several times as fast.
    """
    if not assignments:
        return
    columns = {id(arrays): arrays for _, terms in assignments for _, arrays in terms}
    targets = [target for target, _ in assignments]
    numbers = {key: number for number, key in enumerate(columns)}
    sums = tuple(
        tuple(
            (factor if isinstance(factor, NDArray) else float(factor), numbers[id(arrays)])
            for factor, arrays in terms
        )
        for _, terms in assignments
    )
    is_known = _comes_again(len(targets[0]), sums)
    by_dtype = rows_by_dtype([*targets, *columns.values()])
    if len(sums) > 1 and not (is_known and all(dtype is not None for dtype, _ in by_dtype)):
        for assignment in assignments:
            assign_in_turn(assignment)
        return
    for dtype, rows in by_dtype:
        if dtype is not None and is_known:
            operator = _mxnet.sums_of_multiples(len(rows), sums)
            inputs = [array for row in rows for array in row[len(targets) :]]
            operator(*inputs, out=[array for row in rows for array in row[: len(targets)]])
            continue
        factors = [factor for factor, _ in sums[0]]
        if len(factors) == 1 and dtype in (np.float32, np.float64):
            _assign_multiples(factors[0], rows)
            continue
        for target, *addends in rows:
            _assign_sum(factors, addends, target)


def _assign_multiples(factor: Any, pairs: Sequence[Any]) -> None:
    """Assign a multiple of the second array to the first, for each pair of one dtype."""
    if isinstance(factor, float):
        for target, array in pairs:
            _mxnet.assign_multiple(factor, array, target)
        return
    _, first = pairs[0]
    here = classic(factor).as_in_context(_mxnet.device_of(first)).astype(first.dtype)
    here = here.reshape((1, 1))
    for target, array in pairs:
        mx.nd.dot(here, array.reshape((1, -1)), out=target.reshape((1, -1)))


def _assign_sum(factors: Sequence[Any], addends: Sequence[NDArray], target: NDArray) -> None:
    dtype = SUMMED_IN.get(_mxnet.dtype_name(target), target.dtype)
    wide = [dense(addend).astype(dtype, copy=False) for addend in addends]
    pairs = zip(factors, wide)
    assign(sum(times(f, x) if isinstance(f, NDArray) else f * x for f, x in pairs), target)


def scale_to_norm(arrays: Sequence[NDArray], factor: float, most: NDArray) -> None:
    """Multiply each array by a factor, or by less if its norm would exceed a limit.

    Does not wait for the device.

    Parameters
    ----------
    arrays : sequence of NDArray
        They are multiplied in place.
    factor : float
        The factor.
    most : NDArray
        The largest norm of a result: float64, shape (1,), on the arrays' device.
    """
    groups: dict[Any, list[NDArray]] = {}
    for array in map(classic, arrays):
        dtype = common_dtype([array])
        groups.setdefault(None if dtype == np.float16 else dtype, []).append(array)
    for dtype, group in groups.items():
        if dtype is not None:
            flat = [array.reshape((1, -1)) for array in group]
            operator = _mxnet.scaling_to_norm(len(flat), factor)
            operator(most.astype(dtype).reshape((1, 1)), *flat, out=flat)
            continue
        for array in group:
            wide = dense(array).astype("float32")
            share = mx.nd.broadcast_div(most.astype("float32"), wide.norm().reshape((1,)))
            assign(mx.nd.broadcast_mul(wide, mx.nd.minimum(share, factor)), array)


def times(factor: NDArray, array: NDArray) -> NDArray:
    """A multiple of an array, where the factor is an array of one number, on any device.

    A product of matrices is faster than `broadcast_mul`, see `_mxnet.scaling_to_norm`.
    """
    summed_in = SUMMED_IN[_mxnet.dtype_name(array)]
    flat = dense(classic(array)).astype(summed_in, copy=False).reshape((1, -1))
    here = classic(factor).as_in_context(_mxnet.device_of(array)).astype(flat.dtype)
    return mx.nd.dot(here.reshape((1, 1)), flat).reshape(array.shape)


class Combination:
    """Assign ``factors[0] * sources[0] + ...`` to targets, repeatedly, see `combine`.

    Parameters
    ----------
    factors : tuple of float
        One for each of the sources.
    sources, targets
        As for `combine`.
    keep : object
        An object that must not be freed while this is used.
    """

    def __init__(
        self,
        factors: tuple[float, ...],
        sources: Sequence[Sequence[NDArray]],
        targets: Sequence[NDArray],
        keep: Any,
    ) -> None:
        self._terms = factors, sources, targets
        self._keep = keep
        self._inputs = [classic(array) for row in zip(*sources) for array in row]
        self._outputs = list(map(classic, targets))
        self._is_simple = common_dtype([*self._inputs, *self._outputs]) is not None
        # For large arrays it is used at once, as there are no intermediate results.
        self._comes_again = self._is_simple and any(a.size > LARGE for a in self._outputs)
        self._operator: Any = None

    def __call__(self) -> None:
        """Assign."""
        if self._operator is None and self._is_simple and self._comes_again:
            factors = self._terms[0]
            if factors == (1.0,):
                self._operator = _mxnet.copies_of(self._outputs)
            else:
                sums = (tuple((float(f), n) for n, f in enumerate(factors)),)
                self._operator = _mxnet.sums_of_multiples(len(self._outputs), sums)
        self._comes_again = True
        if self._operator is None:
            combine(*self._terms)
        else:
            self._operator(*self._inputs, out=self._outputs)


_seen: OrderedDict[Any, None] = OrderedDict()


def _comes_again(*key: Any) -> bool:
    """Whether sums are worth compiling an operator: most data have minibatches of two sizes."""
    factors = [factor for terms in key[-1] for factor, _ in terms]
    if any(isinstance(factor, NDArray) for factor in factors):
        return False
    if all(abs(factor) == 1 for factor in factors):
        return True
    is_known = key in _seen
    _seen[key] = None
    _seen.move_to_end(key)
    if len(_seen) > 16:
        _seen.popitem(last=False)
    return is_known
