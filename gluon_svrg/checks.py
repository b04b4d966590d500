"""Checks of arguments, made where the arguments arrive."""

from __future__ import annotations

from math import isfinite
from numbers import Real
from typing import Any

from . import _mxnet
from .stores import kinds


def check_between(
    value: Any, name: str, low: float, high: float, *, open_low: bool = False
) -> None:
    """Raise unless a value is a number from low to high."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}.")
    number = float(value)
    if not (isfinite(number) and low <= number <= high) or (open_low and number == low):
        least = "above" if open_low else "at least"
        most = f" and at most {high:g}" if isfinite(high) else ""
        raise ValueError(f"{name} must be finite, {least} {low:g}{most}, got {value}.")


def check_flag(ignore_stale_grad: Any) -> None:
    """Raise if a closure was passed as the second argument of `step`."""
    if callable(ignore_stale_grad):
        raise TypeError(
            "The second argument of step() is ignore_stale_grad, as in gluon.Trainer. Pass the "
            "closure by its name: step(batch_size, closure=...)."
        )


def check_rate_can_be_set(optimizer: Any, settings: Any, kvstore: Any) -> None:
    """Raise unless this optimizer can use the learning rate of Barzilai and Borwein."""
    if not _mxnet.steps_along_gradient(optimizer):
        name = _mxnet.class_of(optimizer).__name__
        raise ValueError(
            f"barzilai_borwein=True needs the optimizer 'sgd' or 'nag', got {name}: the rate is "
            "meant for steps along the gradient itself."
        )
    scheduler = (settings or {}).get("lr_scheduler", getattr(optimizer, "lr_scheduler", None))
    if scheduler is not None:
        raise ValueError(
            "barzilai_borwein=True sets the learning rate at each refresh, and the optimizer's "
            f"{type(scheduler).__name__} would overwrite it. Leave one of them out."
        )
    if not kinds.kind_of(kvstore).reduces:
        raise ValueError(
            "barzilai_borwein=True needs the number of steps between two snapshots, which no "
            f"worker knows with kvstore={kinds.name_of(kvstore)!r}. Use kvstore='dist_sync'."
        )
