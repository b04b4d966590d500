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

    def difference(self, closure: Callable[[], Loss], point: Point) -> float | None:
        """How much the losses of a minibatch differ from those of this row, relative to their size.

        Computes the losses once more, where the gradient was taken. 0 if they differ by rounding,
        None if that proves nothing. Waits for the device.
        """
        if self.losses is None or not np.isfinite(self.losses.total):
            return None
        with point.network.outside.protected():
            counts, losses = losses_at(point, closure, (), self.seed)
        self.check_counts(counts)
        return self.losses.difference(losses) if np.isfinite(losses.total) else None


def _entries(counts: Sequence[int]) -> str:
    total = f"{sum(counts)} loss entries"
    return total if len(counts) < 2 else f"{total} ({', '.join(map(str, counts))} per device)"
