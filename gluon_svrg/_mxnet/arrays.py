"""Arrays: their devices, their gradient buffers, and the marks of what backward has reached."""

from __future__ import annotations

import ctypes
import re
from contextlib import nullcontext
from operator import attrgetter
from typing import Any, Callable, Iterable, List, Sequence

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call
from mxnet.gluon import Parameter
from mxnet.ndarray import CachedOp, NDArray

__all__ = [
    "Arrays", "Flags", "cause_of", "classic", "device_of", "filled_like", "fresh", "is_gradient_in",
    "is_numpy_like", "is_refused_backward", "like", "mark", "prepared", "readable", "reader",
    "take_fresh", "to_ndarray",
]  # fmt: skip

HAS_DEVICES = hasattr(Parameter, "list_device")  # 2.0 says device where 1.9.1 says context

#: Per parameter, one array per device.
Arrays = List[List[NDArray]]
#: Per parameter, one mark per device.
Flags = List[List[bool]]

# Calls that keep Python's lock, as often as a step makes them: 0.25 microseconds each, where
# `NDArray._fresh_grad` takes 0.8.
_QUICK: Any = ctypes.PyDLL(_LIB._name)
_read, _write = _QUICK.MXNDArrayGetGradState, _QUICK.MXNDArraySetGradState
_STALE, _FRESH = ctypes.c_int(0), ctypes.c_int(1)

#: The device that holds an array.
device_of: Callable[[NDArray], Any] = attrgetter("device" if HAS_DEVICES else "ctx")


def classic(array: NDArray) -> NDArray:
    """The same memory as an array of the classic (not NumPy-like) interface."""
    return array.as_nd_ndarray()


def is_numpy_like(array: NDArray) -> bool:
    """Whether an array has the NumPy-like interface."""
    return array.stype == "default" and hasattr(mx, "np") and isinstance(array, mx.np.ndarray)


def like(array: NDArray, other: NDArray) -> NDArray:
    """The same memory as an array with the interface of another array."""
    return array.as_np_ndarray() if is_numpy_like(other) else classic(array)


def to_ndarray(value: Any, device: Any) -> NDArray:
    """A classic array with the values and the dtype of a NumPy array."""
    value = np.asarray(value)
    return mx.nd.array(value, ctx=device, dtype=value.dtype)


def readable(array: NDArray) -> NDArray:
    """The array; as float32 if it is in bfloat16, which NumPy reads as integers."""
    return array.astype("float32") if np.dtype(array.dtype).names else array


_invoke = _LIB.MXInvokeCachedOp if HAS_DEVICES else _LIB.MXInvokeCachedOpEx


def prepared(
    operator: CachedOp, device: Any, inputs: Sequence[int], outputs: Sequence[int]
) -> Callable[[], None]:
    """A call of a compiled operator, with arrays by their handles, about twice as fast as MXNet."""
    where = (device.device_typeid, device.device_id) if HAS_DEVICES else ()
    count, arrays = ctypes.c_int(len(outputs)), (ctypes.c_void_p * len(outputs))(*outputs)
    results, types = ctypes.c_void_p(ctypes.addressof(arrays)), ctypes.c_void_p()
    given = (ctypes.c_void_p * len(inputs))(*inputs)
    returned = map(ctypes.byref, (count, results, types))
    arguments = (operator.handle, len(inputs), given, *where, *returned)

    def call(_memory: Any = (operator, arrays)) -> None:
        check_call(_invoke(*arguments))

    return call


def reader(array: NDArray, into: np.ndarray) -> Callable[[], np.ndarray]:
    """A function that copies an array into one of NumPy; a small one in an eighth of `asnumpy`."""
    target, size = into.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(into.size)
    handle = array.handle

    def read(_memory: Any = array) -> np.ndarray:
        check_call(_LIB.MXNDArraySyncCopyToCPU(handle, target, size))
        return into

    return read


OTHER_DTYPE = (
    "Data and parameters must have one dtype, which is float32 unless a network is cast: "
    "X.astype('float32'), or net.cast('float64'). MXNet says:"
)
NO_ARRAY = (
    "A network or a loss was called with data that is no array of MXNet, such as one of NumPy: "
    "pass mx.np.array(X) on MXNet 2.0, mx.nd.array(X) on 1.9.1, or a DataLoader. MXNet says:"
)


def cause_of(error: Exception) -> str:
    """The likely cause of an error of MXNet, as a sentence; empty if it is not known."""
    said = str(error)
    if re.search(r"(?i)expected '?(u?int|b?float)\d", said):
        return OTHER_DTYPE
    return NO_ARRAY if re.search("must (be one NDArray|have NDArray type)", said) else ""


def is_refused_backward(error: Exception) -> bool:
    """Whether `backward` failed because no gradient was recorded, or the graph was freed."""
    said = str(error)
    return "not in a computational graph" in said or "in computation graph that require" in said


def not_traced() -> Any:
    """A block whose operations are not traced as part of a network by MXNet 2.0."""
    deferred = getattr(mx, "_deferred_compute", None)
    return nullcontext() if deferred is None else deferred.context(False)


def filled_like(array: NDArray, value: float) -> NDArray:
    """An array like another one, filled with a number; not traced as part of a network."""
    make = mx.np.full if is_numpy_like(array) else mx.nd.full
    with not_traced():
        return make(array.shape, value, ctx=device_of(array), dtype=array.dtype)


def address_of(array: NDArray) -> int | None:
    """The address of a dense array. This undoes what oneDNN has done to its layout."""
    address = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    return address.value


def is_gradient_in(array: NDArray, buffer: NDArray) -> bool:
    """Whether `backward` has written the gradient of an array to its buffer, if that is dense."""
    return buffer.stype != "default" or address_of(array.grad) == address_of(buffer)


def fresh(arrays: Arrays) -> Flags:
    """Tell which gradients `backward` has written since MXNet's marks of that were cleared."""
    flags = take_fresh(arrays)
    mark(arrays, flags)
    return flags


def take_fresh(arrays: Arrays) -> Flags:
    """Tell which gradients are marked as fresh, and mark all as stale."""
    state = ctypes.c_int()
    reference = ctypes.byref(state)
    flags = []
    for per_device in arrays:
        row = []
        for array in per_device:
            handle = array.handle
            _read(handle, reference)
            row.append(state.value != 0)
            if state.value:
                _write(handle, _STALE)
        flags.append(row)
    return flags


def mark(arrays: Iterable[Sequence[NDArray]], flags: Iterable[Sequence[bool]]) -> None:
    """Mark those gradients as fresh that have a flag."""
    for per_device, row in zip(arrays, flags):
        for array, is_fresh in zip(per_device, row):
            if is_fresh:
                _write(array.handle, _FRESH)
