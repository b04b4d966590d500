"""The checks of a refresh, for methods that begin without one."""

from __future__ import annotations

from typing import Callable

from .closure import Loss
from .network import Network
from .points import Point
from .probe import is_lost, probe
from .random_lock import RandomLock
from .repeats import once, twice
from .sums import new_sum


def first_look(
    network: Network, closure: Callable[[], Loss], lock: RandomLock, scale: float, *, compare: bool
) -> int:
    """Check whether gradients add up, and whether a minibatch has the same gradient each time.

    Gradients and auxiliary states do not change.

    Parameters
    ----------
    network : Network
        The network, at its current weights.
    closure : callable
        Returns the loss of the minibatch.
    lock : RandomLock
        Turned on if the gradients differ, with a warning.
    scale : float
        The factor of the losses (mixed precision).
    compare : bool
        Whether to compare two gradients.

    Returns
    -------
    int
        The loss entries that were differentiated for the comparison. The other check is not
        counted, because a loaded trainer repeats it and must have the same counts.
    """
    here = Point.untouched(network)
    with network.grads_kept(), network.outside.protected(search=True):
        network.adds, _ = probe(here, closure, ())
        network.mark(here.weights)
        total = new_sum(network, scale)
        differentiated = 0
        if compare:
            _, reached, _, differentiated = twice(here, closure, (), total, lock)
        else:
            total.start()
            _, reached = once(here, closure, (), total, None)
        if network.adds:
            is_lost(here, closure, (), reached)
        network.is_known_to_add = True
        network.check_hidden()
    return differentiated
