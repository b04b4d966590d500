"""Checks of kvstores, made where the arguments arrive."""

from __future__ import annotations

import os
from math import prod
from typing import Any, Iterable

import mxnet as mx
from mxnet.gluon import Parameter

from .. import _mxnet
from . import kinds

_NEEDS_NORMS = ("LARS", "LAMB", "LANS", "LBSGD")


def parameters_of(params: Any) -> list[Parameter]:
    """The parameters that were passed; none if they are wrong, as `gluon.Trainer` will say."""
    values = params.values() if hasattr(params, "values") else params
    found = list(values) if isinstance(values, Iterable) else []
    return found if all(isinstance(p, Parameter) for p in found) else []


def check_devices(parameters: list[Parameter], kvstore: Any, update_on_kvstore: Any) -> None:
    """Raise if `gluon.Trainer` would let devices drift apart, or fail at the first step."""
    if not parameters:
        return
    devices = _mxnet.devices(parameters[0])
    if kvstore is None and len(devices) > 1:
        raise ValueError(
            f"kvstore=None with {len(devices)} devices: each would be trained on its own data, and "
            "they would drift apart. Choose a kvstore, such as kvstore='device'."
        )
    is_dropped = kvstore is None or (isinstance(kvstore, str) and kinds.kind_of(kvstore).is_alone)
    if update_on_kvstore and len(devices) == 1 and is_dropped:
        raise ValueError(
            "update_on_kvstore=True with one device: no kvstore is used there. Leave it out, or "
            "pass a kvstore object, kvstore=mx.kvstore.create('device')."
        )


def where_to_update(
    parameters: list[Parameter], kvstore: Any, update_on_kvstore: Any, needs_reduced: str
) -> Any:
    """Choose where to update, unless `gluon.Trainer` chooses.

    Parameters
    ----------
    parameters : list of Parameter
        All parameters of the trainer.
    kvstore : KVStoreBase, str or None
        A kvstore, or a known name.
    update_on_kvstore : bool or None
        The user's choice.
    needs_reduced : str
        The name of the method or option that needs the reduced gradients before the update; empty
        if there is none.

    Returns
    -------
    bool or None
        None leaves it to `gluon.Trainer`.

    Raises
    ------
    ValueError
        If the kvstore cannot update there.
    """
    kind = kinds.kind_of(kvstore)
    sparse = next(filter(_mxnet.has_sparse_values, parameters), None)
    if needs_reduced:
        _check_gets_reduced(kvstore, update_on_kvstore, sparse, needs_reduced)
        return False
    if update_on_kvstore is False and not kind.reduces:
        raise ValueError(
            f"update_on_kvstore=False with kvstore={kinds.name_of(kvstore)!r}: its servers update "
            "at each push of any worker. Leave it out, or use a synchronous kvstore."
        )
    if update_on_kvstore is False and sparse is not None and kind.has_servers:
        raise ValueError(
            f"update_on_kvstore=False, but {sparse.name} is a row_sparse weight, which only the "
            "kvstore can update. Leave it out."
        )
    if update_on_kvstore and not kind.can_update:
        raise ValueError(
            f"update_on_kvstore=True with kvstore={kinds.name_of(kvstore)!r}, which exchanges sums "
            "between workers and has no servers to update. Leave it out."
        )
    if update_on_kvstore is None and sparse is None and kind.has_servers and kind.reduces:
        return False  # on the servers, MXNet would ignore set_learning_rate
    return update_on_kvstore


def _check_gets_reduced(kvstore: Any, update_on_kvstore: Any, sparse: Any, name: str) -> None:
    """Raise if the kvstore does not return reduced gradients."""
    needs = f"{name} needs the reduced gradient back before the update, "
    if not kinds.kind_of(kvstore).reduces:
        raise ValueError(
            f"{needs}and kvstore={kinds.name_of(kvstore)!r} never reduces gradients: its servers "
            "update at each push of any worker. Use kvstore='dist_sync'."
        )
    if update_on_kvstore:
        raise ValueError(
            f"{needs}and with update_on_kvstore=True the kvstore keeps it. Leave update_on_kvstore "
            "out."
        )
    if sparse is not None:
        raise ValueError(
            f"{needs}and {sparse.name} is a row_sparse weight, which only the kvstore can update. "
            "Use a dense weight."
        )


