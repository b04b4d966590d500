"""Whether two gradients of the same minibatch at the same weights are the same."""

from __future__ import annotations

import math
from typing import Iterator

import numpy as np

from . import _mxnet
from ._mxnet import Arrays
from .operations import in_numpy

#: They differ by rounding at most, or else by much.
TOLERANCE = {"float64": 1e-6, "float32": 1e-4, "float16": 1e-2}

RANDOM = (
    "The gradient of the same minibatch at the same weights, taken twice, differs by "
    "{difference:.1%} of its norm. If the network draws random numbers (dropout), SVRG adds "
    "variance unless both draw the same. From now on they do, as with lock_random=True; with "
    "lock_random=False they would stay different."
)
NOT_REPEATABLE = (
    "The gradient of the same minibatch at the same weights, taken twice, differs by "
    "{difference:.1%} of its norm, although MXNet's random numbers were the same. The closure must "
    "compute the same each time: it must not draw a minibatch (next(iterator)), carry a state from "
    "call to call, or use random numbers from outside MXNet. Take the minibatch, the state and the "
    "augmentation before the step; lock_random=False leaves this check out."
)
RESHUFFLED = (
    "The stored gradient of minibatch {index} differs from the one that was computed again, at the "
    "same weights, by {difference:.1%} of its norm. batch_index must be the minibatch's position "
    "in the data that update_full_grads was given: was the data reshuffled, or augmented, since "
    "then? Keep the minibatches in a list, or leave batch_index out. If lock_random was changed "
    "since then, call update_full_grads again."
)


def difference(first: Arrays, second: Arrays, whole: Arrays | None = None) -> float:
    """The norm of the difference, relative to that of the second, or of a whole. Waits."""
    squares = sum(float(np.sum((a - b) ** 2)) for a, b in zip(_flat(first), _flat(second)))
    if not squares:
        return 0.0
    norm = sum(float(np.sum(piece**2)) for piece in _flat(second if whole is None else whole))
    return math.sqrt(squares / norm) if norm else math.inf


def tolerance(grads: Arrays) -> float:
    """The difference that rounding can make."""
    return max(TOLERANCE[_mxnet.dtype_name(row[0])] for row in grads)


def _flat(arrays: Arrays) -> Iterator[np.ndarray]:
    return (piece.astype("float64") for row in arrays for array in row for piece in in_numpy(array))
