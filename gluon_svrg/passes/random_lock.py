"""The random lock: both passes of a step draw the same random numbers.

With different dropout masks, the correction would add variance instead of removing it. Random
numbers are found by the sum of a mini-batch's losses, computed twice at the same weights.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Callable, NamedTuple, Sequence

import mxnet as mx
import numpy as np

from .. import _mxnet
from .closure import Loss, Recorded, check_repeatable, record
from .watch import warn

RANDOM = (
    "The losses of the same mini-batch at the same weights, computed twice, differ by {:.2g} of "
    "their size. If the network draws random numbers (dropout), both passes of a step draw the "
    "same from now on, as with lock_random=True; with lock_random=False they would stay "
    "different, and add variance. If it draws none, the closure does not repeat its computation."
)
NOT_REPEATABLE = (
    "The losses of the same mini-batch at the same weights, computed twice, differ by {:.2g} of "
    "their size, although MXNet's random numbers were the same. The closure must compute the same "
    "each time: draw the mini-batch (next(iterator)), augment data and update a state before the "
    "step, with no random numbers from outside MXNet. lock_random=True and False omit this check."
)
#: How far losses may differ by rounding, relative to their size; for narrower dtypes 1e-2.
ROUNDING_OF_LOSSES = {np.dtype("float32"): 1e-4, np.dtype("float64"): 1e-9}


class Losses(NamedTuple):
    """The losses of a mini-batch in a few numbers, to compare them with the same losses later."""

    counts: tuple[int, ...]  # the number of loss entries per device
    total: float  # the sum of all loss entries
    size: float  # the sum of their absolute values
    rounding: float  # relative to the size

    @classmethod
    def of(cls, recorded: Recorded) -> Losses:
        """The numbers of a recorded mini-batch. Waits for the device."""
        total = size = rounding = 0.0
        for loss in recorded.losses:
            entries = _mxnet.readable(loss).asnumpy()
            total += float(entries.sum(dtype="float64"))
            size += float(np.abs(entries).sum(dtype="float64"))
            rounding = max(rounding, ROUNDING_OF_LOSSES.get(np.dtype(loss.dtype), 1e-2))
        return cls(recorded.counts, total, size, rounding)

    def difference(self, other: Losses) -> float:
        """The relative difference to other losses; 0 if it may be rounding, or is NaN."""
        size, rounding = max(self.size, other.size), max(self.rounding, other.rounding)
        relative = abs(self.total - other.total) / size if size else 0.0
        return relative if relative > rounding else 0.0  # a NaN proves nothing


class RandomLock:
    """Whether random numbers are locked, and the seeds that lock them: a part of a file.

    MXNet's generators can be seeded, but their states cannot be saved. So each step or pass has
    its own seed, from its number and a base seed that is drawn once from MXNet.
    """

    def __init__(self, mode: Any) -> None:
        if not (isinstance(mode, bool) or mode == "auto"):
            raise ValueError(f"lock_random must be True, False or 'auto', got {mode!r}.")
        self.mode = mode
        self.locked: bool = mode is True
        self._count = 0

    def is_repeated(self, first: Losses, second: Losses) -> bool:
        """Whether losses are the same twice; if not, warn and lock, or raise if that is on."""
        check_repeatable(first.counts, second.counts)
        difference = first.difference(second)
        if difference and self.locked:
            raise RuntimeError(NOT_REPEATABLE.format(difference))
        if difference:
            self.locked = True
            warn(RANDOM.format(difference))
        return not difference

    def new_seed(self) -> int | None:
        """Draw a seed for a step or a pass, if the lock is on."""
        return self.next_seed() if self.locked else None

    def next_seed(self) -> int:
        """Draw a seed."""
        self._count += 1
        sequence = np.random.SeedSequence([self._base, self._count])
        return int(sequence.generate_state(1)[0] >> 1)

    @cached_property
    def _base(self) -> int:
        return draw_seed()

    def state(self) -> dict[str, Any]:
        """The mode, and what the next seeds follow from, unless the mode is False."""
        base = None if self.mode is False else self._base
        return {"mode": self.mode, "locked": self.locked, "base": base, "count": self._count}

    def assign(self, state: dict[str, Any]) -> None:
        self.mode, self.locked, self._count = state["mode"], state["locked"], state["count"]
        if state["base"] is not None:
            self._base = state["base"]


def losses_at(
    point: Any, closure: Callable[..., Loss], inputs: Sequence[Any], seed: int | None
) -> Losses:
    """The losses of a mini-batch at a point, recorded as in a step. Waits for the device."""
    if seed is not None:
        mx.random.seed(seed)
    try:
        point.enter()
        recorded = record(closure, inputs, point.network.devices)
    finally:
        point.leave()
    return Losses.of(recorded)


def draw_seed() -> int:
    """Draw a seed from MXNet's random numbers."""
    return int(mx.nd.random.randint(0, 2**31 - 1, shape=(1,)).asscalar())  # MXNet takes 31 bits
