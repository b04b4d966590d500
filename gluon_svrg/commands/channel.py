"""Messages between two processes of the command line: JSON, one message per line."""

from __future__ import annotations

import json
import queue
import threading
import time
from contextlib import suppress
from typing import Any, BinaryIO, Callable

_BEAT = 1.0


class Channel:
    """Sends and receives messages, and notices whether the other side is alive.

    Parameters
    ----------
    reader, writer : binary files
        The files from and to the other side.
    close : callable
        Closes the connection below the files. Its argument says whether the other side is lost.
    """

    def __init__(self, reader: BinaryIO, writer: BinaryIO, close: Callable[[bool], Any]) -> None:
        self._reader, self._writer, self._close = reader, writer, close
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
        with suppress(ValueError):
            line = json.dumps(message).encode() + b"\n"
            while not self.has_ended:
                try:
                    return self._outgoing.put(line, timeout=1)
                except queue.Full:
                    continue

    def offer(self, **message: Any) -> None:
        """Send a message, unless the other side accepts none."""
        with suppress(queue.Full):
            self._outgoing.put_nowait(json.dumps(message).encode() + b"\n")

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
            for line in self._reader:
                self._heard = True
                try:
                    message = json.loads(line)
                    if not isinstance(message, dict):
                        raise ValueError
                except ValueError:  # the output of a login shell
                    message = {"line": line.decode(errors="replace").rstrip()}
                if message:
                    receive(message)
        self.has_ended = True

    def _write(self) -> None:
        with suppress(OSError, ValueError):
            while True:
                line = self._outgoing.get()
                if line is None:
                    break
                self._writer.write(line)
                self._writer.flush()
        self._flushed.set()

    def _beat(self) -> None:
        """Count seconds of silence; those in which this process was stopped do not count."""
        while not self.has_ended:
            self.offer()
            time.sleep(_BEAT)
            self.silence = 0.0 if self._heard else self.silence + _BEAT
            self._heard = False
