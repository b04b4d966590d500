"""Arrays per parameter and device: memory for them, and copies."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Iterable, List, Sequence, cast

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import BaseSparseNDArray

from .. import _mxnet
from .._mxnet import Arrays, classic
from .interrupts import is_uninterrupted

#: Dtypes of parameters, and the dtypes in which their gradients are summed.
SUMMED_IN = {"float16": "float32", "float32": "float32", "float64": "float64"}

#: Entries of an array whose arithmetic takes longer than an engine operation.
LARGE = 1 << 16


class _Looked:
    """A list that keeps what it has seen of its arrays; its copies look at their own."""

    def __reduce__(self) -> Any:
        """What makes a copy."""
        return type(self), (list(cast("list[Any]", self)),)


class Column(_Looked, List[NDArray]):
    """The classic arrays of all parameters on one device, not to be changed."""

    @cached_property
    def dtype(self) -> Any:
        """Their common dtype; None if there is none, or an array is sparse."""
        return common_dtype(self)

    @cached_property
    def by_products(self) -> bool:
        """Whether operators get each as a matrix of one row, for sums by products of matrices."""
        return self.dtype is not None and _mxnet.are_added_by_products(self)

    @cached_property
    def _given(self) -> list[NDArray]:
        return [array.reshape((1, -1)) for array in self] if self.by_products else list(self)

    @cached_property
    def addresses(self) -> list[bytes]:
        """Where operators find them."""
        return list(map(_mxnet.address, self._given))

    @cached_property
    def joined(self) -> bytes:
        """Their addresses, joined."""
        return b"".join(self.addresses)

    @cached_property
    def device(self) -> Any:
        """Their device."""
        return _mxnet.device_of(self[0])

    @cached_property
    def is_narrow(self) -> bool:
        """Whether sums of them need more digits than they have."""
        return any(SUMMED_IN[name] != name for name in map(_mxnet.dtype_name, self))


class Buffers(_Looked, List[List[NDArray]]):
    """Arrays per parameter and device, not to be replaced, so that MXNet is asked once for each."""

    @cached_property
    def columns(self) -> list[Column]:
        """The arrays per device."""
        return [Column(map(classic, on_device)) for on_device in zip(*self)]

    @cached_property
    def epsilon(self) -> float:
        """What the most precise of them rounds, relative to a number."""
        return min(float(np.finfo(array.dtype).eps) for row in self for array in row)

    def copies(self) -> Arrays:
        """Copies, as classic arrays."""
        return [list(row) for row in zip(*map(_copied, self.columns))]


def per_device(arrays: Arrays) -> Sequence[list[NDArray]]:
    """Turn lists per parameter into lists per device."""
    if isinstance(arrays, Buffers):
        return arrays.columns
    return [list(on_device) for on_device in zip(*arrays)]


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


def fill_with_ones(arrays: Arrays) -> None:
    """Set all entries of arrays to one."""
    for column in per_device(arrays):
        for dtype, rows in rows_by_dtype([column]):
            assert dtype is not None, "sparse arrays cannot be filled"
            flat = with_dimension(array for (array,) in rows)
            _mxnet.ones_like_each(len(flat))(*flat, out=flat)


def zero(arrays: Sequence[NDArray]) -> None:
    """Set arrays to zero."""
    flat = [array for array in arrays if array.stype == "default"]
    if flat:
        mx.nd.reset_arrays(*with_dimension(flat), num_arrays=len(flat))
    for array in arrays:
        if array.stype != "default":
            assign(mx.nd.zeros(array.shape, ctx=array.ctx, dtype=array.dtype), array)


def common_column_dtype(columns: Sequence[Sequence[NDArray]]) -> Any:
    """The common dtype of all arrays, if each column knows that of its own; otherwise None."""
    dtype = None
    for column in columns:
        if not isinstance(column, Column) or dtype not in (None, column.dtype):
            return None
        dtype = column.dtype
        if dtype is None:
            return None
    return dtype


def rows_by_dtype(columns: Sequence[Sequence[NDArray]]) -> Iterable[tuple[Any, list[Any]]]:
    """Rows of classic arrays, by their common dtype."""
    dtype = common_column_dtype(columns)
    if dtype is not None:
        return [(dtype, list(zip(*columns)))]
    groups: dict[Any, list[Any]] = {}
    for row in zip(*columns):
        row = tuple(map(classic, row))
        groups.setdefault(common_dtype(row), []).append(row)
    return groups.items()


def copy(sources: Sequence[NDArray], targets: Sequence[NDArray]) -> None:
    """Copy arrays to others of equal shapes."""
    # MXNet keeps 5 MB for each thread that has called one of these operators.
    in_one_call = not is_uninterrupted()
    for dtype, rows in rows_by_dtype([sources, targets]):
        if dtype is not None and in_one_call:
            flat, outputs = map(list, zip(*rows))
            _mxnet.copies_in_many_nodes(len(flat))(*flat, out=outputs)
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


def _copied(column: Column) -> list[NDArray]:
    if column.dtype is None or len(column) == 1:
        return [array.copy() for array in column]
    return list(_mxnet.copies_in_many_nodes(len(column))(*column))


def with_dimension(arrays: Iterable[NDArray]) -> list[NDArray]:
    """The same memory with at least one dimension, which some operators require."""
    flat = [classic(array) for array in arrays]
    return [array if array.shape else array.reshape((1,)) for array in flat]


def common_dtype(arrays: Sequence[NDArray]) -> Any:
    """The common dtype of dense arrays; None if there is none, or an array is sparse."""
    if any(isinstance(array, BaseSparseNDArray) for array in arrays):
        return None
    first, *rest = (array.dtype for array in arrays)
    return first if all(dtype == first for dtype in rest) else None


def sum_over_devices(sums: Arrays) -> None:
    """Add the arrays of all devices to those of the first."""
    for total, *addends in sums:
        for addend in addends:
            total += addend.copyto(_mxnet.device_of(total))


def copy_to_devices(arrays: Arrays) -> None:
    """Copy the arrays of the first device to the others."""
    for first, *rest in arrays:
        for target in rest:
            first.copyto(target)
