"""Tests whether two gradients of one minibatch at the same weights are equal.

Keeping both gradients would need memory for both. Sums of their entries with random signs are
enough: such a sketch can be taken of a running sum before and after a gradient is added. The norm
of a sketch equals that of the gradient within a few percent (Charikar, Chen and Farach-Colton,
"Finding Frequent Items in Data Streams", 2002).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Iterable, Iterator

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from .. import _mxnet
from .._mxnet import Arrays
from .arrays import SUMMED_IN, dense
from .entries import alike

#: What is called equal, relative to the norm. Random numbers that are not locked make much more.
TOLERANCE = {"float64": 1e-6, "float32": 1e-4, "float16": 1e-2}
#: Where they are locked, nothing but rounding is left.
LOCKED_TOLERANCE = {"float64": 1e-8, "float32": 2e-6, "float16": 2e-3}

_BUCKETS = 256
_SIGNS = np.random.default_rng(0).choice([-1.0, 1.0], 1 << 17)
_STRIDE = 7919  # each array has its own signs
_TOGETHER = 64  # small arrays
_LARGE = 1 << 15  # entries; MXNet sums up larger arrays, as copying these to NumPy would be slower


def sketch(arrays: Arrays) -> np.ndarray:
    """Sums of entries with random signs, shape (256,), float64. Waits for the device."""
    sums = np.zeros(_BUCKETS)
    found: list[NDArray] = []
    for number, flat in enumerate(_joined(arrays)):
        shift = number * _STRIDE
        if len(flat) >= _LARGE:
            found += _signed_sums(flat, shift)
            pieces = [flat[len(flat) // _BUCKETS * _BUCKETS :].asnumpy()]
        else:
            pieces = [flat.asnumpy()]
        for piece in pieces:
            shift += len(piece)
            _add_signed(piece, shift, sums)
    with np.errstate(invalid="ignore", over="ignore"):
        for part in found:
            sums += part.asnumpy()[0]
    return sums


def _joined(arrays: Arrays) -> Iterator[NDArray]:
    """All arrays flat, small ones joined: waiting for each would take longer than its sum.

    All are dense, of a dtype for sums: a sketch depends on values and shapes alone.
    """
    small: list[NDArray] = []
    for array in (array for row in arrays for array in row):
        summed_in = SUMMED_IN.get(_mxnet.dtype_name(array), "float64")
        flat = dense(_mxnet.classic(array)).astype(summed_in, copy=False).reshape((-1,))
        if len(flat) < _LARGE:
            small.append(flat)
        else:
            yield flat
    for group in alike(small, _TOGETHER):
        yield mx.nd.concat(*group, dim=0)


def _signed_sums(flat: NDArray, shift: int) -> Iterator[NDArray]:
    """Products of signs and the matrix that an array is when it has as many columns as buckets."""
    most = len(_SIGNS) // 2
    matrix = flat[: len(flat) // _BUCKETS * _BUCKETS].reshape((-1, _BUCKETS))
    for begin in range(0, len(matrix), most):
        rows = matrix[begin : begin + most]
        signs = _signs(_mxnet.device_of(flat), _mxnet.dtype_name(flat))
        start = (shift + begin) % (most + 1)
        yield mx.nd.dot(signs[start : start + len(rows)].reshape((1, -1)), rows)


def _add_signed(piece: np.ndarray, shift: int, sums: np.ndarray) -> None:
    start = shift % (len(_SIGNS) - len(piece))
    with np.errstate(invalid="ignore", over="ignore"):
        signed = piece * _SIGNS[start : start + len(piece)]
        whole = len(signed) // _BUCKETS * _BUCKETS
        sums += signed[:whole].reshape(-1, _BUCKETS).sum(axis=0)
        rest = (np.arange(len(signed) - whole) + shift) % _BUCKETS
        sums[rest] += signed[whole:]  # small arrays get their own buckets


@lru_cache(maxsize=16)
def _signs(device: Any, dtype: str) -> NDArray:
    return _mxnet.to_ndarray(_SIGNS.astype(dtype), device)


def difference(first: np.ndarray, second: np.ndarray) -> float:
    """The norm of the difference of two gradients, relative to that of the first.

    It is nan if either is not finite.
    """
    return relative(distance(first, second), first)


def distance(first: np.ndarray, second: np.ndarray, rounding: float = 0.0) -> float:
    """The norm of the difference of two gradients, as far as rounding cannot have made it."""
    with np.errstate(invalid="ignore", over="ignore"):
        found = float(np.linalg.norm(first - second)) - rounding
    return 0.0 if found <= 0 else found


def relative(distance: float, gradient: np.ndarray) -> float:
    """A distance relative to the norm of a gradient; nan if either is not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        norm = float(np.linalg.norm(gradient))
    if not np.isfinite(distance + norm):
        return float("nan")
    if not distance:
        return 0.0
    return distance / norm if norm else float("inf")


def is_other(relative: float, arrays: Iterable[Iterable[object]], locked: bool = False) -> bool:
    """Whether a difference is too large for equal gradients; one that is nan proves nothing."""
    tolerances = LOCKED_TOLERANCE if locked else TOLERANCE
    if not relative > min(tolerances.values()):
        return False
    return relative > max(tolerances[_mxnet.dtype_name(next(iter(row)))] for row in arrays)


def in_words(relative: float) -> str:
    """A relative difference in readable form, never as zero."""
    return f"{relative:.1%}" if relative >= 0.001 else f"{100 * relative:.1g}%"


OTHER_DATA = (
    "The gradient of minibatch {index}, computed again at the weights of its first visit, differs "
    "from the one that was stored then, by {difference} of its norm. batch_index must be the "
    "minibatch's position in the data: was the data reshuffled, or augmented, since then? Each "
    "minibatch is then corrected with the gradient of another: keep the minibatches in a list. If "
    "the network draws random numbers, such as dropout, pass lock_random=True."
)
RESHUFFLED = (
    "The stored gradient of minibatch {index} differs from the one that was computed again, at the "
    "same weights, by {difference} of its norm. batch_index must be the minibatch's position in "
    "the data that update_full_grads was given: was the data reshuffled, or augmented, since then? "
    "Keep the minibatches in a list, or leave batch_index out. If lock_random was changed since "
    "then, call update_full_grads again."
)
