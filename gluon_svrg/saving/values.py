"""Values as plain data: JSON and a list of arrays, nothing that could run.

Writing accepts numbers, strings, containers, arrays, and objects by their attributes. Reading
returns the same, with three special types: a `SavedArray` for every array, a `SavedObject` for
every object, and `ByParameter` for values that belong to the parameters of a trainer.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, NamedTuple, Sequence

import numpy as np
from mxnet.lr_scheduler import LRScheduler
from mxnet.ndarray import NDArray
from mxnet.optimizer import Optimizer

from .. import _mxnet

#: Attributes that the trainer sets itself, or that belong to the running MXNet.
NOT_SAVED = ("param_dict", "sym_info", "allow_np_array", "aggregate_num", "use_fused_step")
#: How deeply containers and objects may be nested.
MAX_DEPTH = 60
#: The longest integer, in bits.
MOST_BITS = 3000

_SCALARS = (bool, int, float, str, type(None))
_CONTAINERS: dict[str, Callable[..., Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset
}  # fmt: skip


class ByParameter(dict):
    """Values by the position of their parameter in the trainer.

    When a trainer reads a file, the positions become its own positions of the same parameters.
    """


class SavedArray(np.ndarray):
    """A read-only array from a file.

    Attributes
    ----------
    kind : {'nd', 'np', 'numpy', 'scalar'}
        Its original kind: an array of MXNet's classic or NumPy-like interface, or one of NumPy.
    stype : str
        Its original storage type in MXNet.
    """

    kind = "numpy"
    stype = "default"


class SavedObject(NamedTuple):
    """The saved attributes of an object."""

    class_name: str
    attributes: dict[str, Any]


def by_attributes(value: Any) -> SavedObject:
    """Save an object by its attributes, except functions, which belong to its class."""
    return SavedObject(
        type(value).__name__,
        {
            name: item
            for name, item in vars(value).items()
            if name not in NOT_SAVED and (is_object(item) or not callable(item))
        },
    )


def is_object(value: Any) -> bool:
    """Whether a value is saved by its attributes wherever it occurs.

    These are optimizers, schedulers, and callables with attributes, but no functions or classes.
    """
    return isinstance(value, (Optimizer, LRScheduler, SavedObject)) or (
        callable(value) and hasattr(value, "__dict__") and not hasattr(value, "__name__")
    )


def saved_array(array: np.ndarray, kind: str, stype: str = "default") -> SavedArray:
    """Record the original kind of an array."""
    saved = array.view(SavedArray)
    saved.kind, saved.stype = kind, stype
    saved.flags.writeable = False
    return saved


# --- to plain data -----------------------------------------------------------------------------


def encode(value: Any, arrays: list[np.ndarray], where: str = "it", depth: int = 0) -> Any:
    """Convert a value to a form that JSON can hold; arrays are appended to a list.

    Parameters
    ----------
    value : object
        Numbers, strings, None, containers, arrays, optimizers, schedulers.
    arrays : list of ndarray
        The list that gets the arrays.
    where : str
        The name of the value, for the error.
    depth : int
        The number of containers around it.

    Raises
    ------
    TypeError
        If the value is, or contains, anything else; if it contains itself.
    """
    if depth > MAX_DEPTH:
        raise TypeError(
            f"{where[:60]} contains itself, or is nested more than {MAX_DEPTH} deep, and cannot "
            "be saved. Flatten it, or do not keep it as an attribute of an optimizer or schedule."
        )
    if type(value) is int and value.bit_length() > MOST_BITS:
        raise TypeError(f"{where} is a number of {value.bit_length()} bits, which cannot be saved.")
    if type(value) in _SCALARS:
        return value
    if isinstance(value, NDArray):
        return _array(value.asnumpy(), "np" if _mxnet.is_numpy_like(value) else "nd", value, arrays)
    if isinstance(value, SavedArray):
        return _array(value, value.kind, value, arrays)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return _array(value, "numpy", None, arrays)
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return _array(np.asarray(value), "scalar", None, arrays)
    if isinstance(value, SavedObject):
        attributes = [
            [name, encode(item, arrays, f"{value.class_name}.{name}", depth + 1)]
            for name, item in value.attributes.items()
        ]
        return {"kind": "object", "class": value.class_name, "attributes": attributes}
    if is_object(value):
        return encode(by_attributes(value), arrays, where, depth)
    if type(value).__name__ in _CONTAINERS and type(value) is _CONTAINERS[type(value).__name__]:
        if isinstance(value, (set, frozenset)):
            _check_hashed(value, where)
        items = [encode(item, arrays, f"{where}[...]", depth + 1) for item in value]
        return {"kind": type(value).__name__, "items": items}
    if isinstance(value, dict):
        _check_hashed(value, where)
        pairs = [
            [encode(key, arrays), encode(item, arrays, f"{where}[{key!r}]", depth + 1)]
            for key, item in value.items()
        ]
        return {"kind": "parameters" if type(value) is ByParameter else "dict", "items": pairs}
    raise TypeError(
        f"{where} is a {type(value).__name__}, which cannot be saved. An optimizer, a scheduler or "
        "a schedule is saved by its attributes: numbers, strings, containers and arrays, and "
        "schedulers in an attribute, a list, a tuple or a dict."
    )


def _array(array: np.ndarray, kind: str, source: Any, arrays: list[np.ndarray]) -> dict[str, Any]:
    arrays.append(np.asarray(array, order="C"))
    encoded = {"kind": kind, "array": len(arrays) - 1}
    if source is not None and source.stype != "default":
        encoded["stype"] = source.stype
    return encoded


def _check_hashed(items: Any, where: str) -> None:
    for item in items:
        if not is_key(item):
            raise TypeError(
                f"{where} has a {type(item).__name__} as a key or in a set, which cannot be "
                "saved: use numbers, strings, None, or tuples of these."
            )


def is_key(value: Any) -> bool:
    """Whether a value can be the key of a dict in a file."""
    if type(value) is tuple:
        return len(value) <= 16 and all(type(item) in _SCALARS for item in value)
    return type(value) in _SCALARS


# --- from plain data ---------------------------------------------------------------------------


def decode(encoded: Any, arrays: Sequence[np.ndarray], unused: set[int] | None = None) -> Any:
    """Convert the result of `encode` back to a value.

    Every array must be used once: otherwise a small file could become a large value.

    Parameters
    ----------
    encoded : object
        From JSON.
    arrays : sequence of ndarray
        The arrays.
    unused : set of int, optional
        The numbers of the unused arrays; those used here are removed. By default all are unused,
        and none may remain.

    Raises
    ------
    ValueError
        If it is no result of `encode`.
    """
    left = set(range(len(arrays))) if unused is None else unused
    value = _decode(encoded, arrays, left, 0)
    if left and unused is None:
        raise malformed(f"{len(left)} arrays are not used")
    return value


def _decode(encoded: Any, arrays: Sequence[np.ndarray], unused: set[int], depth: int) -> Any:
    if type(encoded) in _SCALARS:
        return encoded
    if depth > MAX_DEPTH + 10 or not isinstance(encoded, dict):
        raise malformed("a value is nested too deeply" if depth > MAX_DEPTH else "a value")
    kind = encoded.get("kind")
    if kind in ("nd", "np", "numpy", "scalar"):
        number, stype = encoded.get("array"), encoded.get("stype", "default")
        if type(number) is not int or number not in unused:
            raise malformed(f"array {number!r} does not exist or is used twice")
        unused.remove(number)
        if stype not in ("default", "row_sparse", "csr") or (
            kind == "scalar" and arrays[number].ndim
        ):
            raise malformed("an array")
        return saved_array(arrays[number], kind, stype)
    items = encoded.get("attributes" if kind == "object" else "items")
    if not isinstance(items, list):
        raise malformed(f"a value of kind {kind!r}")
    if isinstance(kind, str) and kind in _CONTAINERS:
        values = [_decode(item, arrays, unused, depth + 1) for item in items]
        if "set" in kind and not all(map(is_key, values)):
            raise malformed("a set")
        return _CONTAINERS[kind](values)
    pairs = [_pair(item) for item in items]
    keys = [_decode(key, arrays, unused, depth + 1) for key, _ in pairs]
    if not all(map(is_key, keys)) or len(set(keys)) != len(keys):
        raise malformed("the keys of a dict")
    found = {key: _decode(item, arrays, unused, depth + 1) for key, (_, item) in zip(keys, pairs)}
    if kind == "dict":
        return found
    if kind == "parameters" and all(type(key) is int for key in found):
        return ByParameter(found)
    name = encoded.get("class")
    if kind == "object" and isinstance(name, str) and all(isinstance(key, str) for key in found):
        return SavedObject(name, found)
    raise malformed(f"a value of kind {kind!r}")


def _pair(item: Any) -> Any:
    if not (isinstance(item, list) and len(item) == 2):
        raise malformed("a dict")
    return item


def malformed(what: str) -> ValueError:
    """Make the error about a part of a file that no version of gluon_svrg has written."""
    return ValueError(f"its manifest is malformed: {what[:200]}")


# --- walking -----------------------------------------------------------------------------------


def by_position(value: Any, positions: Callable[[int], int]) -> Any:
    """Convert the positions of parameters in a value to the positions in this trainer.

    Raises
    ------
    ValueError
        If a value belongs to a parameter that does not exist.
    """
    if isinstance(value, dict):
        found = {key: by_position(item, positions) for key, item in value.items()}
        if isinstance(value, ByParameter):
            return ByParameter({positions(key): item for key, item in found.items()})
        return found
    if isinstance(value, SavedObject):
        return SavedObject(value.class_name, by_position(value.attributes, positions))
    if isinstance(value, (list, tuple)):
        return type(value)(by_position(item, positions) for item in value)
    return value


def arrays_in(value: Any) -> Iterator[Any]:
    """All arrays in a value."""
    if isinstance(value, (np.ndarray, NDArray)):
        yield value
    elif isinstance(value, SavedObject):
        yield from arrays_in(value.attributes)
    elif isinstance(value, dict):
        for item in value.values():
            yield from arrays_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from arrays_in(item)
