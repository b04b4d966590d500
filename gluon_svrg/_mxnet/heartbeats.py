"""The heartbeats of MXNet's parameter servers, and the processes that answer them.

MXNet sends them if ``PS_HEARTBEAT_INTERVAL`` is set in every process, but nothing reads them: its
own function for that, `get_num_dead_node`, is not part of its Python interface.
"""

from __future__ import annotations

import ctypes
from typing import Any, Callable

#: The id of the scheduler. Servers have the ids 8, 10, ..., workers 9, 11, ...
SCHEDULER = 1


def server(rank: int) -> int:
    """The id of a server."""
    return 8 + 2 * rank


def worker(rank: int) -> int:
    """The id of a worker."""
    return 9 + 2 * rank


def is_silent(store: Any, node: int, seconds: int) -> bool | None:
    """Whether a node has sent no heartbeat for that long; None when the kvstore is closed.

    The scheduler receives the heartbeats of all others, and they receive those of the scheduler.
    """
    from mxnet.base import _LIB

    number = ctypes.c_int()
    failed = _LIB.MXKVStoreGetNumDeadNode(store.handle, node, ctypes.byref(number), seconds)
    return None if failed else number.value > 0


def rank(store: Any) -> int | None:
    """The rank of this process among those of its role; None until all processes have joined.

    A server or scheduler must not call this before it listens: MXNet 2.0 would abort.
    """
    from mxnet.base import MXNetError

    try:
        return int(store.rank)
    except MXNetError:
        return None


def run_role(before: Callable[[Any], None]) -> None:
    """Run as the server or the scheduler that ``DMLC_ROLE`` names, until the job ends.

    Parameters
    ----------
    before : callable
        Called with the kvstore before it is connected.
    """
    import mxnet as mx
    from mxnet.kvstore.kvstore_server import KVStoreServer

    store = mx.kv.create("dist")
    before(store)
    KVStoreServer(store).run()