def check_compression(compression_params: Any, kvstore: Any) -> None:
    """Raise if MXNet cannot compress gradients, or would fail at the first step."""
    if not compression_params:
        return
    name, kind = kinds.name_of(kvstore), kinds.kind_of(kvstore)
    if not kind.can_compress or name.startswith("local"):
        raise ValueError(
            f"MXNet cannot compress gradients in a kvstore {name!r}"
            + (" under gluon.Trainer" if kind.has_servers else "")
            + ". Use kvstore='device' with several devices, or no compression_params."
        )
    try:
        mx.kv.create("device").set_gradient_compression(compression_params)
    except Exception as error:
        raise ValueError(
            f"MXNet cannot compress gradients by {compression_params}: {error}. Use "
            "{'type': '2bit', 'threshold': 0.5}."
        ) from error


def check_sparse(parameters: list[Parameter], kvstore: Any) -> None:
    """Raise if sparse gradients would crash the servers, or cannot be exchanged."""
    for parameter in parameters:
        if not _mxnet.is_sparse(parameter):
            continue
        if kinds.kind_of(kvstore).has_servers and not _mxnet.has_sparse_values(parameter):
            raise ValueError(
                f"{parameter.name} has sparse gradients and a dense weight, and MXNet's servers "
                "fail with these, under gluon.Trainer too. Use sparse_grad=False, a row_sparse "
                "weight (gluon.contrib.nn.SparseEmbedding), or one worker."
            )
        if not (kvstore is None or _is_native(kvstore)):
            raise ValueError(
                f"{parameter.name} is sparse, and kvstore={kinds.name_of(kvstore)!r} exchanges "
                "dense gradients only. Use sparse_grad=False, or kvstore='dist_sync' with a "
                "row_sparse weight."
            )


def _is_native(kvstore: Any) -> bool:
    return kvstore in kinds.NATIVE if isinstance(kvstore, str) else _mxnet.is_native(kvstore)


def check_server_optimizer(optimizer: Any, parameters: Iterable[Parameter]) -> None:
    """Raise if an optimizer needs whole arrays and the servers hold slices."""
    bound = int(os.environ.get("MXNET_KVSTORE_BIGARRAY_BOUND", "1000000"))
    servers = int(os.environ.get("DMLC_NUM_SERVER", "1"))
    if type(optimizer).__name__ not in _NEEDS_NORMS or servers == 1:
        return
    for parameter in parameters:
        size = prod(parameter.shape or ())
        if _mxnet.is_trainable(parameter) and size >= bound:
            raise ValueError(
                f"{type(optimizer).__name__} needs the norm of {parameter.name}, whose {size} "
                f"entries are sliced over {servers} servers. Use update_on_kvstore=False, one "
                "server, or a larger MXNET_KVSTORE_BIGARRAY_BOUND (of all processes)."
            )


def check_states_are_here(kvstore: Any, update_on_kvstore: Any, name: str) -> None:
    """Raise if the states of the optimizer are on servers.

    Parameters
    ----------
    kvstore : KVStoreBase, str or None
        The kvstore, or its name.
    update_on_kvstore : bool or None
        Whether it updates.
    name : str
        The method that would save or load the states.
    """
    if kinds.kind_of(kvstore).has_servers and update_on_kvstore is not False:
        raise RuntimeError(
            f"{name}() is not possible where the servers update: the states of the optimizer "
            "are there, and MXNet cannot fetch them. Use update_on_kvstore=False with a "
            "synchronous kvstore."
        )
