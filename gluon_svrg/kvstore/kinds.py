"""Which kvstore has which workers, and what is refused before anything is computed."""

from __future__ import annotations

import os
from math import prod
from typing import Any, Iterable

import mxnet as mx
from mxnet.gluon import Parameter

from .. import _mxnet
from .collective import Collective, HorovodKVStore
from .servers import AsynchronousServers, SynchronousServers
from .workers import Workers

#: MXNet treats any other name as 'local', or as 'device' or 'dist_sync' if it contains these.
NATIVE = [
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
]


def name_of(kvstore: Any) -> str:
    """The name of a kvstore, or of its kind."""
    return str(getattr(kvstore, "type", kvstore))


def kind_of(kvstore: Any) -> type[Workers]:
    """The kind of workers behind a kvstore, or a named one. It says what they can do."""
    name = name_of(kvstore)
    if "dist" in name and not _is_in_python(kvstore):
        return AsynchronousServers if "async" in name else SynchronousServers
    if kvstore == "horovod" or isinstance(kvstore, HorovodKVStore):
        return Collective
    try:
        return Collective if _is_in_python(kvstore) and kvstore.num_workers > 1 else Workers
    except NotImplementedError:  # as of MXNet's base class: a kvstore of one process
        return Workers


def _is_in_python(kvstore: Any) -> bool:
    """Whether a kvstore is a class in Python, and not of MXNet's C++ library; not for its name."""
    if isinstance(kvstore, str):
        return kvstore == "horovod"
    return isinstance(kvstore, mx.kvstore.KVStoreBase) and not _mxnet.is_native(kvstore)


