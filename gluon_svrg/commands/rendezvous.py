"""How the processes of a job find the one of rank 0, and prove to each other who they are."""

from __future__ import annotations

import errno
import json
import os
import resource
import secrets
import selectors
import socket
import stat
import time
from contextlib import suppress
from hmac import compare_digest
from pathlib import Path
from typing import Any, Callable, NamedTuple

from .arguments import UserError
from .channel import Channel
from .output import print_line
from .proof import Seal, nonce, proof
from .roles import is_address
from .signals import EndedError, Interruptible

TITLE = "gluon-svrg join"
_INTERVAL = 0.2
_HANDSHAKE = 5.0  # seconds
_LONGEST = 2000  # bytes of a message
_MOST = 128  # connections that have proved nothing yet
_TELL = 60.0  # seconds from one line about strangers to the next


class Meeting(NamedTuple):
    """The place to find rank 0."""

    addresses: list[str]
    port: int
    token: str = ""  # what a process knows that has read the file

    def write(self, path: Path) -> None:
        """Write a file that only this user can read, and that appears complete."""
        new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            json.dump(self._asdict(), file)
        os.replace(new, path)

    @classmethod
    def read(cls, path: Path) -> Meeting | None:
        """Read such a file; None if there is none.

        Raises
        ------
        OSError
            If another user has written it, or could have.
        """
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        with open(file, encoding="utf-8") as opened:
            status = os.fstat(file)
            mode = stat.S_IFMT(status.st_mode) | status.st_mode & 0o077
            if status.st_uid != os.geteuid() or mode != stat.S_IFREG:
                raise PermissionError(f"{path} is no file that only this user could have written")
            try:
                found = cls(**json.loads(opened.read(_LONGEST * 10)))
                is_valid = all(map(is_address, found.addresses)) and len(found.token) > 20
                return found if is_valid and 0 < found.port < 65536 else None
            except (ValueError, TypeError, RecursionError):
                return None

    def key(self, secret: str) -> bytes:
        """What the processes of the job know, and nobody else."""
        return f"{secret}\n{self.token}".encode()

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
        self.until = time.monotonic() + _HANDSHAKE


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
        self._say(connection, visitor.nonce)
        if len(self._visitors) > self._most:
            self._refuse_first()

    def _say(self, connection: socket.socket, line: bytes) -> None:
        with suppress(OSError):  # it is short: if it does not fit, nobody listens
            connection.send(line + b"\n")

    def _hear(self, visitor: _Visitor) -> None:
        try:
            found = visitor.connection.recv(_LONGEST)
        except BlockingIOError:
            return
        except OSError:
            found = b""
        visitor.said += found
        line, end, more = visitor.said.partition(b"\n")
        if end and not more:
            self._meet(visitor, line)
        elif not found or more or len(visitor.said) > _LONGEST:
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
        self._say(connection, expected + b" " + answer)
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


class _NoProofError(OSError):
    """Something listens that has not proved to be rank 0 of this job."""


def connect(
    find: Callable[[], Meeting | None],
    secret: str,
    rank: int,
    size: int,
    seconds: float,
    interrupted: Interruptible,
) -> tuple[socket.socket, bytes]:
    """At another rank: connect to rank 0, as soon as it listens.

    Returns
    -------
    connection : socket
    session : bytes
        The key of this conversation.

    Raises
    ------
    UserError
        If it does not listen in time, or refuses.
    """
    deadline = time.monotonic() + seconds
    reason, told = "", False
    while time.monotonic() < deadline:
        try:
            meeting = find()
            for address in meeting.addresses if meeting else ():
                assert meeting is not None
                try:
                    return _introduce((address, meeting.port), meeting.key(secret), rank, size)
                except _NoProofError as error:
                    reason = f"; {error}"
                except (OSError, ValueError):
                    continue
        except OSError as error:
            reason = f"; {error}"
        if reason and not told and time.monotonic() > deadline - seconds + _HANDSHAKE:
            told = True
            print_line(f"{TITLE}: rank {rank} still waits for rank 0{reason}")
        if interrupted.signal:
            raise EndedError(interrupted, "rank 0 answered")
        time.sleep(_INTERVAL)
    raise UserError(f"rank 0 did not answer within {seconds:g} s: use a longer --wait{reason}")


def _introduce(
    address: tuple[str, int], key: bytes, rank: int, size: int
) -> tuple[socket.socket, bytes]:
    """Prove to belong to the job, and let rank 0 prove it; before that nothing of it is used."""
    deadline = time.monotonic() + _HANDSHAKE
    connection = socket.create_connection(address, timeout=_HANDSHAKE)
    try:
        challenge = _line(connection, deadline)
        hello = {"rank": rank, "size": size, "host": socket.gethostname(), "nonce": nonce()}
        said = json.dumps(hello).encode()
        line = proof(key, b"guest", challenge, said) + b" " + said
        connection.sendall(line + b"\n")
        found, _, answer = _line(connection, deadline).partition(b" ")
        if not compare_digest(found, proof(key, b"rank 0", challenge, line, answer)):
            raise _NoProofError
        refusal = json.loads(answer)["refusal"]
        if refusal is not None:
            raise UserError(refusal)
    except (_NoProofError, ConnectionResetError) as error:
        connection.close()
        raise _NoProofError(
            f"what listens on {address[0]}:{address[1]} did not prove to be rank 0 of this job"
        ) from error
    except BaseException:
        connection.close()
        raise
    return connection, proof(key, b"session", challenge, line, answer)


def _line(connection: socket.socket, deadline: float) -> bytes:
    """Read up to the end of a line, and no further."""
    line = b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or len(line) > _LONGEST:
            raise _NoProofError
        connection.settimeout(left)
        try:
            byte = connection.recv(1)
        except socket.timeout:
            raise _NoProofError from None
        if not byte:
            raise _NoProofError
        line += byte
    return line[:-1]


def channel(connection: socket.socket, session: bytes, is_root: bool) -> Channel:
    """Make a channel of a connection."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    from_root, to_root = (Seal(proof(session, side)) for side in (b"from rank 0", b"to rank 0"))

    def close(lost: bool) -> Any:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()

    seals = (to_root, from_root) if is_root else (from_root, to_root)
    return Channel(connection.makefile("rb"), connection.makefile("wb"), close, seals)
