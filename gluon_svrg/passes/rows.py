"""Stored gradients of mini-batches, and checks that the mini-batches are still the same."""

from __future__ import annotations

from typing import Callable, NamedTuple, Sequence

import numpy as np

from .closure import MASK, Loss
from .columns import Columns
from .points import ParameterValues
from .random_lock import Losses, losses_at
from .watch import warn

RESHUFFLED = (
    "The stored gradient of mini-batch {index} differs from what the closure computes now: its "
    "losses, computed again at the weights of {when}, are off by {difference:.2g} of their size: "
    "was the data reshuffled? Keep the mini-batches in a list, and shuffle their positions. If the "
    "network draws random numbers, pass lock_random=True; lock_random=False omits this check."
)
NO_ROW = (
    "batch_index is {index}, and the gradients of {count} mini-batches are stored. It must be the "
    "position of a mini-batch in the data, 0 or more."
)


class StoredGradient(NamedTuple):
    """The gradient of a mini-batch, a row of a table."""

    position: int  # of the mini-batch in the data
    grads: Columns  # the *sum* over its loss entries, unscaled; in SVRG's table r - c mu
    counts: tuple[int, ...]  # loss entries per device
    seed: int | None  # of the random numbers that it was taken with, where they are locked
    losses: Losses | None = None  # at the weights of the gradient; None if unknown

    def check_counts(self, counts: Sequence[int]) -> None:
        """Raise a ValueError if the loss entries of a mini-batch are not those of this row."""
        if counts != self.counts:
            raise ValueError(
                f"Mini-batch {self.position} had {list(self.counts)} loss entries per device when "
                f"its gradient was stored, and the closure returned {list(counts)}. batch_index "
                f"must be the position of the mini-batch in the data: was it reshuffled? {MASK}"
            )


class StaleTableCheck:
    """The weights at which rows were taken, until the losses of one were computed there again.

    `outside` is the checksum of a file; without it the rows are new, and it is computed.
    """

    def __init__(
        self, point: ParameterValues, *, outside: int | None = None, visit: int | None = None
    ) -> None:
        self._point: ParameterValues | None = point  # None once it is known, or off
        # A checksum of the weights then that are not the trainer's
        self.outside = point.network.outside.fingerprint() if outside is None else outside
        self.visit = visit  # the mini-batch of the row, if not all rows were taken at a refresh

    def check(self, row: StoredGradient, closure: Callable[[], Loss], is_on: bool) -> None:
        """Raise or warn if the first row, computed again where it was taken, has other losses."""
        point = self._point = self._point if is_on else None  # it keeps a copy of the weights
        if point is None or self.visit not in (None, row.position):
            return
        if row.losses is None or not np.isfinite(row.losses.total):
            return
        outside = point.network.outside
        with outside.protected():
            losses = losses_at(point, closure, (), row.seed)
        row.check_counts(losses.counts)
        if not np.isfinite(losses.total):
            return
        difference = row.losses.difference(losses)
        if difference and outside.fingerprint() == self.outside:
            when = "the refresh" if self.visit is None else "its first visit"
            message = RESHUFFLED.format(index=row.position, when=when, difference=difference)
            if self.visit is None:
                raise RuntimeError(message)
            warn(message)
        self._point = None
