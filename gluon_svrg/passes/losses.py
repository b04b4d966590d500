"""The sum of all losses of a pass."""

from __future__ import annotations

from typing import Any

import mxnet as mx
from mxnet.ndarray import NDArray

from .. import _mxnet
from .closure import Recorded


class LossSum:
    """A sum of losses that grows without waiting for the device.

    It waits only if the device is more than 64 minibatches behind, because queued operations hold
    data.
    """

    _FOLD = 64  # minibatches whose losses are kept before they are joined

    def __init__(self) -> None:
        self._recorded: list[Recorded] = []
        self._partial: list[NDArray] = []

    def add(self, recorded: Recorded) -> None:
        """Add the losses of a minibatch."""
        self._recorded.append(recorded)
        if len(self._recorded) == self._FOLD:
            self._fold()

    def total(self) -> float:
        """The sum so far. Waits for the device."""
        self._fold()
        return sum(float(partial.asscalar()) for partial in self._partial)

    def _fold(self) -> None:
        alike: dict[Any, list[NDArray]] = {}
        for recorded in self._recorded:
            for loss, device, shape in zip(recorded.losses, recorded.devices, recorded.shapes):
                flat = _mxnet.classic(loss)
                flat = flat if len(shape) == 1 else flat.reshape((-1,))
                alike.setdefault((device, flat.dtype), []).append(flat)
        self._recorded.clear()
        for partial in self._partial[-len(alike) :]:
            partial.wait_to_read()
        for losses in alike.values():
            self._partial.append(mx.nd.concat(*losses, dim=0).astype("float64").sum())
