"""The full gradient: the mean gradient over a whole data set, at one point."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Callable, Iterable, NamedTuple, Sequence

import mxnet as mx
from mxnet.ndarray import NDArray

from . import _mxnet, gradient
from ._mxnet import Arrays
from .batches import arguments
from .buffer import GradientBuffer
from .closure import Evaluation, Loss
from .gradient import Network
from .operations import all_finite, divide
from .snapshot import Snapshot, copy_all
from .stores.agreement import Agreement


class FullGradient(NamedTuple):
    """What a pass over the data found."""

    entries: int  # of this worker
    mean_loss: float  # of all workers
    in_objective: list[bool]  # per parameter: whether any loss depends on it


def take(
    snapshot: Snapshot,
    closure: Callable[..., Loss],
    batches: Iterable[Any],
    network: Network,
    buffer: GradientBuffer,
    agreement: Agreement,
    evaluate: Callable[..., Evaluation] = gradient.at_snapshot,
) -> FullGradient:
    """Take the mean gradient at a snapshot over all loss entries of all batches and devices.

    Parameters
    ----------
    snapshot : Snapshot
        Where to take it. The gradients of its parameters are as before afterwards.
    closure : callable
        Called with the items of each batch.
    batches : iterable
        The data.
    network : Network
        What gradients are taken of.
    buffer : GradientBuffer
        Where it goes, the same on all devices.
    agreement : Agreement
        Of all workers, each with a part of the data: on the number of loss entries, the sum of the
        losses, and which parameters these depend on.
    evaluate : callable
        Takes the gradient of a minibatch, and perhaps stores it.

    Returns
    -------
    FullGradient

    Raises
    ------
    ValueError
        If there is no data, or a loss depends on no parameter.
    FloatingPointError
        If the result is not finite.
    """
    entries, losses, ever = 0, _LossSum(), [False] * len(snapshot.parameters)
    spare = [[_mxnet.classic(grad).copy() for grad in row] for row in snapshot.buffers]
    buffer.zero()
    try:
        with gradient.marks_kept(snapshot.parameters), network.others.protected() as others:
            for batch in batches:
                with nullcontext() if entries else others.found():
                    evaluation = evaluate(snapshot, closure, arguments(batch), network)
                for device, count in enumerate(evaluation.counts):
                    if count:  # without entries the gradient is zero
                        buffer.add(device)
                entries += sum(evaluation.counts)
                losses.add(evaluation.losses)
                if not all(ever):
                    ever = [was or any(now) for was, now in zip(ever, evaluation.touched)]
    finally:
        buffer.finish()
        copy_all(spare, snapshot.buffers)
    if not entries:
        raise ValueError(
            "There was no data for the full gradient. Pass an iterable with at least one batch; a "
            "generator that was used before is empty."
        )
    del spare  # what follows needs memory too
    loss = losses.total()
    _sum_over_devices(buffer.arrays)
    all_entries, loss, *counts = agreement.reach([entries, loss, *ever])
    numbers = map(list(network.parameters).index, snapshot.parameters)
    agreement.sum({n: total for n, (total, *_) in zip(numbers, buffer.arrays)})
    _take_mean(buffer.arrays, all_entries * network.scale)
    if not all_finite(total for total, *_ in buffer.arrays):
        raise FloatingPointError(
            "The full gradient is not finite (NaN or infinity). Nothing was changed: a snapshot "
            "held before is still in force. Look for a learning rate that is too high or for bad "
            "values in the data."
        )
    return FullGradient(entries, float(loss / all_entries), [count > 0 for count in counts])


def _sum_over_devices(sums: Arrays) -> None:
    """Add the sums of all devices to those of the first."""
    for total, *addends in sums:
        for addend in addends:
            total += addend.copyto(_mxnet.device_of(total))


def _take_mean(sums: Arrays, divisor: float) -> None:
    """Divide the sums of the first device, and copy them to the others."""
    divide([total for total, *_ in sums], divisor)
    for total, *others in sums:
        for target in others:
            total.copyto(target)


class _LossSum:
    """A sum of losses that does not make the device wait while it grows.

    It waits for the device, when that is more than 64 losses behind: what is queued holds its data.
    """

    _FOLD = 64  # losses are kept until there are so many, then summed at once

    def __init__(self) -> None:
        self._losses: dict[tuple[str, str], list[NDArray]] = {}
        self._partial: list[NDArray] = []

    def add(self, losses: Sequence[NDArray]) -> None:
        for loss in losses:
            key = str(_mxnet.device_of(loss)), _mxnet.dtype_name(loss)
            kept = self._losses.setdefault(key, [])
            kept.append(loss)
            if len(kept) == self._FOLD:
                self._fold(kept)

    def total(self) -> float:
        for kept in self._losses.values():
            self._fold(kept)
        return sum(float(partial.asscalar()) for partial in self._partial)

    def _fold(self, kept: list[NDArray]) -> None:
        if kept:
            flat = [_mxnet.classic(loss).reshape((-1,)) for loss in kept]
            self._partial.append(mx.nd.concat(*flat, dim=0).astype("float64").sum())
            self._partial[-2:][0].wait_to_read()
            kept.clear()
