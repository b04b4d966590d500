"""Minibatch gradients, at a snapshot and at the current weights.

Both end up in the gradient buffers of the parameters, each the *sum* over the loss entries of its
device. What backward did not reach counts as zero: its buffer holds the gradient of another
minibatch.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator, NamedTuple, Sequence

from mxnet.gluon import Parameter

from . import _mxnet
from ._mxnet import Arrays, Flags
from .closure import Evaluation, Loss, differentiate
from .operations import zero
from .others import Others
from .snapshot import Snapshot


class Network(NamedTuple):
    """What gradients are taken of."""

    parameters: Sequence[Parameter]  # the trainer's
    devices: Sequence[Any]  # where they are
    others: Others  # what else the closure reads
    scale: float  # of the losses


@contextmanager
def marks_kept(parameters: Sequence[Parameter]) -> Iterator[None]:
    """Mark all gradients as stale for a while, so that it shows what backward reaches.

    Those that were fresh are fresh again afterwards.
    """
    weights = _mxnet.weights(parameters)
    fresh = _mxnet.take_fresh(weights)
    try:
        yield
    finally:
        _mxnet.mark(weights, fresh, fresh=True)


def at_snapshot(
    snapshot: Snapshot, closure: Callable[..., Loss], batch: Sequence[Any], network: Network
) -> Evaluation:
    """Take the gradient of a minibatch at a snapshot; inside `marks_kept`.

    Returns
    -------
    Evaluation
        With ``touched`` per parameter of the snapshot and device.

    Raises
    ------
    RuntimeError
        If the closure computes with arrays that it took from parameters before.
    """
    snapshot.clear_accumulated()
    with snapshot.entered():
        evaluation = differentiate(closure, batch, network.devices, scale=network.scale)
    touched = _mxnet.take_fresh(snapshot.weights)
    live = _mxnet.weights(snapshot.parameters)
    reached = _mxnet.fresh(live)
    if any(map(any, reached)):
        _mxnet.mark(live, reached, fresh=False)
        raise RuntimeError(
            "The closure computes with values of parameters that it took before it was called, so "
            "that they are not those of the snapshot. Call Parameter.data() inside the closure."
        )
    _check_dependent(touched)
    _zero_untouched(snapshot.buffers, touched)
    return evaluation._replace(touched=touched)


def at_current_weights(
    network: Network,
    closure: Callable[[], Loss],
    check: Callable[[Sequence[int]], None] | None = None,
) -> Evaluation:
    """Take the gradient of a minibatch at the current weights; inside `marks_kept`.

    The numbers of loss entries per device can be checked before anything is differentiated.

    Marks the gradients as `gluon.Trainer` expects it: those that backward reached are fresh, on
    all devices (where one has no data, zero is its gradient).
    """
    evaluation = differentiate(closure, (), network.devices, check, network.scale)
    reached = _mxnet.with_gradients(network.parameters)
    weights = _mxnet.weights(reached)
    touched = _mxnet.fresh(weights)
    _check_dependent(touched)
    if not all(map(all, touched)):
        _mxnet.mark(weights, [[any(flags)] * len(flags) for flags in touched], fresh=True)
        written = [
            (_mxnet.gradients(parameter), flags)
            for parameter, flags in zip(reached, touched)
            if parameter.grad_req == "write"
        ]
        _zero_untouched([buffers for buffers, _ in written], [flags for _, flags in written])
    return evaluation._replace(touched=touched)


def _zero_untouched(buffers: Arrays, touched: Flags) -> None:
    for row, flags in zip(buffers, touched):
        if not all(flags):
            for buffer, flag in zip(row, flags):
                if not flag:
                    zero([buffer])


def _check_dependent(touched: Flags) -> None:
    if not any(map(any, touched)):
        raise ValueError(
            "The loss depends on none of the trainer's parameters. Compute it from the network "
            "whose parameters the trainer was given."
        )
