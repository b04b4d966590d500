"""How the processes of a job find the one of rank 0, and connect to it."""

from __future__ import annotations

import json
import os
import queue
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, NamedTuple

from .arguments import UserError
from .channel import Channel
from .signals import Interruptible

_INTERVAL = 0.2
_HANDSHAKE = 5.0  # seconds


class Meeting(NamedTuple):
    """The place to find rank 0."""

    addresses: list[str]
    port: int
    token: str = ""  # proves that a process has read the file

    def write(self, path: Path) -> None:
        """Write a file that only this user can read, and that appears complete."""
        new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            json.dump(self._asdict(), file)
        os.replace(new, path)

    @classmethod
    def read(cls, path: Path) -> Meeting | None:
        """Read such a file; None if there is none."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def is_open(self) -> bool:
        """Whether rank 0 still waits there for other ranks."""
        return any(map(self._answers, self.addresses))

    def _answers(self, address: str) -> bool:
        try:
            with socket.create_connection((address, self.port), timeout=2):
                return True
        except OSError:
            return False


class Guest(NamedTuple):
    """Another process, as rank 0 sees it."""

    rank: int
    host: str
    socket: socket.socket
    address: str  # of the other process
    here: str  # the address of this machine that it has used

    @property
    def is_local(self) -> bool:
        """Whether it runs on this machine."""
        return self.address == self.here


def listen(port: int) -> socket.socket:
    """Open the socket that the other ranks connect to; port 0 is any free one."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(("", port))
    except (OSError, OverflowError) as error:
        found.close()
        reason = getattr(error, "strerror", None) or "expected a number from 1 to 65535"
        raise UserError(f"cannot use port {port}: {reason}") from error
    found.listen(1024)
    return found


def receive(
    listener: socket.socket,
    size: int,
    token: str,
    seconds: float,
    interrupted: Interruptible,
) -> list[Guest]:
    """At rank 0: wait until all other ranks have connected.

    Raises
    ------
    UserError
        If some do not connect in time.
    """
    guests: dict[int, Guest] = {}
    arrived: queue.Queue[tuple[Guest, dict]] = queue.Queue()
    listener.settimeout(_INTERVAL)
    deadline = time.monotonic() + seconds
    while len(guests) < size - 1:
        if interrupted.signal:
            raise UserError(f"ended by {interrupted.name} before all had joined")
        if time.monotonic() > deadline:
            missing = [str(rank) for rank in range(1, size) if rank not in guests]
            raise UserError(
                f"{_ranks(missing)} of {size} did not join within {seconds:g} s: "
                "use a longer --wait"
            )
        with suppress(socket.timeout):
            connection, _ = listener.accept()
            threading.Thread(target=_greet, args=(connection, arrived), daemon=True).start()
        while not arrived.empty():
            guest, hello = arrived.get()
            refusal = _refusal(guest, hello, size, token, guests)
            with suppress(OSError):
                guest.socket.sendall(json.dumps({"refusal": refusal}).encode() + b"\n")
            if refusal is None:
                guests[guest.rank] = guest
            else:
                guest.socket.close()
    return [guests[rank] for rank in sorted(guests)]


def _ranks(numbers: list[str]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(numbers)


def _greet(connection: socket.socket, arrived: queue.Queue[tuple[Guest, dict]]) -> None:
    """Read the first message of a process. Drop connections from elsewhere."""
    try:
        connection.settimeout(_HANDSHAKE)
        hello = json.loads(_line(connection))
        guest = Guest(
            int(hello["rank"]),
            str(hello["host"]),
            connection,
            connection.getpeername()[0],
            connection.getsockname()[0],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return connection.close()
    arrived.put((guest, hello))


def _refusal(
    guest: Guest, hello: dict, size: int, token: str, guests: dict[int, Guest]
) -> str | None:
    if not secrets.compare_digest(str(hello.get("token")), token):
        return "another job"
    if hello.get("size") != size:
        return f"rank 0 expects {size} processes, and rank {guest.rank} {hello.get('size')}"
    if guest.rank in guests or not 0 < guest.rank < size:
        return f"there is already a rank {guest.rank}"
    return None


def connect(
    find: Callable[[], Meeting | None],
    rank: int,
    size: int,
    seconds: float,
    interrupted: Interruptible,
) -> socket.socket:
    """At another rank: connect to rank 0, as soon as it listens.

    Raises
    ------
    UserError
        If it does not listen in time, or refuses.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        meeting = find()
        for address in meeting.addresses if meeting else ():
            with suppress(OSError, ValueError):
                return _introduce(address, meeting, rank, size)  # type: ignore[arg-type]
        if interrupted.signal:
            raise UserError(f"ended by {interrupted.name} before rank 0 answered")
        time.sleep(_INTERVAL)
    raise UserError(f"rank 0 did not answer within {seconds:g} s: use a longer --wait")


def _introduce(address: str, meeting: Meeting, rank: int, size: int) -> socket.socket:
    connection = socket.create_connection((address, meeting.port), timeout=_HANDSHAKE)
    try:
        hello = {"token": meeting.token, "rank": rank, "size": size, "host": socket.gethostname()}
        connection.sendall(json.dumps(hello).encode() + b"\n")
        refusal = json.loads(_line(connection))["refusal"]
    except BaseException:
        connection.close()
        raise
    if refusal == "another job":  # the file is old, or another machine has this address
        connection.close()
        raise OSError
    if refusal is not None:
        connection.close()
        raise UserError(refusal)
    return connection


def _line(connection: socket.socket) -> bytes:
    """Read up to the end of a line, and no further."""
    line = b""
    while not line.endswith(b"\n") and len(line) < 10000:
        byte = connection.recv(1)
        if not byte:
            raise OSError("closed")
        line += byte
    return line


def channel(connection: socket.socket) -> Channel:
    """Make a channel of a connection."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(lost: bool) -> Any:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()

    return Channel(connection.makefile("rb"), connection.makefile("wb"), close)
