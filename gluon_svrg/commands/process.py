"""A process of a job: what it says, what is known about it, and how it is ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, Callable, Mapping, NamedTuple, Sequence

from ..stores.launcher import PLACE


class State(NamedTuple):
    """What is known about a process. It travels between machines."""

    role: str
    code: int | None = None  # as `subprocess` has it; None while it runs
    rank: str | None = None  # MXNet's
    has_finished: bool = False  # its program has, though MXNet may keep the process
    seconds: float = 0.0  # of processor time
    lost: dict | None = None  # which others it has found silent, and for how long

    @property
    def name(self) -> str:
        """The role, with the rank of a worker where it is known."""
        has_rank = self.role.startswith("worker") and self.rank is not None
        return f"{self.role} (rank {self.rank})" if has_rank else self.role


class Process:
    """A process, the leader of a session and process group of its own.

    Parameters
    ----------
    role : str
        What it is called.
    command : sequence of str
        What it runs.
    environment : dict of str
        All of its variables.
    folder : Path
        Where it tells the launcher things.
    say : callable
        Gets each line of its output, with the role before it.
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
        self._reader = threading.Thread(target=self._forward, daemon=True)
        self._reader.start()

    def _forward(self) -> None:
        stream: IO[str] = self._process.stdout  # type: ignore[assignment]
        for line in stream:
            self._say(f"[{self.role}] {line.rstrip()}")

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def state(self) -> State:
        """What is known about it now."""
        code, lost = self._process.poll(), self._told("lost")
        return State(
            role=self.role,
            code=code,
            rank=self._told("rank"),
            has_finished=code is not None or self._told("end") is not None,
            seconds=self._seconds(),
            lost=None if lost is None else json.loads(lost),
        )

    def _told(self, what: str) -> str | None:
        try:
            return Path(f"{self._place}.{what}").read_text(encoding="utf-8")
        except OSError:
            return None

    def _seconds(self) -> float:
        try:
            fields = Path(f"/proc/{self.id}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def signal(self, number: int) -> None:
        """Send a signal to the process and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.id, number)

    def finish(self) -> None:
        """Wait for the process and its output to end."""
        self._process.wait()
        self._reader.join(1)
        if not self._reader.is_alive() and self._process.stdout is not None:
            self._process.stdout.close()


def ending(code: int) -> str:
    """How a process ended, in words."""
    if code > 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
