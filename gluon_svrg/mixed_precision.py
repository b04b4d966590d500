"""What AMP adds to a trainer: losses are scaled, and steps with overflows are skipped."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Iterator

import mxnet as mx


class Scaling:
    """The loss scaler that ``amp.init_trainer`` has given to a trainer, if it has.

    Parameters
    ----------
    trainer : Trainer
        The trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def _scaler(self) -> Any:
        return getattr(self._trainer, "_amp_loss_scaler", None)

    @property
    def is_on(self) -> bool:
        """Whether losses are scaled."""
        return self._scaler is not None

    @property
    def scale(self) -> float:
        """What losses are multiplied by."""
        return 1.0 if self._scaler is None else float(self._scaler.loss_scale)

    def let_optimizer_undo(self) -> None:
        """Let the next step divide by the scale, as ``amp.scale_loss`` does."""
        if self.is_on:
            self._trainer._scale = self._trainer._amp_original_scale / self.scale

    def skip(self) -> None:
        """Lower the scale for an overflow that the scaler could not see by itself."""
        overflow = mx.nd.array([float("inf")])
        if mx.util.is_np_array():
            overflow = overflow.as_np_ndarray()
        self._scaler.has_overflow([SimpleNamespace(_grad=[overflow])])

    def halve(self, data: Any) -> bool:
        """Halve the scale at once, for a pass over data that is taken again.

        Returns
        -------
        bool
            Whether there is anything to halve.

        Raises
        ------
        FloatingPointError
            If the data can be iterated over only once.
        """
        if self.scale <= 1:
            return False
        if hasattr(data, "__next__") and not hasattr(data, "reset"):
            raise FloatingPointError(
                f"The full gradient overflowed at a loss scale of {self.scale:g}, and the pass "
                f"cannot be repeated at a lower one: the data is a {type(data).__name__}, which "
                "can be used once. Pass a list or a DataLoader. Nothing was changed."
            )
        scaler = self._scaler
        scaler._loss_scale = scaler._next_loss_scale = scaler._loss_scale / 2
        scaler._unskipped = 0
        return True

    @contextmanager
    def kept_on_error(self) -> Iterator[None]:
        """Put the scale back if the block raises."""
        before = dict(vars(self._scaler)) if self.is_on else {}
        try:
            yield
        except BaseException:
            if before:
                vars(self._scaler).update(before)
            raise
