"""The random lock: both passes of a step draw the same random numbers.

With different dropout masks, the reference gradient and the gradient that it corrects belong to
different functions: the correction would add variance instead of removing it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator

import mxnet as mx
import numpy as np

from .._arguments import is_natural
from . import sketch
from .warnings import warn

RANDOM = (
    "The {what} of the same minibatch at the same weights, taken twice, differs by {difference} "
    "of its norm. If the network draws random numbers (dropout), the reference gradient adds "
    "variance unless both draw the same numbers. From now on they do, as with lock_random=True; "
    "with lock_random=False they would stay different."
)
NOT_REPEATABLE = (
    "The {what} of the same minibatch at the same weights, taken twice, differs by {difference} "
    "of its norm, although MXNet's random numbers were the same. The closure must compute the same "
    "each time: it must not draw a minibatch (next(iterator)), carry a state from call to call, or "
    "use random numbers from outside MXNet (custom operators do: MXNet does not seed them). Take "
    "the minibatch, the state and the augmentation before the step; lock_random=True and "
    "lock_random=False omit this check."
)
_LARGEST = 2**31 - 1  # MXNet takes 31 bits


class RandomLock:
    """Whether random numbers are locked, and the seeds that lock them.

    MXNet's generators can be seeded, but their states cannot be saved. So each pair of passes has
    its own seed, from the number of the pair and a base seed that is drawn once from MXNet.

    Parameters
    ----------
    mode : bool or 'auto'
        Whether to lock; ``'auto'`` locks if it proves necessary.

    Attributes
    ----------
    locked : bool
        Whether the lock is on.
    """

    def __init__(self, mode: Any) -> None:
        if not (isinstance(mode, bool) or mode == "auto"):
            raise ValueError(f"lock_random must be True, False or 'auto', got {mode!r}.")
        self.mode = mode
        self.locked: bool = mode is True
        self._base: int | None = None
        self._count = 0

    def turn_on(self, what: str, difference: float) -> None:
        """Lock random numbers, with a warning, because what was computed twice differs.

        Raises
        ------
        RuntimeError
            If they are locked already.
        """
        message = NOT_REPEATABLE if self.locked else RANDOM
        text = message.format(what=what, difference=sketch.in_words(difference))
        if self.locked:
            raise RuntimeError(text)
        warn(text)
        self.locked = True

    def new_seed(self) -> int | None:
        """Draw a seed for one pair of passes, if the lock is on."""
        return self._next_seed() if self.locked else None

    def move_on(self) -> None:
        """Seed MXNet anew, so that it does not repeat the numbers of an earlier seed."""
        start(self._next_seed())

    def _next_seed(self) -> int:
        if self._base is None:
            self._base = draw_seed()
        self._count += 1
        sequence = np.random.SeedSequence([self._base, self._count])
        return int(sequence.generate_state(1)[0] >> 1)

    @contextmanager
    def kept_on_error(self) -> Iterator[None]:
        """Restore the lock if the block raises an exception."""
        was_locked, count = self.locked, self._count
        try:
            yield
        except BaseException:
            self.locked, self._count = was_locked, count
            raise

    # --- its state, to be saved with the trainer -----------------------------------------------

    def state(self) -> dict[str, Any]:
        """Whether it is on, and which seeds were drawn. What is resumed draws the same."""
        if self.locked and self._base is None:
            self._base = draw_seed()
        return {
            "mode": self.mode,
            "locked": self.locked,
            "base": self._base,
            "count": self._count,
        }

    def problems(self, state: Any) -> Iterator[str]:
        """Tell why a state cannot be assigned."""
        if not (
            isinstance(state, dict)
            and set(state) == {"mode", "locked", "base", "count"}
            and (isinstance(state["mode"], bool) or state["mode"] == "auto")
            and isinstance(state["locked"], bool)
            and (state["base"] is None or is_natural(state["base"], _LARGEST))
            and is_natural(state["count"], 2**62)
        ):
            yield "the state of its random lock has another form"

    def assign(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        self.mode, self.locked = state["mode"], state["locked"]
        self._base, self._count = state["base"], state["count"]


def draw_seed() -> int:
    """Draw a seed from MXNet's random numbers."""
    return int(mx.nd.random.randint(0, _LARGEST, shape=(1,)).asscalar())


def start(seed: int | None) -> None:
    """Seed MXNet's random numbers."""
    if seed is not None:
        mx.random.seed(seed)
