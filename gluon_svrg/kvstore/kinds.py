"""Which kvstore has which workers, and what is refused before anything is computed."""

from __future__ import annotations

import os
from typing import Any, Iterable

import mxnet as mx
from mxnet.gluon import Parameter

from .. import _mxnet
from ..passes.watch import warn
from . import job
from .collective import Collective, HorovodKVStore
from .servers import AsynchronousServers, SynchronousServers
from .workers import Workers

#: MXNet treats any other name as 'local', or as 'device' or 'dist' if it contains these.
NATIVE = (
    "local", "local_allreduce_cpu", "local_allreduce_device", "local_update_cpu", "device", "nccl",
    "dist", "dist_sync", "dist_device_sync", "dist_sync_device",
    "dist_async", "dist_device_async", "dist_async_device",
)  # fmt: skip


def chosen(params: Any, kvstore: Any, compression: Any, update: Any, needs: str) -> dict[str, Any]:
    """Check arguments of a trainer, and make those of a `KVStoreTrainer`. May wait for all workers.

    `needs` names who needs the reduced gradient before the update, if anyone does.
    """
    job.rearm_timeout()
    parameters, kvstore = parameters_of(params), recognized(kvstore)
    check(parameters, kvstore, compression)
    update = where_to_update(parameters, kvstore, update, needs)
    kvstore, count = created(kvstore), job.number_of_workers()
    workers = kind_of(kvstore)
    if workers.is_alone and count > 1:
        warn(f"kvstore={kvstore!r} connects none of {count} workers. Use 'dist_sync' or 'horovod'.")
    return {"kvstore": kvstore, "update_on_kvstore": update, "workers": workers}


def name_of(kvstore: Any) -> str:
    """The name of a kvstore, or of its kind."""
    return str(getattr(kvstore, "type", kvstore))


def kind_of(kvstore: Any) -> type[Workers]:
    """The kind of workers behind a kvstore, or a named one. It says what they can do."""
    name, is_in_python = name_of(kvstore), _is_in_python(kvstore)
    if "dist" in name and not is_in_python:
        return AsynchronousServers if "async" in name else SynchronousServers
    try:
        is_shared = name == "horovod" or (is_in_python and kvstore.num_workers > 1)
    except NotImplementedError:  # as of MXNet's base class: a kvstore of one process
        return Workers
    return Collective if is_shared else Workers


def _is_in_python(kvstore: Any) -> bool:
    """Whether a kvstore, or that of a name, is a class in Python and not of MXNet's C++ library."""
    is_class = isinstance(kvstore, mx.kvstore.KVStoreBase)
    return kvstore == "horovod" or (is_class and not isinstance(kvstore, mx.kvstore.KVStore))


def recognized(kvstore: Any) -> Any:
    """Convert the argument `kvstore` to what `gluon.Trainer` does not misunderstand."""
    if kvstore is None or isinstance(kvstore, HorovodKVStore):
        return kvstore
    if not isinstance(kvstore, (str, mx.kvstore.KVStoreBase)):
        raise TypeError(f"kvstore must be a kvstore, name or None, got {type(kvstore).__name__}.")
    name = name_of(kvstore).lower()
    if name == "nccl" and not mx.runtime.Features().is_enabled("NCCL"):
        raise ValueError("This MXNet was not built with NCCL. Use kvstore='device'.")
    known = {*NATIVE, *mx.kvstore.KVStoreBase.kv_registry, "horovod"}
    if name not in known and not _is_in_python(kvstore):
        names = ", ".join(map(repr, sorted(known)))
        raise ValueError(f"MXNet has no kvstore {name!r}; it would use another. Known are {names}.")
    if name == "horovod" or (isinstance(kvstore, str) and name in NATIVE):
        return name
    # With one device, gluon.Trainer would ignore the name of a registered class.
    return mx.kv.create(name) if isinstance(kvstore, str) else kvstore


