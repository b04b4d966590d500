"""What a process knows of its job. Servers import this file inside ``import mxnet``."""

from __future__ import annotations

import faulthandler
import os
import re
import sys
from functools import lru_cache
from typing import Any, Iterable, Iterator

#: The variable with the seconds after which a process ends that calls no trainer.
TIMEOUT = "GLUON_SVRG_TIMEOUT"


def seconds(text: str) -> float:
    """The number of seconds in a text; raise a ValueError if it is none."""
    if not re.fullmatch(r"\d{1,8}(\.\d*)?", text):
        raise ValueError(f"{TIMEOUT} must be seconds, with 8 digits at most, got {text!r}.")
    return float(text)


@lru_cache(maxsize=None)
def _timeout() -> float:
    return seconds(os.environ.get(TIMEOUT) or "0")


def is_worker() -> bool:
    """Whether this is a worker of MXNet's parameter servers."""
    return os.environ.get("DMLC_ROLE") == "worker"


def number_of_workers() -> int:
    """The workers of the job that this process is part of; 1 if no variable tells."""
    return int(os.environ.get("DMLC_NUM_WORKER" if is_worker() else "HOROVOD_SIZE", "1"))


def end_on_errors() -> None:
    """Let an exception end this process at once; MXNet would wait for the other workers."""
    hook = sys.excepthook

    def end(kind: Any, error: Any, traceback: Any) -> None:
        try:
            hook(kind, error, traceback)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = end


def rearm_timeout() -> None:
    """Begin the seconds anew, after which this process prints where it is, and ends: 23 us."""
    if _timeout():
        faulthandler.dump_traceback_later(_timeout(), exit=True, file=2)


def rearming(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches of a refresh, before each of which the time-out begins anew."""
    for batch in batches:
        rearm_timeout()
        yield batch
    rearm_timeout()
