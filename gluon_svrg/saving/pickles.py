"""Reading the pickles of `gluon.Trainer.save_states` without running them.

A pickle is a program. What it may name is replaced by a stand-in here, which notes what it would
have been called with; nothing is called or imported. A crafted pickle can still use up the memory.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from typing import Any, Iterator

import numpy as np
from mxnet.lr_scheduler import LRScheduler
from mxnet.optimizer import Optimizer

from .values import NOT_SAVED, SavedArray, SavedObject, saved_array

#: What makes arrays, by name, with their kind; and what is in these.
_ARRAYS = {"NDArray": "nd", "RowSparseNDArray": "nd", "ndarray": "np", "_reconstruct": "numpy",
           "scalar": "scalar", "bytearray": "", "dtype": ""}  # fmt: skip
_DTYPES = {0: "<f4", 1: "<f8", 2: "<f2", 3: "|u1", 4: "<i4", 5: "|i1", 6: "<i8", 7: "|b1"}


def loads(content: bytes) -> tuple[dict[Any, Any], SavedObject, str]:
    """Read the states by index, the optimizer, and the first number of MXNet's version."""
    found = _Unpickler(io.BytesIO(content)).load()
    is_pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], _StandIn)
    if not is_pair or "begin_num_update" not in found[1].state:
        raise ValueError("it is a pickle, but not of the states of a gluon.Trainer")
    states, optimizer = map(_value, found)
    return states, optimizer, "2" if "use_fused_step" in found[1].state else "1"


class _StandIn:
    """What a pickle has made in place of an object: the arguments of the call, and the state."""

    arguments: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *arguments: Any) -> _StandIn:
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle._Unpickler):  # that in C asks no subclass for an extension
    """Makes plain containers, and stand-ins for objects; it refuses persistent ids by itself."""

    def get_extension(self, code: int) -> Any:
        """Refuse a code: Python may know an object for it, and would not ask `find_class`."""
        raise ValueError(f"it has the code of an extension, {code}, which no MXNet writes")

    def find_class(self, module: str, name: str) -> Any:
        """A stand-in for an array, an optimizer or a scheduler, by its name; nothing else."""
        if name not in [*_ARRAYS, *_names(Optimizer), *_names(LRScheduler)]:
            raise ValueError(
                f"it contains {module}.{name}, which is no optimizer, scheduler or array, and "
                "could run code. Define an optimizer of your own before loading"
            )
        return type(name, (_StandIn,), {})


def _names(cls: Any) -> Iterator[str]:
    """The names of a class and its subclasses that are already defined."""
    yield cls.__qualname__
    for subclass in cls.__subclasses__():
        yield from _names(subclass)


def _value(value: Any) -> Any:
    """Convert what a pickle has made to numbers, strings, containers, arrays and objects."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value)(map(_value, value))
    if isinstance(value, dict):
        return {key: _value(item) for key, item in value.items()}
    if not isinstance(value, _StandIn):
        return value
    name = type(value).__name__
    if _ARRAYS.get(name):
        return _array(value, _ARRAYS[name])
    attributes = {key: item for key, item in value.state.items() if key not in NOT_SAVED}
    return SavedObject(name.rpartition(".")[2], _value(attributes))


def _array(made: _StandIn, kind: str) -> SavedArray:
    if kind in ("nd", "np"):
        return _of_mxnet(_bytes(made.state["handle"]), kind)
    dtype, *_, content = made.arguments if kind == "scalar" else made.state[2:]
    shape, in_fortran = ((), False) if kind == "scalar" else made.state[1:4:2]
    name = dtype.state[1] + dtype.arguments[0]
    if not re.fullmatch(r"[<>|=][biuf][1248]", name):
        raise ValueError("it has an array of a dtype that is no number")
    order: Any = "F" if in_fortran else "C"
    return saved_array(np.ndarray(shape, np.dtype(name), _bytes(content), order=order), kind)


def _of_mxnet(content: bytes, kind: str) -> SavedArray:
    """An array as MXNet writes it; a sparse one becomes dense. MXNet's own reader can crash."""
    file = io.BytesIO(content)

    def take(layout: str) -> tuple[int, ...]:
        return struct.unpack(f"<{layout}", file.read(struct.calcsize(f"<{layout}")))

    magic, stype = take("Ii")
    if magic not in (0xF993FAC9, 0xF993FACA) or stype not in (0, 1):
        raise ValueError("it has an array in a form that no MXNet from 1.5 to 2.0 writes")
    if stype:  # MXNet writes this shape before it is known; that of the indices is right
        take(f"{take('i')[0]}q")
    shape = take(f"{take('i')[0]}q")
    dtype = np.dtype(_DTYPES[take("iii")[2]])  # after the device
    if not stype:
        return saved_array(np.ndarray(shape, dtype, content, file.tell()), kind)
    index_dtype = np.dtype(_DTYPES[take("i")[0]])
    (rows,) = take(f"{take('i')[0]}q")
    dense = np.zeros(shape, dtype)
    values: Any = np.ndarray((rows, *shape[1:]), dtype, file.read(rows * dense[:1].nbytes))
    dense[np.ndarray((rows,), index_dtype, file.read())] = values
    return saved_array(dense, kind, "row_sparse")


def _bytes(value: Any) -> bytes:
    """Bytes, or those of a bytearray."""
    found = value.arguments[0] if isinstance(value, _StandIn) else value
    if type(found) is not bytes:
        raise ValueError("it has an array without content")
    return found
