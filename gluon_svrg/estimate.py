"""The SVRG estimate of a minibatch gradient: two passes and the formula."""

from __future__ import annotations

import math
import warnings
from typing import Callable, Iterator, NamedTuple

import numpy as np

from . import _mxnet, gradient, random_lock
from ._mxnet import Arrays
from .closure import Evaluation, Loss
from .control_variate import ControlVariate
from .gradient import Network
from .operations import in_numpy
from .random_lock import RandomLock
from .snapshot import copy_all

#: Two gradients at the same weights differ by rounding at most, or else by much.
TOLERANCE = {"float64": 1e-6, "float32": 1e-4, "float16": 1e-2}


class Estimate(NamedTuple):
    """What a minibatch gave, apart from the gradients."""

    loss: Loss
    entries: int  # differentiated


def plain(network: Network, closure: Callable[[], Loss]) -> Estimate:
    """Take the gradient of a minibatch as it is."""
    with gradient.marks_kept(network.parameters):
        evaluation = gradient.at_current_weights(network, closure)
    return Estimate(evaluation.loss, sum(evaluation.counts))


def corrected(
    network: Network,
    held: ControlVariate,
    closure: Callable[[], Loss],
    coefficient: float,
    lock: RandomLock,
    *,
    compare: bool,
) -> Estimate:
    """Take the SVRG estimate of the gradient of a minibatch.

    Parameters
    ----------
    network : Network
        The parameters; the estimate goes to their gradient buffers.
    held : ControlVariate
        What the snapshot left behind.
    closure : callable
        Returns the loss of the minibatch.
    coefficient : float
        How much of the control variate to use.
    lock : RandomLock
        Whether both passes draw the same random numbers.
    compare : bool
        Whether the current weights are those of the snapshot, so that both gradients must be
        equal. If they are not, the lock is turned on.

    Raises
    ------
    RuntimeError
        If both gradients are compared, and differ even with the lock.
    """
    with gradient.marks_kept(network.parameters), held.snapshot.accumulation():
        if compare:
            evaluation, pairs = _both_compared(network, held, closure, lock)
        else:
            evaluation, pairs = _both(network, held, closure, lock), 1
        held.subtract_from_grads(evaluation.counts, coefficient, network.scale)
    return Estimate(evaluation.loss, 2 * pairs * sum(evaluation.counts))


def _both(
    network: Network, held: ControlVariate, closure: Callable[[], Loss], lock: RandomLock
) -> Evaluation:
    """Take the gradient at the snapshot, into the buffer, and at the current weights."""
    seed = lock.new_seed()
    random_lock.start(seed)
    with network.others.protected(gradients=False):
        there = gradient.at_snapshot(held.snapshot, closure, (), network)
    held.buffer.keep()
    held.snapshot.clear_accumulated()
    random_lock.start(seed)
    return gradient.at_current_weights(network, closure, counts=there.counts)


def _both_compared(
    network: Network, held: ControlVariate, closure: Callable[[], Loss], lock: RandomLock
) -> tuple[Evaluation, int]:
    """Take both gradients where they must be equal; if they are not, lock, and take both again.

    Returns
    -------
    evaluation : Evaluation
    pairs : int
        How often both were taken.
    """
    auxiliaries = held.snapshot.auxiliaries + network.others.auxiliaries
    states = [_mxnet.data(parameter) for parameter in auxiliaries]
    before = [[state.copy() for state in row] for row in states]
    was_locked = lock.locked
    try:
        here = _both(network, held, closure, lock)
        difference = _difference(held)
        if difference <= _tolerance(held):
            return here, 1
        if not lock.locked:
            warnings.warn(_DIFFERENT.format(difference=difference), stacklevel=4)
            lock.locked = True
            copy_all(before, states)  # where the first attempt has moved them
            _mxnet.take_fresh(_mxnet.weights(network.parameters))
            here = _both(network, held, closure, lock)
            difference = _difference(held)
            if difference <= _tolerance(held):
                return here, 2
        raise RuntimeError(_STILL_DIFFERENT.format(difference=difference))
    except BaseException:
        copy_all(before, states)
        lock.locked = was_locked
        raise


_DIFFERENT = (
    "The gradient of the same minibatch at the same weights, taken twice, differs by "
    "{difference:.1%} of its norm. If the network draws random numbers (dropout), SVRG adds "
    "variance unless both draw the same. From now on they do, as with lock_random=True; with "
    "lock_random=False they would stay different."
)
_STILL_DIFFERENT = (
    "The gradient of the same minibatch at the same weights, taken twice, differs by "
    "{difference:.1%} of its norm, although MXNet's random numbers were the same. The closure must "
    "compute the same each time: it must not draw a minibatch (next(iterator)), carry a state from "
    "call to call, or use random numbers from outside MXNet. Take the minibatch, the state and the "
    "augmentation before the step; lock_random=False leaves this check out."
)


def _difference(held: ControlVariate) -> float:
    """The norm of the difference of both gradients, relative to the norm of the gradient."""
    squares = np.zeros(2)
    for there, here in zip(_flat(held.buffer.arrays), _flat(held.snapshot.buffers)):
        squares += np.sum((there - here) ** 2), np.sum(here**2)
    if not squares[0]:
        return 0.0
    return math.sqrt(squares[0] / squares[1]) if squares[1] else math.inf


def _flat(arrays: Arrays) -> Iterator[np.ndarray]:
    return (piece.astype("float64") for row in arrays for array in row for piece in in_numpy(array))


def _tolerance(held: ControlVariate) -> float:
    return max(TOLERANCE[_mxnet.dtype_name(row[0])] for row in held.snapshot.weights)
