"""Gluon parameters: their devices, their values, and other values in their place."""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from .arrays import HAS_DEVICES, device_of, not_traced

__all__ = [
    "all_rows", "data", "devices", "devices_of_estimator", "dtype_of", "end_notes", "gradients",
    "has_data", "has_sparse_values", "is_auxiliary", "is_deferred", "is_sparse", "is_trainable",
    "name_of", "not_initialized", "note_keys", "notes", "put", "reads_noted",
]  # fmt: skip


def devices(parameter: Parameter) -> list[Any]:
    """The devices on which a parameter is (or, when deferred, will be) initialized."""
    return parameter.list_device() if HAS_DEVICES else parameter.list_ctx()


def devices_of_estimator(estimator: Any) -> Any:
    """The devices that an `Estimator` trains on."""
    return estimator.device if hasattr(estimator, "device") else estimator.context


_keys: weakref.WeakKeyDictionary[Parameter, str] = weakref.WeakKeyDictionary()


def note_keys(parameters: Mapping[str, Parameter]) -> None:
    """Remember the keys of a mapping of parameters: the names of MXNet 2.0 lack the layer."""
    for key, parameter in parameters.items():
        _keys[parameter] = max(str(key), _keys.get(parameter, ""), key=len)


def name_of(parameter: Parameter) -> str:
    """The name of a parameter for messages, with its layer where that is known."""
    return _keys.get(parameter, parameter.name)


def not_initialized(parameters: Iterable[Parameter]) -> str:
    """A message about those whose shapes are not known."""
    names = [name_of(p) for p in parameters if is_deferred(p)]
    return (
        f"No mini-batch initializes {', '.join(names[:5])}{', ...' * (len(names) > 5)}. If none "
        "has passed the network yet, pass step(batch_size, closure=...), or call it with one. If "
        "it does not use a layer, set its in_units or in_channels, or leave it out of the trainer."
    )


def is_deferred(parameter: Parameter) -> bool:
    """Whether a parameter waits for the first forward pass to learn its shape."""
    return bool(parameter._deferred_init)


def has_data(parameter: Parameter) -> bool:
    """Whether a parameter has values, so that no deferred initialization is left."""
    return parameter._data is not None


def is_trainable(parameter: Parameter) -> bool:
    """Whether a parameter has gradients."""
    return parameter.grad_req != "null"


def is_auxiliary(parameter: Parameter) -> bool:
    """Whether operators may write to a parameter by themselves, as BatchNorm to its states."""
    return not is_trainable(parameter) and (
        not parameter._differentiable or len(parameter.shape or ()) <= 1
    )


#: The values of an initialized parameter, one array per device. In C, as each step asks for all.
data: Callable[[Parameter], list[NDArray]] = attrgetter("_data")


def all_rows(parameter: Parameter) -> list[NDArray]:
    """The values of a parameter, one array per device; row_sparse ones get all rows first."""
    weights = data(parameter)
    if has_sparse_values(parameter):
        trainer: Any = parameter._trainer
        trainer = trainer() if isinstance(trainer, weakref.ref) else trainer  # 2.0
        for weight in weights:
            rows = mx.nd.arange(parameter.shape[0], ctx=device_of(weight), dtype="int64")
            trainer._row_sparse_pull(parameter, weight, rows, full_idx=True)
    return weights


def dtype_of(thing: Parameter | NDArray) -> str:
    """The name of the dtype of an array, or that a parameter has or, when deferred, will have."""
    try:
        return np.dtype(thing.dtype).name
    except TypeError:  # bfloat16 of a parameter, which NumPy does not have
        return str(thing.dtype)


def has_sparse_values(parameter: Parameter) -> bool:
    """Whether the values of a parameter are sparse."""
    return parameter._stype != "default"


def is_sparse(parameter: Parameter) -> bool:
    """Whether a parameter or its gradient is sparse."""
    return has_sparse_values(parameter) or parameter._grad_stype != "default"


#: The gradient buffers of a parameter, one array per device; None if there are none.
gradients: Callable[[Parameter], list[NDArray]] = attrgetter("_grad")


def put(parameters: Sequence[Parameter], arrays: Sequence[list[NDArray]]) -> None:
    """Let the network compute with other arrays; blocks read `Parameter.data` at every call."""
    for parameter, values in zip(parameters, arrays):
        parameter._data = values


_check_and_get: Any = Parameter._check_and_get
notes: dict[int, Callable[[Parameter], None]] = {}  # by thread


@contextmanager
def reads_noted(note: Callable[[Parameter], None]) -> Iterator[None]:
    """Call a function, by a patch, with each parameter just before this thread reads its values."""
    notes[threading.get_ident()] = note
    Parameter._check_and_get = _note_and_get
    try:
        yield
    finally:
        end_notes()


def _note_and_get(parameter: Parameter, arrays: Any, device: Any) -> Any:
    note = notes.get(threading.get_ident())
    if note is not None and arrays is not None and arrays is parameter._data:
        with not_traced(), mx.autograd.pause():
            note(parameter)
        arrays = parameter._data
    return _check_and_get(parameter, arrays, device)


def end_notes() -> None:
    """End `reads_noted` in this thread; an interrupt may have left it on."""
    mine = threading.get_ident()
    if {*notes} <= {mine} and Parameter._check_and_get is not _check_and_get:
        Parameter._check_and_get = _check_and_get  # only if it is another: Python keeps its caches
    notes.pop(mine, None)
