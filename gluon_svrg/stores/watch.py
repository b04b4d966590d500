"""A watch over the other processes of a job, because MXNet waits forever for a vanished one.

Only a process that the launcher has started keeps a watch. It ends itself when another is silent.
So all processes end, on all machines, whichever link or machine has failed.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import Any, Callable, Mapping

from .launcher import TIMEOUT_VARIABLE, allowed_silence, is_launched, tell, tell_the_end

_INTERVAL = 1.0
#: Closing a kvstore waits for all other workers. If a function closed it on return, the launcher
#: would not learn that the program has ended. So kvstores are kept until exit.
_kept: list[Any] = []


def timeout() -> float:
    """The configured seconds; 0 for no watch."""
    return float(os.environ.get(TIMEOUT_VARIABLE, "0"))


def watch(store: Any, nodes: Mapping[int, str]) -> None:
    """Watch the nodes of a kvstore in a thread, as soon as all have joined.

    Parameters
    ----------
    store : KVStore
        A kvstore of MXNet's parameter servers. The thread does not keep it alive.
    nodes : dict of str
        The names of the nodes to watch, by their ids.
    """
    if timeout() > 0:
        stopped = threading.Event()
        atexit.register(stopped.set)  # MXNet closes its kvstores at exit
        arguments = (weakref.ref(store), nodes, timeout(), stopped)
        threading.Thread(target=_watch, args=arguments, daemon=True).start()


def joined(store: Any) -> None:
    """In a worker of MXNet's parameter servers: report its rank, and watch the scheduler."""
    tell("rank", str(store.rank))
    if is_launched():
        _kept.append(store)
        atexit.register(_let_go)
        tell_the_end()  # first of all at the end
        watch(store, {1: "the scheduler"})


def _let_go() -> None:
    """Close the kvstores while MXNet still exists: later, MXNet 2.0 would abort."""
    import mxnet as mx

    mx.nd.waitall()
    _kept.clear()


def _watch(
    find_store: Callable[[], Any],
    nodes: Mapping[int, str],
    seconds: float,
    stopped: threading.Event,
) -> None:
    # A node that has just joined has sent nothing yet. Neither has one whose process was stopped
    # and continues. So a node counts as silent only if MXNet reports it for a while.
    allowed = allowed_silence(seconds)
    patience = min(5.0, allowed / 2)
    since: dict[int, float] = {}
    has_joined = False
    while not stopped.wait(_INTERVAL):
        if not has_joined:
            has_joined = _has_joined(find_store())
            continue
        silent = _silent(find_store(), nodes, max(2, round(allowed - patience)))
        now = time.monotonic()
        since = {node: since.get(node, now) for node in silent}
        dead = [nodes[node] for node in silent if now - since[node] > patience]
        if dead:
            _end(dead, seconds)


def _has_joined(store: Any) -> bool:
    """Whether all processes have joined; if so, report the rank of this one to the launcher."""
    from .._mxnet import heartbeats

    rank = heartbeats.rank(store) if store is not None and _is_listening() else None
    if rank is not None:
        tell("rank", str(rank))
    return rank is not None


def _silent(store: Any, nodes: Mapping[int, str], seconds: int) -> list[int]:
    """The nodes that have been silent for that long."""
    from .._mxnet import heartbeats

    if store is None:
        return []
    return [node for node in nodes if heartbeats.is_silent(store, node, seconds)]


def _end(dead: list[str], seconds: float) -> None:
    message = f"{' and '.join(dead)} did not answer for {seconds:g} s"
    with suppress(OSError, ValueError):
        print(f"gluon-svrg: {message}; this process ends", file=sys.stderr, flush=True)
    tell("lost", json.dumps({"nodes": dead, "seconds": seconds}))
    os._exit(1)


def _is_listening() -> bool:
    """Whether this process has a socket that others can connect to."""
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:
            continue
        try:
            with socket.socket(fileno=copy) as found:
                if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    return True
        except OSError:
            os.close(copy)
    return False
