"""A process of a job: its output, its state, and how to end it."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Callable, Mapping, NamedTuple, Sequence

from ..stores.launcher import PLACE

_MEASURE = 0.5  # seconds from one measurement of processor time to the next


def print_line(line: str) -> None:
    """Print a complete line at once, even if other threads print too."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


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
    """A process that leads its own session and process group.

    Parameters
    ----------
    role : str
        Its name.
    command : sequence of str
        Its command.
    environment : dict of str
        All of its variables.
    folder : Path
        The folder of its reports to the launcher.
    say : callable
        Called with each line of its output, with the role before it.
    """

    def __init__(
        self,
        role: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        say: Callable[[str], None],
    ) -> None:
        self.role = role
        self._place, self._say = folder / role, say
        self._process = subprocess.Popen(
            command,
            env={**environment, PLACE: str(self._place)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.id = self._process.pid
        self._measured = -math.inf, 0.0
        self._stopped_since: float | None = None
        self._reader = threading.Thread(target=self._forward, daemon=True)
        self._reader.start()
        self._ended = math.inf
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        """Record when it ended: other processes may die of that within milliseconds."""
        self._process.wait()
        self._ended = time.time()

    def _forward(self) -> None:
        stream: IO[str] = self._process.stdout  # type: ignore[assignment]
        for line in stream:
            self._say(f"[{self.role}] {line.rstrip()}")

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def state(self) -> State:
        """Its current state."""
        code, lost = self._process.poll(), self._told("lost")
        return State(
            role=self.role,
            code=code,
            rank=self._told("rank"),
            finished=min(self._finished(), self._ended),
            seconds=self._seconds(),
            lost=None if lost is None else json.loads(lost),
            stopped=self._stopped(),
            ended=self._ended,
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

    def signal(self, number: int) -> None:
        """Send a signal to the process and everything that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.id, number)

    def finish(self) -> None:
        """Wait for the process and its output to end."""
        self._process.wait()
        self._reader.join(1)
        if not self._reader.is_alive() and self._process.stdout is not None:
            self._process.stdout.close()


def busy_seconds(process: int) -> float:
    """The time that all threads of a process used a processor or waited for one."""
    total = 0
    for file in Path(f"/proc/{process}/task").glob("*/schedstat"):
        with suppress(OSError, ValueError):  # a thread that has just ended
            used, waited, _ = file.read_text().split()
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
