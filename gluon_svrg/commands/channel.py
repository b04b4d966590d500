"""Messages between two processes of the command line: JSON, one message per line."""

from __future__ import annotations

import json
import queue
import threading
import time
from contextlib import suppress
from typing import Any, BinaryIO, Callable

from .proof import Seal

_BEAT = 1.0
_LONGEST = 2**24  # bytes of a message


class Channel:
    """Sends and receives messages, and notices whether the other side is alive.

    Parameters
    ----------
    reader, writer : binary files
        The files from and to the other side.
    close : callable
        Closes the connection below the files. Its argument says whether the other side is lost.
    seals : tuple of Seal, optional
        Those of arriving and of sent messages, where ssh does not protect the connection.
    """

    def __init__(
        self,
        reader: BinaryIO,
        writer: BinaryIO,
        close: Callable[[bool], Any],
        seals: tuple[Seal, Seal] | None = None,
    ) -> None:
        self._reader, self._writer, self._close, self._seals = reader, writer, close, seals
        self._outgoing: queue.Queue[bytes | None] = queue.Queue(1000)
        self.has_ended = False
        self.silence = 0.0  # seconds without a message
        self._heard = True
        self._flushed = threading.Event()

    def open(self, receive: Callable[[dict], None]) -> None:
        """Start threads that send messages, and that pass on arriving ones."""
        for target, arguments in ((self._read, (receive,)), (self._write, ()), (self._beat, ())):
            threading.Thread(target=target, args=arguments, daemon=True).start()

    def send(self, **message: Any) -> None:
        """Send a message; wait while the other side accepts none."""
        line = json.dumps(message).encode()
        while not self.has_ended:
            try:
                return self._outgoing.put(line, timeout=1)
            except queue.Full:
                continue

    def offer(self, **message: Any) -> None:
        """Send a message, unless the other side accepts none."""
        with suppress(queue.Full):
            self._outgoing.put_nowait(json.dumps(message).encode())

    def close(self, lost: bool = False) -> None:
        """Send the remaining messages, unless the other side is lost, and close."""
        with suppress(queue.Full):
            self._outgoing.put_nowait(None)
            self._flushed.wait(0 if lost else 2)
        self.has_ended = True
        with suppress(OSError, ValueError):
            self._close(lost)

    def _read(self, receive: Callable[[dict], None]) -> None:
        with suppress(OSError, ValueError):
            for line in iter(lambda: self._reader.readline(_LONGEST), b""):
                message = self._message(line)
                self._heard = True
                if message:
                    receive(message)
        self.has_ended = True

    def _message(self, line: bytes) -> dict:
        if self._seals is not None:
            return dict(json.loads(self._seals[0].open(line[:-1])))
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError, RecursionError):  # the output of a login shell
            return {"line": line.decode(errors="replace").rstrip()}

    def _write(self) -> None:
        with suppress(OSError, ValueError):
            while True:
                line = self._outgoing.get()
                if line is None:
                    break
                self._writer.write((self._seals[1].close(line) if self._seals else line) + b"\n")
                self._writer.flush()
        self._flushed.set()

    def _beat(self) -> None:
        """Count seconds of silence; those in which this process was stopped do not count."""
        while not self.has_ended:
            self.offer()
            time.sleep(_BEAT)
            self.silence = 0.0 if self._heard else self.silence + _BEAT
            self._heard = False
