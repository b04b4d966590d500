"""Tests whether backward can add gradients in the live gradients, see `sums`."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

import mxnet as mx
import numpy as np

from .arrays import per_device, with_dimension, zero
from .entries import in_numpy
from .points import Point


class Probe(NamedTuple):
    """The result of a probe."""

    adds: bool
    differentiated: int  # loss entries that it took


def probe(point: Point, closure: Callable[..., Any], batch: Sequence[Any]) -> Probe:
    """Test whether backward adds to the live gradients, with the given factor.

    This overwrites the live gradients, and waits for the device.

    Parameters
    ----------
    point : Point
        Where to run backward.
    closure : callable
        Returns the loss of a minibatch.
    batch : sequence
        The minibatch.
    """
    network = point.network
    if not network.may_add():
        return Probe(False, 0)
    was, network.adds = network.adds, True
    network.mark(point.weights)
    probing = _Probing(point, closure, batch)
    try:
        return Probe(probing.adds_nothing_for_zero(), probing.differentiated)
    finally:
        network.adds = was
        network.mark(point.weights)


def is_lost(
    point: Point, closure: Callable[..., Any], batch: Sequence[Any], reached: Sequence[bool]
) -> Probe | None:
    """Test whether backward failed to add a gradient.

    In bfloat16 on 1.9.1, it never adds. Call this when the gradient of one minibatch was added to
    zero. Usually no gradient is zero, and this does nothing; otherwise it overwrites the gradients.

    Returns
    -------
    Probe or None
        None if there is a gradient for all parameters that were reached.
    """
    network = point.network
    rows = zip(network.live_grads, reached)
    empty = [row for row, flag in rows if flag and not _has_entries(row)]
    if not empty:
        return None
    network.adds = False
    probing = _Probing(point, closure, batch)
    written = probing.written()
    adds = not any(row is other for row in empty for other in written)
    return Probe(adds, probing.differentiated)


class _Probing:
    def __init__(self, point: Point, closure: Callable[..., Any], batch: Sequence[Any]) -> None:
        self._point, self._closure, self._batch = point, closure, batch
        self._live_grads = point.network.live_grads
        self.differentiated = 0

    def adds_nothing_for_zero(self) -> bool:
        """Run backward with the factor 0 on gradients full of ones: ones must remain."""
        for row in self._live_grads:
            for grad in with_dimension(row):
                mx.nd.ones_like(grad, out=grad)
        self._backward(0.0)
        found = (piece for row in self._live_grads for grad in row for piece in in_numpy(grad))
        return all(np.all((piece == 1) | ~np.isfinite(piece)) for piece in found)  # NaN: no proof

    def written(self) -> list[Any]:
        """The live gradients that are not zero when backward may write them."""
        for column in per_device(self._live_grads):
            zero(column)
        self._point.network.mark(self._point.weights)
        return [row for row in self._backward(1.0) if _has_entries(row)]

    def _backward(self, factor: float) -> list[Any]:
        """Run backward, and return the live gradients that it has reached."""
        recorded = self._point.at(self._record)
        recorded.backward(factor)
        self.differentiated += recorded.entries
        touched = self._point.take_touched()
        return [row for row, flags in zip(self._live_grads, touched) if any(flags)]

    def _record(self) -> Any:
        return self._point.network.record(self._closure, self._batch)


def _has_entries(row: Sequence[Any]) -> bool:
    return any(np.any(piece) for grad in row for piece in in_numpy(grad))
