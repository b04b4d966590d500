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
    "then? Keep the minibatches in a list, or leave batch_index out."
)


def difference(first: Arrays, second: Arrays) -> float:
    """The norm of the difference, relative to the norm of the second. Waits."""
    squares = np.zeros(2)
    for there, here in zip(_flat(first), _flat(second)):
        squares += np.sum((there - here) ** 2), np.sum(here**2)
    if not squares[0]:
        return 0.0
    return math.sqrt(squares[0] / squares[1]) if squares[1] else math.inf


def tolerance(grads: Arrays) -> float:
    """The difference that rounding can make."""
    return max(TOLERANCE[_mxnet.dtype_name(row[0])] for row in grads)


def _flat(arrays: Arrays) -> Iterator[np.ndarray]:
    return (piece.astype("float64") for row in arrays for array in row for piece in in_numpy(array))
