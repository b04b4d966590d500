"""The base of SARAH, STORM and MARS, which compare a mini-batch with the previous step.

The reference is the weights before the last step, and m comes from the last estimate or gradient.
A step writes both anew, and they take effect when the optimizer has moved the weights.
"""

from __future__ import annotations

from typing import Any

from mxnet.ndarray import NDArray

from .columns import Columns, Mean
from .combine import copy
from .method import Method
from .pending_update import PendingUpdate
from .points import ParameterValues


class Recursive(Method):
    """A method whose reference is the previous step. Both passes have the current frozen values."""

    updates_every_step = keeps_weights = keeps_mean = True

    def __init__(self) -> None:
        super().__init__()
        self._other: ParameterValues | None = None  # memory of the next reference

    def bind(self) -> None:
        super().bind()
        self._other = None

    def discard(self) -> None:
        """Start over at the next step; SARAH at the next refresh."""
        super().discard()
        self._other = None

    def next_state(self, pending: PendingUpdate, scale: float, entries: float | NDArray) -> Mean:
        """Compute m for the next step."""
        sums: Columns = []
        if self.keeps_mean:
            sums = self.network.take_spare()
            copy(pending.total, sums, 1 / pending.total_scale)
        return Mean(sums, entries)

    def before_update(self, next_state: Any, scale: float) -> None:
        """Copy the weights, which are about to move, to the next reference."""
        if self._other is not None:
            self._other.move()
        elif self.keeps_weights:
            self._other = ParameterValues.copied(self.network, frozen=False)

    def moved(self, pending: PendingUpdate) -> None:
        """Put the next state in place of the last one, whose memory is used again."""
        super().moved(pending)
        kept, last = pending.next_state if self.keeps_mean else None, self.mean
        new = kept, self._other, self.point, None
        # In one line, as an interrupt comes between lines.
        self.mean, self.point, self._other, pending.next_state = new
        if last is not None:
            self.network.give_spare(last.sums)
