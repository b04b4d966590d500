"""The processes of a job on another machine, seen from this end of the channel."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any, Callable, Sequence

from ..stores.launcher import allowed_silence
from .channel import Channel
from .process import State
from .roles import LaunchError, Role
from .signals import EndedError, Interruptible

_INTERVAL = 0.1
_ANSWER = 20.0  # seconds


class RemoteProcesses:
    """The processes of a job on another machine, where `serve` starts and ends them.

    Parameters
    ----------
    channel : Channel
        The channel to that machine.
    name : str
        The machine's name in messages.
    timeout : float
        The seconds within which its silence ends the job; 0 for never.
    show_line : callable
        Called with each line of output that arrives here.
    slots : int, optional
        The most workers that it may run.
    """

    def __init__(
        self,
        channel: Channel,
        name: str,
        timeout: float,
        show_line: Callable[[str], None],
        slots: int | None = None,
    ) -> None:
        self.name, self.slots = name, slots
        self.label, self.address = name, ""
        self._channel, self._timeout, self._show_line = channel, timeout, show_line
        self._run = 0
        self._states: list[State] = []
        self._failure: str | None = None
        self._refusal: str | None = None
        self._answers: queue.Queue[Any] = queue.Queue()
        self._ended = threading.Event()

    def receive(self, message: dict) -> None:
        """Handle a message from the other machine."""
        if "line" in message:
            self._show_line(message["line"])
        if message.get("run") == self._run and "states" in message:
            self._states = [State(*state) for state in message["states"]]
        if message.get("run") == self._run and "ended" in message:
            self._ended.set()
        if "answer" in message:
            self._answers.put(message["answer"])
        if "refusal" in message:
            self._refusal = message["refusal"]
        if "failure" in message:
            self._failure = message["failure"]

    @property
    def problem(self) -> str | None:
        """Describe why its processes are out of reach; None while they are not."""
        if self._failure is not None:
            return self._failure
        if self._timeout and self._channel.silence >= allowed_silence(self._timeout):
            return f"did not answer for {self._timeout:g} s"
        if self._channel.has_ended:
            return "is out of reach: the connection has ended"
        return None

    def ask(
        self,
        question: str,
        *arguments: object,
        seconds: float = _ANSWER,
        interrupted: Interruptible | None = None,
    ) -> Any:
        """Ask a question that `serve.answer` answers, and wait.

        Raises
        ------
        LaunchError
            If there is no answer.
        """
        self._channel.send(ask=[question, *arguments])
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not (self.problem or self._refusal):
            if interrupted is not None and interrupted.signal:
                raise EndedError(interrupted, "the start")
            try:
                return self._answers.get(timeout=_INTERVAL)
            except queue.Empty:
                continue
        self.states()
        raise LaunchError(f"{self.label} {self.problem or 'gives no answer'}")

    def free_port(self, port: int | None = None) -> int:
        """A port that nothing listens on there: this one, or any."""
        return int(self.ask("port", port))

    def prepare(self, **settings: object) -> None:
        """Send what `serve` needs before it can start processes."""
        self._channel.send(prepare=settings)

    def start(self, roles: Sequence[Role]) -> None:
        """Start processes."""
        self._run += 1
        self._ended.clear()
        self._states = [State(role.name) for role in roles]
        self._channel.send(start=roles, run=self._run)

    def states(self) -> list[State]:
        """The state of each process.

        Raises
        ------
        LaunchError
            If one could not be started.
        """
        if self._refusal is not None:
            raise LaunchError(f"{self._refusal}, on {self.name}" if self.name else self._refusal)
        return self._states

    def end(self) -> None:
        """Tell all to end; `has_ended` waits for that."""
        self._channel.send(end=True)

    def has_ended(self, seconds: float) -> bool:
        """Whether all have ended, after waiting for at most this long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.problem:
            if self._ended.wait(_INTERVAL):
                return True
        return self._ended.is_set()

    def close(self, status: int) -> None:
        """End the connection; the other side exits with this status."""
        lost = self.problem is not None
        if not lost:
            self._channel.send(close=status)
        self._channel.close(lost)
