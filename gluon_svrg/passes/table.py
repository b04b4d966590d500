"""Rows of a table: the gradients of minibatches, with what tells that a minibatch is the same."""

from __future__ import annotations

from typing import Callable, NamedTuple, Sequence

import numpy as np

from .arrays import Columns
from .closure import Loss
from .points import Point
from .random_lock import Losses, losses_at

RESHUFFLED = (
    "The stored gradient of minibatch {index} differs from what the closure computes now: at the "
    "same weights, its losses are off by {difference:.2g} of their size. Unless the losses are "
    "random by other means than MXNet's random numbers: was the data reshuffled? batch_index must "
    "be the position of the minibatch in the data. Keep the minibatches in a list, and shuffle "
    "their positions. lock_random=False omits this check."
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


class TakenAt(NamedTuple):
    """The weights at which rows were taken, until the losses of one were computed there again."""

    point: Point
    outside: int | None  # a checksum of others' weights then

    @classmethod
    def now(cls, point: Point) -> TakenAt:
        """At the current weights, which the point has."""
        return cls(point, point.network.outside.fingerprint())

    def difference(self, row: Row, closure: Callable[[], Loss]) -> float | None:
        """How much the losses of a minibatch differ from those of a row, relative to their size.

        Computes them once more. 0 if they differ by rounding, or cannot be compared as others'
        weights have changed; None if one is not finite. Waits for the device.
        """
        outside = self.point.network.outside
        if outside.fingerprint() not in (None, self.outside):
            return 0.0
        if row.losses is None or not np.isfinite(row.losses.total):
            return None
        with outside.protected():
            counts, losses = losses_at(self.point, closure, (), row.seed)
        row.check_counts(counts)
        return row.losses.difference(losses) if np.isfinite(losses.total) else None


def _entries(counts: Sequence[int]) -> str:
    total = f"{sum(counts)} loss entries"
    return total if len(counts) < 2 else f"{total} ({', '.join(map(str, counts))} per device)"
