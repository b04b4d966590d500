"""The kinds of kvstores, and the workers behind each."""

from __future__ import annotations

import os
from typing import Any

import mxnet as mx

from .. import _mxnet
from .alone import Alone
from .collective import Collective
from .horovod import HorovodKVStore, HorovodWorkers
from .interface import Workers
from .parameter_servers import AsynchronousServers, SynchronousServers

#: MXNet treats any other name as 'local', or as 'device' or 'dist_sync' if it contains these.
NATIVE = (
    "local",
    "local_allreduce_cpu",
    "local_allreduce_device",
    "local_update_cpu",
    "device",
    "nccl",
    "dist",
    "dist_sync",
    "dist_device_sync",
    "dist_sync_device",
    "dist_async",
    "dist_device_async",
    "dist_async_device",
)

NO_JOB = (
    "kvstore={kvstore!r} needs a job with parameter servers, and this process is in none: "
    "DMLC_NUM_WORKER is not set. Start the script by a launcher, such as `gluon-svrg launch -n 2 "
    "-s 1 -- python train.py`, or leave kvstore out to train in this process alone."
)


def name_of(kvstore: Any) -> str:
    """The name of a kvstore, or of its kind."""
    return str(getattr(kvstore, "type", kvstore))


def kind_of(kvstore: Any) -> type[Workers]:
    """The kind of workers behind a kvstore, or a named one. It says what they can do."""
    name = name_of(kvstore)
    if (isinstance(kvstore, str) or _mxnet.is_native(kvstore)) and "dist" in name:
        return AsynchronousServers if "async" in name else SynchronousServers
    if kvstore == "horovod" or isinstance(kvstore, HorovodKVStore):
        return HorovodWorkers
    return Collective if _has_several_workers(kvstore) else Alone


def recognized(kvstore: Any) -> Any:
    """Convert the argument `kvstore` to a form that `gluon.Trainer` does not misunderstand.

    Returns
    -------
    KVStoreBase, str or None
        A name only if it is ``'horovod'`` or a kvstore of MXNet's C++ library.

    Raises
    ------
    TypeError
        If it is no kvstore, name or None.
    ValueError
        If it is a name that MXNet does not know, or a kvstore that was made from one.
    """
    if kvstore is None:
        return None
    if not isinstance(kvstore, (str, mx.kvstore.KVStoreBase)):
        raise TypeError(
            f"kvstore must be a kvstore, the name of one, or None, got {type(kvstore).__name__}."
        )
    name = name_of(kvstore).lower()
    if name == "horovod":
        return kvstore if isinstance(kvstore, HorovodKVStore) else name
    if name == "nccl" and not mx.runtime.Features().is_enabled("NCCL"):
        raise ValueError(
            "kvstore='nccl' needs an MXNet that was built with NCCL, and this one was not. Use "
            "kvstore='device'."
        )
    registered = _mxnet.registered_kvstores()
    is_class = not isinstance(kvstore, str) and not _mxnet.is_native(kvstore)
    if name not in NATIVE and name not in registered and not is_class:
        names = ", ".join(map(repr, sorted({*NATIVE, *registered, "horovod"})))
        raise ValueError(
            f"MXNet has no kvstore {name!r}; it would silently use another. Known are {names}, "
            "and what you register with mx.kvstore.KVStoreBase.register."
        )
    if not isinstance(kvstore, str):
        return kvstore
    # With one device, gluon.Trainer would ignore the name of a registered class.
    return name if name in NATIVE else mx.kv.create(name)


def created(kvstore: Any) -> Any:
    """The kvstore of a name, unless it stands for one in this process.

    One with parameter servers waits for all workers.

    Raises
    ------
    RuntimeError
        If this process is in no job with parameter servers.
    """
    if kvstore == "horovod":
        return HorovodKVStore()
    if not isinstance(kvstore, str) or not kind_of(kvstore).has_servers:
        return kvstore
    if "DMLC_NUM_WORKER" not in os.environ:  # what MXNet looks for first
        raise RuntimeError(NO_JOB.format(kvstore=kvstore))
    return mx.kv.create(kvstore)


def _has_several_workers(kvstore: Any) -> bool:
    """Whether a kvstore is a class in Python with several workers."""
    if not isinstance(kvstore, mx.kvstore.KVStoreBase) or _mxnet.is_native(kvstore):
        return False
    try:
        return kvstore.num_workers > 1
    except NotImplementedError:  # as of MXNet's base class: a kvstore of one process
        return False
