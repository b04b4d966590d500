"""Gradient buffers, and the marks that show which of them backward has reached."""

from __future__ import annotations

import ctypes
from typing import Any, Iterable, List, Sequence

import mxnet as mx
from mxnet.base import _LIB
from mxnet.ndarray import NDArray

#: Per parameter, one array per device.
Arrays = List[List[NDArray]]
#: Per parameter, one mark per device.
Flags = List[List[bool]]

# Calls that keep Python's lock, as often as a step makes them: 0.25 microseconds each, where
# `NDArray._fresh_grad` takes 0.8.
_QUICK: Any = ctypes.PyDLL(_LIB._name)
_read, _write = _QUICK.MXNDArrayGetGradState, _QUICK.MXNDArraySetGradState
_STALE, _FRESH = ctypes.c_int(0), ctypes.c_int(1)


def put_gradients_into(arrays: Arrays, buffers: Arrays, grad_req: str) -> None:
    """Let `backward` write the gradients of arrays to buffers ('write'), or add them ('add')."""
    flat = [array for per_device in arrays for array in per_device]
    if flat:
        flat_buffers = [buffer for per_device in buffers for buffer in per_device]
        mx.autograd.mark_variables(flat, flat_buffers, grad_req)


def fresh(arrays: Arrays) -> Flags:
    """Tell which gradients `backward` has written since their marks were cleared.

    `gluon.Trainer` reads the same marks.
    """
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
