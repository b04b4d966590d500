"""Reading the pickles of `gluon.Trainer.save_states` without running them.

A pickle is a program. `pickletools` takes it apart here, and its operations make plain containers
and notes of what would have been called; nothing is called or imported.
"""

from __future__ import annotations

import io
import pickletools
import re
import struct
from typing import Any, Callable, Iterator

import numpy as np
from mxnet.lr_scheduler import LRScheduler
from mxnet.optimizer import Optimizer

from .file_format import view
from .values import MAX_DEPTH, NOT_SAVED, SavedArray, SavedObject, is_key, saved_array

_MOST_OPERATIONS = 500_000  # and as many values: these take two seconds
#: What makes arrays, by name, with their kind; and what is in these.
_ARRAYS = {"NDArray": "nd", "RowSparseNDArray": "nd", "ndarray": "np", "_reconstruct": "numpy",
           "scalar": "scalar", "bytearray": "", "dtype": ""}  # fmt: skip
_DTYPES = {0: "<f4", 1: "<f8", 2: "<f2", 3: "|u1", 4: "<i4", 5: "|i1", 6: "<i8", 7: "|b1"}


def loads(content: bytes, most_bytes: int) -> tuple[dict[Any, Any], SavedObject, str]:
    """Read the states by index, the optimizer, and the first number of MXNet's version."""
    try:
        found = _run(content)
        is_pair = isinstance(found, tuple) and [*map(type, found)] == [dict, _Call]
        if not is_pair or "begin_num_update" not in found[1].state:
            raise ValueError("it is a pickle, but not of the states of a gluon.Trainer")
        states, optimizer = _Reader(most_bytes + len(content)).value(found)
        return states, optimizer, "2" if "use_fused_step" in found[1].state else "1"
    except Exception as error:
        raise ValueError(f"it is damaged, or not of MXNet: {error!s:.500}") from error


class _Call:
    """What a pickle would call, with which arguments, and the state that it would set."""

    def __init__(self, name: Any, arguments: Any) -> None:
        self.name, self.arguments, self.state = _key(name), arguments, None

    def build(self, state: Any) -> _Call:
        self.state = state
        return self


def _key(value: Any) -> Any:
    """A key, which is checked before it is hashed: the hash of nested tuples can take forever."""
    if not is_key(value):
        raise ValueError(f"it has a value or key of type {type(value).__name__}")
    return value


def _fill(target: Any, *items: Any) -> Any:
    """Put items into a list, a dict or a set."""
    if isinstance(target, list):
        target.extend(items)
    elif isinstance(target, dict):
        target.update(zip(map(_key, items[::2]), items[1::2]))
    else:
        target.update(map(_key, items))
    return target


_OPERATIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(["EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"], lambda *items: items),
    **dict.fromkeys(["EMPTY_LIST", "LIST"], lambda *items: [*items]),
    **dict.fromkeys(["EMPTY_DICT", "DICT"], lambda *items: _fill({}, *items)),
    **dict.fromkeys(["APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS"], _fill),
    **dict.fromkeys(["REDUCE", "NEWOBJ"], _Call),
    "BUILD": _Call.build,
    "EMPTY_SET": set,
    "FROZENSET": lambda *items: frozenset(map(_key, items)),
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "STOP": lambda result: result,
}


