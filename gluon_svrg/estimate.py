"""The SVRG estimate of a minibatch gradient: two passes and the formula."""

from __future__ import annotations

import math
import warnings
from contextlib import ExitStack
from functools import partial
from typing import Callable, NamedTuple

from . import _mxnet, comparison, gradient, random_lock
from .closure import Evaluation, Loss, check_repeatable
from .control_variate import ControlVariate
from .gradient import Network
from .random_lock import RandomLock
from .snapshot import copy_all
from .stored import StoredGradients


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


def from_stored(
    network: Network,
    held: ControlVariate,
    index: int,
    closure: Callable[[], Loss],
    coefficient: float,
    lock: RandomLock,
) -> Estimate:
    """Take the SVRG estimate of the gradient of a minibatch whose gradient there is stored.

    Parameters
    ----------
    network, held, closure, coefficient, lock
        As for `corrected`.
    index : int
        Of the minibatch, among the stored gradients.

    Raises
    ------
    ValueError
        If the closure returns another number of loss entries than then.
    RuntimeError
        If the stored gradient, when it is computed again, is another one.
    """
    stored = held.check_stored(index)
    check = partial(stored.check_counts, index)
    with ExitStack() as stack:
        stack.enter_context(gradient.marks_kept(network.parameters))
        stack.enter_context(held.snapshot.accumulation())
        if stored.seeds[index] is not None:
            stack.callback(lock.move_on)  # what is drawn next is not the same each time
        pairs = 0
        if not (stored.confirmed or lock.mode is False):
            _confirm(network, held, stored, index, closure)
            pairs = 1
        held.snapshot.clear_accumulated()
        random_lock.start(stored.seeds[index])
        evaluation = gradient.at_current_weights(network, closure, check)
        held.subtract_stored_from_grads(index, evaluation.counts, coefficient, network.scale)
    return Estimate(evaluation.loss, (1 + pairs) * sum(evaluation.counts))


def _confirm(
    network: Network,
    held: ControlVariate,
    stored: StoredGradients,
    index: int,
    closure: Callable[[], Loss],
) -> None:
    """Compute a stored gradient again, and raise unless it is the same."""
    random_lock.start(stored.seeds[index])
    with network.others.protected(gradients=False):
        again = gradient.at_snapshot(held.snapshot, closure, (), network)
    stored.check_counts(index, again.counts)
    difference = held.difference_to_stored(index, network.scale)
    if difference > comparison.tolerance(held.snapshot.buffers):
        message = comparison.RESHUFFLED.format(index=index, difference=difference)
        raise RuntimeError(message)
    stored.confirmed = math.isfinite(difference)  # an overflow proves nothing


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
    return gradient.at_current_weights(network, closure, partial(check_repeatable, there.counts))


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
    tolerance = comparison.tolerance(held.snapshot.buffers)
    try:
        with lock.kept_on_error():
            here = _both(network, held, closure, lock)
            difference = comparison.difference(held.buffer.arrays, held.snapshot.buffers)
            if difference <= tolerance:
                return here, 1
            if not lock.locked:
                warnings.warn(comparison.RANDOM.format(difference=difference), stacklevel=4)
                lock.locked = True
                copy_all(before, states)  # where the first attempt has moved them
                _mxnet.take_fresh(_mxnet.weights(network.parameters))
                here = _both(network, held, closure, lock)
                difference = comparison.difference(held.buffer.arrays, held.snapshot.buffers)
                if difference <= tolerance:
                    return here, 2
            raise RuntimeError(comparison.NOT_REPEATABLE.format(difference=difference))
    except BaseException:
        copy_all(before, states)
        raise