def recognized(kvstore: Any) -> Any:
    """Convert the argument `kvstore` to what `gluon.Trainer` does not misunderstand.

    That is a kvstore or None; a name only if it is 'horovod' or of MXNet's C++ library.
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
    known = {*NATIVE, *_mxnet.registered_kvstores()}
    if name not in known and not _is_in_python(kvstore):
        names = ", ".join(map(repr, sorted({*known, "horovod"})))
        raise ValueError(
            f"MXNet has no kvstore {name!r}; it would silently use another. Known are {names}, "
            "and what you register with mx.kvstore.KVStoreBase.register."
        )
    if not isinstance(kvstore, str):
        return kvstore
    # With one device, gluon.Trainer would ignore the name of a registered class.
    return name if name in NATIVE else mx.kv.create(name)


def created(kvstore: Any) -> Any:
    """The kvstore of a name, unless it stands for one in this process. Waits for all workers."""
    if kvstore == "horovod":
        return HorovodKVStore()
    if not isinstance(kvstore, str) or not kind_of(kvstore).has_servers:
        return kvstore
    if "DMLC_NUM_WORKER" not in os.environ:  # what MXNet looks for first
        raise RuntimeError(
            f"kvstore={kvstore!r} needs a job with parameter servers, and this process is in none: "
            "DMLC_NUM_WORKER is not set. Start the script by a launcher, such as `gluon-svrg "
            "launch -n 2 -s 1 -- python train.py`, or leave kvstore out to train in this process "
            "alone."
        )
    return mx.kv.create(kvstore)


def parameters_of(params: Any) -> list[Parameter]:
    """The parameters that were passed; none if they are wrong, as `gluon.Trainer` will say."""
    values = params.values() if hasattr(params, "values") else params
    found = list(values) if isinstance(values, Iterable) else []
    return found if all(isinstance(p, Parameter) for p in found) else []


def check_initialized(parameters: list[Parameter]) -> None:
    """Raise if `gluon.Trainer` would fail at the first step."""
    for p in parameters:
        if not _mxnet.has_data(p) and not _mxnet.is_deferred(p):
            raise RuntimeError(
                f"{p.name} is not initialized. Call net.initialize() before you make the trainer."
            )


def check_server_optimizer(optimizer: Any, parameters: Iterable[Parameter]) -> None:
    """Raise if an optimizer needs whole arrays and the servers hold slices."""
    bound = int(os.environ.get("MXNET_KVSTORE_BIGARRAY_BOUND", "1000000"))
    servers = int(os.environ.get("DMLC_NUM_SERVER", "1"))
    if type(optimizer).__name__ not in ("LARS", "LAMB", "LANS", "LBSGD") or servers == 1:
        return
    for p in filter(_mxnet.is_trainable, parameters):
        if prod(p.shape or ()) >= bound:
            raise ValueError(
                f"{type(optimizer).__name__} needs the norm of {p.name}, whose {prod(p.shape)} "
                f"entries are sliced over {servers} servers. Use update_on_kvstore=False, one "
                "server, or a larger MXNET_KVSTORE_BIGARRAY_BOUND (of all processes)."
            )


def where_to_update(
    parameters: list[Parameter], kvstore: Any, update_on_kvstore: Any, needs_reduced: str
) -> Any:
    """Choose whether the kvstore updates; None leaves it to `gluon.Trainer`."""
    kind = kind_of(kvstore)
    is_free = update_on_kvstore is None and not any(map(_mxnet.has_sparse_values, parameters))
    if needs_reduced or (is_free and kind.has_servers and kind.reduces):
        return False  # on the servers, MXNet would ignore set_learning_rate
    return update_on_kvstore


def refusal(
    parameters: list[Parameter],
    kvstore: Any,
    compression_params: Any,
    update_on_kvstore: Any,
    needs_reduced: str,
) -> str | None:
    """Say why `gluon.Trainer` or servers would fail with this, or let weights drift apart.

    `needs_reduced` names what needs the reduced gradients before the update, if anything does.
    """
    kind, named = kind_of(kvstore), f"kvstore={name_of(kvstore)!r}"
    devices = len(_mxnet.devices(parameters[0])) if parameters else 1
    is_in_python = _is_in_python(kvstore)
    if kvstore is None and devices > 1:
        return (
            f"kvstore=None with {devices} devices: each would be trained on its own data, and "
            "they would drift apart. Choose a kvstore, such as kvstore='device'."
        )
    is_dropped = kvstore is None or (isinstance(kvstore, str) and kind.is_alone)
    if update_on_kvstore and devices == 1 and is_dropped:
        return (
            "update_on_kvstore=True with one device: no kvstore is used there. Leave it out, or "
            "pass a kvstore object, kvstore=mx.kvstore.create('device')."
        )
    cannot_compress = is_in_python and not hasattr(kvstore, "set_gradient_compression")
    is_local = name_of(kvstore).startswith("local")
    if compression_params and (kind.has_servers or cannot_compress or is_local):
        return (
            f"MXNet cannot compress gradients in a kvstore {name_of(kvstore)!r} under "
            "gluon.Trainer. Use kvstore='device' with several devices, or no compression_params."
        )
    for p in filter(_mxnet.is_sparse, parameters):
        if kind.has_servers and not _mxnet.has_sparse_values(p):
            return (
                f"{p.name} has sparse gradients and a dense weight, and MXNet's servers fail with "
                "these, under gluon.Trainer too. Use sparse_grad=False, a row_sparse weight "
                "(gluon.contrib.nn.SparseEmbedding), or one worker."
            )
        if is_in_python:
            return (
                f"{p.name} is sparse, and {named} exchanges dense gradients only. Use "
                "sparse_grad=False, or kvstore='dist_sync' with a row_sparse weight."
            )
    needs = f"{needs_reduced} needs the reduced gradient back before the update, and"
    if needs_reduced and not kind.reduces:
        return (
            f"{needs} {named} never reduces gradients: its servers update at each push of any "
            "worker. Use kvstore='dist_sync'."
        )
    if needs_reduced and update_on_kvstore:
        return f"{needs} with update_on_kvstore=True the kvstore keeps it. Leave that out."
    for p in filter(_mxnet.has_sparse_values, parameters if needs_reduced else ()):
        return (
            f"{needs} {p.name} is a row_sparse weight, which only the kvstore can update. Use a "
            "dense weight."
        )
    if update_on_kvstore is False and not kind.reduces:
        return (
            f"update_on_kvstore=False with {named}: its servers update at each push of any "
            "worker. Leave it out, or use a synchronous kvstore."
        )
    if update_on_kvstore and kind is Collective:
        return (
            f"update_on_kvstore=True with {named}, which exchanges sums between workers and has "
            "no servers to update. Leave it out."
        )
    return None
