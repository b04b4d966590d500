"""Tests whether backward can add gradients in the live gradients, see `sums`."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

import numpy as np
from mxnet.ndarray import NDArray

from .arrays import fill_with_ones, per_device, zero
from .closure import Recorded
from .entries import in_numpy
from .points import Point


class Probe(NamedTuple):
    """The result of a probe."""

    adds: bool
    recorded: Recorded | None  # the losses, if there was a pass


def probe(point: Point, closure: Callable[..., Any], batch: Sequence[Any]) -> Probe:
    """Test whether backward adds to the live gradients, with the given factor.

    Gradients full of ones must remain where backward adds, with the factor 0. This overwrites the
    live gradients, and waits for the device. Call `Network.mark` after it.

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
    if not network.may_add:
        return Probe(False, None)
    was, network.adds = network.adds, True
    network.mark(point.weights)
    try:
        fill_with_ones(network.live_grads)
        recorded = point.at(network.record, closure, batch)
        recorded.backward(0.0)
        point.take_touched()
        grads = (grad for row in network.live_grads for grad in row)
        return Probe(all(map(_are_ones, grads)), recorded)
    finally:
        network.adds = was


def is_lost(
    point: Point, closure: Callable[..., Any], batch: Sequence[Any], reached: Sequence[bool]
) -> bool:
    """Test whether backward failed to add a gradient, and turn `Network.adds` off if so.

    In bfloat16 on 1.9.1, it never adds. Call this when the gradient of one minibatch was added to
    zero. Usually no gradient is zero, and this does nothing.

    Returns
    -------
    bool
        Whether this has overwritten the live gradients.
    """
    network = point.network
    rows = zip(network.live_grads, reached)
    empty = [row for row, flag in rows if flag and not _has_entries(row)]
    if not empty:
        return False
    network.adds = False
    for column in per_device(network.live_grads):
        zero(column)
    network.mark(point.weights)
    point.at(network.record, closure, batch).backward()
    touched = point.take_touched()
    written = [row for row, flags in zip(network.live_grads, touched) if any(flags)]
    network.adds = not any(row is other and _has_entries(row) for row in empty for other in written)
    return True


def _are_ones(grad: NDArray) -> bool:
    # An entry that is not a number proves nothing.
    pieces = in_numpy(grad)
    return all((p == 1).all() or ((p == 1) | ~np.isfinite(p)).all() for p in pieces)


def _has_entries(row: Sequence[NDArray]) -> bool:
    return any(piece.any() for grad in row for piece in in_numpy(grad))
