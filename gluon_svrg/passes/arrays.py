"""Arrays of all trainable parameters: a column for each device."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Iterable, Iterator, List, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from .. import _mxnet
from .._mxnet import SUMMED_IN, Step, classic


class Column(List[NDArray]):
    """The classic arrays of some parameters on one device, not to be replaced."""

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """Their dtypes."""
        return tuple(map(_mxnet.dtype_name, self))

    @cached_property
    def are_dense(self) -> bool:
        """Whether none of them is sparse."""
        return all(array.stype == "default" for array in self)

    def only(self, chosen: Sequence[bool] | None) -> Column:
        """Those with a flag; all of them if there are no flags."""
        if chosen is None:
            return self
        return Column(array for array, is_chosen in zip(self, chosen) if is_chosen)


#: A column for each device.
Columns = List[Column]


def columns(arrays: Sequence[Sequence[NDArray]]) -> Columns:
    """The columns of arrays per parameter and device."""
    return [Column(map(classic, on_device)) for on_device in zip(*arrays)]


def zeros_like(these: Columns) -> Columns:
    """Dense zeros in which gradients like these can be summed."""
    return [Column(map(_zero_sum, column)) for column in these]


def _zero_sum(array: NDArray) -> NDArray:
    dtype = SUMMED_IN[_mxnet.dtype_name(array)]
    return mx.nd.zeros(array.shape, ctx=_mxnet.device_of(array), dtype=dtype)


def dense(array: NDArray) -> NDArray:
    """A sparse array as a dense one; dense arrays unchanged."""
    return array if array.stype == "default" else array.tostype("default")


def zero(arrays: Iterable[NDArray]) -> None:
    """Set arrays to zero."""
    flat: list[NDArray] = []
    for array in map(classic, arrays):
        if array.stype == "default":
            flat.append(array if array.shape else array.reshape((1,)))
        else:
            _store(mx.nd.zeros(array.shape, ctx=array.ctx, dtype=array.dtype), array)
    if flat:
        mx.nd.reset_arrays(*flat, num_arrays=len(flat))


def _store(value: NDArray, target: NDArray) -> None:
    (value if target.stype == "default" else value.tostype(target.stype)).copyto(target)


_made: dict[Any, None] = {}  # what was assigned once
_MOST = 1000


def assign(row: Sequence[Column], *steps: Step) -> None:
    """Assign sums of multiples of columns on one device, to columns.

    Parameters
    ----------
    row : sequence of Column
        Columns of equal shapes.
    *steps
        Each has the number of the column to assign to, and the terms of the sum: a factor, and the
        number of a column. A factor is a number, or an array of one number, which stays on its
        device. Later steps see what earlier ones have assigned. Only the first term of a step may
        be the column itself.

    Notes
    -----
    Most data have minibatches of two sizes, so factors come again and again: steps are compiled
    when they come for the second time. Intermediate results need no memory where at most the first
    factor of each step differs from 1 and -1; large arrays are then added in a third of the time.
    """
    if not row[0]:
        return
    targets = [row[n] for n in _mxnet.are_assigned(steps)]
    if all(column.are_dense for column in row) and _is_known(steps, row):
        operator = _mxnet.assigning(steps, tuple(column.dtypes for column in row))
        read = [row[n] for n in _mxnet.are_read(steps)]
        inputs = [array for arrays in zip(*read) for array in arrays]
        operator(*inputs, out=[array for arrays in zip(*targets) for array in arrays])
        return
    for n in range(len(row[0])):
        values = {number: dense(row[number][n]) for number in _mxnet.are_read(steps)}
        dtypes = tuple(column.dtypes[n] for column in row)
        for found, target in zip(_mxnet.results(mx.nd, steps, values, dtypes), targets):
            _store(found, target[n])


def _is_known(steps: tuple[Step, ...], row: Sequence[Column]) -> bool:
    """Whether these steps, whose factors are numbers, were made before."""
    if any(isinstance(factor, NDArray) for _, terms in steps for factor, _ in terms):
        return False
    key = steps, len(row[0])
    if key in _made:
        return True
    if len(_made) > _MOST:
        _made.clear()
    _made[key] = None
    return False


def scale_to_norm(arrays: Column, most: float, entries: float | NDArray) -> None:
    """Scale each array down whose norm exceeds ``most * entries``. Does not wait for the device."""
    groups: dict[str, list[NDArray]] = {}
    for array, dtype in zip(arrays, arrays.dtypes):
        groups.setdefault(dtype if array.stype == "default" else "", []).append(array)
    for dtype, group in groups.items():
        where = _mxnet.device_of(group[0])
        limit = mx.nd.full((1, 1), most, ctx=where, dtype="float64")
        if isinstance(entries, NDArray):
            limit = limit * entries.as_in_context(where).astype("float64").reshape((1, 1))
        else:
            limit = limit * entries
        if dtype in ("float32", "float64"):
            flat = [array.reshape((1, -1)) for array in group]
            _mxnet.scaling_to_norm(len(flat))(limit.astype(dtype), *flat, out=flat)
            continue
        for array in group:
            wide = dense(array).astype("float32").reshape((1, -1))
            _mxnet.scaling_to_norm(1)(limit.astype("float32"), wide, out=wide)
            _store(wide.reshape(array.shape).astype(array.dtype), array)


def copy(these: Columns, targets: Columns) -> None:
    """Copy columns to others of equal shapes."""
    for column, target in zip(these, targets):
        assign([target, column], (0, ((1.0, 1),)))


def copies(arrays: Iterable[Sequence[NDArray]]) -> list[list[NDArray]]:
    """Copies of arrays, in lists of lists."""
    return [[array.copy() for array in row] for row in arrays]


def put_back(before: Iterable[Sequence[NDArray]], targets: Iterable[Sequence[NDArray]]) -> None:
    """Copy the earlier values of arrays, in lists of lists, back to them."""
    with mx.autograd.pause():
        for row, target_row in zip(before, targets):
            for value, target in zip(row, target_row):
                value.copyto(target)


def sum_to_first(sums: Columns) -> None:
    """Add the columns of all devices to that of the first."""
    first, *others = sums
    for other in others:
        for total, addend in zip(first, other):
            total += addend.copyto(_mxnet.device_of(total))


def copy_from_first(arrays: Columns) -> None:
    """Copy the column of the first device to the others."""
    first, *others = arrays
    for other in others:
        for value, target in zip(first, other):
            value.copyto(target)


def pieces(array: NDArray) -> Iterator[np.ndarray]:
    """The entries of an array in float64, in pieces that need little memory. Waits for it."""
    flat = dense(classic(array)).reshape((-1,))
    for start in range(0, flat.shape[0], 1 << 16):
        yield flat[start : start + (1 << 16)].asnumpy().astype("float64")


def norm(arrays: Iterable[NDArray]) -> float:
    """The norm of all entries of arrays. Waits for them."""
    squares = (float(np.dot(x, x)) for array in arrays for x in pieces(array))
    return float(np.sqrt(sum(squares)))


def are_finite(arrays: Iterable[NDArray]) -> bool:
    """Whether all entries of arrays are finite. Waits for them."""
    groups: dict[Any, list[NDArray]] = {}
    for number, array in enumerate(map(dense, map(classic, arrays))):
        # With more than 200 arrays, the operator would write beyond its memory.
        kind = _mxnet.device_of(array), array.dtype, number // 100
        groups.setdefault(kind, []).append(array if array.shape else array.reshape((1,)))
    found = [mx.nd.multi_all_finite(*group, num_arrays=len(group)) for group in groups.values()]
    return all(bool(flag.asscalar()) for flag in found)


def are_equal(these: Iterable[NDArray], those: Iterable[NDArray]) -> bool:
    """Whether arrays are equal to the last bit. Waits for them."""
    pairs = zip(these, those)
    return all(np.array_equal(*map(_values, pair)) for pair in pairs)


def _values(array: NDArray) -> np.ndarray:
    return dense(classic(array)).asnumpy()
