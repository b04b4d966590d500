"""Checks of arguments, made where the arguments arrive."""

from __future__ import annotations

from math import isfinite
from numbers import Integral, Real
from typing import Any

from . import _mxnet
from .stores import kinds


def check_number(value: Any, name: str) -> None:
    """Raise unless a value is a finite number that is not negative."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}.")
    if not isfinite(value) or value < 0:
        raise ValueError(
            f"{name} must be finite and not negative, got {value}. 1 is SVRG, 0 the plain "
            "optimizer, in between alpha-SVRG."
        )


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


def check_coefficient(coefficient: Any) -> None:
    """Raise unless a coefficient is a number or a callable that returns numbers."""
    if not callable(coefficient):
        check_number(coefficient, "coefficient")


def check_flag(ignore_stale_grad: Any) -> None:
    """Raise if a closure was passed as the second argument of `step`."""
    if callable(ignore_stale_grad):
        raise TypeError(
            "The second argument of step() is ignore_stale_grad, as in gluon.Trainer. Pass the "
            "closure by its name: step(batch_size, closure=...)."
        )


def refuse_compression(compression_params: Any, name: str) -> None:
    """Raise for a method whose mean gradient would keep errors of compression."""
    if compression_params:
        raise ValueError(
            f"{name} cannot compress gradients: its mean gradient moves by each reduced gradient, "
            "so an error would stay forever. Leave compression_params out."
        )


def check_index(index: Any) -> None:
    """Raise unless an index is an integer or None."""
    if index is not None and (isinstance(index, bool) or not isinstance(index, Integral)):
        raise TypeError(
            f"batch_index must be the position of a minibatch, an integer, got "
            f"{type(index).__name__}."
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


NOT_CORRECTED = (
    "{name}() needs {method} gradients while a snapshot is held: pass "
    "step(batch_size, closure=...), or call correct_grads(closure) before. To go on with the plain "
    "optimizer, call discard_snapshot()."
)
NO_INDEX = (
    "{name}() needs batch_index=..., the position of the minibatch, with the closure: it names the "
    "row of the table that holds the last gradient of this minibatch, and that this step replaces. "
    "Keep the minibatches in a list, and shuffle their positions."
)
NOT_CORRECTED_ROW = (
    "{name}() needs {method} gradients: pass step(batch_size, closure=..., batch_index=...), or "
    "call correct_grads(closure, batch_index=...) before."
)
NEEDS_CLOSURE = (
    "{name}() needs {method} gradients: pass step(batch_size, closure=...), or call "
    "correct_grads(closure) before. For the plain optimizer use gluon.Trainer."
)
NOT_REDUCED = (
    "update() needs allreduce_grads() before, even on one device: {method} takes its mean gradient "
    "there, before gradients are clipped."
)
OVERWRITTEN = (
    "{name}() was to use what correct_grads() left in the gradient of {parameter}, but a backward "
    "has overwritten it: that of another trainer on the same loss, or your own. Give all "
    "parameters to one trainer (with lr_mult if their learning rates differ), call correct_grads() "
    "after your own backward, or set grad_req='add' to add a further gradient."
)
