"""The base of SARAH, STORM and MARS, which compare a minibatch with the previous step.

The reference is the weights before the last step, and m comes from the last estimate. A step writes
both anew, and they take effect when the optimizer has moved the weights.
"""

from __future__ import annotations

from typing import Sequence

from mxnet.ndarray import NDArray

from .passes.columns import Columns, Mean, zero
from .passes.combine import copy
from .passes.full_pass import FullGradient
from .passes.live_gradients import LiveGradients
from .passes.method import Method
from .passes.points import Point

NEEDS_CLOSURE = (
    "{name}() needs {method} gradients: pass step(batch_size, closure=...), or call "
    "correct_grads(closure) before. For the plain optimizer use gluon.Trainer."
)


class Recursive(Method):
    """A method whose reference is the previous step. Both passes have the current frozen values."""

    moves = True
    keeps_weights = True
    keeps_mean = True

    def __init__(self) -> None:
        super().__init__()
        self._other: Point | None = None  # the weights before the next step

    def bind(self) -> None:
        """Bind to new arrays of the parameters."""
        super().bind()
        self._other = None

    def discard(self) -> None:
        """Start over at the next step."""
        super().discard()
        self._other = None

    def treated(self) -> Sequence[bool] | None:
        """A flag for each parameter that the method treats; None if it treats all."""
        return None

    def refresh(self, full: FullGradient) -> None:
        """Start over at the current weights: m is the full gradient."""
        super().refresh(full)
        if self.mean is not None:
            self._leave_out(self.mean.sums)

    def next_state(self, live: LiveGradients, scale: float, entries: float | NDArray) -> Mean:
        """Compute m for the next step."""
        sums: Columns = []
        if self.keeps_mean:
            sums = self.network.take_spare()
            copy(live.total, sums, 1 / live.total_scale)
            self._leave_out(sums)
        return Mean(sums, entries)

    def _leave_out(self, sums: Columns) -> None:
        """Set the mean gradient of parameters to zero that the method does not treat."""
        chosen = self.treated()
        if chosen is not None:
            for column in sums:
                zero(array for array, is_treated in zip(column, chosen) if not is_treated)

    def before_update(self) -> None:
        """Copy the weights, which are about to move, to the next reference."""
        if self._other is not None:
            self._other.move()
        elif self.keeps_weights:
            self._other = Point.copied(self.network, frozen=False)

    def moved(self, live: LiveGradients) -> None:
        """Put the next state in place of the last one, whose memory is used again."""
        super().moved(live)
        kept, last = live.following if self.keeps_mean else None, self.mean
        new = kept, self._other, self.point, None
        self.mean, self.point, self._other, live.following = new  # an interrupt comes between lines
        if last is not None:
            self.network.give_spare(last.sums)
