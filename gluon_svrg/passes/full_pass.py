"""The full gradient: the mean gradient over a whole data set, at the current weights."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from operator import or_
from typing import Any, Callable, Iterable, NamedTuple, Sequence

import numpy as np
from mxnet.ndarray import NDArray

from .closure import Loss
from .columns import Mean, copy_from_first, norm, sum_to_first, zeros_like
from .combine import assign
from .data import arguments
from .estimate import differentiate
from .network import Network
from .points import Point
from .random_lock import Losses, RandomLock, losses_at
from .rows import Row

#: The number of minibatches whose losses are computed twice, to detect random numbers. Randomness
#: in a share p of all calls escapes one pair with probability 1 - 2 p (1 - p). With p = 1/2 it
#: escapes three pairs in one refresh of 8, with p = 1/5 in one of 3.
REPEATED = 3
#: The number of minibatches that the device may be behind, since what is queued holds their data.
QUEUED = 64


class FullGradient(NamedTuple):
    """The results of a pass over the data."""

    mean: Mean  # in the memory of the pass; over as many entries as a first minibatch has
    norm: float  # of the mean
    mean_loss: float  # of all workers
    reached: list[bool]  # per parameter: whether any loss depends on it
    all_entries: int  # of all workers
    entries: int  # of this worker
    rows: list[Row]  # the gradients of all minibatches, if they were wanted


def full_gradient(
    network: Network,
    closure: Callable[..., Loss],
    batches: Iterable[Any],
    lock: RandomLock,
    scale: float,
    workers: Any,
    *,
    keeps_rows: bool,
) -> FullGradient:
    """Compute the mean gradient at the current weights over all loss entries of all batches.

    The workers, each with a part of the data, sum numbers by ``reach`` and arrays by ``sum``. This
    overwrites the live gradients: call it inside `Network.grads_kept`. With ``'auto'``, the
    losses of the first minibatches are computed twice; if two differ, the lock is turned on. Raises
    a FloatingPointError if the result is not finite.
    """
    here, total, outside = Point.here(network), zeros_like(network.live), network.outside
    entries, together, reached, is_seeded = 0, 0.0, [False] * len(network.trainable), False
    rows: list[Row] = []
    queue: deque[Sequence[NDArray]] = deque()  # losses that the device may still compute
    losses: list[Losses] = []  # those of earlier minibatches
    for number, batch in enumerate(batches):
        inputs = arguments(batch)
        looks = number < REPEATED and lock.mode == "auto"
        guarded = number == 0 or outside.may_move
        with outside.protected(gradients=True, search=not number) if guarded else nullcontext():
            while True:
                # Under the lock, what a pass draws follows from the seed of its first minibatch.
                seed = lock.new_seed() if looks or keeps_rows or not is_seeded else None
                earlier = losses_at(here, closure, inputs, seed) if looks else None
                recorded, its_reached = differentiate(here, closure, inputs, seed, scale)
                if earlier is None:
                    break
                if lock.is_repeated(earlier, (recorded.counts, Losses.of(recorded.losses))):
                    break
        if number == 0:
            network.check_hidden()
        is_seeded = is_seeded or seed is not None
        for target, live in zip(total, network.live):
            assign([target, live], (0, ((1.0, 0), (1.0, 1))))
        if keeps_rows:
            grads = zeros_like(network.live)
            for target, live in zip(grads, network.live):
                assign([target, live], (0, ((1 / scale, 1),)))
            rows.append(Row(number, grads, recorded.counts, seed))
        entries, together = entries + recorded.entries, together or recorded.counts[0]
        reached = list(map(or_, reached, its_reached))
        queue.append([loss.detach() for loss in recorded.losses])
        if len(queue) > QUEUED:
            losses.append(Losses.of(queue.popleft()))
    if not entries:
        raise ValueError("There was no data. Pass at least one batch; a used generator is empty.")
    network.check_hidden()
    losses += map(Losses.of, queue)
    sums = workers.reach([entries, sum(loss.total for loss in losses), together, 1, *reached])
    sum_to_first(total)
    numbers = map(network.parameters.index, network.trainable)
    workers.sum(dict(zip(numbers, total[0])))
    together = sums[2] / sums[3] or 1.0  # the same on all workers
    assign([total[0]], (0, ((together / (sums[0] * scale), 0),)))
    copy_from_first(total)
    size = norm(total[0]) / together
    if not np.isfinite(size):
        raise FloatingPointError(
            "The full gradient is not finite (NaN or infinity). Nothing was changed: a snapshot "
            "held before is still in force. Look for a learning rate that is too high or for bad "
            "values in the data."
        )
    return FullGradient(
        Mean(total, together),
        size,
        float(sums[1] / sums[0]),
        [count > 0 for count in sums[4:]],
        int(sums[0]),
        entries,
        [row._replace(losses=its_losses) for row, its_losses in zip(rows, losses)],
    )
