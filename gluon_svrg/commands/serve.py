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
from .roles import LaunchError, checked, is_address
from .signals import Interruptible

_INTERVAL = 0.1


def serve(
    channel: Channel,
    timeout: float,
    interrupted: Interruptible,
    processes: LocalProcesses | None = None,
    make: Callable[[dict], LocalProcesses] | None = None,
) -> tuple[int, str | None]:
    """Start and end processes as the other side directs, until it sends the exit status.

    Parameters
    ----------
    channel : Channel
        The channel to the machine that directs the job. It is opened here.
    timeout : float
        The seconds within which silence of the other side ends the job; 0 for never.
    interrupted : Interruptible
        Notices signals.
    processes : LocalProcesses, optional
        What the other side directs: it chooses roles, but no command and no other variables.
    make : callable, optional
        Makes them from the settings that are sent first, by a user who has logged in with ssh.

    Returns
    -------
    status : int
        The exit status.
    reason : str or None
        Why the job ended, if the other side cannot say it.
    """
    messages: queue.Queue[dict] = queue.Queue()
    channel.open(messages.put)
    run, sent, last = 0, 0.0, None
    try:
        while True:
            try:
                message = messages.get(timeout=_INTERVAL)
            except queue.Empty:
                message = {}
            try:
                if "prepare" in message and make is not None:
                    timeout = float(message["prepare"]["timeout"])
                    processes = make(message["prepare"])
                if "ask" in message:
                    channel.send(answer=answer(*message["ask"]))
                if "start" in message and processes is not None:
                    run, roles = int(message["run"]), checked(message["start"])
                    processes.start(roles)
            except OSError as error:
                channel.send(refusal=f"{error.strerror}: {error.filename}")
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
    except (TypeError, ValueError, KeyError) as error:
        return 1, f"sent what no job needs ({error})"
    finally:
        if processes is not None:
            processes.close(0)
        channel.close()


def _news(states: list[State], last: list[State] | None) -> bool:
    """Whether anything has changed that cannot wait for a second."""
    return last is None or list(map(_urgent, states)) != list(map(_urgent, last))


def _urgent(state: State) -> State:
    return state._replace(seconds=0, stopped=0, calls=None)


def answer(question: str, argument: Any = None) -> Any:
    """Answer a question of the machine that directs the job.

    Raises
    ------
    LaunchError
        If a port cannot be used.
    ValueError
        If it is no such question.
    """
    if question == "port" and (argument is None or type(argument) is int):
        return usable_port(argument)
    if question == "reached":  # the address by which ssh has reached this machine
        connection = os.environ.get("SSH_CONNECTION", "").split()
        if len(connection) < 3:
            raise LaunchError(
                "SSH_CONNECTION is not set, which tells by which address ssh has reached this "
                "machine. Start the job with gluon-svrg launch -H, by ssh."
            )
        return connection[2]
    if question == "route" and is_address(argument):
        return route_to(argument)
    if question == "interface" and is_address(argument):
        return interface_of(argument)
    raise ValueError(f"the question {question!r}")
