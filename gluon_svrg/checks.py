"""Errors about arguments, raised where these arrive."""

from __future__ import annotations

import os
from math import isfinite, prod
from numbers import Integral, Real
from typing import Any, Iterable

import mxnet as mx
from mxnet.gluon import Parameter

from . import _mxnet
from .operations import SUMMED_IN
from .stores.workers import is_distributed


def check_number(value: Any, name: str) -> None:
    """Raise unless a value is a finite number that is not negative."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}.")
    if not isfinite(value) or value < 0:
        raise ValueError(
            f"{name} must be finite and not negative, got {value}. 1 is SVRG, 0 the plain "
            "optimizer, in between alpha-SVRG."
        )


def check_coefficient(coefficient: Any) -> None:
    """Raise unless a coefficient is a number or a callable that gives numbers."""
    if not callable(coefficient):
        check_number(coefficient, "coefficient")


def check_store(params: Any, kvstore: Any, update_on_kvstore: Any) -> None:
    """Raise where `gluon.Trainer` would let devices drift apart, or fail at the first step."""
    values = params.values() if hasattr(params, "values") else params
    parameters = list(values) if isinstance(values, Iterable) else []
    if not parameters or not isinstance(parameters[0], Parameter):
        return  # gluon.Trainer says what is wrong
    devices = _mxnet.devices(parameters[0])
    if kvstore is None and len(devices) > 1:
        raise ValueError(
            f"kvstore=None with {len(devices)} devices: each would be trained on its own data, and "
            "they would drift apart. Choose a store, such as kvstore='device'."
        )
    needs_no_store = kvstore is None or (isinstance(kvstore, str) and "dist" not in kvstore)
    if update_on_kvstore and len(devices) == 1 and needs_no_store:
        raise ValueError(
            "update_on_kvstore=True with one device: no store is used there. Leave it out, or pass "
            "a store itself, kvstore=mx.kvstore.create('device')."
        )


def check_compression(compression_params: Any, kvstore: Any) -> None:
    """Raise where MXNet could not compress gradients, or would fail at the first step."""
    if not compression_params:
        return
    name = str(getattr(kvstore, "type", kvstore))
    if is_distributed(kvstore) or name.startswith("local"):
        raise ValueError(
            f"MXNet cannot compress gradients in a store {name!r}"
            + (" under gluon.Trainer" if is_distributed(kvstore) else "")
            + ". Use kvstore='device' with several devices, or no compression_params."
        )
    try:
        mx.kv.create("device").set_gradient_compression(compression_params)
    except Exception as error:
        raise ValueError(
            f"MXNet cannot compress gradients by {compression_params}: {error}. Use "
            "{'type': '2bit', 'threshold': 0.5}."
        ) from error


def check_sparse(params: Any, kvstore: Any) -> None:
    """Raise where sparse gradients would crash the servers."""
    values = params.values() if hasattr(params, "values") else params
    for parameter in values if isinstance(values, Iterable) else []:
        if (
            isinstance(parameter, Parameter)
            and _mxnet.is_sparse(parameter)
            and is_distributed(kvstore)
        ):
            raise ValueError(
                f"{parameter.name} is sparse, and MXNet's distributed stores fail with sparse "
                "gradients under gluon.Trainer. Use sparse_grad=False, or one worker."
            )


def check_server_optimizer(optimizer: Any, params: Iterable[Parameter]) -> None:
    """Raise where servers would have to know whole arrays, and have slices."""
    uses_norms = type(optimizer).__name__ in ("LARS", "LAMB", "LANS", "LBSGD")
    bound = int(os.environ.get("MXNET_KVSTORE_BIGARRAY_BOUND", "1000000"))
    servers = int(os.environ.get("DMLC_NUM_SERVER", "1"))
    if not uses_norms or servers == 1:
        return
    for parameter in params:
        size = prod(parameter.shape or ())
        if _mxnet.is_trainable(parameter) and size >= bound:
            raise ValueError(
                f"{type(optimizer).__name__} needs the norm of {parameter.name}, whose {size} "
                f"entries are sliced over {servers} servers. Use update_on_kvstore=False, one "
                "server, or a larger MXNET_KVSTORE_BIGARRAY_BOUND (of all processes)."
            )


def check_flag(ignore_stale_grad: Any) -> None:
    """Raise where a closure was passed as the second argument of `step`."""
    if callable(ignore_stale_grad):
        raise TypeError(
            "The second argument of step() is ignore_stale_grad, as in gluon.Trainer. Pass the "
            "closure by its name: step(batch_size, closure=...)."
        )


def check_index(index: Any) -> None:
    """Raise unless an index is an integer, or left out."""
    if index is not None and (isinstance(index, bool) or not isinstance(index, Integral)):
        raise TypeError(
            f"batch_index must be the position of a minibatch, an integer, got "
            f"{type(index).__name__}."
        )


def check_dtypes(parameters: Iterable[Parameter]) -> None:
    """Raise unless all gradients are of a dtype that can be corrected."""
    for parameter in parameters:
        if _mxnet.is_trainable(parameter):
            dtype = _mxnet.dtype_name(_mxnet.data(parameter)[0])
            if dtype not in SUMMED_IN:
                raise TypeError(
                    f"{parameter.name} is {dtype}; SVRG needs parameters of {', '.join(SUMMED_IN)}."
                )
