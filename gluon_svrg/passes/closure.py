"""Recording what a closure computes, counting its loss entries, and differentiating it."""

from __future__ import annotations

from inspect import signature
from math import prod
from typing import Any, Callable, NamedTuple, Sequence

import mxnet as mx
from mxnet.base import MXNetError
from mxnet.ndarray import NDArray

from .. import _mxnet

#: The result of a user's closure: a loss, or one per device or task.
Loss = Any

MASK = "If a mask selects losses, multiply all by the mask instead: their number must not change."
REFUSED = (
    "The loss of the closure cannot be differentiated: either the closure called backward() "
    "itself, or its loss depends on no parameter (was it detached, or computed under pause()?)."
)


class Recorded(NamedTuple):
    """The recorded losses of one mini-batch."""

    loss: Loss  # as the closure returned it
    losses: tuple[NDArray, ...]  # the same as a tuple
    counts: tuple[int, ...]  # the loss entries per device
    entries: int  # the sum of these

    def backward(self, scale: float = 1.0) -> None:
        """Differentiate the sum of all loss entries, times the scale of AMP's losses."""
        heads = None if scale == 1 else [_mxnet.filled_like(loss, scale) for loss in self.losses]
        try:
            mx.autograd.backward(list(self.losses), heads)
        except MXNetError as error:
            if not _mxnet.is_refused_backward(error):
                raise
            raise RuntimeError(REFUSED) from error


def check_closure(closure: Any) -> None:
    """Raise a TypeError if an argument is not a closure."""
    if not callable(closure):
        raise TypeError(
            f"closure must be a function that returns the loss, got {type(closure).__name__}. "
            "Pass the function itself: closure=lambda: loss_fn(net(X), y)."
        )


def takes(closure: Callable[..., Loss], inputs: Sequence[Any]) -> bool:
    """Whether a closure can be called with such arguments, as far as one can tell."""
    try:
        signature(closure).bind(*inputs)
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)  # a function of C has no signature
    return True


def record(closure: Callable[..., Loss], batch: Sequence[Any], devices: Sequence[Any]) -> Recorded:
    """Call a closure and record; raise unless it returns losses on devices of the parameters."""
    result = called(closure, batch, mx.autograd.record())
    losses = tuple(result) if isinstance(result, (list, tuple)) else (result,)
    if not losses:
        raise ValueError("The closure returned an empty tuple or list, expected at least one loss.")
    counts = [0] * len(devices)
    for loss in losses:
        if not isinstance(loss, NDArray):
            raise TypeError(
                f"The closure returned {type(loss).__name__}, alone or in a list, expected the "
                "loss: an NDArray, or a list or tuple of NDArrays. All are differentiated. End it "
                "with `return loss`, and return predictions and metrics by other means."
            )
        device = _mxnet.device_of(loss)
        if device not in devices:
            raise ValueError(
                f"The closure returned a loss on {device}, but the trainer's parameters are on "
                f"{', '.join(map(str, devices))}. Copy the data to one of these, or initialize "
                "the network there as well."
            )
        counts[devices.index(device)] += prod(loss.shape)
    return Recorded(result, losses, tuple(counts), sum(counts))


def called(closure: Callable[..., Loss], batch: Sequence[Any], scope: Any) -> Loss:
    """Call a closure in a scope of autograd, and explain its errors where the cause is known."""
    try:
        with scope:
            return closure(*batch)
    except (AssertionError, MXNetError, TypeError, ValueError) as error:
        if _mxnet.is_refused_backward(error):
            raise RuntimeError(REFUSED) from error
        if isinstance(error, TypeError) and not takes(closure, batch):
            what = f"the {len(batch)} items of a batch" if batch else "no arguments"
            raise TypeError(
                f"The closure was called with {what}, but its signature is {signature(closure)}. "
                "With def loss_of(X, y), write update_full_grads(loss_of, data), and "
                "step(batch_size, closure=lambda: loss_of(X, y))."
            ) from error
        cause = _mxnet.cause_of(error)
        if not cause:
            raise
        raise type(error)(f"{cause}\n{error}") from error


def check_repeatable(before: Sequence[int], counts: Sequence[int]) -> None:
    """Raise if the loss entries of a closure differ between two calls."""
    if before != counts:
        raise RuntimeError(
            f"The closure returned {list(before)} loss entries per device for a mini-batch, and "
            f"{list(counts)} when called again. If it draws a mini-batch, do that before the "
            f"step. {MASK}"
        )
