"""Differentiating what a closure returns, and counting it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import mxnet as mx
from mxnet.base import MXNetError
from mxnet.ndarray import NDArray

from . import _mxnet

#: What a user's closure returns: a loss, or one per device or task.
Loss = Any


class Evaluation(NamedTuple):
    """The losses of one minibatch, differentiated."""

    loss: Loss  # as the closure returned it
    losses: tuple[NDArray, ...]
    counts: tuple[int, ...]  # loss entries per device
    touched: Sequence[Sequence[bool]] = ()  # per parameter and device: whether backward reached it


def check_closure(closure: Any) -> None:
    """Raise a TypeError where a closure is expected and something else arrives."""
    if not callable(closure):
        raise TypeError(
            f"closure must be a function that returns the loss, got {type(closure).__name__}. "
            "Pass the function itself: closure=lambda: loss_fn(net(X), y)."
        )


def check_repeatable(snapshot_counts: Sequence[int], counts: Sequence[int]) -> None:
    """Raise if a closure returned other numbers of loss entries when it was called again."""
    if tuple(snapshot_counts) != tuple(counts):
        raise RuntimeError(
            f"The closure returned {sum(snapshot_counts)} loss entries when it was called for the "
            f"gradient at the snapshot, and {sum(counts)} when it was called again. It must "
            "compute the same each time: take the minibatch before the step, not inside."
        )


def differentiate(
    closure: Callable[..., Loss],
    batch: Sequence[Any],
    devices: Sequence[Any],
    check: Callable[[Sequence[int]], None] | None = None,
    scale: float = 1.0,
) -> Evaluation:
    """Record the closure, run backward on the losses that it returns, and count their entries.

    Parameters
    ----------
    closure : callable
        Returns an NDArray, or a list or tuple of NDArrays.
    batch : sequence
        The arguments of the closure.
    devices : sequence of device
        Where the parameters are.
    check : callable, optional
        Raises if the numbers of loss entries per device are not those expected.
    scale : float
        What losses are multiplied by before they are differentiated (mixed precision).

    Returns
    -------
    Evaluation
        The gradients, each the *sum* over the loss entries of its device, are where the
        parameters' gradients go.

    Raises
    ------
    TypeError
        If the closure returns anything else.
    ValueError
        If it returns no loss, or one on a device without parameters.
    RuntimeError
        If a loss was not recorded or has been differentiated before, or if the numbers of loss
        entries are not those expected.
    """
    with _explained(), mx.autograd.record():
        loss = closure(*batch)
    losses = _losses(loss)
    found = _entries(losses, devices)
    if check is not None:
        check(found)
    heads = list(losses)
    if scale != 1:
        with mx.autograd.record():
            heads = [loss * scale for loss in losses]
    with _explained():
        mx.autograd.backward(heads)
    return Evaluation(loss, losses, found)


def forward(closure: Callable[..., Loss], batch: Sequence[Any], *, train_mode: bool) -> None:
    """Call the closure without recording."""
    with _explained(), mx.autograd.pause(train_mode=train_mode):
        closure(*batch)


@contextmanager
def _explained() -> Iterator[None]:
    """Say what is wrong where MXNet refuses to run backward."""
    try:
        yield
    except MXNetError as error:
        if not _mxnet.is_refused_backward(error):
            raise
        raise RuntimeError(
            "The loss of the closure cannot be differentiated: either the closure called "
            "backward() itself, or its loss depends on no parameter (was it detached, turned into "
            "a number, or computed under autograd.pause()?). The closure computes the loss and "
            "returns it; the trainer records it and runs backward."
        ) from error


def _losses(loss: Loss) -> tuple[NDArray, ...]:
    if isinstance(loss, NDArray):
        return (loss,)
    if loss is None:
        raise TypeError("The closure returned None instead of the loss. End it with `return loss`.")
    if not isinstance(loss, (list, tuple)):
        raise TypeError(
            f"The closure returned {type(loss).__name__}, expected the loss: an NDArray, or a list "
            "or tuple of NDArrays (one per device or task)."
        )
    for item in loss:
        if not isinstance(item, NDArray):
            raise TypeError(
                f"The closure returned a {type(loss).__name__} with {type(item).__name__} in it, "
                "expected nothing but losses (NDArrays): what is returned is what is "
                "differentiated. Return predictions and metrics by other means."
            )
    if not loss:
        raise ValueError(
            f"The closure returned an empty {type(loss).__name__}, expected at least one loss."
        )
    return tuple(loss)


def _entries(losses: Sequence[NDArray], devices: Sequence[Any]) -> tuple[int, ...]:
    counts: list[int] = [0] * len(devices)
    for loss in losses:
        device = _mxnet.device_of(loss)
        if device not in devices:
            raise ValueError(
                f"The closure returned a loss on {device}, but the trainer's parameters are on "
                f"{', '.join(map(str, devices))}. Copy the data to one of these, or initialize "
                "the network there as well."
            )
        counts[devices.index(device)] += loss.size
    return tuple(counts)
