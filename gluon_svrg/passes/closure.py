"""Recording what a closure computes, counting its loss entries, and differentiating it."""

from __future__ import annotations

from collections import OrderedDict
from math import prod
from operator import attrgetter
from typing import Any, Callable, Sequence

import mxnet as mx
import numpy as np
from mxnet.base import MXNetError
from mxnet.ndarray import NDArray

from .. import _mxnet

_shape_of = attrgetter("shape")

#: The result of a user's closure: a loss, or one per device or task.
Loss = Any


class Recorded:
    """The losses of one minibatch, recorded and not yet differentiated.

    Parameters
    ----------
    loss : Loss
        As the closure returned it.
    losses : tuple of NDArray
        The same as a tuple.
    known_devices : sequence of device
        Those of the parameters.
    factors : OrderedDict
        Arrays of factors, kept from minibatch to minibatch.

    Attributes
    ----------
    devices, shapes : tuple
        Of each loss, after `count`.
    counts : tuple of int
        The loss entries per device, after `count`.
    entries : int
        The sum of these.
    """

    def __init__(
        self,
        loss: Loss,
        losses: tuple[NDArray, ...],
        known_devices: Sequence[Any],
        factors: OrderedDict[Any, NDArray],
    ) -> None:
        self.loss, self.losses = loss, losses
        self._known_devices, self._factors = known_devices, factors
        self.devices: tuple[Any, ...] = ()
        self.shapes: tuple[Any, ...] = ()
        self.counts: tuple[int, ...] = ()
        self.entries = 0

    def count(self) -> Recorded:
        """Count the loss entries.

        Where no sum needs them before, do this after `backward`: the device then works meanwhile.

        Raises
        ------
        ValueError
            If a loss is on a device without parameters.
        """
        self.devices = tuple(map(_mxnet.device_of, self.losses))
        self.shapes = tuple(map(_shape_of, self.losses))
        self.counts = _entries(self.shapes, self.devices, self._known_devices)
        self.entries = sum(self.counts)
        return self

    def rounds(self, factor: float, epsilon: float) -> bool:
        """Whether a loss can hold a factor only with a larger relative error than epsilon.

        MXNet 2.0's losses of float64 networks are float32, as its mean is.
        """
        kinds = {np.dtype(loss.dtype).type for loss in self.losses if _is_number(loss)}
        return any(abs(float(kind(factor)) - factor) > epsilon * abs(factor) for kind in kinds)

    def backward(self, factor: float = 1.0, *, keep_graph: bool = False) -> None:
        """Differentiate the sum of all loss entries, times a factor."""
        heads = None
        if factor != 1:
            kept = self._factors
            heads = [
                _filled_like(kept, each, _mxnet.device_of(each), factor) for each in self.losses
            ]
        try:
            mx.autograd.backward(list(self.losses), heads, retain_graph=keep_graph)
        except MXNetError as error:
            _explain(error)
            raise


def check_closure(closure: Any) -> None:
    """Raise a TypeError if an argument is not a closure."""
    if not callable(closure):
        raise TypeError(
            f"closure must be a function that returns the loss, got {type(closure).__name__}. "
            "Pass the function itself: closure=lambda: loss_fn(net(X), y)."
        )


def record(
    closure: Callable[..., Loss],
    batch: Sequence[Any],
    devices: Sequence[Any],
    factors: OrderedDict[Any, NDArray] | None = None,
) -> Recorded:
    """Call a closure under ``autograd.record()``.

    Parameters
    ----------
    closure : callable
        Returns an NDArray, or a list or tuple of NDArrays.
    batch : sequence
        The arguments of the closure.
    devices : sequence of device
        The devices of the parameters.
    factors : OrderedDict, optional
        Arrays of factors from earlier calls, for reuse.

    Returns
    -------
    Recorded
        Not counted yet.

    Raises
    ------
    TypeError
        If the closure returns anything else.
    ValueError
        If it returns no loss.
    RuntimeError
        If it called backward itself.
    """
    try:
        with mx.autograd.record():
            loss = closure(*batch)
    except MXNetError as error:
        _explain(error)
        raise
    factors = OrderedDict() if factors is None else factors
    return Recorded(loss, _losses(loss), devices, factors)


def forward(closure: Callable[..., Loss], batch: Sequence[Any], *, train_mode: bool) -> None:
    """Call the closure without recording."""
    try:
        with mx.autograd.pause(train_mode=train_mode):
            closure(*batch)
    except MXNetError as error:
        _explain(error)
        raise


def check_repeatable(before: Sequence[int], counts: Sequence[int]) -> None:
    """Raise if the loss entries of a closure differ between two calls."""
    if tuple(before) != tuple(counts):
        raise RuntimeError(
            f"The closure returned {sum(before)} loss entries for a minibatch, and {sum(counts)} "
            "when it was called again. It must compute the same each time: draw the minibatch "
            "before the step, not inside the closure."
        )


def _is_number(loss: NDArray) -> bool:
    return _mxnet.dtype_name(loss).startswith("float")  # NumPy does not have bfloat16


def _filled_like(
    kept: OrderedDict[Any, NDArray], loss: NDArray, device: Any, factor: float
) -> NDArray:
    """An array of factors like a loss. Few shapes come again and again."""
    key = device, loss.dtype, loss.shape, factor, type(loss)
    if key not in kept:
        make = mx.np.full if _mxnet.is_numpy_like(loss) else mx.nd.full
        with _mxnet.not_traced():
            kept[key] = make(loss.shape, factor, ctx=device, dtype=loss.dtype)
        if len(kept) > 16:
            kept.popitem(last=False)
    return kept[key]


def _explain(error: MXNetError) -> None:
    """Explain the error if MXNet refuses to run backward."""
    if _mxnet.is_refused_backward(error):
        raise RuntimeError(
            "The loss of the closure cannot be differentiated: either the closure called "
            "backward() itself, or its loss depends on no parameter (was it detached, turned "
            "into a number, or computed under autograd.pause()?). The closure computes the "
            "loss and returns it; the trainer records it and runs backward."
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


def _entries(
    shapes: Sequence[Any], found: Sequence[Any], devices: Sequence[Any]
) -> tuple[int, ...]:
    if len(shapes) == len(devices) == 1 and found[0] in devices:
        return (prod(shapes[0]),)
    counts: list[int] = [0] * len(devices)
    for shape, device in zip(shapes, found):
        if device not in devices:
            raise ValueError(
                f"The closure returned a loss on {device}, but the trainer's parameters are on "
                f"{', '.join(map(str, devices))}. Copy the data to one of these, or initialize "
                "the network there as well."
            )
        counts[devices.index(device)] += prod(shape)
    return tuple(counts)
