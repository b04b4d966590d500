"""The full gradient: the mean gradient over a whole data set, at the current weights."""

from __future__ import annotations

from operator import or_
from typing import Any, Callable, Iterable, NamedTuple, Protocol, Sequence

from mxnet.ndarray import NDArray

from .._mxnet import Arrays
from . import sketch
from .arrays import copy_to_devices, per_device, sum_over_devices
from .batches import arguments
from .closure import Loss, Recorded
from .entries import all_finite
from .losses import LossSum
from .multiples import combine
from .network import Network
from .points import Point
from .probe import is_lost, probe
from .random_lock import RandomLock
from .repeats import loss_difference, once, record_again, twice
from .sums import LiveSum, new_sum

#: The number of minibatches whose loss is computed twice, to detect random numbers. Randomness in
#: a share p of all calls escapes one pair with probability 1 - 2 p (1 - p). With p = 1/2 it escapes
#: three pairs in one refresh of 8, with p = 1/5 in one of 3.
REPEATED = 3


class Table(Protocol):
    """A container for the gradient of each minibatch."""

    def append(self, v: LiveSum, counts: Sequence[int], seed: int | None) -> None:
        """Append a gradient, which is the current sum."""

    def add_to(self, v: LiveSum) -> None:
        """Add all stored gradients to a sum."""


class FullGradient(NamedTuple):
    """The results of a pass over the data."""

    mean: Arrays  # times `multiple`, per parameter and device; in the memory of the pass
    mean_loss: float  # of all workers
    in_objective: list[bool]  # per parameter: whether any loss depends on it
    all_entries: int  # of all workers
    differentiated: int  # loss entries of this worker, each once
    of_first: int  # loss entries of the first minibatch, on the first device that has any
    multiple: int = 1  # what a method has multiplied the mean by


class Collective(Protocol):
    """How workers, each with a part of the data, agree on sums."""

    def reach(self, numbers: Sequence[float]) -> Sequence[float]:
        """Sum up numbers over all workers."""

    def sum(self, arrays: dict[int, NDArray]) -> None:
        """Sum up arrays over all workers, in place; each has the number of its parameter."""


def full_gradient(
    network: Network,
    closure: Callable[..., Loss],
    batches: Iterable[Any],
    lock: RandomLock,
    scale: float,
    workers: Collective,
    table: Table | None = None,
) -> FullGradient:
    """Compute the mean gradient at the current weights over all loss entries of all batches.

    This overwrites the live gradients: call it inside `Network.grads_kept`.

    Parameters
    ----------
    network : Network
        The network whose gradients are computed.
    closure : callable
        Called with the items of each batch.
    batches : iterable
        The data.
    lock : RandomLock
        In mode ``'auto'``, the losses of the first minibatches are computed twice, and for a table
        the first gradient, with which no step compares; if two differ, the lock is turned on.
    scale : float
        The factor of the losses (mixed precision).
    workers : Collective
        All workers.
    table : Table, optional
        Keeps the gradient of each minibatch.

    Raises
    ------
    ValueError
        If there is no data, or a loss depends on no parameter.
    RuntimeError
        If a minibatch has another gradient or loss each time although random numbers are locked.
    FloatingPointError
        If the result is not finite.
    """
    here = Point.untouched(network)
    total: LiveSum | None = None
    repeat = lock.mode == "auto" and not lock.locked
    entries, of_first = 0, 0
    losses, ever = LossSum(), [False] * len(network.trainable)
    earlier: Recorded | None = None
    for number, batch in enumerate(batches):
        inputs = arguments(batch)
        with network.outside.protected(search=number == 0):
            if total is None:
                network.adds, earlier = probe(here, closure, inputs)
                network.is_known_to_add = True
                network.mark(here.weights)
                total = new_sum(network, scale)
                total.put()
            if table is not None:
                total.put()
            again = repeat and number < REPEATED
            if again and number == 0 and table is not None:
                recorded, reached, seed, _ = twice(here, closure, inputs, total, lock)
            else:
                seed = lock.new_seed()
                # Under the lock, what a pass draws follows from the seed of its first minibatch.
                seed = seed if again or table is not None or number == 0 else None
                recorded, reached = once(here, closure, inputs, total, seed)
                is_random = again and _is_random(
                    # No name for the other losses: what they were computed from would be kept.
                    loss_difference(recorded, earlier or record_again(here, closure, inputs, seed)),
                    network,
                    lock,
                )
                if is_random and table is not None:  # keep a gradient whose seed is known
                    seed = lock.new_seed()
                    total.put()
                    recorded, reached = once(here, closure, inputs, total, seed)
            earlier = None
            if number == 0:
                if network.adds and is_lost(here, closure, inputs, reached):
                    network.mark(here.weights)
                    total = new_sum(network, scale)
                    total.put()
                    recorded, reached = once(here, closure, inputs, total, seed)
                network.check_hidden()
        if table is not None:
            table.append(total, recorded.counts, seed)
        ever = list(map(or_, ever, reached))
        entries += recorded.entries
        of_first = of_first or next(filter(None, recorded.counts), 0)
        losses.add(recorded)
    if not entries or total is None:
        raise ValueError(
            "There was no data for the full gradient. Pass an iterable with at least one batch; a "
            "generator that was used before is empty."
        )
    network.check_hidden()
    if table is not None:
        total.put()
        table.add_to(total)
    sum_over_devices(total.arrays)
    sums = workers.reach([entries, losses.total(), *ever])
    numbers = map(network.parameters.index, network.trainable)
    workers.sum({n: first for n, (first, *_) in zip(numbers, total.arrays)})
    _take_mean(total.arrays, sums[0] * scale)
    if not all_finite(first for first, *_ in total.arrays):
        raise FloatingPointError(
            "The full gradient is not finite (NaN or infinity). Nothing was changed: a snapshot "
            "held before is still in force. Look for a learning rate that is too high or for bad "
            "values in the data."
        )
    counts = [count > 0 for count in sums[2:]]
    mean_loss = float(sums[1] / sums[0])
    return FullGradient(total.arrays, mean_loss, counts, int(sums[0]), entries, of_first)


def _is_random(difference: float, network: Network, lock: RandomLock) -> bool:
    """Whether two losses of a minibatch differ; if so, lock random numbers, with a warning."""
    if not sketch.is_other(difference, network.live_grads, lock.locked):
        return False
    lock.turn_on("loss", difference)
    return True


def _take_mean(sums: Arrays, divisor: float) -> None:
    """Divide the sums of the first device, and copy them to the others."""
    first = per_device(sums)[0]
    combine([1 / divisor], [first], first)
    copy_to_devices(sums)
