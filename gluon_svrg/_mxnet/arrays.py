"""Arrays and their devices."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, MXNetError, check_call
from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

HAS_DEVICES = hasattr(Parameter, "list_device")  # 2.0 says device where 1.9.1 says context


_context_of: Any = ctypes.PyDLL(_LIB._name).MXNDArrayGetContext  # keeps Python's lock: quicker
_devices: dict[tuple[int, int], Any] = {}


def device_of(array: NDArray) -> Any:
    """The device that holds an array; always the same object for the same device.

    Without the overhead of `NDArray.ctx`, which makes another object each time.
    """
    kind, number = ctypes.c_int(), ctypes.c_int()
    status = _context_of(array.handle, ctypes.byref(kind), ctypes.byref(number))
    if status:
        check_call(status)
    known = _devices.get((kind.value, number.value))
    return only(array.device if HAS_DEVICES else array.ctx) if known is None else known


def only(device: Any) -> Any:
    """The one object for a device."""
    return _devices.setdefault((device.device_typeid, device.device_id), device)


def classic(array: NDArray) -> NDArray:
    """The same memory as an array of the classic (not NumPy-like) interface."""
    return array.as_nd_ndarray()


def is_numpy_like(array: NDArray) -> bool:
    """Whether an array has the NumPy-like interface."""
    return array.stype == "default" and hasattr(mx, "np") and isinstance(array, mx.np.ndarray)


def like(array: NDArray, other: NDArray) -> NDArray:
    """The same memory as an array with the interface of another array."""
    return array.as_np_ndarray() if is_numpy_like(other) else classic(array)


def to_ndarray(value: np.ndarray, device: Any) -> NDArray:
    """A classic array with the values and the dtype of a NumPy array."""
    return mx.nd.array(value, ctx=device, dtype=value.dtype)


def dtype_name(array: NDArray) -> str:
    """The name of an array's dtype, such as ``float32``."""
    return _name_of(array.dtype)


@lru_cache(maxsize=None)
def _name_of(dtype: Any) -> str:
    return str(np.dtype(dtype))


def is_refused_backward(error: MXNetError) -> bool:
    """Whether `backward` failed because its head was not recorded or its graph was freed."""
    message = str(error)
    return (
        "not in a computational graph" in message
        or "no inputs in computation graph that require gradients" in message
    )


def not_traced() -> Any:
    """A block whose operations are not traced as part of a network by MXNet 2.0."""
    deferred = getattr(mx, "_deferred_compute", None)
    return nullcontext() if deferred is None else deferred.context(False)


ASSIGNED = (
    "The closure assigned values to a parameter (Parameter.set_data or param.data()[:] = ...), and "
    "the trainer calls it at other weights too: the assignment would be lost, or would damage the "
    "snapshot. Assign before step(), not in the forward pass, or use grad_req='null' and a "
    "parameter of one dimension for a state that the forward pass changes."
)


@lru_cache(maxsize=None)
def _guarded(cls: Any) -> Any:
    def refuse(array: NDArray, key: Any, value: Any) -> None:
        raise RuntimeError(ASSIGNED)

    return type(cls.__name__, (cls,), {"__setitem__": refuse, "__slots__": (), "is_guarded": True})


def guard(array: NDArray) -> NDArray:
    """Make an array, in place, refuse assignments to its entries."""
    cls: Any = type(array)
    array.__class__ = _guarded(cls)
    return array


def unguarded(array: NDArray) -> NDArray:
    """Make an array, in place, accept assignments again."""
    array.__class__ = next(c for c in type(array).__mro__ if not hasattr(c, "is_guarded"))
    return array
