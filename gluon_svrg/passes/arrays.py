"""Operations on many arrays at once.

A network has hundreds of parameters, most of them small; an engine operation for each would cost
more than its arithmetic. All arrays of a list are on one device.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import cached_property
from typing import Any, Iterable, Iterator, List, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import BaseSparseNDArray

from .. import _mxnet
from .._mxnet import Arrays, classic
from .interrupts import is_uninterrupted

#: Dtypes of parameters, and the dtypes in which their gradients are summed.
SUMMED_IN = {"float16": "float32", "float32": "float32", "float64": "float64"}

_PIECE = 1 << 16
_AT_MOST = 100  # arrays: with more than 200, `multi_all_finite` writes beyond its memory


class Column(List[NDArray]):
    """The classic arrays of all parameters on one device, not to be changed."""

    @cached_property
    def dtype(self) -> Any:
        """Their common dtype; None if there is none, or an array is sparse."""
        return _common_dtype(self)

    @cached_property
    def is_narrow(self) -> bool:
        """Whether sums of them need more digits than they have."""
        return any(SUMMED_IN[name] != name for name in map(_mxnet.dtype_name, self))


class Buffers(List[List[NDArray]]):
    """Arrays per parameter and device, not to be replaced, so that MXNet is asked once for each."""

    @cached_property
    def columns(self) -> list[Column]:
        """The arrays per device."""
        return [Column(map(classic, on_device)) for on_device in zip(*self)]


def per_device(arrays: Arrays) -> Sequence[list[NDArray]]:
    """Turn lists per parameter into lists per device."""
    if isinstance(arrays, Buffers):
        return arrays.columns
    return [list(on_device) for on_device in zip(*arrays)]


def all_finite(arrays: Iterable[NDArray]) -> bool:
    """Whether all entries are finite. Waits for the device."""
    groups: dict[bool, list[NDArray]] = {True: [], False: []}
    for array in arrays:
        groups[_mxnet.device_of(array).device_type == "gpu"].append(array)
    return finite_on_host(groups[False]) and finite_on_device(groups[True])


def finite_on_host(arrays: Iterable[NDArray]) -> bool:
    """As `all_finite`, in NumPy: a hundred times as fast as MXNet's operator on a CPU."""
    return all(np.isfinite(piece).all() for array in arrays for piece in in_numpy(array))


def finite_on_device(arrays: Iterable[NDArray]) -> bool:
    """As `all_finite`, without copies to the host."""
    groups = alike(map(dense, arrays), _AT_MOST)
    found = [mx.nd.multi_all_finite(*group, num_arrays=len(group)) for group in groups]
    return all(bool(flag.asscalar()) for flag in found)


def alike(arrays: Iterable[NDArray], most: int) -> Iterator[list[NDArray]]:
    """Lists of dense arrays of one dtype and device each, with at least one dimension."""
    groups: dict[Any, list[NDArray]] = {}
    for array in with_dimension(arrays):
        groups.setdefault((_mxnet.device_of(array), array.dtype), []).append(array)
    for group in groups.values():
        yield from (group[begin : begin + most] for begin in range(0, len(group), most))


def in_numpy(array: NDArray) -> Iterator[np.ndarray]:
    """The entries of an array, in pieces that need little memory. Waits for the device."""
    values = dense(classic(array))
    if values.size <= _PIECE:
        yield values.asnumpy().ravel()
        return
    flat = values.reshape((-1,))
    for start in range(0, flat.shape[0], _PIECE):
        yield flat[start : start + _PIECE].asnumpy()


def dense(array: NDArray) -> NDArray:
    """A sparse array as a dense one; dense arrays unchanged."""
    return array if array.stype == "default" else array.tostype("default")


def assign(value: NDArray, target: NDArray) -> None:
    """Copy a dense array to one of any storage and dtype."""
    classic(value).astype(target.dtype, copy=False).tostype(target.stype).copyto(classic(target))