def created(kvstore: Any) -> Any:
    """The kvstore of a name, unless it stands for one in this process; waits for all workers."""
    if kvstore == "horovod":
        return HorovodKVStore()
    if not isinstance(kvstore, str) or not kind_of(kvstore).has_servers:
        return kvstore
    if "DMLC_NUM_WORKER" not in os.environ:  # what MXNet looks for first
        raise RuntimeError(
            f"kvstore={kvstore!r} needs a job with servers: start it by `gluon-svrg launch -n 2 -- "
            "python train.py`, or leave kvstore out."
        )
    return mx.kv.create(kvstore)


def parameters_of(params: Any) -> list[Parameter]:
    """The parameters that were passed; none if they are wrong, as `gluon.Trainer` will say."""
    is_mapping = hasattr(params, "values")
    values = params.values() if is_mapping else params
    found = list(values) if isinstance(values, Iterable) else []
    if not all(isinstance(p, Parameter) for p in found):
        return []
    if is_mapping:
        _mxnet.note_keys(params)
    return found


def where_to_update(parameters: list[Parameter], kvstore: Any, wanted: Any, needs: str) -> Any:
    """Choose if the kvstore updates, as is wanted; `needs` names who needs the reduced gradient."""
    kind, named = kind_of(kvstore), f"kvstore={name_of(kvstore)!r}"
    devices = len(_mxnet.devices(parameters[0])) if parameters else 1
    sparse = next(filter(_mxnet.has_sparse_values, parameters), None)
    if kvstore is None and devices > 1:
        raise ValueError(f"With kvstore=None, {devices} devices drift apart. Use kvstore='device'.")
    is_unused = kvstore is None or (isinstance(kvstore, str) and sparse is None)
    is_dropped = devices == 1 and kind.is_alone and is_unused
    if wanted and (is_dropped or kind is Collective):
        where = "one device" if is_dropped else named
        raise ValueError(f"update_on_kvstore=True with {where}, which cannot update. Leave it out.")
    if wanted is False and not kind.reduces:
        raise ValueError(f"update_on_kvstore=False, but {named} always updates. Leave it out.")
    problem = ""
    if not kind.reduces:
        problem = f"{named} never reduces gradients. Use kvstore='dist_sync'."
    elif wanted:
        problem = "with update_on_kvstore=True the kvstore keeps it. Leave that out."
    elif sparse is not None:
        problem = f"{_mxnet.name_of(sparse)} is row_sparse, which only the kvstore can update."
    if needs and problem:
        raise ValueError(f"{needs} needs the reduced gradient before the update, and {problem}")
    # On servers that sum, MXNet would ignore set_learning_rate.
    is_better_here = wanted is None and kind.has_servers and not problem
    return False if needs or is_better_here else wanted


def check(parameters: list[Parameter], kvstore: Any, compression: Any) -> None:
    """Raise where `gluon.Trainer` or servers would fail later, or be wrong without a word."""
    kind, has_servers = name_of(kvstore), kind_of(kvstore).has_servers
    for p in parameters:
        name = _mxnet.name_of(p)
        if not _mxnet.has_data(p) and not _mxnet.is_deferred(p):
            raise RuntimeError(f"{name} is not initialized. Call net.initialize() before.")
        fails = has_servers and not _mxnet.has_sparse_values(p)  # under gluon.Trainer, too
        if _mxnet.is_sparse(p) and (fails or _is_in_python(kvstore)):
            raise ValueError(
                f"{name} is sparse, and kvstore={kind!r} cannot exchange its gradients. Use "
                "sparse_grad=False, or kvstore='dist_sync' with a row_sparse weight."
            )
    cannot = _is_in_python(kvstore) and not hasattr(kvstore, "set_gradient_compression")
    if compression and (has_servers or cannot or kind.startswith("local")):
        raise ValueError(
            f"Under gluon.Trainer a kvstore {kind!r} cannot compress gradients. Leave "
            "compression_params out, or use 'device' with several devices."
        )
