"""The port of rank 0: the other processes of the job come in after a proof, strangers never."""

from __future__ import annotations

import errno
import json
import resource
import selectors
import socket
import time
from contextlib import suppress
from hmac import compare_digest
from typing import Any, NamedTuple

from .arguments import UserError
from .output import print_line
from .proof import nonce, proof
from .signals import EndedError, Interruptible

TITLE = "gluon-svrg join"
_INTERVAL = 0.2
#: Seconds and bytes in which two processes must prove to each other that they belong together.
HANDSHAKE, LONGEST = 5.0, 2000
_MOST = 128  # connections that have proved nothing yet
_TELL = 60.0  # seconds from one line about strangers to the next


class Guest(NamedTuple):
    """Another process, as rank 0 sees it."""

    rank: int
    host: str
    socket: socket.socket
    address: str  # of the other process
    here: str  # the address of this machine that it has used
    session: bytes  # the key of this conversation

    @property
    def is_local(self) -> bool:
        """Whether it runs on this machine."""
        return self.address == self.here


def listen(port: int, address: str = "") -> socket.socket:
    """Open the socket that the other ranks connect to.

    Parameters
    ----------
    port : int
        Its port; 0 is any free one.
    address : str
        The address of this machine that the others use; by default, any.
    """
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((address, port))
    except (OSError, OverflowError) as error:
        found.close()
        if getattr(error, "errno", None) == errno.EADDRNOTAVAIL and address:
            return listen(port)  # the others reach another machine, which passes on what they send
        reason = getattr(error, "strerror", None) or "expected a number from 1 to 65535"
        raise UserError(f"cannot use port {port}: {reason}") from error
    found.listen(1024)
    found.setblocking(False)
    return found


def receive(
    listener: socket.socket,
    size: int,
    key: bytes,
    seconds: float,
    interrupted: Interruptible,
) -> list[Guest]:
    """At rank 0: wait until all other ranks have connected.

    Raises
    ------
    UserError
        If some do not connect in time.
    """
    door = _Door(listener, size, key)
    deadline = time.monotonic() + seconds
    try:
        while len(door.guests) < size - 1:
            if interrupted.signal:
                raise EndedError(interrupted, "all had joined")
            if time.monotonic() > deadline:
                missing = [str(rank) for rank in range(1, size) if rank not in door.guests]
                raise UserError(
                    f"{_ranks(missing)} of {size} did not join within {seconds:g} s: "
                    "use a longer --wait" + door.refusals()
                )
            door.wait()
    finally:
        door.close()
    return [door.guests[rank] for rank in sorted(door.guests)]


def _ranks(numbers: list[str]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(numbers)


class _Visitor:
    """A connection that has not proved anything yet."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.said = connection, b""
        self.nonce = nonce().encode()
        self.until = time.monotonic() + HANDSHAKE


class _Door:
    """Where connections come in: the job's processes stay, after a proof; all others have to go.

    One thread serves all of them. None can make it wait, and those that prove nothing hold few
    resources for few seconds.
    """

    def __init__(self, listener: socket.socket, size: int, key: bytes) -> None:
        self.guests: dict[int, Guest] = {}
        self._listener, self._size, self._key = listener, size, key
        self._visitors: dict[socket.socket, _Visitor] = {}  # the first one has come first
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = _MOST if files < 0 else min(_MOST, files // 4)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._refused, self._told = 0, -_TELL

    def wait(self) -> None:
        """Serve who has come or has said something, after waiting for a moment."""
        for key, _ in self._selector.select(_INTERVAL):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj in self._visitors:
                self._hear(self._visitors[key.fileobj])
        now = time.monotonic()
        while self._visitors and next(iter(self._visitors.values())).until < now:
            self._refuse_first()
        if self._refused and now - self._told > _TELL:
            self._told = now
            print_line(f"{TITLE}: rank 0 still waits{self.refusals()}")

    def refusals(self) -> str:
        """How many were refused, in words."""
        if not self._refused:
            return ""
        number = "1 connection" if self._refused == 1 else f"{self._refused} connections"
        return f"; {number} did not prove to belong to this job"

    def close(self) -> None:
        """Send away who is left."""
        for connection in list(self._visitors):
            self._forget(connection).close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._refuse_first()
            return
        visitor = _Visitor(connection)
        self._visitors[connection] = visitor
        self._selector.register(connection, selectors.EVENT_READ)
        connection.setblocking(False)
        self._send(connection, visitor.nonce)
        if len(self._visitors) > self._most:
            self._refuse_first()

    def _send(self, connection: socket.socket, line: bytes) -> None:
        with suppress(OSError):  # it is short: if it does not fit, nobody listens
            connection.send(line + b"\n")

    def _hear(self, visitor: _Visitor) -> None:
        try:
            found = visitor.connection.recv(LONGEST)
        except BlockingIOError:
            return
        except OSError:
            found = b""
        visitor.said += found
        line, end, more = visitor.said.partition(b"\n")
        if end and not more:
            self._meet(visitor, line)
        elif not found or more or len(visitor.said) > LONGEST:
            self._refuse(visitor.connection)

    def _meet(self, visitor: _Visitor, line: bytes) -> None:
        """Let a process in that has proved that it belongs to the job."""
        connection = visitor.connection
        found, _, hello = line.partition(b" ")
        expected = proof(self._key, b"guest", visitor.nonce, hello)
        if not compare_digest(found, expected):
            return self._refuse(connection)
        try:
            told = json.loads(hello)
            rank, size, host = told["rank"], told["size"], str(told["host"])
            address, here = connection.getpeername()[0], connection.getsockname()[0]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return self._refuse(connection)
        refusal = self._reason_to_refuse(rank, size)
        answer = json.dumps({"refusal": refusal}).encode()
        expected = proof(self._key, b"rank 0", visitor.nonce, line, answer)
        self._send(connection, expected + b" " + answer)
        if refusal is not None:
            return self._forget(connection).close()
        session = proof(self._key, b"session", visitor.nonce, line, answer)
        self._forget(connection)
        self.guests[rank] = Guest(rank, host, connection, address, here, session)

    def _reason_to_refuse(self, rank: Any, size: Any) -> str | None:
        if size != self._size:
            return f"rank 0 expects {self._size} processes, and rank {rank} {size}"
        if type(rank) is not int or rank in self.guests or not 0 < rank < size:
            return f"there is already a rank {rank}"
        return None

    def _refuse_first(self) -> None:
        if self._visitors:
            self._refuse(next(iter(self._visitors)))

    def _refuse(self, connection: socket.socket) -> None:
        self._forget(connection).close()
        self._refused += 1

    def _forget(self, connection: socket.socket) -> socket.socket:
        del self._visitors[connection]
        self._selector.unregister(connection)
        return connection
