"""Rows of a table: the gradients of minibatches, with what tells that a minibatch is the same."""

from __future__ import annotations

from typing import Callable, NamedTuple, Sequence

import numpy as np

from .arrays import Columns
from .closure import Loss
from .points import Point
from .random_lock import Losses, losses_at
from .warn import warn

RESHUFFLED = (
    "The stored gradient of minibatch {index} differs from what the closure computes now: at the "
    "same weights, its losses are off by {difference:.2g} of their size. Unless the losses are "
    "random by other means than MXNet's random numbers: was the data reshuffled? batch_index must "
    "be the position of the minibatch in the data. Keep the minibatches in a list, and shuffle "
    "their positions. lock_random=False omits this check."
)
OTHER_DATA = (
    "The losses of minibatch {index}, computed again at the weights of its first visit, differ by "
    "{difference:.2g} of their size from those of then. batch_index must be the position of the "
    "minibatch in the data, the same in each epoch: was the data reshuffled? If the network draws "
    "random numbers (dropout), pass lock_random=True."
)


class Row(NamedTuple):
    """The gradient of a minibatch, and what is known of it."""

    position: int  # of the minibatch in the data
    grads: Columns  # the *sum* over its loss entries, of unscaled losses, per device
    counts: tuple[int, ...]  # loss entries per device
    seed: int | None  # of the random numbers that it was taken with, where they are locked
    losses: Losses | None = None  # at the weights of the gradient; None if unknown

    def check_counts(self, counts: Sequence[int]) -> None:
        """Raise a ValueError if the loss entries of a minibatch are not those of this row."""
        if counts != self.counts:
            raise ValueError(
                f"Minibatch {self.position} had {_entries(self.counts)} when its gradient was "
                f"stored, and the closure returned {_entries(counts)}. batch_index must be the "
                "position of the minibatch in the data: was it reshuffled? If the number of losses "
                "depends on the weights, as with hard examples that a mask selects, multiply the "
                "losses by the mask instead."
            )


class TakenAt:
    """The weights at which rows were taken, until the losses of one were computed there again."""

    def __init__(self, point: Point, outside: int | None, visit: int | None = None) -> None:
        self.outside = outside  # a checksum of others' weights then
        self.visit = visit  # the minibatch of that row, if not all rows were taken at a refresh
        self._point: Point | None = point

    @classmethod
    def now(cls, point: Point, visit: int | None = None) -> TakenAt:
        """At the current weights, which the point has."""
        return cls(point, point.network.outside.fingerprint(), visit)

    def check(self, row: Row, closure: Callable[[], Loss]) -> None:
        """Compute the losses of the first row again; raise, or warn, if they are others.

        Not if others' weights have changed. If a loss is not finite, the next row is the first.
        Waits for the device.
        """
        point = self._point
        if point is None or self.visit not in (None, row.position):
            return
        outside = point.network.outside
        if outside.fingerprint() in (None, self.outside):
            if row.losses is None or not np.isfinite(row.losses.total):
                return
            with outside.protected():
                counts, losses = losses_at(point, closure, (), row.seed)
            row.check_counts(counts)
            if not np.isfinite(losses.total):
                return
            difference = row.losses.difference(losses)
            if difference and self.visit is None:
                raise RuntimeError(RESHUFFLED.format(index=row.position, difference=difference))
            if difference:
                warn(OTHER_DATA.format(index=row.position, difference=difference))
        self._point = None


def _entries(counts: Sequence[int]) -> str:
    total = f"{sum(counts)} loss entries"
    return total if len(counts) < 2 else f"{total} ({', '.join(map(str, counts))} per device)"
