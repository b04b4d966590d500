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
from .arrays import (
    LARGE,
    SUMMED_IN,
    Column,
    assign,
    common_column_dtype,
    common_dtype,
    dense,
    rows_by_dtype,
)

#: What to assign to a column, by its number: the sum of terms, each a factor times a column.
Step = Tuple[int, Tuple[Tuple[Any, int], ...]]


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
    columns = [targets, *sources]
    numbers = [0 if source is targets else n for n, source in enumerate(sources, 1)]
    assign_in_turn(columns, ((0, tuple(zip(factors, numbers))),))


def assign_in_turn(columns: Sequence[Sequence[NDArray]], steps: tuple[Step, ...]) -> None:
    """Assign sums of multiples of arrays, as `combine`, where each sum sees the earlier ones.

    Without sums in between, which would need memory, large arrays are added several times as fast.

    Parameters
    ----------
    columns : sequence of sequence of NDArray
        Lists of arrays, which have equal shapes at equal places.
    steps : tuple of tuple
        The number of the column to assign to, and its terms, see `Step`. Only the first term may be
        the column itself.
    """
    if not steps:
        return
    dtype = common_column_dtype(columns)
    groups: Any = [(dtype, columns)]
    if dtype is None:
        groups = [(d, list(map(Column, zip(*rows)))) for d, rows in rows_by_dtype(columns)]
    plans = [None if dtype is None else _plan(part, steps) for dtype, part in groups]
    if len(steps) > 1 and None in plans:
        for step in steps:
            assign_in_turn(columns, (step,))
        return
    for plan, (dtype, part) in zip(plans, groups):
        if plan is None:
            _assign_at_once(part, *steps[0], dtype)
        else:
            plan(part)


def _assign_at_once(columns: Sequence[Column], target: int, terms: Any, dtype: Any) -> None:
    """Make a step, array by array."""
    factors = [factor for factor, _ in terms]
    addends = list(zip(*(columns[number] for _, number in terms)))
    if len(factors) == 1 and dtype in (np.float32, np.float64):
        _assign_multiples(factors[0], [(a, b) for a, (b,) in zip(columns[target], addends)])
        return
    for array, summed in zip(columns[target], addends):
        _assign_sum(factors, summed, array)


class _Plan:
    """An operator that makes steps, and the columns that it takes and gives.

    Parameters
    ----------
    count : int
        The number of rows.
    steps : tuple of tuple
        As for `assign_in_turn`, with numbers as factors.
    by_products : bool
        Whether the columns are, see `Column`.
    """

    def __init__(self, count: int, steps: tuple[Step, ...], by_products: bool) -> None:
        self._targets = [target for target, _ in steps]
        self._used = list(dict.fromkeys(number for _, terms in steps for _, number in terms))
        places = {number: place for place, number in enumerate(self._used)}
        sums = tuple(
            tuple((float(factor), places[number]) for factor, number in terms) for _, terms in steps
        )
        self._sums = _mxnet.sums_of_multiples(count, sums, by_products=by_products)

    def __call__(self, columns: Sequence[Any]) -> None:
        """Assign, in instances of `Column` of one dtype."""
        used = [columns[number].addresses for number in self._used]
        addresses = [address for row in zip(*used) for address in row]
        targets = [columns[number].addresses for number in self._targets]
        outputs = b"".join([address for row in zip(*targets) for address in row])
        inputs = self._sums.inputs(addresses, columns[0][0])
        _mxnet.assign_by(self._sums.operator, inputs, outputs, columns[0].device)


_MOST = 32  # plans that are kept
_plans: OrderedDict[Any, _Plan] = OrderedDict()
_seen: OrderedDict[Any, None] = OrderedDict()  # steps that were made once


def _plan(columns: Sequence[Column], steps: tuple[Step, ...]) -> _Plan | None:
    """The plan for steps, if they are worth compiling: most data have minibatches of two sizes.

    A product rounds once, so sums by products are always compiled, and are the same each time.
    """
    by_products = columns[0].by_products
    key = len(columns[0]), steps, by_products
    known = _plans.get(key)
    if known is not None:
        return known
    factors = [factor for _, terms in steps for factor, _ in terms]
    if any(isinstance(factor, NDArray) for factor in factors):
        return None
    if not by_products and key not in _seen and any(abs(factor) != 1 for factor in factors):
        _remember(_seen, key, None)
        return None
    return _remember(_plans, key, _Plan(*key))


def _remember(known: OrderedDict[Any, Any], key: Any, value: Any) -> Any:
    """Keep a value, and not the first of those that were kept before if there are many."""
    known[key] = value
    if len(known) > _MOST:
        known.popitem(last=False)
    return value


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
        self._inputs = Column(classic(array) for row in zip(*sources) for array in row)
        self._outputs = Column(map(classic, targets))
        self._is_simple = common_dtype([*self._inputs, *self._outputs]) is not None
        # For large arrays it is used at once, as there are no intermediate results.
        self._comes_again = self._is_simple and any(a.size > LARGE for a in self._outputs)
        self._operator: Any = None
        self._joined = b""  # the addresses of its inputs

    def __call__(self) -> None:
        """Assign."""
        if self._operator is None and self._is_simple and self._comes_again:
            factors = self._terms[0]
            if factors == (1.0,):
                self._operator = _mxnet.copies_of(self._outputs)
                self._joined = self._inputs.joined
            else:
                terms = (tuple((float(f), n) for n, f in enumerate(factors)),)
                count, by_products = len(self._outputs), self._outputs.by_products
                sums = _mxnet.sums_of_multiples(count, terms, by_products=by_products)
                self._operator = sums.operator
                self._joined = sums.inputs(self._inputs.addresses, self._outputs[0])
        self._comes_again = True
        if self._operator is None:
            combine(*self._terms)
        else:
            _mxnet.assign_by(
                self._operator, self._joined, self._outputs.joined, self._outputs.device
            )
