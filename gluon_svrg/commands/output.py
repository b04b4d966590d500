"""The output of the command line, whose reader may go away."""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress

_is_lost = False


def print_line(line: str) -> None:
    """Print a complete line at once, even if other threads print too.

    If the output cannot be written, nothing is raised: `is_lost` tells.
    """
    try:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except OSError:
        _lose()


def print_last_line(line: str) -> None:
    """Print what the user must know, even if nobody reads the output: then to stderr."""
    print_line(line)
    if _is_lost:
        with suppress(OSError):
            print(line, file=sys.stderr, flush=True)


def is_lost() -> bool:
    """Whether the reader of the output has gone away, also if nothing was written since then."""
    if not _is_lost:
        poll = select.poll()
        poll.register(1, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            _lose()
    return _is_lost


def _lose() -> None:
    """Let all further output vanish, what Python has kept for a last attempt included."""
    global _is_lost
    if not _is_lost:
        _is_lost = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
