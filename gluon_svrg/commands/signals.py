"""Orderly ends of a command: on signals, and on the death of its parent."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from . import output
from .arguments import UserError


class Interruptible:
    """Note Ctrl-C and SIGTERM instead of dying of them, so that no process is left behind.

    Parameters
    ----------
    needs_parent : bool
        Whether the death of the parent process counts as SIGHUP. Launchers of clusters do not end
        their processes when they are killed.
    needs_reader : bool
        Whether the end of the output's reader counts as SIGPIPE, as for most programs.
    """

    def __init__(self, needs_parent: bool = False, needs_reader: bool = True) -> None:
        self._number = 0
        self._needs_reader = needs_reader
        self._parent = os.getppid() if needs_parent else None
        self._before: dict[int, Any] = {}

    @property
    def signal(self) -> int:
        """The number of the signal that has arrived; 0 for none."""
        if self._number == 0 and self._parent not in (None, os.getppid()):
            self._number = signal.SIGHUP
        if self._number == 0 and self._needs_reader and output.is_lost():
            self._number = signal.SIGPIPE
        return self._number

    @property
    def name(self) -> str:
        """The name of the signal."""
        reason = ", for nobody reads its output" if self._number == signal.SIGPIPE else ""
        return signal.Signals(self._number).name + reason

    def __enter__(self) -> Interruptible:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                    self._before[number] = signal.signal(number, self._notice)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _notice(self, number: int, frame: object) -> None:
        self._number = number


class EndedError(UserError):
    """A signal that came before the job."""

    def __init__(self, interrupted: Interruptible, before: str) -> None:
        super().__init__(f"ended by {interrupted.name} before {before}")
        self.status = 128 + interrupted.signal
