"""Whether two gradients of the same minibatch at the same weights are the same.

Two gradients cannot be kept side by side without memory for both, and they need not: sums of their
entries with random signs are enough, and such sums can be taken of the sum that a gradient is
added to, before and after. The norm of a sketch is that of the gradient within a few percent
(Charikar, Chen and Farach-Colton, "Finding Frequent Items in Data Streams", 2002).
"""

from __future__ import annotations

from typing import Iterable

import numpy as np
from mxnet.ndarray import NDArray

from .. import _mxnet
from .._mxnet import Arrays
from .arrays import in_numpy

#: They differ by rounding at most, or else by much.
TOLERANCE = {"float64": 1e-6, "float32": 1e-4, "float16": 1e-2}

_BUCKETS = 256
_SIGNS = np.random.default_rng(0).choice([-1.0, 1.0], 1 << 17)
_STRIDE = 7919  # each piece has signs and buckets of its own
# Of a large array every k-th entry will do: sketches of ResNet-18 take half of the time, and what
# draws random numbers changes many entries.
_MOST = 1 << 17


def sketch(arrays: Arrays) -> np.ndarray:
    """Sums of entries with random signs, shape (256,), float64. Waits for the device."""
    sums = np.zeros(_BUCKETS)
    pieces = (piece for row in arrays for array in row for piece in in_numpy(_thinned(array)))
    with np.errstate(invalid="ignore", over="ignore"):
        for number, piece in enumerate(pieces):
            start = number * _STRIDE % (len(_SIGNS) - len(piece))
            signed = piece * _SIGNS[start : start + len(piece)]
            whole = len(signed) // _BUCKETS * _BUCKETS
            sums += signed[:whole].reshape(-1, _BUCKETS).sum(axis=0)
            rest = (np.arange(len(signed) - whole) + number * _STRIDE) % _BUCKETS
            sums[rest] += signed[whole:]  # small arrays go to buckets of their own
    return sums


def _thinned(array: NDArray) -> NDArray:
    every = -(-array.size // _MOST) | 1  # odd: no columns of a matrix are left out
    if every == 1 or array.stype != "default":
        return array
    return _mxnet.classic(array).reshape((-1,))[::every]


def difference(first: np.ndarray, second: np.ndarray) -> float:
    """The norm of the difference of two gradients, relative to that of the first.

    Nan if either is not finite.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        distance, norm = float(np.linalg.norm(first - second)), float(np.linalg.norm(first))
    if not np.isfinite(distance + norm):
        return float("nan")
    if not distance:
        return 0.0
    return distance / norm if norm else float("inf")


def tolerance(arrays: Iterable[Iterable[object]]) -> float:
    """The difference that rounding can make."""
    return max(TOLERANCE[_mxnet.dtype_name(next(iter(row)))] for row in arrays)


def in_words(relative: float) -> str:
    """A relative difference as people read it, never as zero."""
    return f"{relative:.1%}" if relative >= 0.001 else f"{100 * relative:.1g}%"


RANDOM = (
    "The gradient of the same minibatch at the same weights, taken twice, differs by {difference} "
    "of its norm. If the network draws random numbers (dropout), the reference gradient adds "
    "variance unless both draw the same. From now on they do, as with lock_random=True; with "
    "lock_random=False they would stay different."
)
NOT_REPEATABLE = (
    "The gradient of the same minibatch at the same weights, taken twice, differs by {difference} "
    "of its norm, although MXNet's random numbers were the same. The closure must compute the same "
    "each time: it must not draw a minibatch (next(iterator)), carry a state from call to call, or "
    "use random numbers from outside MXNet (custom operators do: MXNet does not seed them). Take "
    "the minibatch, the state and the augmentation before the step; lock_random=False leaves this "
    "check out."
)
RESHUFFLED = (
    "The stored gradient of minibatch {index} differs from the one that was computed again, at the "
    "same weights, by {difference} of its norm. batch_index must be the minibatch's position in "
    "the data that update_full_grads was given: was the data reshuffled, or augmented, since then? "
    "Keep the minibatches in a list, or leave batch_index out. If lock_random was changed since "
    "then, call update_full_grads again."
)
