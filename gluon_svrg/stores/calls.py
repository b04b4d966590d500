"""The calls that all workers must make alike, counted where the launcher can read them.

A step and a refresh each wait for the same call of all other workers. If these make another one,
MXNet waits forever. The launcher cannot see what a worker waits for, but it can compare the calls:
a worker that is only slow has made the first ones of the others' calls.
"""

from __future__ import annotations

import mmap
import struct
from typing import Any, NamedTuple

from . import launcher

_FORMAT = struct.Struct("3q")
_counts: Any = None  # of this process, in a file; None if no launcher reads them


class Calls(NamedTuple):
    """The calls that a worker has begun."""

    steps: int
    refreshes: int
    before: int  # the steps before the last refresh

    def __str__(self) -> str:
        if not self.steps + self.refreshes:
            return "no call yet"
        if self.steps == self.before:
            return f"refresh {self.refreshes}, after {_number(self.steps, 'step')}"
        return f"step {self.steps}, after {_number(self.refreshes, 'refresh', 'refreshes')}"

    def can_become(self, other: Calls) -> bool:
        """Whether these calls are the first ones of another worker's, or the other way round."""
        few, many = sorted((self, other), key=lambda calls: calls.refreshes)
        if few.refreshes == many.refreshes:
            return few.before == many.before
        return few.steps <= many.before  # otherwise the missing refresh came after fewer steps


def _number(count: int, one: str, several: str = "") -> str:
    return f"{count} {one if count == 1 else several or one + 's'}"


def begin() -> None:
    """In a worker whose steps wait for the other workers: count calls, if a launcher asks."""
    global _counts
    path = launcher.path_of("calls")
    if _counts is None and path is not None:
        with open(path, "w+b") as file:
            file.truncate(_FORMAT.size)
            _counts = memoryview(mmap.mmap(file.fileno(), _FORMAT.size)).cast("q")


def step() -> None:
    """Count a step, before its gradients are sent."""
    if _counts is not None:
        _counts[0] += 1


def refresh() -> None:
    """Count a refresh, before it waits for the other workers."""
    if _counts is not None:
        _counts[2] = _counts[0]
        _counts[1] += 1


def read(place: str) -> Calls | None:
    """In the launcher: the calls of a worker, if it counts them."""
    try:
        with open(f"{place}.calls", "rb") as file:
            return Calls(*_FORMAT.unpack(file.read()))
    except (OSError, struct.error):
        return None
