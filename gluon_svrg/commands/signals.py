"""Signals that end a command in an orderly way."""

from __future__ import annotations

import signal
import threading
from typing import Any


class Interruptible:
    """Notice Ctrl-C and SIGTERM instead of dying of them, so that no process is left behind."""

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[int, Any] = {}

    @property
    def name(self) -> str:
        """Of the signal."""
        return signal.Signals(self.signal).name

    def __enter__(self) -> Interruptible:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._before[number] = signal.signal(number, self._notice)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _notice(self, number: int, frame: object) -> None:
        self.signal = number
