"""How the other processes of a job find the one of rank 0, and let it prove that it is."""

from __future__ import annotations

import json
import os
import secrets
import socket
import stat
import time
from contextlib import suppress
from hmac import compare_digest
from pathlib import Path
from typing import Any, Callable, NamedTuple

from .arguments import UserError
from .channel import Channel
from .door import HANDSHAKE, LONGEST, TITLE
from .output import print_line
from .proof import Seal, nonce, proof
from .roles import is_address
from .signals import EndedError, Interruptible

_INTERVAL = 0.2


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
                found = cls(**json.loads(opened.read(LONGEST * 10)))
                is_valid = all(map(is_address, found.addresses)) and len(found.token) > 20
                return found if is_valid and 0 < found.port < 65536 else None
            except (ValueError, TypeError, RecursionError):
                return None

    def key(self, secret: bytes) -> bytes:
        """What the processes of the job know, and nobody else."""
        return secret + b"\n" + self.token.encode()

    def is_open(self) -> bool:
        """Whether rank 0 still waits there for other ranks."""
        return any(map(self._answers, self.addresses))

    def _answers(self, address: str) -> bool:
        try:
            with socket.create_connection((address, self.port), timeout=2):
                return True
        except OSError:
            return False


class _NoProofError(OSError):
    """Something listens that has not proved to be rank 0 of this job."""


def connect(
    find: Callable[[], Meeting | None],
    secret: bytes,
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
        if reason and not told and time.monotonic() > deadline - seconds + HANDSHAKE:
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
    deadline = time.monotonic() + HANDSHAKE
    connection = socket.create_connection(address, timeout=HANDSHAKE)
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
        if left <= 0 or len(line) > LONGEST:
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
