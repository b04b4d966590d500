"""Reading the pickles of `gluon.Trainer.save_states` without Python's unpickler.

A pickle is a program. This module has a small interpreter for it, which makes numbers, strings,
plain containers and arrays, and notes the classes of optimizers and schedulers. It calls nothing
that the pickle names: no class, no function, no ``__setstate__``, and none of MXNet's or NumPy's
readers of arrays. Its results are never much larger than the file.
"""

from __future__ import annotations

import struct
from typing import Any, Callable, Iterator

import numpy as np
from mxnet.lr_scheduler import LRScheduler
from mxnet.optimizer import Optimizer

from .raw_arrays import dtype_of, from_mxnet, view
from .values import MAX_DEPTH, NOT_SAVED, SavedArray, SavedObject, is_key, saved_array

#: The names that a pickle may contain, and their meaning here.
_KNOWN = {
    ("builtins", "bytearray"): "bytes",
    ("builtins", "bytes"): "bytes",
    ("builtins", "set"): "set",
    ("builtins", "frozenset"): "frozenset",
    ("_codecs", "encode"): "bytes",
    ("collections", "OrderedDict"): "dict",
    ("mxnet.ndarray.ndarray", "NDArray"): "nd",
    ("mxnet.ndarray.sparse", "RowSparseNDArray"): "nd",
    ("mxnet.numpy", "ndarray"): "np",
    ("mxnet.numpy.multiarray", "ndarray"): "np",
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("numpy.core.multiarray", "_reconstruct"): "numpy",
    ("numpy.core.multiarray", "scalar"): "scalar",
    ("numpy.core.numeric", "_frombuffer"): "frombuffer",
}
_RENAMED = {"__builtin__": "builtins", "numpy._core.multiarray": "numpy.core.multiarray",
            "numpy._core.numeric": "numpy.core.numeric"}  # fmt: skip
_MARK = object()
_MOST_OPERATIONS = 1_000_000  # these take some seconds
_MOST_DIGITS = 400  # of an integer, in bytes


def loads(content: bytes, most_bytes: int) -> tuple[Any, str]:
    """Read a pickle of optimizers, schedulers, arrays and plain containers.

    Parameters
    ----------
    content : bytes
        The pickle.
    most_bytes : int
        The most bytes that all of its arrays together may take.

    Returns
    -------
    value : object
        The value, with `SavedArray` for arrays and `SavedObject` for objects.
    generation : str
        The first number of the version of the MXNet that wrote it.

    Raises
    ------
    ValueError
        If it contains anything else, which the message names, or if it is damaged or too large.
    """
    machine = _Machine(content, most_bytes)
    try:
        value = machine.run()
        finished = _Finished(machine.count, most_bytes)
        return finished.value(value), "2" if finished.has_fused_step else "1"
    except (IndexError, KeyError, TypeError, AttributeError, struct.error, OverflowError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__} in its pickle)") from error
    except UnicodeDecodeError as error:
        raise ValueError("it is damaged (a string in its pickle is malformed)") from error


class _Class:
    """A known class or function that the pickle has named."""

    def __init__(self, role: str, name: str = "") -> None:
        self.role, self.name = role, name


class _Unfinished:
    """An array, dtype or object that gets its content later."""

    def __init__(self, role: str, name: str = "") -> None:
        self.role, self.name = role, name
        self.content: Any = None


