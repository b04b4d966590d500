"""What a process knows of its job. It imports only Python's own modules.

The package imports this first, on servers inside ``import mxnet``.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from typing import Any

#: The variable with the seconds after which a worker without a step ends.
TIMEOUT = "GLUON_SVRG_TIMEOUT"

_seconds = float(os.environ.get(TIMEOUT) or 0)
_hook: Any = None  # Python's own `sys.excepthook`, once it is replaced


def number_of_workers() -> int:
    """The workers of the job that this process is part of; 1 without a job."""
    names = ["HOROVOD_SIZE"]
    if is_worker():
        names.append("DMLC_NUM_WORKER")
    return max(int(os.environ.get(name) or 1) for name in names)


def is_worker() -> bool:
    """Whether this is a worker of MXNet's parameter servers."""
    return os.environ.get("DMLC_ROLE") == "worker"


def end_on_errors() -> None:
    """Let an exception end this process at once.

    Otherwise MXNet would keep the process to wait for the other workers, which wait for this one.
    """
    global _hook
    if _hook is None:
        _hook, sys.excepthook = sys.excepthook, _end


def _end(kind: Any, error: Any, traceback: Any) -> None:
    _hook(kind, error, traceback)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)


def rearm_timeout() -> None:
    """Begin the seconds of `TIMEOUT` anew, at each step and each minibatch of a refresh.

    A worker that waits longer, for workers that make other calls, have stopped or cannot be
    reached, prints where it waits and ends. This takes 23 us, and nothing without the variable.
    """
    if _seconds:
        faulthandler.dump_traceback_later(_seconds, exit=True, file=2)
