"""What a worker reports to its launcher.

Importing this costs nothing: the command line does, and so do the servers inside ``import mxnet``.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

#: The variable that names the file, without its ending, where a process tells its launcher things.
PLACE = "GLUON_SVRG_TELL"

_place: str | None = None
_process = 0


def tell_launcher() -> None:
    """In a worker: let the launcher know when the program ends, and end at once on an error.

    Otherwise MXNet would keep the process, waiting for the other workers, which wait for it. Only
    the first program that imports this package is the worker; those that it starts are not.
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
    """Tell the launcher of the end before all that was registered for it until now.

    Waiting for the last sum may take forever, if the others do not take part in it.
    """
    atexit.register(tell, "end", "")


def is_launched() -> bool:
    """Whether this process is a worker that a launcher has started."""
    return _place is not None and os.getpid() == _process


def tell(what: str, text: str) -> None:
    """Tell the launcher something, if there is one."""
    place = _place if os.getpid() == _process else os.environ.get(PLACE)
    if place is None:
        return
    try:
        with open(f"{place}.{what}.new", "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(f"{place}.{what}.new", f"{place}.{what}")  # it appears whole
    except OSError:
        pass  # the launcher has died, and this process will, too
