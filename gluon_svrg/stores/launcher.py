"""The reports of a worker to its launcher.

This module is cheap to import: the command line imports it, and so do servers inside
``import mxnet``.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

#: The variable with the path, without suffix, of the files that a process writes for its launcher.
PLACE = "GLUON_SVRG_TELL"
#: The variable that sets the seconds within which a silent process ends the job, and its default.
TIMEOUT_VARIABLE = "GLUON_SVRG_TIMEOUT"
DEFAULT_TIMEOUT = 45.0

_place: str | None = None
_process = 0


def allowed_silence(timeout: float) -> float:
    """The seconds of silence after which a process counts as dead.

    They are fewer than the time-out: silence is noticed within a second, and what is left of the
    job then has a second to end.
    """
    return timeout - min(2.0, timeout / 4)


def tell_launcher() -> None:
    """In a worker: tell the launcher when the program ends, and end at once on an error.

    Otherwise MXNet would keep the process alive to wait for the other workers, which wait for it.
    Only the first program that imports this package is the worker; programs that it starts are not.
    """
    global _place, _process
    if os.environ.get("DMLC_ROLE", "worker") != "worker" or PLACE not in os.environ:
        return
    _place, _process = os.environ.pop(PLACE), os.getpid()
    tell_the_end()
    hook = sys.excepthook

    def end_at_once(kind: Any, error: Any, traceback: Any) -> None:
        hook(kind, error, traceback)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = end_at_once


def tell_the_end() -> None:
    """Register the report of the program's end to run before all earlier exit functions.

    One of those waits for the last sum, which can take forever if the other workers are missing.
    """
    atexit.register(tell, "end", "")


def is_launched() -> bool:
    """Whether this process is a worker that a launcher has started."""
    return _place is not None and os.getpid() == _process


def path_of(what: str) -> str | None:
    """The file of a report to the launcher, if there is one."""
    place = _place if os.getpid() == _process else os.environ.get(PLACE)
    return None if place is None else f"{place}.{what}"


def number_of_workers() -> int:
    """The workers of the job that a launcher has made this process part of; 1 without one."""
    if not is_launched():
        return 1
    sizes = (os.environ.get(name, "1") for name in ("DMLC_NUM_WORKER", "HOROVOD_SIZE"))
    return max(int(size) for size in sizes if size.isdigit())


def tell(what: str, text: str) -> None:
    """Tell the launcher something, if there is one."""
    path = path_of(what)
    if path is None:
        return
    try:
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(f"{path}.new", path)  # no reader sees half a file
    except OSError:
        pass  # the launcher has died, and this process will, too
