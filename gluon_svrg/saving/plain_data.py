"""Python values as plain data: JSON and a list of arrays, nothing that could run.

Optimizers and schedulers become the dict of their attributes. Reading assigns these to an object
that is there already, of the same class; so those that users define work too.
"""

from __future__ import annotations

from typing import Any, Iterator

import mxnet as mx
import numpy as np
from mxnet.lr_scheduler import LRScheduler
from mxnet.ndarray import NDArray
from mxnet.optimizer import Optimizer

from .. import _mxnet

#: Attributes that the trainer sets by itself, or that belong to the MXNet that runs.
_NOT_SAVED = ("param_dict", "sym_info", "allow_np_array", "aggregate_num", "use_fused_step")
_SCALARS = (bool, int, float, str, type(None))


def encode(value: Any, arrays: list[np.ndarray], where: str = "") -> Any:
    """Turn a value into what JSON can hold; arrays are appended to a list.

    Parameters
    ----------
    value : object
        Numbers, strings, None, containers, arrays, optimizers, schedulers.
    arrays : list of ndarray
        Where arrays go.
    where : str
        What the value is, for the error.

    Raises
    ------
    TypeError
        If it is, or contains, anything else.
    """
    if type(value) in _SCALARS:
        return value
    if isinstance(value, NDArray):
        arrays.append(value.asnumpy())
        kind = "np" if _mxnet.is_numpy_like(value) else "nd"
        return {"kind": kind, "array": len(arrays) - 1, "stype": value.stype}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
        arrays.append(np.asarray(value))
        kind = "numpy" if isinstance(value, np.ndarray) else "scalar"
        return {"kind": kind, "array": len(arrays) - 1}
    if type(value) in (list, tuple, set):
        items = [encode(item, arrays, f"{where}[...]") for item in value]
        return {"kind": type(value).__name__, "items": items}
    if isinstance(value, dict):
        pairs = [
            [encode(key, arrays, where), encode(item, arrays, f"{where}[{key!r}]")]
            for key, item in value.items()
        ]
        return {"kind": "dict", "items": pairs}
    if is_object(value):
        return {"kind": "object", **encode_object(value, arrays)}
    raise TypeError(
        f"{where or 'It'} is a {type(value).__name__}, which cannot be saved. An optimizer, a "
        "scheduler or a schedule is saved by its attributes: numbers, strings, containers, arrays."
    )


def is_object(value: Any) -> bool:
    """Whether a value is saved by its attributes."""
    return isinstance(value, (Optimizer, LRScheduler))


def is_stateful(value: Any) -> bool:
    """Whether something that can be called is an object, not a function or class."""
    return callable(value) and hasattr(value, "__dict__") and not hasattr(value, "__name__")


def encode_object(value: Any, arrays: list[np.ndarray]) -> dict[str, Any]:
    """The class and the attributes of an object; functions among them are part of the class."""
    name = type(value).__name__
    attributes = {
        key: encode(item, arrays, f"{name}.{key}")
        for key, item in vars(value).items()
        if key not in _NOT_SAVED and (is_object(item) or not callable(item))
    }
    return {"class": name, "attributes": attributes}


def decode(value: Any, arrays: list[np.ndarray], live: Any = None) -> Any:
    """Turn what `encode` made into a value.

    Parameters
    ----------
    value : object
        From JSON.
    arrays : list of ndarray
        The arrays.
    live : object, optional
        What is there now. Objects are not made, but found there.
    """
    if not isinstance(value, dict):
        return value
    kind = value["kind"]
    if kind in ("nd", "np"):
        array = mx.nd.array(arrays[value["array"]], dtype=arrays[value["array"]].dtype)
        return array.as_np_ndarray() if kind == "np" else array.tostype(value["stype"])
    if kind in ("numpy", "scalar"):
        array = arrays[value["array"]]
        return array.copy() if kind == "numpy" else array[()]
    if kind == "dict":
        found = {}
        for encoded_key, item in value["items"]:
            key = decode(encoded_key, arrays)
            here = live.get(key) if isinstance(live, dict) else None
            found[key] = decode(item, arrays, here)
        return found
    if kind == "object":
        assign(value, arrays, live)
        return live
    items = [decode(item, arrays) for item in value["items"]]
    return {"list": list, "tuple": tuple, "set": set}[kind](items)


def assign(encoded: dict[str, Any], arrays: list[np.ndarray], live: Any) -> None:
    """Give an object the attributes that were saved of another of its class."""
    for key, item in encoded["attributes"].items():
        setattr(live, key, decode(item, arrays, vars(live).get(key)))


def differences(encoded: Any, live: Any, where: str) -> Iterator[str]:
    """Tell where objects were saved for which there is no object of the same class.

    Yields
    ------
    str
        What is wrong, in words.
    """
    was = encoded.get("class") if isinstance(encoded, dict) else None
    now = type(live).__name__ if is_object(live) else None
    if was != now:
        yield f"{where} was {was or 'none'} and is {now or 'none'} here"
    elif was is not None:
        attributes = encoded["attributes"]
        for key in {*attributes, *vars(live)} - {*_NOT_SAVED}:
            if is_object(vars(live).get(key)) or "class" in _dict(attributes.get(key)):
                yield from differences(attributes.get(key), vars(live).get(key), f"its {key}")


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
