"""Objects by their attributes: saved attributes are assigned to an existing object."""

from __future__ import annotations

import copy
import math
from typing import Any, Iterator

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from .. import _mxnet
from .._mxnet import optimizers
from .values import NOT_SAVED, ByParameter, SavedArray, SavedObject, by_attributes, is_object

_NUMBERS = (bool, int, float, np.generic)


def problems(saved: Any, live: Any, where: str, *, complete: bool = True) -> Iterator[str]:
    """Describe why the saved attributes cannot be assigned to an object.

    Parameters
    ----------
    saved : SavedObject
        The attributes.
    live : object
        The object.
    where : str
        The name of the object in messages.
    complete : bool
        Whether every attribute of an object of MXNet must have been saved.

    Yields
    ------
    str
        A problem.
    """
    was = saved.class_name if isinstance(saved, SavedObject) else "none"
    now = "none" if live is None else type(live).__name__
    if not isinstance(saved, SavedObject) or live is None or was != now:
        yield f"{where} was {was} and is {now} here: make it the same one before loading"
        return
    strict = optimizers.is_of_mxnet(live)
    here = by_attributes(live).attributes
    for name, value in saved.attributes.items():
        known = name in here
        if not known and not _can_be_set(live, name):
            yield f"{where} has an attribute {name!r} that a {now} cannot have"
        else:
            yield from _differences(value, here.get(name), f"its {name}", strict and known, known)
    if strict and complete:
        for name in here.keys() - saved.attributes.keys() - {*optimizers.SEPARATE}:
            yield f"{where} ({was}) lacks its {name}"


def assign(saved: SavedObject, live: Any) -> None:
    """Assign the saved attributes of one object to another of its class.

    Parameters
    ----------
    saved : SavedObject
        The attributes, in which `problems` has found nothing.
    live : object
        The object. The objects in its attributes stay, and get their own saved attributes.
    """
    here = vars(live)
    values = {name: restored(item, here.get(name)) for name, item in saved.attributes.items()}
    for name, value in values.items():
        setattr(live, name, value)


def restored(value: Any, live: Any = None) -> Any:
    """Convert a value of a file for use; objects are not created, but taken from ``live``."""
    if isinstance(value, SavedArray):
        if value.kind in ("nd", "np"):
            array = mx.nd.array(np.array(value), dtype=value.dtype)
            return array.as_np_ndarray() if value.kind == "np" else array.tostype(value.stype)
        return np.array(value)[()] if value.kind == "scalar" else np.array(value)
    if isinstance(value, SavedObject):
        assign(value, live)
        return live
    if isinstance(value, dict):
        inside = live if isinstance(live, dict) else {}
        return {key: restored(item, inside.get(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        others = [*live] if isinstance(live, (list, tuple)) else []
        others += [None] * (len(value) - len(others))
        return type(value)(restored(item, here) for item, here in zip(value, others))
    return copy.copy(value)


def _can_be_set(live: Any, name: str) -> bool:
    """Whether an object can get a new plain attribute of this name (no method or property)."""
    found = getattr(type(live), name, None)
    return (
        name.isidentifier()
        and not name.startswith("__")
        and name not in NOT_SAVED
        and not callable(found)
        and not hasattr(found, "__get__")
    )


def _differences(value: Any, live: Any, where: str, strict: bool, known: bool) -> Iterator[str]:
    """Describe where a saved object has no counterpart, or a value is of another kind."""
    if is_object(value) or (is_object(live) and known):
        yield from problems(value, live, where)
        return
    if isinstance(value, ByParameter):
        yield f"{where} is malformed"
    elif strict:
        yield from _unfit(value, live, where)
    inside: Any = []  # pairs of saved and existing values
    if isinstance(value, dict):
        here = live if isinstance(live, dict) else {}
        inside = [(item, here.get(key), repr(key)) for key, item in value.items()]
        inside += [(None, item, repr(key)) for key, item in here.items() if key not in value]
    elif isinstance(value, (list, tuple)):
        others = [*live] if isinstance(live, (list, tuple)) else []
        length = max(len(value), len(others))
        rows = ([*row, *[None] * (length - len(row))] for row in (value, others))
        inside = [(*pair, str(number)) for number, pair in enumerate(zip(*rows))]
    elif _has_object(live):
        yield f"{where} was {_kind(value)} and holds objects here"
    for item, other, place in inside:
        if _has_object(item) or _has_object(other):
            yield from _differences(item, other, f"{where}[{place}]", False, True)


def _has_object(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_object, value.values()))
    return is_object(value) or (isinstance(value, (list, tuple)) and any(map(_has_object, value)))


def _unfit(value: Any, live: Any, where: str) -> Iterator[str]:
    """Compare the kinds of a value of MXNet's own class, so that its update cannot fail."""
    was, now = _kind(value), _kind(live)
    if isinstance(value, (float, np.floating)) and not math.isfinite(value):
        yield f"{where} is {value} and must be finite"
    elif isinstance(value, int) and abs(value) >= 2**63:
        yield f"{where} is too large"
    elif was == now == "an array":
        if _shape(value) != _shape(live):
            yield f"{where} has shape {_shape(value)} and must have {_shape(live)}"
    elif {was, now} == {"a number", "an array"}:
        array = value if was == "an array" else live
        if int(np.prod(_shape(array))) != 1:
            yield f"{where} was {was} of shape {_shape(array)} and is {now} here"
    elif was != now and "None" not in (was, now):
        yield f"{where} was {was} and is {now} here"


def _shape(array: Any) -> tuple[int, ...]:
    return tuple(array.shape)


def _kind(value: Any) -> str:
    if isinstance(value, (np.ndarray, NDArray)):
        is_scalar = isinstance(value, SavedArray) and value.kind == "scalar"
        return "a number" if is_scalar else "an array"
    if value is None:
        return "None"
    return "a number" if isinstance(value, _NUMBERS) else f"a {type(value).__name__}"


def is_numeric(value: Any) -> bool:
    """Whether a value is a real number, but no array and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def described(state: Any) -> Any:
    """Storage types, dtypes and shapes of arrays, in the same containers."""
    if isinstance(state, (list, tuple)):
        return [described(item) for item in state]
    if isinstance(state, NDArray):
        return _array_description(_mxnet.dtype_name(state), state)
    if isinstance(state, SavedArray) and state.kind in ("nd", "np"):
        return _array_description(str(np.dtype(state.dtype)), state)
    if isinstance(state, dict):
        return {key: described(item) for key, item in state.items()}
    return None if state is None else _kind(state)


def _array_description(dtype: str, array: Any) -> str:
    prefix = "" if array.stype == "default" else f"{array.stype} "
    return f"{prefix}{dtype} {_shape(array)}"
