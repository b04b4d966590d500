"""The formula of all methods: the estimate from a mini-batch's gradient.

::

    v = a g + b r + k c m

``g`` is the gradient of the mini-batch at the current weights, ``r`` its gradient at a reference
(other weights, or a row of a table), each the *sum* over the mini-batch's ``c`` loss entries, and
``m`` a *mean* per loss entry. A method chooses the factors, the reference and ``m``, see
`EstimateCoefficients`. Each device has its own ``g``, ``r`` and ``c``.

Backward only writes gradients, or adds them to zero. So a step has two passes, and one assignment
after each::

    at the reference:    grads = r        spare = r + (k / b) c m
    at the weights:      grads = g        grads = a g + b spare

A row of a table takes the place of the first pass.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, Callable, NamedTuple, Sequence

import mxnet as mx

from .. import _mxnet
from .closure import Loss, Recorded, check_repeatable, record
from .columns import Columns, DeviceArrays, Mean, zero
from .combine import assign, is_one_of
from .network import ParameterBuffers
from .points import ParameterValues
from .rows import StoredGradient


class EstimateCoefficients(NamedTuple):
    """The factors, the reference and the mean of an estimate: ``v = a g + b r + k c m``."""

    a: float = 1.0
    b: float = 0.0
    k: float = 0.0
    reference: ParameterValues | StoredGradient | None = None  # of r; None without one
    mean: Mean | None = None  # m; None without one
    copy_to: Columns | None = None  # memory for a copy of g, without the scale of AMP's losses
    adds_to_sum: bool = False  # whether to add a g + b r to the sum of m, in the spare memory
    select: Sequence[bool] | None = None  # flags of parameters; v = g for those without


#: v = g.
PLAIN_GRADIENT = EstimateCoefficients()


class Estimate(NamedTuple):
    """The results of a mini-batch, apart from v, which is in the live gradients."""

    recorded: Recorded  # the losses at the weights
    grad_evaluations: int  # loss entries, over all passes
    reached: list[bool]  # per parameter: whether its loss depends on it
    seed: int | None  # of the random numbers, if they are locked


def estimate(
    here: ParameterValues,
    closure: Callable[[], Loss],
    terms: EstimateCoefficients,
    seed: int | None,
    scale: float,
) -> Estimate:
    """Leave ``v = a g + b r + k c m`` in the live gradients; AMP multiplies losses by a scale.

    Where the terms have no reference and nothing to copy, it leaves g; the method adds the rest.
    """
    network, reference, there = here.network, terms.reference, None
    columns = []
    if reference is not None or terms.copy_to is not None:  # otherwise v is g, or follows later
        columns = [_columns(network, terms, device) for device in range(len(network.grads))]
    network.hide_marks()
    check: Callable[[Sequence[int]], None] | None = None
    if isinstance(reference, ParameterValues):
        with network.outside.protected() if network.outside.may_move else nullcontext():
            there, _ = gradient_at(reference, closure, (), seed, scale)
        for these, count in zip(columns, there.counts):
            _combine_at_reference(these, terms, count * scale)
        check = partial(check_repeatable, there.counts)
    elif reference is not None:
        check = reference.check_counts
    recorded, reached = gradient_at(here, closure, (), seed, scale, check)
    network.check_hidden()
    combine = _combine_at_weights if terms.copy_to is None else _combine_and_copy
    for these, count in zip(columns, recorded.counts):
        combine(these, terms, count, scale)
    passes = 1 if there is None else 2
    return Estimate(recorded, passes * recorded.entries, reached, seed)


def gradient_at(
    point: ParameterValues,
    closure: Callable[..., Loss],
    batch: Sequence[Any],
    seed: int | None,
    scale: float,
    check: Callable[[Sequence[int]], None] | None = None,
) -> tuple[Recorded, list[bool]]:
    """Leave a mini-batch's gradient at a point in the live gradients.

    It is zero for parameters on which the loss does not depend. The flags tell which parameters
    backward has reached, on any device.
    """
    network = point.network
    if seed is not None:
        mx.random.seed(seed)
    try:
        point.enter()
        recorded = record(closure, batch, network.devices)
        if check is not None:
            check(recorded.counts)
        if network.accumulating:
            zero(network.accumulating)
        recorded.backward(scale)
    finally:
        point.leave()
    touched = _mxnet.take_fresh(point.weights)
    if network.unseen:
        network.check_written(point.weights, touched)
    if all(map(all, touched)):
        return recorded, [True] * len(touched)
    rows = zip(network.grads_by_parameter, touched)
    zero(grad for grads, flags in rows for grad, flag in zip(grads, flags) if not flag)
    reached = list(map(any, touched))
    if not any(reached):
        raise ValueError(
            "The loss depends on none of the trainer's parameters. Compute it from the network "
            "whose parameters the trainer was given."
        )
    return recorded, reached


# --- the assignments after each pass, on one device ---------------------------------------------
# Each is a chain of sums, see `assign`.

GRADS, SPARE, MEAN, ROW, COPY = range(5)  # the columns


def _columns(
    network: ParameterBuffers, terms: EstimateCoefficients, device: int
) -> list[DeviceArrays]:
    """The columns on a device, for some parameters; gradients where none is needed."""
    grads, row = network.grads[device], terms.reference
    columns = [
        grads,
        network.spare[device],
        grads if terms.mean is None else terms.mean.sums[device],
        row.grads[device] if isinstance(row, StoredGradient) else grads,
        grads if terms.copy_to is None else terms.copy_to[device],
    ]
    return columns if terms.select is None else [column.select(terms.select) for column in columns]


def _combine_at_reference(
    columns: list[DeviceArrays], terms: EstimateCoefficients, count: float
) -> None:
    """Assign ``spare = r + (k / b) c m``, where the live gradients hold r."""
    if terms.mean is None or not count:
        assign(columns, (SPARE, ((1.0, GRADS),)))
    else:
        at_mean = terms.k / terms.b * (count / terms.mean.entries), MEAN
        pair = ((1.0, GRADS), at_mean) if is_one_of(at_mean[0], 1, -1) else (at_mean, (1.0, GRADS))
        assign(columns, (SPARE, pair))


def _combine_at_weights(
    columns: list[DeviceArrays], terms: EstimateCoefficients, count: int, scale: float
) -> None:
    """Assign ``grads = a g + b r + k c m``: all but a g is in the spare memory, or r in a row."""
    factor, number = terms.b, SPARE
    if not isinstance(terms.reference, ParameterValues):
        factor, number = terms.b * scale, ROW
    if is_one_of(factor, 1, -1):
        assign(columns, (GRADS, ((terms.a, GRADS), (factor, number))))
    else:
        assign(columns, (SPARE, ((factor, number),)), (GRADS, ((terms.a, GRADS), (1.0, SPARE))))


def _combine_and_copy(
    columns: list[DeviceArrays], terms: EstimateCoefficients, count: int, scale: float
) -> None:
    """Copy g; assign v to the live gradients, and a g + b r, or the new sum of m, to the spare."""
    at_row, last = [(terms.a, GRADS)], [(1.0, SPARE)]
    if terms.reference is not None:
        at_row.append((terms.b * scale, ROW))
    if terms.mean is not None and count:
        last.insert(0, (terms.k * (count * scale / terms.mean.entries), MEAN))
    steps = [(COPY, ((1 / scale, GRADS),)), (SPARE, tuple(at_row)), (GRADS, tuple(last))]
    if terms.adds_to_sum:
        unscaled, before = (1 / scale, SPARE), ((1.0, MEAN),) if terms.mean is not None else ()
        steps.append((SPARE, (unscaled, *before)))
    assign(columns, *steps)