class _Machine:
    """Runs a pickle."""

    def __init__(self, content: bytes, most_bytes: int) -> None:
        self._content, self._at, self._most_bytes = content, 0, most_bytes
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self.count = 0  # of operations

    def run(self) -> Any:
        operations = _operations(self)
        while True:
            code = self._read(1)
            if code == b".":
                return self._stack.pop()
            if code not in operations:
                raise ValueError(f"it is damaged ({code!r} in its pickle)")
            operations[code]()
            self.count += 1
            if self.count > _MOST_OPERATIONS:
                raise ValueError("its pickle is too long: states of an optimizer are short")

    # --- reading ---------------------------------------------------------------------------

    def _read(self, count: int) -> bytes:
        content = self._content[self._at : self._at + count]
        if len(content) != count:
            raise ValueError("it is damaged (its pickle ends too early)")
        self._at += count
        return content

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self._read(struct.calcsize(layout)))[0]

    def sized(self, layout: str) -> bytes:
        return self._read(self.number(layout))

    def line(self) -> str:
        end = self._content.find(b"\n", self._at, self._at + 1000)
        if end < 0:
            raise ValueError("it is damaged (a line in its pickle has no end)")
        return self._read(end + 1 - self._at)[:-1].decode()

    def integer(self, layout: str) -> int:
        digits = self.sized(layout)
        if len(digits) > _MOST_DIGITS:
            raise ValueError("it has a number with too many digits")
        return int.from_bytes(digits, "little", signed=True)

    def small(self) -> Any:
        """An integer or a bool, written as text."""
        line = self.line()
        return {"00": False, "01": True}.get(line, int(line) if len(line) < 30 else None)

    # --- the stack -------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self, count: int) -> list[Any]:
        items = self._stack[-count:]
        if len(items) < count or any(item is _MARK for item in items):
            raise ValueError("it is damaged (its pickle takes from an empty stack)")
        del self._stack[-count:]
        return items

    def marked(self) -> list[Any]:
        for place in range(len(self._stack) - 1, -1, -1):
            if self._stack[place] is _MARK:
                items = self._stack[place + 1 :]
                del self._stack[place:]
                return items
        raise ValueError("it is damaged (a mark is missing in its pickle)")

    def top(self, *kinds: type) -> Any:
        if not isinstance(self._stack[-1], kinds):
            raise ValueError("it is damaged (its pickle fills what is no container)")
        return self._stack[-1]

    def remember(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def remembered(self, number: int) -> None:
        self.push(self._memo[number])

    def set_items(self, items: list[Any]) -> None:
        target = self.top(dict)
        for key, value in zip(items[::2], items[1::2]):
            if not is_key(key):
                raise ValueError("it has a dict with keys that are neither numbers nor texts")
            target[key] = value

    def marked_dict(self) -> None:
        items = self.marked()
        self.push({})
        self.set_items(items)

    def extend(self, items: list[Any]) -> None:
        self.top(list).extend(items)

    def add_items(self, items: list[Any]) -> None:
        target = self.top(set)
        if not all(map(is_key, items)):
            raise ValueError("it has a set of more than numbers and texts")
        target.update(items)

    # --- classes, and their calls ------------------------------------------------------------

    def find(self, module: str, name: str) -> None:
        module = _RENAMED.get(module, module)
        role = _KNOWN.get((module, name))
        if role is not None:
            self.push(_Class(role))
            return
        for cls in _admitted():
            is_same = cls.__module__ == module or _both_of_mxnet(cls.__module__, module)
            if is_same and cls.__qualname__ == name:
                self.push(_Class("object", cls.__name__))
                return
        raise ValueError(
            f"it contains {module[:60]}.{name[:60]}, which is no optimizer, scheduler, array or "
            "plain container; it was refused, because it could run code. If it is your own "
            "optimizer or scheduler, define (and register) it before loading"
        )

    def make(self) -> None:
        """Make an empty object of a class."""
        cls, arguments = self.pop(2)
        if cls.role != "object" or arguments != ():
            raise ValueError("it makes an object in a way that MXNet does not")
        self.push(_Unfinished("object", cls.name))

    def call(self) -> None:
        function, arguments = self.pop(2)
        role, first = function.role, arguments[0] if arguments else None
        if role in ("nd", "np") and arguments == (None,):
            self.push(_Unfinished(role))
        elif role == "bytes":
            self.push(first.encode("latin-1") if isinstance(first, str) else bytes_or_fail(first))
        elif role in ("set", "frozenset") and len(arguments) <= 1:
            items = first if isinstance(first, list) else []
            if not all(map(is_key, items)):
                raise ValueError("it has a set of more than numbers and texts")
            self.push(set(items) if role == "set" else frozenset(items))
        elif role == "dict" and not arguments:
            self.push({})
        elif role == "dtype" and isinstance(first, str):
            self.push(_Unfinished("dtype", first))
        elif role == "numpy" and len(arguments) == 3:
            self.push(_Unfinished("numpy"))
        elif role == "scalar" and len(arguments) == 2:
            array = view(bytes_or_fail(arguments[1]), _dtype(first), ())
            self.push(saved_array(array, "scalar"))
        elif role == "frombuffer" and len(arguments) == 4:
            content, dtype, shape, order = arguments
            array = view(bytes_or_fail(content), _dtype(dtype), shape, order == "F")
            self.push(saved_array(array, "numpy"))
        else:
            raise ValueError("it calls something in a way that MXNet does not")

    def build(self) -> None:
        """Give an array, a dtype or an object its content."""
        (state,) = self.pop(1)
        target = self.top(_Unfinished)
        if target.role == "dtype":
            target.content = state[1]
            if any(part is not None for part in state[2:5]):
                raise ValueError("it has an array of a compound dtype")
        elif target.content is not None:
            raise ValueError("it fills an array or object twice")
        elif target.role == "numpy":
            _, shape, dtype, in_fortran, content = state
            array = view(bytes_or_fail(content), _dtype(dtype), shape, bool(in_fortran))
            target.content = saved_array(array, "numpy")
        elif target.role == "object":
            if not (isinstance(state, dict) and all(isinstance(key, str) for key in state)):
                raise ValueError(f"the state of its {target.name} is no dict of attributes")
            target.content = state
        else:
            array, stype = from_mxnet(bytes_or_fail(state["handle"]), self._most_bytes)
            target.content = saved_array(array, target.role, stype)


def bytes_or_fail(value: Any) -> bytes:
    """Return bytes; raise a ValueError for any other value, such as an array without content."""
    if not isinstance(value, bytes):
        raise ValueError("it has an array without content")
    return value


def _dtype(value: Any) -> np.dtype:
    if not (isinstance(value, _Unfinished) and value.role == "dtype"):
        raise ValueError("it has an array without a dtype")
    dtype = dtype_of(value.name)
    return dtype.newbyteorder(value.content) if value.content in ("<", ">") else dtype


def _operations(m: _Machine) -> dict[bytes, Callable[[], Any]]:
    """The operation of each code of a pickle."""

    def put(read: Callable[[], Any]) -> Callable[[], None]:
        return lambda: m.push(read())

    return {
        b"\x80": lambda: m.number("B"),  # protocol
        b"\x95": lambda: m.number("<Q"),  # a frame
        b"N": put(lambda: None),
        b"\x88": put(lambda: True),
        b"\x89": put(lambda: False),
        b"K": put(lambda: m.number("B")),
        b"M": put(lambda: m.number("<H")),
        b"J": put(lambda: m.number("<i")),
        b"I": put(m.small),
        b"\x8a": put(lambda: m.integer("B")),
        b"\x8b": put(lambda: m.integer("<I")),
        b"G": put(lambda: m.number(">d")),
        b"U": put(lambda: m.sized("B").decode("latin-1")),
        b"T": put(lambda: m.sized("<I").decode("latin-1")),
        b"\x8c": put(lambda: m.sized("B").decode("utf-8", "surrogatepass")),
        b"X": put(lambda: m.sized("<I").decode("utf-8", "surrogatepass")),
        b"\x8d": put(lambda: m.sized("<Q").decode("utf-8", "surrogatepass")),
        b"V": put(m.line),
        b"C": put(lambda: m.sized("B")),
        b"B": put(lambda: m.sized("<I")),
        b"\x8e": put(lambda: m.sized("<Q")),
        b"\x96": put(lambda: m.sized("<Q")),  # a bytearray
        b"]": put(list),
        b"}": put(dict),
        b"\x8f": put(set),
        b")": put(tuple),
        b"(": put(lambda: _MARK),
        b"0": lambda: m.pop(1),
        b"1": m.marked,
        b"t": put(lambda: tuple(m.marked())),
        b"\x85": put(lambda: tuple(m.pop(1))),
        b"\x86": put(lambda: tuple(m.pop(2))),
        b"\x87": put(lambda: tuple(m.pop(3))),
        b"l": put(m.marked),
        b"d": m.marked_dict,
        b"a": lambda: m.extend(m.pop(1)),
        b"e": lambda: m.extend(m.marked()),
        b"s": lambda: m.set_items(m.pop(2)),
        b"u": lambda: m.set_items(m.marked()),
        b"\x90": lambda: m.add_items(m.marked()),
        b"\x91": put(lambda: frozenset(filter(is_key, m.marked()))),
        b"\x94": lambda: m.remember(len(m._memo)),
        b"q": lambda: m.remember(m.number("B")),
        b"r": lambda: m.remember(m.number("<I")),
        b"p": lambda: m.remember(m.small()),
        b"h": lambda: m.remembered(m.number("B")),
        b"j": lambda: m.remembered(m.number("<I")),
        b"g": lambda: m.remembered(m.small()),
        b"c": lambda: m.find(m.line(), m.line()),
        b"i": lambda: m.find(m.line(), m.line()),
        b"\x93": lambda: m.find(*m.pop(2)),
        b"\x81": m.make,
        b"R": m.call,
        b"b": m.build,
    }


class _Finished:
    """Makes final values, without sharing and without cycles."""

    def __init__(self, operations: int, most_bytes: int) -> None:
        self._left = 10 * operations + 1000  # values; shared ones count each time
        self._bytes_left = most_bytes
        self.has_fused_step = False  # an attribute that optimizers have since MXNet 2.0

    def value(self, value: Any, depth: int = 0) -> Any:
        self._left -= 1
        if self._left < 0 or depth > MAX_DEPTH:
            raise ValueError("its values are nested too deeply, or in a cycle")
        if isinstance(value, _Unfinished):
            if value.role == "dtype" or value.content is None:
                raise ValueError("it has an array or object without content")
            if value.role == "object":
                self.has_fused_step |= "use_fused_step" in value.content
                attributes = {k: v for k, v in value.content.items() if k not in NOT_SAVED}
                return SavedObject(value.name, self.value(attributes, depth + 1))
            value = value.content
        if isinstance(value, SavedArray):
            self._bytes_left -= value.nbytes
            if self._bytes_left < 0:
                raise ValueError("it has larger arrays than the parameters of this trainer allow")
            return value
        if isinstance(value, dict):
            return {key: self.value(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.value(item, depth + 1) for item in value)
        if isinstance(value, (set, frozenset, bool, int, float, str, type(None))):
            return value
        raise ValueError(
            f"it has a value of type {type(value).__name__}, which MXNet does not save"
        )


def _admitted() -> Iterator[Any]:
    """Classes that are already defined; nothing is imported."""
    yield from Optimizer.opt_registry.values()
    yield from _subclasses(Optimizer)
    yield from _subclasses(LRScheduler)


def _both_of_mxnet(module: str, other: str) -> bool:
    """Whether two modules are both MXNet's: 2.0 has one module for each optimizer."""
    return module.startswith("mxnet.") and other.startswith("mxnet.")


def _subclasses(cls: Any) -> Iterator[Any]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _subclasses(subclass)
