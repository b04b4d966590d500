"""Whether backward can add gradients up in the live gradients, see `sums`."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from .arrays import in_numpy, per_device, zero
from .points import Point


class Probe(NamedTuple):
    """What was found."""

    adds: bool
    differentiated: int  # loss entries that it took


def probe(point: Point, closure: Callable[..., Any], batch: Sequence[Any]) -> Probe:
    """Find out whether backward adds to the live gradients, with the factor that it is given.

    The live gradients are lost. Waits for the device.

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
        adds = probing.adds_nothing_for_zero()
        if adds and not network.was_seen_to_add:
            adds = network.was_seen_to_add = probing.adds_something()
        return Probe(adds, probing.differentiated)
    finally:
        network.adds = was
        network.mark(point.weights)


class _Probing:
    def __init__(self, point: Point, closure: Callable[..., Any], batch: Sequence[Any]) -> None:
        self._point, self._closure, self._batch = point, closure, batch
        self._live_grads = point.network.live_grads
        self.differentiated = 0

    def adds_nothing_for_zero(self) -> bool:
        """Run backward with the factor 0 on gradients full of ones: ones must remain."""
        for row in self._live_grads:
            for grad in row:
                grad[:] = 1
        self._backward(0.0)
        pieces = (piece for row in self._live_grads for grad in row for piece in in_numpy(grad))
        return all(np.all((p == 1) | ~np.isfinite(p)) for p in pieces)  # NaN proves nothing

    def adds_something(self) -> bool:
        """See that a gradient that backward can write is not zero when it is to be added.

        In bfloat16 on 1.9.1, backward adds nothing at all. Once is enough: it depends on operators
        and dtypes, not on weights.
        """
        for column in per_device(self._live_grads):
            zero(column)
        empty = [row for row in self._backward(1.0) if not _has_entries(row)]
        if empty:
            network = self._point.network
            network.adds = False
            network.mark(self._point.weights)
            self._backward(1.0)
        return not any(map(_has_entries, empty))

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
