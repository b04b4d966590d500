"""The process that ssh starts on another machine.

It communicates with `gluon-svrg launch` through its input and output. When these close, it ends all
processes that it has started.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from .channel import Channel
from .local import LocalProcesses
from .serve import serve
from .signals import Interruptible


def main() -> int:
    """Serve; return an exit status."""
    reader, writer = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "r+") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)  # nothing else that this process prints is a message
    channel = Channel(reader, writer, lambda lost: None)  # ssh has checked who is there

    def make(settings: dict[str, Any]) -> LocalProcesses:
        os.chdir(settings["folder"])
        return LocalProcesses(
            settings["script"],
            settings["timeout"],
            {**os.environ, **settings["variables"]},
            lambda line: channel.send(line=line),
        )

    with Interruptible(needs_reader=False) as interrupted:
        status, _ = serve(channel, 0, interrupted, make=make)
    return status


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())  # threads may wait for a connection that is gone