def _run(content: bytes) -> Any:
    """Run the operations of a pickle."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    names = [*_ARRAYS, *_names(Optimizer), *_names(LRScheduler)]
    for count, (operation, argument, _) in enumerate(pickletools.genops(content)):
        code, before, after = operation.name, operation.stack_before, operation.stack_after
        if count > _MOST_OPERATIONS or (isinstance(argument, int) and abs(argument) >= 2**63):
            raise ValueError("it is too long, or has a number with too many digits")
        if code == "MARK":
            marks.append(len(stack))
        elif code == "MEMOIZE" or code.endswith("PUT"):
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif code.endswith("GET"):
            stack.append(memo[argument])
        elif code.endswith("GLOBAL"):
            module, name = argument.split(" ") if argument else (stack.pop(-2), stack.pop())
            if name not in names:
                raise ValueError(
                    f"it contains {'.'.join([module, name])}, which is no optimizer, scheduler or "
                    "array, and could run code. Define an optimizer of your own before loading"
                )
            stack.append(name)
        elif argument is not None and after not in ([], [pickletools.anyobject]):
            stack.append(argument)  # a number, a text or bytes
        elif code not in ("PROTO", "FRAME"):
            is_marked = pickletools.markobject in before
            start = marks.pop() if is_marked else len(stack) - len(before)
            if code in ("APPENDS", "SETITEMS", "ADDITEMS"):
                start -= 1  # the container, below the mark
            if start < 0 or code not in _OPERATIONS:
                raise ValueError(f"it has the operation {code}")
            stack[start:] = [_OPERATIONS[code](*stack[start:])]
    return stack[-1]


def _names(cls: Any) -> Iterator[str]:
    """The names of a class and its subclasses that are already defined."""
    yield cls.__qualname__
    for subclass in cls.__subclasses__():
        yield from _names(subclass)


class _Reader:
    """Makes values of what a pickle has made, without calls, sharing and cycles."""

    def __init__(self, most_bytes: int) -> None:
        self._bytes_left, self._values_left = most_bytes, _MOST_OPERATIONS

    def value(self, value: Any, depth: int = 0) -> Any:
        """A value of numbers, strings, containers, arrays and objects."""
        self._values_left -= 1
        if self._values_left < 0 or depth > MAX_DEPTH:
            raise ValueError("its values are nested too deeply, or in a cycle")
        if isinstance(value, (list, tuple)):
            return type(value)(self.value(item, depth + 1) for item in value)
        if isinstance(value, dict):
            return {key: self.value(item, depth + 1) for key, item in value.items()}
        if not isinstance(value, _Call):
            return value if isinstance(value, (set, frozenset)) else _key(value)
        if _ARRAYS.get(value.name):
            return self._array(value, _ARRAYS[value.name])
        if not (isinstance(value.state, dict) and all(type(key) is str for key in value.state)):
            raise ValueError("the state of an object in it is no dict of attributes")
        attributes = {key: item for key, item in value.state.items() if key not in NOT_SAVED}
        return SavedObject(value.name.rpartition(".")[2], self.value(attributes, depth + 1))

    def _array(self, call: Any, kind: str) -> SavedArray:
        if kind in ("nd", "np"):
            return self._of_mxnet(io.BytesIO(_bytes(call.state["handle"])), kind)
        dtype, *_, content = call.arguments if kind == "scalar" else call.state[2:]
        shape, in_fortran = ((), False) if kind == "scalar" else call.state[1:4:2]
        name = dtype.state[1] + dtype.arguments[0]
        if not re.fullmatch(r"[<>|=][biuf][1248]", name):
            raise ValueError("it has an array of a dtype that is no number")
        array = view(_bytes(content), np.dtype(name), shape, "F" if in_fortran else "C")
        return saved_array(self._counted(array), kind)

    def _of_mxnet(self, file: Any, kind: str) -> SavedArray:
        """An array as MXNet writes it; a sparse one becomes dense."""

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
            return saved_array(self._counted(view(file.read(), dtype, shape)), kind)
        index_dtype = np.dtype(_DTYPES[take("i")[0]])
        (rows,) = take(f"{take('i')[0]}q")
        dense = self._counted(np.broadcast_to(dtype.type(0), shape)).copy()
        values = view(file.read(rows * dense[:1].nbytes), dtype, (rows, *shape[1:]))
        dense[view(file.read(), index_dtype, (rows,))] = values
        return saved_array(dense, kind, "row_sparse")

    def _counted(self, array: np.ndarray) -> np.ndarray:
        self._bytes_left -= array.nbytes
        if self._bytes_left < 0:
            raise ValueError("it has larger arrays than the parameters of this trainer allow")
        return array


def _bytes(value: Any) -> bytes:
    """Bytes, or those of a bytearray."""
    found = value.arguments[0] if isinstance(value, _Call) else value
    if type(found) is not bytes:
        raise ValueError("it has an array without content")
    return found
