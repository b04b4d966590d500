"""A process of a job: its output and its state."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Callable, NamedTuple, Sequence

from ..stores import calls

_MEASURE = 0.5  # seconds from one measurement of processor time to the next


class State(NamedTuple):
    """The state of a process. It is sent between machines."""

    role: str
    code: int | None = None  # as `subprocess` has it; None while it runs
    rank: str | None = None  # MXNet's
    finished: float = math.inf  # when its program ended, although MXNet may keep the process
    seconds: float = 0.0  # in which it used a processor or waited for one
    lost: dict | None = None  # which other processes it found silent, and for how long
    stopped: float = 0.0  # seconds since a signal stopped it
    ended: float = math.inf  # when the process ended
    calls: Sequence[int] | None = None  # the exchanges that it has begun, see `Calls`

    @property
    def has_finished(self) -> bool:
        """Whether its program has ended."""
        return self.finished < math.inf

    @property
    def name(self) -> str:
        """The role, with the rank of a worker if it is known."""
        has_rank = self.role.startswith("worker") and self.rank is not None
        return f"{self.role} (rank {self.rank})" if has_rank else self.role


class Process:
    """A process that the warden has started.

    Parameters
    ----------
    role : str
        Its name.
    process : int
        Its id.
    output : int
        The file descriptor of its output.
    place : Path
        The files of its reports to the launcher, without their suffixes.
    show_line : callable
        Called with each line of its output, with the role before it.
    """

    def __init__(
        self, role: str, process: int, output: int, place: Path, show_line: Callable[[str], None]
    ) -> None:
        self.role, self.id = role, process
        self.code: int | None = None
        self.ended = math.inf
        self._output, self._place, self._show_line = output, place, show_line
        self._measured = -math.inf, 0.0
        self._stopped_since: float | None = None
        self._reader = threading.Thread(target=self._forward, daemon=True)
        self._reader.start()

    def _forward(self) -> None:
        with open(self._output, encoding="utf-8", errors="replace") as stream:
            for line in stream:
                self._show_line(f"[{self.role}] {line.rstrip()}")

    def state(self) -> State:
        """Its current state."""
        code, lost = self.code, self._told("lost")
        return State(
            role=self.role,
            code=code,
            rank=self._told("rank"),
            finished=min(self._finished(), self.ended),
            seconds=self._seconds(),
            lost=None if lost is None else json.loads(lost),
            stopped=self._stopped(),
            ended=self.ended,
            calls=calls.read(str(self._place)),
        )

    def _told(self, what: str) -> str | None:
        try:
            return Path(f"{self._place}.{what}").read_text(encoding="utf-8")
        except OSError:
            return None

    def _finished(self) -> float:
        try:
            return Path(f"{self._place}.end").stat().st_mtime
        except OSError:
            return math.inf

    def _stopped(self) -> float:
        """How long it has been stopped."""
        try:
            status = Path(f"/proc/{self.id}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            status = ""
        if status != "T":
            self._stopped_since = None
            return 0.0
        self._stopped_since = self._stopped_since or time.monotonic()
        return time.monotonic() - self._stopped_since

    def _seconds(self) -> float:
        """Its processor time, plus the time for which it waited for a processor."""
        now = time.monotonic()
        if now - self._measured[0] > _MEASURE:
            self._measured = now, busy_seconds(self.id)
        return self._measured[1]

    def finish(self) -> None:
        """Wait for the last of its output."""
        self._reader.join(1)


def busy_seconds(process: int) -> float:
    """The time that all threads of a process used a processor or waited for one."""
    total = 0
    with suppress(OSError):  # the process has just ended
        for thread in os.listdir(f"/proc/{process}/task"):
            with suppress(OSError, ValueError):  # a thread that has just ended
                schedstat = Path(f"/proc/{process}/task/{thread}/schedstat").read_text()
                used, waited, _ = schedstat.split()
                total += int(used) + int(waited)
    return total / 1e9


def ending(code: int) -> str:
    """How a process ended, in words."""
    if code > 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
