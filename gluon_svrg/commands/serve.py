"""The processes of a job on this machine, directed from another machine."""

from __future__ import annotations

import os
import queue
import time
from typing import Any, Callable

from ..stores.launcher import allowed_silence
from .addresses import interface_of, route_to
from .channel import Channel
from .local import LocalProcesses, usable_port
from .process import State
from .roles import LaunchError, Role
from .signals import Interruptible

_INTERVAL = 0.1


def serve(
    channel: Channel,
    make: Callable[[dict], LocalProcesses],
    timeout: float,
    interrupted: Interruptible,
) -> tuple[int, str | None]:
    """Start and end processes as the other side directs, until it sends the exit status.

    Parameters
    ----------
    channel : Channel
        The channel to the machine that directs the job. It is opened here.
    make : callable
        Makes the processes from the settings, which are sent first.
    timeout : float
        The seconds within which silence of the other side ends the job; 0 for never.
    interrupted : Interruptible
        Notices signals.

    Returns
    -------
    status : int
        The exit status.
    reason : str or None
        Why the job ended, if the other side cannot say it.
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
            if timeout and channel.silence >= allowed_silence(timeout):
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
    """Whether anything has changed except times."""
    before = None if last is None else [state._replace(seconds=0, stopped=0) for state in last]
    return [state._replace(seconds=0, stopped=0) for state in states] != before


def _answer(question: str, *arguments: Any) -> Any:
    return QUESTIONS[question](*arguments)


def _port() -> int:
    return usable_port(None)


def _reached() -> str:
    """The address by which ssh has reached this machine."""
    return os.environ.get("SSH_CONNECTION", "").split()[2]


#: The questions that this machine answers.
QUESTIONS: dict[str, Callable[..., Any]] = {
    "port": _port,
    "route": route_to,
    "interface": interface_of,
    "reached": _reached,
}
