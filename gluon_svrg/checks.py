"""Checks of arguments, made where the arguments arrive."""

from __future__ import annotations

from typing import Any

from . import _arguments, _mxnet
from .kvstore import kinds


def check_not_closure(ignore_stale_grad: Any) -> None:
    """Raise if a closure was passed as the second argument of `step`."""
    if callable(ignore_stale_grad):
        raise TypeError(
            "The second argument of step() is ignore_stale_grad, as in gluon.Trainer. Pass the "
            "closure by its name: step(batch_size, closure=...)."
        )


def check_batch_size(batch_size: Any) -> None:
    """Raise unless gradients can be divided by this."""
    if type(batch_size) is not int or batch_size <= 0:  # the rest takes Python longer to tell
        _arguments.number(batch_size, "batch_size", open_low=True)


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
