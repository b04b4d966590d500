"""Whether a minibatch has the same loss and the same gradient each time they are computed.

Both gradients are taken at the same weights, with the same factor, as MXNet rounds the multiples of
a gradient in other ways. They may still differ by rounding, where a sum was computed in another
order. The gradient of a convolution's bias before BatchNorm is zero but for rounding, and may be a
large part of a gradient late in training. So a difference is compared with what other roundings of
the same backward change.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from . import random_lock, sketch
from .arrays import per_device, zero
from .closure import Loss, Recorded, check_repeatable, forward
from .multiples import combine
from .network import Network, check_dependent
from .points import Point
from .random_lock import RandomLock
from .sums import LiveSum, Observed

#: Factors of a gradient that are rounded in other ways than 1. Losses of all dtypes can hold them.
OTHER_FACTORS = (0.6875, 0.8125, 1.125)
#: The differences between two gradients that rounding explains, in units of those between factors.
#: In float32, another order of the samples makes up to 12 of these, and another minibatch 80,000.
MARGIN = 32


class Repeated(NamedTuple):
    """A gradient that was taken twice, and how to take it again."""

    gradients: Sequence[Observed]
    recorded: Sequence[Recorded]
    point: Point
    closure: Callable[..., Loss]
    inputs: Sequence[Any]
    seed: int | None
    scale: float  # of the losses (mixed precision)

    def distance(self) -> float:
        """The norm of the difference of both, without what the sums around them have rounded."""
        first, second = self.gradients
        return sketch.distance(first.sketch, second.sketch, first.rounding + second.rounding)

    def difference(self) -> float:
        """The distance, relative to the norm of the first."""
        return sketch.relative(self.distance(), self.gradients[0].sketch)


class Verdict(NamedTuple):
    """What a comparison of two gradients has shown."""

    is_same: bool
    is_known: bool = True  # an overflow proves nothing
    differentiated: int = 0  # loss entries, to find out
    is_intact: bool = True  # whether the live gradients are as before


def once(
    here: Point,
    closure: Callable[..., Loss],
    inputs: Sequence[Any],
    total: LiveSum,
    seed: int | None,
    factor: float = 1.0,
) -> tuple[Recorded, list[bool]]:
    """Add the gradient of a minibatch, and tell which parameters it reaches."""

    def add() -> tuple[Recorded, Any]:
        recorded = here.network.record(closure, inputs)
        return recorded, total.add(recorded, here, factor)

    random_lock.start(seed)
    recorded, touched = here.at(add)
    return recorded, check_dependent(touched)


def twice(
    here: Point,
    closure: Callable[..., Loss],
    inputs: Sequence[Any],
    total: LiveSum,
    lock: RandomLock,
) -> tuple[Recorded, list[bool], int | None, int]:
    """Begin with half of the gradient of a minibatch twice, and compare both halves.

    If they differ, random numbers are locked, with a warning, and both are taken again.

    Returns
    -------
    recorded : Recorded
    reached : list of bool
        Per parameter: whether the loss depends on it.
    seed : int or None
        The seed of the random numbers, if they are locked.
    differentiated : int
        Loss entries, over all passes.

    Raises
    ------
    RuntimeError
        If they differ although random numbers are locked.
    """
    differentiated = 0
    while True:
        seed = lock.new_seed()
        total.start()
        seen: list[Observed] = []
        total.observed = seen
        first, reached = once(here, closure, inputs, total, seed, 0.5)
        second, _ = once(here, closure, inputs, total, seed, 0.5)
        total.observed = None
        halves = Repeated(seen, (first, second), here, closure, inputs, seed, total.scale)
        verdict = compare(halves, lock)
        differentiated += 2 * first.entries + verdict.differentiated
        if verdict.is_same:
            if not verdict.is_intact:
                total.start()
                once(here, closure, inputs, total, seed)
            return first, reached, seed, differentiated


def compare(found: Repeated, lock: RandomLock) -> Verdict:
    """Compare two gradients; if they differ, lock random numbers, with a warning.

    Raises
    ------
    RuntimeError
        If they differ although random numbers are locked.
    """
    network, differentiated = found.point.network, 0
    relative = found.difference()
    if not sketch.is_other(relative, network.live_grads, lock.locked):
        return Verdict(True, is_known=not np.isnan(relative))
    if not sketch.is_other(loss_difference(*found.recorded), network.live_grads):
        is_same, differentiated = is_rounding(found)
        if is_same:
            return Verdict(True, True, differentiated, is_intact=False)
    lock.turn_on("gradient", relative)
    call_elsewhere(network, found.closure, found.inputs)
    return Verdict(False, True, differentiated, is_intact=False)


def is_rounding(found: Repeated) -> tuple[bool, int]:
    """Whether rounding can make such a difference. Overwrites the live gradients.

    Returns
    -------
    is_rounding : bool
    differentiated : int
        Loss entries.
    """
    point, network = found.point, found.point.network

    def look() -> tuple[list[np.ndarray], int]:
        recorded, sketches = network.record(found.closure, found.inputs), []
        for factor in (0.0, 1.0, *OTHER_FACTORS):
            for column in per_device(network.live_grads):
                zero(column)
            recorded.backward(factor * found.scale, keep_graph=True)
            point.take_touched()
            sketches.append(sketch.sketch(network.live_grads) / found.scale)
        return sketches, len(sketches) * recorded.entries

    random_lock.start(found.seed)
    with network.outside.protected(gradients=False):
        (of_zero, exact, *others), differentiated = point.at(look)
    if of_zero.any():  # some operator has the same gradient for all factors
        return False, differentiated
    pairs = zip(others, OTHER_FACTORS)
    most = max(float(np.linalg.norm(other / factor - exact)) for other, factor in pairs)
    return found.distance() <= MARGIN * most, differentiated


def call_elsewhere(network: Network, closure: Callable[..., Loss], inputs: Sequence[Any]) -> None:
    """Call a closure at other weights, half of the current ones.

    The state of a recurrent network that a closure carries comes to rest where the closure is
    called with one minibatch again and again. This moves it, so that it is found.
    """
    elsewhere = Point.copied(network)
    for column in per_device(elsewhere.weights):
        combine([0.5], [column], column)
    elsewhere.at(lambda: forward(closure, inputs, train_mode=True))


def record_again(
    here: Point, closure: Callable[..., Loss], inputs: Sequence[Any], seed: int | None
) -> Recorded:
    """Compute the loss of a minibatch with the random numbers of a seed."""
    random_lock.start(seed)
    return here.at(here.network.record, closure, inputs)


def loss_difference(first: Recorded, second: Recorded) -> float:
    """How much the losses of one minibatch differ, relative to their norm."""
    check_repeatable(first.counts, second.counts)
    return sketch.difference(*map(_losses, (first, second)))


def _losses(recorded: Recorded) -> np.ndarray:
    """All losses in one array."""
    narrow = (loss.astype("float32", copy=False) for loss in recorded.losses)
    return np.concatenate([loss.asnumpy().ravel() for loss in narrow])
