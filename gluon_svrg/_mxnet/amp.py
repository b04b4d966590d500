"""AMP in a trainer: it scales losses, and skips steps with overflows."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Iterator

__all__ = ["LossScale"]


class LossScale:
    """The loss scaler that ``amp.init_trainer`` has given to a trainer, if any."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    scaler = property(attrgetter("_trainer._loss_scaler"))

    @property
    def value(self) -> float:
        """The factor of the losses."""
        return 1.0 if self.scaler is None else float(self.scaler.loss_scale)

    def let_optimizer_undo(self) -> None:
        """Let the next step divide by the scale, as ``amp.scale_loss`` does. Only under AMP."""
        self._trainer._scale = self._trainer._amp_original_scale / self.value

    @property
    def of_grads(self) -> float:
        """The factor of the gradients, after ``amp.unscale`` and in an update as well."""
        trainer = self._trainer
        original = getattr(trainer, "_amp_original_scale", None)
        return 1.0 if original is None else original / trainer._scale

    def skip(self, *_: Any) -> None:
        """Lower the scale for a step whose overflow the scaler itself cannot see."""
        scaler = self.scaler
        scaler._loss_scale = scaler._next_loss_scale
        scaler._next_loss_scale, scaler._unskipped = scaler._loss_scale / 2, 0

    def halve(self, data: Any) -> None:
        """Halve the scale after an overflow; raise if the data can be used once."""
        if hasattr(data, "__next__") and not hasattr(data, "reset"):
            raise FloatingPointError(
                f"The full gradient overflowed at a loss scale of {self.value:g}, and the pass "
                f"cannot be repeated at a lower one: the data is a {type(data).__name__}, which "
                "can be used once. Pass a list or a DataLoader. Nothing was changed."
            )
        scaler = self.scaler
        scaler._loss_scale = scaler._next_loss_scale = scaler._loss_scale / 2
        scaler._unskipped = 0

    def state(self) -> Any:
        """The attributes of the scaler, and the trainer's factors; None without AMP."""
        if self.scaler is None:
            return None
        trainer = self._trainer
        scales = {"scale": trainer._scale, "original_scale": trainer._amp_original_scale}
        return {"scaler": dict(vars(self.scaler)), **scales}

    def problems(self, state: Any) -> Iterator[str]:
        if self.scaler is None:
            yield "it has the state of a loss scaler: call amp.init_trainer(trainer) first"

    def assign(self, state: Any) -> None:
        vars(self.scaler).update(state["scaler"])
        self._trainer._scale = state["scale"]
        self._trainer._amp_original_scale = state["original_scale"]
