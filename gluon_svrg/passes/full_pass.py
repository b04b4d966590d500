"""The full gradient: the mean gradient over a whole data set, at the current weights."""

from __future__ import annotations

from operator import or_
from typing import Any, Callable, Iterable, List, NamedTuple, Protocol, Sequence, Tuple, Union

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


#: A minibatch, the parameters that its loss reaches, and the seed of its random numbers.
_Found = Tuple[Recorded, List[bool], Union[int, None]]


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
    added = _Sum(network, closure, lock, scale, one_by_one=table is not None)
    entries, of_first = 0, 0
    losses, ever = LossSum(), [False] * len(network.trainable)
    for batch in batches:
        recorded, reached, seed = added.add(arguments(batch))
        if table is not None:
            table.append(added.total, recorded.counts, seed)
        ever = list(map(or_, ever, reached))
        entries += recorded.entries
        of_first = of_first or next(filter(None, recorded.counts), 0)
        losses.add(recorded)
    if not entries:
        raise ValueError(
            "There was no data for the full gradient. Pass an iterable with at least one batch; a "
            "generator that was used before is empty."
        )
    network.check_hidden()
    total = added.total
    if table is not None:
        total.start()
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


class _Sum:
    """The sum of the gradients of minibatches at the current weights.

    Parameters
    ----------
    network, closure, lock, scale
        As for `full_gradient`.
    one_by_one : bool
        Whether the sum is that of the last minibatch alone, to be stored in a table.
    """

    def __init__(
        self,
        network: Network,
        closure: Callable[..., Loss],
        lock: RandomLock,
        scale: float,
        *,
        one_by_one: bool,
    ) -> None:
        self._network, self._closure, self._lock = network, closure, lock
        self._scale, self._one_by_one = scale, one_by_one
        self._here = Point.untouched(network)
        self._number = 0  # of the next minibatch
        self._repeated = REPEATED if lock.mode == "auto" and not lock.locked else 0
        self._earlier: Recorded | None = None  # losses of the next minibatch

    def add(self, inputs: Sequence[Any]) -> tuple[Recorded, list[bool], int | None]:
        """Add the gradient of a minibatch.

        Returns
        -------
        recorded : Recorded
        reached : list of bool
            Per parameter: whether the loss depends on it.
        seed : int or None
            The seed of the random numbers, if they are locked for this gradient.
        """
        is_first = self._number == 0
        with self._network.outside.protected(search=is_first):
            if is_first:
                self._test(inputs)
            elif self._one_by_one:
                self.total.start()
            if self._number >= self._repeated:
                seed = self._lock.new_seed()
                # Under the lock, what a pass draws follows from the seed of its first minibatch.
                found = self._once(inputs, seed if self._one_by_one or is_first else None)
            elif is_first and self._one_by_one:
                found = twice(self._here, self._closure, inputs, self.total, self._lock)[:3]
            else:
                found = self._with_other_losses(inputs)
            if is_first:
                found = self._unless_lost(inputs, found)
                self._network.check_hidden()
        self._number += 1
        self._earlier = None
        return found

    def _start(self) -> None:
        self._network.mark(self._here.weights)
        self.total = new_sum(self._network, self._scale)
        self.total.start()

    def _test(self, inputs: Sequence[Any]) -> None:
        """Test whether backward can add gradients, and begin with a sum of the right kind."""
        network = self._network
        network.adds, self._earlier = probe(self._here, self._closure, inputs)
        network.is_known_to_add = True
        self._start()

    def _unless_lost(self, inputs: Sequence[Any], found: _Found) -> _Found:
        """Add the first gradient again, apart, if backward has failed to add it."""
        _, reached, seed = found
        if not (self._network.adds and is_lost(self._here, self._closure, inputs, reached)):
            return found
        self._start()
        return self._once(inputs, seed)

    def _once(self, inputs: Sequence[Any], seed: int | None) -> _Found:
        return (*once(self._here, self._closure, inputs, self.total, seed), seed)

    def _other_losses(self, inputs: Sequence[Any], seed: int | None) -> Recorded:
        earlier, self._earlier = self._earlier, None
        return earlier or record_again(self._here, self._closure, inputs, seed)

    def _with_other_losses(self, inputs: Sequence[Any]) -> _Found:
        """Add a gradient, and lock random numbers if another call has other losses."""
        lock, seed = self._lock, self._lock.new_seed()
        found = self._once(inputs, seed)
        # No name for the other losses: what they were computed from would be kept.
        difference = loss_difference(found[0], self._other_losses(inputs, seed))
        if sketch.is_other(difference, self._network.live_grads, lock.locked):
            lock.turn_on("loss", difference)
            if self._one_by_one:  # keep a gradient whose seed is known
                self.total.start()
                found = self._once(inputs, lock.new_seed())
        return found


def _take_mean(sums: Arrays, divisor: float) -> None:
    """Divide the sums of the first device, and copy them to the others."""
    first = per_device(sums)[0]
    combine([1 / divisor], [first], first)
    copy_to_devices(sums)
