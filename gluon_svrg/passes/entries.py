"""Looking at the entries of arrays on the host."""

from __future__ import annotations

from typing import Any, Iterable, Iterator

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from .. import _mxnet
from .._mxnet import classic
from .arrays import LARGE, dense, with_dimension

_AT_MOST = 100  # arrays: with more than 200, `multi_all_finite` writes beyond its memory


def all_finite(arrays: Iterable[NDArray]) -> bool:
    """Whether all entries are finite. Waits for the device."""
    groups: dict[bool, list[NDArray]] = {True: [], False: []}
    for array in arrays:
        groups[_mxnet.device_of(array).device_type == "gpu"].append(array)
    return finite_on_host(groups[False]) and finite_on_device(groups[True])


def all_zero(arrays: Iterable[NDArray]) -> bool:
    """Whether all entries are zero. Waits for the device, usually for one array alone."""
    return not any(piece.any() for array in arrays for piece in in_numpy(array))


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
    if values.size <= LARGE:
        yield values.asnumpy().ravel()
        return
    flat = values.reshape((-1,))
    for start in range(0, flat.shape[0], LARGE):
        yield flat[start : start + LARGE].asnumpy()
