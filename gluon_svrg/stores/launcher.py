"""What a worker tells the launcher that has started it."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

#: The variable that tells a worker where it tells the launcher something.
PLACE = "GLUON_SVRG_TELL"


def tell_launcher() -> None:
    """In a worker: let the launcher know when the program ends, and end at once on an error.

    Otherwise MXNet would keep the process, waiting for the other workers, which wait for it.
    """
    if PLACE not in os.environ or os.environ.get("DMLC_ROLE") != "worker":
        return
    atexit.register(tell, "end", "")
    hook = sys.excepthook

    def end_at_once(kind: Any, error: Any, traceback: Any) -> None:
        hook(kind, error, traceback)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = end_at_once


def tell(what: str, text: str) -> None:
    """In a worker: tell the launcher, if there is one."""
    place = os.environ.get(PLACE)
    if place is not None:
        with suppress(OSError):  # it has died, and this process will, too
            Path(f"{place}.{what}").write_text(text)
