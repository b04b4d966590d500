"""The processes of a job on another machine: both ends of the channel to them."""

from __future__ import annotations

import os
import queue
import threading
import time
from typing import Any, Callable, Sequence

from .addresses import interface_of, route_to
from .channel import Channel
from .local import LocalProcesses, usable_port
from .process import State
from .roles import LaunchError, Role
from .signals import Interruptible

_INTERVAL = 0.1
_ANSWER = 20.0  # seconds


class RemoteProcesses:
    """The processes of a job on another machine, where `serve` starts and ends them.

    Parameters
    ----------
    channel : Channel
        To that machine.
    name : str
        What messages call the machine.
    timeout : float
        The seconds of silence after which it counts as lost; 0 for never.
    say : callable
        Gets each line of the output that arrives here.
    slots : int, optional
        The most workers that it may run.
    """

    def __init__(
        self,
        channel: Channel,
        name: str,
        timeout: float,
        say: Callable[[str], None],
        slots: int | None = None,
    ) -> None:
        self.name, self.slots = name, slots
        self.label, self.address = name, ""
        self._channel, self._timeout, self._say = channel, timeout, say
        self._run = 0
        self._states: list[State] = []
        self._failure: str | None = None
        self._refusal: str | None = None
        self._answers: queue.Queue[Any] = queue.Queue()
        self._ended = threading.Event()

    def receive(self, message: dict) -> None:
        """Take a message from the other machine."""
        if "line" in message:
            self._say(message["line"])
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
        """Why its processes are out of reach, in words; None while they are not."""
        if self._failure is not None:
            return self._failure
        if self._timeout and self._channel.silence >= self._timeout:
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
        """Ask for the result of one of the `QUESTIONS`, and wait for it.

        Raises
        ------
        LaunchError
            If there is no answer.
        """
        self._channel.send(ask=[question, *arguments])
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.problem:
            if interrupted is not None and interrupted.signal:
                raise LaunchError(f"ended by {interrupted.name} before the start")
            try:
                return self._answers.get(timeout=_INTERVAL)
            except queue.Empty:
                continue
        raise LaunchError(f"{self.label} {self.problem or self._refusal or 'gives no answer'}")

    def free_port(self) -> int:
        """A port that nothing listens on there."""
        return int(self.ask("port"))

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
        """What is known about each.

        Raises
        ------
        LaunchError
            If one could not be started.
        """
        if self._refusal is not None:
            raise LaunchError(f"{self._refusal}, on {self.name}" if self.name else self._refusal)
        return self._states

    def end(self) -> None:
        """Have all ended; `has_ended` waits for it."""
        self._channel.send(end=True)

    def has_ended(self, seconds: float) -> bool:
        """Whether all have ended, after so many seconds at most."""
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


def serve(
    channel: Channel,
    make: Callable[[dict], LocalProcesses],
    timeout: float,
    interrupted: Interruptible,
) -> tuple[int, str | None]:
    """Start and end processes as the other side says, until it says how to exit.

    Parameters
    ----------
    channel : Channel
        From the machine that directs the job. It is opened here.
    make : callable
        Makes the processes from the settings that are sent first.
    timeout : float
        The seconds of silence after which the other side counts as lost; 0 for never.
    interrupted : Interruptible
        Notices signals.

    Returns
    -------
    status : int
        The exit status.
    reason : str or None
        What has ended the job, where the other side cannot say it.
    """
    messages: queue.Queue[dict] = queue.Queue()
    channel.open(messages.put)
    processes: LocalProcesses | None = None
    run, sent, last = 0, 0.0, None
    try:
        while True:
            try:
                message = messages.get(timeout=_INTERVAL)
            except queue.Empty:
                message = {}
            if "prepare" in message:
                timeout = float(message["prepare"].get("timeout", timeout))
                try:
                    processes = make(message["prepare"])
                except OSError as error:
                    channel.send(refusal=f"{error.strerror}: {error.filename}")
            if "ask" in message:
                channel.send(answer=_answer(*message["ask"]))
            if "start" in message and processes is not None:
                run = message["run"]
                try:
                    processes.start([Role(*role) for role in message["start"]])
                except LaunchError as error:
                    channel.send(refusal=str(error))
            if "end" in message and processes is not None:
                processes.end()
                channel.send(ended=True, run=run)
            if "close" in message:
                return int(message["close"]), None
            if interrupted.signal:
                name = interrupted.name
                channel.send(failure=f"was ended by {name}")
                return 128 + interrupted.signal, f"was ended by {name}"
            if channel.has_ended and messages.empty():
                return 1, "is out of reach: the connection has ended"
            if timeout and channel.silence >= timeout:
                return 1, f"did not answer for {timeout:g} s"
            states = processes.states() if processes is not None else []
            now = time.monotonic()
            if states != last and now - sent > (0 if _news(states, last) else 1):
                channel.offer(states=states, run=run)
                sent, last = now, states
    finally:
        if processes is not None:
            processes.close(0)
        channel.close()


def _news(states: list[State], last: list[State] | None) -> bool:
    """Whether more has changed than what time changes."""
    before = None if last is None else [state._replace(seconds=0, stopped=0) for state in last]
    return [state._replace(seconds=0, stopped=0) for state in states] != before


def _answer(question: str, *arguments: Any) -> Any:
    return QUESTIONS[question](*arguments)


def _port() -> int:
    return usable_port(None)


def _reached() -> str:
    """The address by which ssh has reached this machine."""
    return os.environ.get("SSH_CONNECTION", "").split()[2]


#: What can be asked of the other machine.
QUESTIONS: dict[str, Callable[..., Any]] = {
    "port": _port,
    "route": route_to,
    "interface": interface_of,
    "reached": _reached,
}
