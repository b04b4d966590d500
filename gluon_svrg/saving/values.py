"""Values as plain data: JSON and a list of arrays, nothing that could run."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import numpy as np
from mxnet.ndarray import NDArray

from .. import _mxnet

#: Attributes that the trainer sets itself, or that belong to the running MXNet.
NOT_SAVED = ("param_dict", "sym_info", "allow_np_array", "aggregate_num", "use_fused_step")

_SCALARS = (bool, int, float, str, type(None))
#: What a file can have; only those of 0.6 have sets.
_CONTAINERS: dict[str, Any] = {cls.__name__: cls for cls in (list, tuple, set, frozenset)}


class ByParameter(dict):
    """Values by the position of their parameter in the trainer."""


class SavedArray(np.ndarray):
    """A read-only array: MXNet's classic (``nd``) or new (``np``) one, ``numpy`` or ``scalar``."""

    kind = "numpy"
    stype = "default"


class SavedObject(NamedTuple):
    """The saved attributes of an object."""

    class_name: str
    attributes: dict[str, Any]


def by_attributes(value: Any) -> SavedObject:
    """Save an object by its attributes, except functions and those in `NOT_SAVED`."""
    attributes: dict[str, Any] = {}
    for name, item in vars(value).items():
        if callable(item) and hasattr(item, "__dict__") and not hasattr(item, "__name__"):
            attributes[name] = by_attributes(item)  # a scheduler, and not a function
        elif name not in NOT_SAVED and not callable(item):
            attributes[name] = item
    return SavedObject(type(value).__name__, attributes)


def is_key(value: Any) -> bool:
    """Whether a value can be the key of a dict in a file."""
    items = value if type(value) is tuple else (value,)
    return all(type(item) in _SCALARS for item in items)


def saved_array(array: np.ndarray, kind: str, stype: str = "default") -> SavedArray:
    """Record the original kind of an array."""
    saved = array.view(SavedArray)
    saved.kind, saved.stype = kind, stype
    saved.flags.writeable = False
    return saved


def encode(value: Any, arrays: list[np.ndarray], where: str) -> Any:
    """Convert a value for JSON, its arrays to a list; a TypeError names what cannot be saved."""
    kind = type(value).__name__
    if type(value) in _SCALARS:
        return value
    if isinstance(value, NDArray):
        of_mxnet = "np" if _mxnet.is_numpy_like(value) else "nd"
        value = saved_array(value.asnumpy(), of_mxnet, value.stype)
    elif isinstance(value, np.generic):
        value = saved_array(np.asarray(value), "scalar")
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        array = value if isinstance(value, SavedArray) else value.view(SavedArray)
        arrays.append(np.asarray(array, order="C"))
        found = {"kind": array.kind, "array": len(arrays) - 1, "stype": array.stype}
        return {**found, "order": "F"} if array.flags.fnc else found  # sums depend on the layout
    if isinstance(value, SavedObject):
        kind, own = value
        items = [[name, encode(v, arrays, f"{kind}.{name}")] for name, v in own.items()]
        return {"kind": "object", "class": kind, "attributes": items}
    if isinstance(value, dict) and all(map(is_key, value)):
        pairs = value.items()
        items = [[encode(k, arrays, where), encode(v, arrays, f"{where}[{k!r}]")] for k, v in pairs]
        return {"kind": "parameters" if type(value) is ByParameter else "dict", "items": items}
    if type(value) in (list, tuple):
        items = [encode(item, arrays, f"{where}[...]") for item in value]
        return {"kind": kind, "items": items}
    raise TypeError(
        f"{where[:200]} is a {kind}, which cannot be saved. Use numbers, strings, None, arrays, "
        "and lists, tuples and dicts of these, with numbers and strings as keys."
    )


def decode(encoded: Any, arrays: Sequence[np.ndarray], positions: Sequence[int]) -> Any:
    """Convert the result of `encode` back, with the positions of parameters in this trainer."""
    if not isinstance(encoded, dict):
        return encoded
    kind = encoded["kind"]
    if "array" in encoded:
        array = np.asarray(arrays[encoded["array"]], order=encoded.get("order", "C"))
        return saved_array(array, kind, encoded["stype"])
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](decode(item, arrays, positions) for item in encoded["items"])
    pairs = encoded["attributes" if kind == "object" else "items"]
    found = {decode(k, arrays, positions): decode(v, arrays, positions) for k, v in pairs}
    if kind == "object":
        return SavedObject(encoded["class"], found)
    if kind == "parameters":
        return ByParameter({positions[key]: value for key, value in found.items()})
    return found
