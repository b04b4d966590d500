"""The full gradient: the mean gradient over a whole data set, at the current weights."""

from __future__ import annotations

from contextlib import nullcontext
from operator import or_
from typing import Any, Callable, Iterable, NamedTuple

import numpy as np

from .. import _mxnet
from .closure import Loss, Recorded
from .columns import Columns, Mean, norm, zeros_like
from .combine import assign, copy
from .data import NO_DATA, arguments
from .estimate import gradient_at
from .network import ParameterBuffers
from .points import ParameterValues
from .random_lock import Losses, RandomLock, losses_at
from .rows import StoredGradient
from .watch import first_shape

#: The number of mini-batches whose losses are computed twice, to detect random numbers. Randomness
#: in a share p of all calls escapes one pair with probability 1 - 2 p (1 - p). With p = 1/2 it
#: escapes three pairs in one refresh of 8, with p = 1/5 in one of 3.
REPEATED = 3
#: The number of mini-batches that the device may be behind, since what is queued holds their data.
QUEUED = 64
NOT_FINITE = (
    "The full gradient is not finite (NaN or infinity). No snapshot was taken: one of the same "
    "arrays is still in force. Is a learning rate too high, or are data not finite?"
)


class FullGradient(NamedTuple):
    """The results of a pass over the data."""

    mean: Mean  # in the memory of the pass; over about a device's entries of a mini-batch
    norm: float  # of the mean; perhaps not finite
    mean_loss: float  # of all workers
    compared_loss: float | None  # the mean loss at another point, if that was wanted
    eps: float  # the rounding of the losses' dtype
    draws: bool  # whether random numbers are locked on any worker
    is_data_finite: bool  # False if a loss is not finite at the other point, either
    reached: list[bool]  # per parameter: whether any loss depends on it
    all_entries: int  # of all workers
    entries: int  # of this worker
    first_shape: tuple[int, ...]  # what `watch.first_shape` has found, for a `MisuseWarnings`
    rows: list[StoredGradient]  # the gradients of all mini-batches, if they were wanted


def full_gradient(
    network: ParameterBuffers,
    closure: Callable[..., Loss],
    batches: Iterable[Any],
    lock: RandomLock,
    scale: float,
    workers: Any,
    keeps_rows: bool,
    origin: ParameterValues | None,
    compares: bool,
) -> FullGradient:
    """Compute the mean gradient at the current weights over all loss entries of all batches.

    This overwrites the live gradients: call it inside `ParameterBuffers.grads_kept`. The losses may
    also be computed at an origin, with the same random numbers if they are locked. There the first
    one that is not finite always is, with other numbers, to tell bad data from bad steps.
    """
    here, total, outside = ParameterValues.here(network), zeros_like(network.grads), network.outside
    entries, together, reached = 0, 0.0, [False] * len(network.trainable)
    queue: list[tuple[Recorded, Any]] = []  # what the device may still compute, with its inputs
    fault: list[bool] = []  # whether a loss is not finite at the origin either

    def added(minibatches: list[tuple[Recorded, Any]]) -> float:
        """The sum of the losses of some mini-batches, which ends their wait."""
        total = 0.0
        for recorded, inputs in minibatches:
            arrays = (_mxnet.readable(loss).asnumpy() for loss in recorded.losses)
            its_loss = sum(float(entries.sum(dtype="float64")) for entries in arrays)
            if origin is not None and not fault and not np.isfinite(its_loss):
                fault.append(not np.isfinite(losses_at(origin, closure, inputs, None).total))
            total += its_loss
        return total

    loss = compared_loss = 0.0  # the sum of those before; that at the other point
    rows: list[tuple[Columns, Recorded, int | None]] = []  # gradients, losses and seed of each
    for number, batch in enumerate(batches):
        inputs, is_first = arguments(batch), number == 0
        looks = number < REPEATED and lock.mode == "auto"
        guarded = is_first or outside.may_move
        with outside.protected(gradients=True, search=is_first) if guarded else nullcontext():
            while True:
                # Under the lock, others go on with the random numbers of the last seed.
                is_own = is_first or looks or keeps_rows or compares
                seed = lock.new_seed() if is_own else None
                earlier = losses_at(here, closure, inputs, seed) if looks else None
                recorded, its_reached = gradient_at(here, closure, inputs, seed, scale)
                if earlier is None or lock.is_repeated(earlier, Losses.of(recorded)):
                    break
        if compares:  # without a backward, statistics of BatchNorm do not move
            compared_loss += losses_at(origin, closure, inputs, seed).total
        if is_first:
            network.check_hidden()
            shape = first_shape(inputs, recorded)
            eps = max(float(np.finfo(_mxnet.readable(x).dtype).eps) for x in recorded.losses)
        for pair in zip(total, network.grads):
            assign(pair, (0, ((1.0, 0), (1.0, 1))))
        if keeps_rows:
            grads = zeros_like(network.grads)
            copy(network.grads, grads, 1 / scale)
            rows.append((grads, recorded, seed))
        entries, together = entries + recorded.entries, together or recorded.counts[0]
        if its_reached != reached:
            reached = list(map(or_, reached, its_reached))
        queue.append((recorded, inputs))
        if len(queue) == QUEUED:
            loss += added(queue[: QUEUED // 2])
            del queue[: QUEUED // 2]
    if not entries:
        raise ValueError(NO_DATA)
    network.check_hidden()
    loss += added(queue)
    numbers = entries, loss, together, 1, compared_loss, compares, any(fault), lock.locked
    sums = workers.reach([*map(float, numbers), *reached])
    network.sum_everywhere(total, workers.sum)
    together = sums[2] / sums[3] or 1.0  # the same on all workers
    for column in total:
        assign([column], (0, ((together / (sums[0] * scale), 0),)))
    size = norm(total[0]) / together
    mean, mean_loss = Mean(total, together), float(sums[1] / sums[0])
    there = float(sums[4] / sums[0]) if sums[5] == sums[3] else None
    reached = [count > 0 for count in sums[8:]]
    kept = [
        StoredGradient(number, grads, recorded.counts, seed, Losses.of(recorded))
        for number, (grads, recorded, seed) in enumerate(rows)
    ]
    losses = mean_loss, there, eps, bool(sums[7]), not sums[6]
    return FullGradient(mean, size, *losses, reached, int(sums[0]), entries, shape, kept)
