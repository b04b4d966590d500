"""Arrays of all trainable parameters: a column for each device."""

from __future__ import annotations

import sys
from functools import cached_property
from itertools import compress, count
from typing import Any, Callable, Iterable, Iterator, List, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from .. import _mxnet
from .._mxnet import classic

#: Dtypes of parameters, and the dtypes in which their gradients are summed.
SUMMED_IN = {"float16": "float32", "float32": "float32", "float64": "float64"}
SMALL = 2**13  # numbers: 32 kB of float32, for which a call takes longer than its arithmetic
_numbers = count()


class DeviceArrays(List[NDArray]):
    """The classic arrays of some parameters on one device. Do not replace its items."""

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """Their dtypes."""
        return tuple(map(_mxnet.dtype_of, self))

    @cached_property
    def is_dense(self) -> bool:
        """Whether none is sparse."""
        return all(array.stype == "default" for array in self)

    @cached_property
    def kind(self) -> str:
        """Their dtypes, storage types and shapes; interned, so that Python compares addresses."""
        return sys.intern(str([(a.dtype, a.stype, a.shape) for a in self]))

    @cached_property
    def number(self) -> int:
        """A number that no other column has ever had."""
        return next(_numbers)

    @cached_property
    def handles(self) -> list[int]:
        """Their addresses in MXNet's C interface."""
        return [array.handle.value for array in self]

    @cached_property
    def device(self) -> Any:
        """Their device."""
        return _mxnet.device_of(self[0])

    def select(self, chosen: Sequence[bool] | None) -> DeviceArrays:
        """The arrays with a flag; all of them if there are no flags."""
        if chosen is None:
            return self
        key = tuple(chosen)
        if key not in self._parts:
            self._parts[key] = DeviceArrays(compress(self, key))
        return self._parts[key]

    @cached_property
    def _parts(self) -> dict[tuple[bool, ...], DeviceArrays]:
        return {}


#: A column for each device.
Columns = List[DeviceArrays]


class Mean(NamedTuple):
    """A mean per loss entry, stored as a sum and the number of entries in it.

    So c m of a mini-batch with this number of loss entries is added without a product.
    """

    sums: Columns
    entries: Any  # a number, or an array whose first one it is

    def divisor(self) -> float:
        """The number of entries. Waits for the device, if it is there."""
        entries = self.entries
        return float(entries[0].asscalar() if isinstance(entries, NDArray) else entries)

    def vector(self) -> np.ndarray:
        """The mean as `vector` has it. Waits for the device."""
        return vector(self.sums[0]) / self.divisor()


def vector(arrays: Iterable[NDArray]) -> np.ndarray:
    """The entries of arrays, one after the other, in float64. Waits for them."""
    flat = [dense(classic(array)).asnumpy().ravel() for array in arrays]
    return np.concatenate(flat).astype("float64")


def vector_reader(arrays: Sequence[NDArray]) -> Callable[[], np.ndarray]:
    """A function that returns the `vector` of arrays of one dtype, small ones six times as fast."""
    flat = np.empty(sum(array.size for array in arrays), _mxnet.dtype_of(arrays[0]))
    pieces = split(flat, [array.size for array in arrays])
    reads = [_mxnet.reader(array, piece) for array, piece in zip(arrays, pieces)]

    def read() -> np.ndarray:
        for each in reads:
            each()
        return flat.astype("float64")

    return read


def split(values: np.ndarray, sizes: Iterable[int]) -> list[np.ndarray]:
    """The inverse of `vector`: the parts of these sizes, along the last axis."""
    return np.split(values, np.cumsum([*sizes])[:-1], axis=-1)


def columns(arrays: Sequence[Sequence[NDArray]]) -> Columns:
    """The columns of arrays per parameter and device."""
    return [DeviceArrays(map(classic, on_device)) for on_device in zip(*arrays)]


def zeros_like(these: Columns) -> Columns:
    """Dense zeros in which gradients like these can be summed."""

    def empty(array: NDArray) -> NDArray:
        dtype = SUMMED_IN[_mxnet.dtype_of(array)]
        return mx.nd.empty(array.shape, ctx=_mxnet.device_of(array), dtype=dtype)

    sums = [DeviceArrays(map(empty, column)) for column in these]
    for column in sums:
        zero(column)
    return sums


def dense(array: NDArray) -> NDArray:
    """A sparse array as a dense one; dense arrays unchanged."""
    return array if array.stype == "default" else array.tostype("default")


def store(value: NDArray, target: NDArray) -> None:
    """Copy a dense array to one of any storage."""
    (value if target.stype == "default" else value.tostype(target.stype)).copyto(target)


def zero(arrays: Iterable[NDArray]) -> None:
    """Set arrays to zero."""
    by_device: dict[Any, list[NDArray]] = {}
    for array in map(classic, arrays):
        if array.stype == "default":
            flat = array if array.shape else array.reshape((1,))
            by_device.setdefault(array.ctx, []).append(flat)
        else:
            store(mx.nd.zeros(array.shape, ctx=array.ctx, dtype=array.dtype), array)
    for on_device in by_device.values():
        mx.nd.reset_arrays(*on_device, num_arrays=len(on_device))


def copy_rows(rows: Iterable[Sequence[NDArray]], targets: Iterable[Sequence[NDArray]]) -> None:
    """Copy arrays to others, on any devices; both are in lists of lists."""
    pairs = [pair for row, target_row in zip(rows, targets) for pair in zip(row, target_row)]
    if pairs:
        with mx.autograd.pause():
            for value, target in pairs:
                value.copyto(target)


def pieces(array: NDArray) -> Iterator[np.ndarray]:
    """The entries of an array, in pieces that need little memory. Waits for it."""
    flat = dense(classic(array)).reshape((-1,))
    for start in range(0, flat.shape[0], 1 << 16):
        yield flat[start : start + (1 << 16)].asnumpy()


def norm(arrays: Iterable[NDArray]) -> float:
    """The norm of all entries of arrays. Waits for them."""
    wide = (x.astype("float64") for array in arrays for x in pieces(array))
    return float(np.sqrt(sum(float(np.dot(x, x)) for x in wide)))


#: How far copies of one value may differ by rounding, relative to their norm.
ROUNDING_OF_COPIES = {"float16": 1e-3, "float64": 1e-14}


def are_close(these: Sequence[NDArray], those: Sequence[NDArray]) -> bool:
    """Whether arrays of one dtype are equal, or differ by rounding. Waits for them."""
    if are_equal(these, those):
        return True
    rounding = ROUNDING_OF_COPIES.get(_mxnet.dtype_of(these[0]), 1e-6)
    wide = [vector(arrays) for arrays in (these, those)]
    return bool(np.linalg.norm(wide[0] - wide[1]) <= rounding * np.linalg.norm(wide[1]))


def are_equal(these: Iterable[NDArray], those: Iterable[NDArray]) -> bool:
    """Whether arrays have equal entries, no NaN among them. Waits for them."""
    pairs = (pair for a, b in zip(these, those) for pair in zip(pieces(a), pieces(b)))
    return all(np.array_equal(a, b) for a, b in pairs)