def zeros_to_sum(array: NDArray) -> NDArray:
    """A dense array of zeros in which gradients like an array can be summed."""
    dtype = SUMMED_IN[_mxnet.dtype_name(array)]
    return mx.nd.zeros(array.shape, ctx=_mxnet.device_of(array), dtype=dtype)


def buffers_like(arrays: Arrays) -> Buffers:
    """Arrays of zeros in which gradients like some arrays can be summed."""
    return Buffers([zeros_to_sum(array) for array in row] for row in arrays)


def zero(arrays: Sequence[NDArray]) -> None:
    """Set arrays to zero."""
    flat = [array for array in arrays if array.stype == "default"]
    if flat:
        mx.nd.reset_arrays(*with_dimension(flat), num_arrays=len(flat))
    for array in arrays:
        if array.stype != "default":
            assign(mx.nd.zeros(array.shape, ctx=array.ctx, dtype=array.dtype), array)


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
    by_dtype = _rows_by_dtype([*targets, *columns.values()])
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


def _rows_by_dtype(columns: Sequence[Sequence[NDArray]]) -> Iterable[tuple[Any, list[Any]]]:
    """Rows of classic arrays, by their common dtype."""
    dtypes = {column.dtype if isinstance(column, Column) else None for column in columns}
    if len(dtypes) == 1 and None not in dtypes:
        return [(dtypes.pop(), list(zip(*columns)))]
    groups: dict[Any, list[Any]] = {}
    for row in zip(*columns):
        row = tuple(map(classic, row))
        groups.setdefault(_common_dtype(row), []).append(row)
    return groups.items()


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
        dtype = _common_dtype([array])
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
        self._is_simple = _common_dtype([*self._inputs, *self._outputs]) is not None
        # For large arrays it is used at once, as there are no intermediate results.
        self._comes_again = self._is_simple and any(a.size > _PIECE for a in self._outputs)
        self._operator: Any = None

    def __call__(self) -> None:
        """Assign."""
        if self._operator is None and self._is_simple and self._comes_again:
            sums = (tuple((float(f), n) for n, f in enumerate(self._terms[0])),)
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


def copy(sources: Sequence[NDArray], targets: Sequence[NDArray]) -> None:
    """Copy arrays to others of equal shapes."""
    # MXNet keeps 5 MB for each thread that has called one of these operators.
    at_once = not is_uninterrupted()
    for dtype, rows in _rows_by_dtype([sources, targets]):
        if dtype is not None and at_once:
            flat, outputs = map(list, zip(*rows))
            _mxnet.sums_of_multiples(len(flat), (((1.0, 0),),))(*flat, out=outputs)
            continue
        for source, target in rows:
            if source.stype == target.stype and source.dtype == target.dtype:
                source.copyto(target)
            else:
                assign(dense(source), target)


def copy_all(sources: Arrays, targets: Arrays) -> None:
    """Copy arrays per parameter and device."""
    for column, target_column in zip(per_device(sources), per_device(targets)):
        copy(column, target_column)


def put_back(before: Arrays, targets: Arrays) -> None:
    """Copy the earlier values of arrays back to them.

    An interrupt at the end of ``autograd.record()`` leaves MXNet recording, where a copy would
    become part of the graph.
    """
    with mx.autograd.pause():
        copy_all(before, targets)


def copies(arrays: Arrays) -> Arrays:
    """Copies of arrays per parameter and device."""
    return [[array.copy() for array in row] for row in arrays]


def with_dimension(arrays: Iterable[NDArray]) -> list[NDArray]:
    """The same memory with at least one dimension, which some operators require."""
    flat = [classic(array) for array in arrays]
    return [array if array.shape else array.reshape((1,)) for array in flat]


def _common_dtype(arrays: Sequence[NDArray]) -> Any:
    """The common dtype of dense arrays; None if there is none, or an array is sparse."""
    if any(isinstance(array, BaseSparseNDArray) for array in arrays):
        return None
    first, *rest = (array.dtype for array in arrays)
    return first if all(dtype == first for dtype in rest) else None
