"""What a refresh finds out on its way, for methods that begin without one."""

from __future__ import annotations

from typing import Callable

from .closure import Loss
from .full_pass import twice
from .network import Network, check_dtypes
from .points import Point
from .random_lock import RandomLock
from .sums import adds_up, new_sum


def first_look(
    network: Network, closure: Callable[[], Loss], lock: RandomLock, scale: float, *, compare: bool
) -> int:
    """Find out whether gradients add up, and whether a minibatch has the same one each time.

    Gradients and auxiliary states are as before.

    Parameters
    ----------
    network : Network
        At its current weights.
    closure : callable
        Returns the loss of the minibatch.
    lock : RandomLock
        Turned on if the gradients differ, with a warning.
    scale : float
        What losses are multiplied by (mixed precision).
    compare : bool
        Whether to compare two gradients.

    Returns
    -------
    int
        How many loss entries were differentiated to compare them.
    """
    check_dtypes(network.parameters)
    here = Point.untouched(network)
    with network.grads_kept(), network.outside.protected(search=True):
        network.adds = adds_up(here, closure, ())
        network.is_known_to_add = True
        network.mark(here.weights)
        differentiated = 0
        if compare:
            total = new_sum(network, scale)
            total.put()
            recorded, times, _ = twice(here, closure, (), total, lock, lock.new_seed())
            differentiated = times * recorded.entries
        here.take_touched()
        network.check_hidden()
    return differentiated
