"""Reading the pickles of `gluon.Trainer.save_states` without running them.

A pickle is a program. Python's own unpickler runs it here, with inert stand-ins for everything that
it names: they make numbers, strings, plain containers and arrays, and note the classes of
optimizers and schedulers. No class, function or ``__setstate__`` of anybody else is called, and
none of MXNet's or NumPy's readers of arrays. Results are never much larger than the file: so it is
the unpickler that is written in Python, since the one in C allocates memory for the numbers in a
pickle.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
from typing import Any, Callable, Iterator

import numpy as np
from mxnet.lr_scheduler import LRScheduler
from mxnet.optimizer import Optimizer

from .raw_arrays import dtype_of, from_mxnet, view
from .values import MAX_DEPTH, NOT_SAVED, SavedArray, SavedObject, is_key, saved_array

#: Operations that are not in pickles of MXNet and lead to objects outside of them.
_REFUSED = ("ext1", "ext2", "ext4", "inst", "obj", "newobj_ex", "persid", "binpersid",
            "next_buffer", "readonly_buffer")  # fmt: skip
_RENAMED = {"__builtin__": "builtins", "numpy._core.multiarray": "numpy.core.multiarray",
            "numpy._core.numeric": "numpy.core.numeric"}  # fmt: skip
_MOST_READS = 1_000_000  # these take some seconds
_LONGEST_LINE = 300
_TOO_LARGE = "it has larger arrays than the parameters of this trainer allow"
_DAMAGED = (
    IndexError, KeyError, TypeError, AttributeError, struct.error, OverflowError,
    pickle.UnpicklingError,
)  # fmt: skip


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
    file = _File(content)
    try:
        value = _Unpickler(file, most_bytes).load()
        finished = _Finished(file.reads, most_bytes)
        return finished.value(value), "2" if finished.has_fused_step else "1"
    except _DAMAGED as error:
        raise ValueError(f"it is damaged ({type(error).__name__} in its pickle)") from error
    except UnicodeDecodeError as error:
        raise ValueError("it is damaged (a string in its pickle is malformed)") from error


class _File(io.BytesIO):
    """The bytes of a pickle, of which every operation reads some."""

    reads = 0

    def read(self, size: int | None = -1) -> bytes:
        self.reads += 1
        if self.reads > _MOST_READS:
            raise ValueError("its pickle is too long: states of an optimizer are short")
        content = super().read(size)
        if len(content) != size:
            raise ValueError("it is damaged (its pickle ends too early)")
        return content

    def readline(self, size: int | None = -1) -> bytes:
        line = super().readline(_LONGEST_LINE)
        if not line.endswith(b"\n"):
            raise ValueError("it is damaged (a line in its pickle has no end)")
        return line


# --- stand-ins ---------------------------------------------------------------------------------


class _Unfinished:
    """An array ('nd', 'np', 'numpy'), 'dtype' or 'object' that gets its content later."""

    def __init__(self, role: str, name: str = "") -> None:
        self.role, self.name = role, name
        self.content: Any = None

    def fill(self, state: Any, most_bytes: int) -> None:
        """Take what a pickle passes to ``__setstate__``."""
        if self.role == "dtype":
            _, self.content, *parts = state
            if type(self.content) is not str or any(part is not None for part in parts[:3]):
                raise ValueError("it has an array of a compound dtype")
        elif self.content is not None:
            raise ValueError("it fills an array or object twice")
        elif self.role == "numpy":
            _, shape, dtype, in_fortran, content = state
            array = view(_bytes(content), _as_dtype(dtype), shape, bool(in_fortran))
            self.content = saved_array(array, "numpy")
        elif self.role == "object":
            if not (isinstance(state, dict) and all(isinstance(key, str) for key in state)):
                raise ValueError(f"the state of its {self.name} is no dict of attributes")
            self.content = state
        else:
            array, stype = from_mxnet(_bytes(state["handle"]), most_bytes)
            self.content = saved_array(array, self.role, stype)


def _bytes(value: Any, encoding: Any = None) -> bytes:
    """Bytes, also from protocols that write them as text; no other value, such as None."""
    if isinstance(value, str):
        return value.encode("latin-1")
    if not isinstance(value, bytes):
        raise ValueError("it has an array without content")
    return value


def _as_dtype(value: Any) -> np.dtype:
    if not (isinstance(value, _Unfinished) and value.role == "dtype" and type(value.name) is str):
        raise ValueError("it has an array without a dtype")
    dtype = dtype_of(value.name)
    return dtype.newbyteorder(value.content) if value.content in ("<", ">") else dtype


def _keys(items: Any, what: str = "set of more than numbers and texts") -> Any:
    """Check what becomes a key, before it is hashed: a hash can take forever."""
    if not (isinstance(items, list) and all(map(is_key, items))):
        raise ValueError(f"it has a {what}")
    return items


def _scalar(dtype: Any, content: Any) -> SavedArray:
    return saved_array(view(_bytes(content), _as_dtype(dtype), ()), "scalar")


def _frombuffer(content: Any, dtype: Any, shape: Any, order: Any) -> SavedArray:
    return saved_array(view(_bytes(content), _as_dtype(dtype), shape, str(order) == "F"), "numpy")


#: What stands in for the names that a pickle may contain.
_STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    ("builtins", "bytearray"): _bytes,
    ("builtins", "bytes"): _bytes,
    ("builtins", "set"): lambda items: set(_keys(items)),
    ("builtins", "frozenset"): lambda items: frozenset(_keys(items)),
    ("_codecs", "encode"): _bytes,
    ("collections", "OrderedDict"): lambda: {},
    ("mxnet.ndarray.ndarray", "NDArray"): lambda handle: _Unfinished("nd"),
    ("mxnet.ndarray.sparse", "RowSparseNDArray"): lambda handle: _Unfinished("nd"),
    ("mxnet.numpy", "ndarray"): lambda handle: _Unfinished("np"),
    ("mxnet.numpy.multiarray", "ndarray"): lambda handle: _Unfinished("np"),
    ("numpy", "ndarray"): lambda: None,  # only an argument of `_reconstruct`
    ("numpy", "dtype"): lambda name, align, copy: _Unfinished("dtype", name),
    ("numpy.core.multiarray", "_reconstruct"): lambda cls, shape, kind: _Unfinished("numpy"),
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy.core.numeric", "_frombuffer"): _frombuffer,
}


class _Unpickler(pickle._Unpickler):
    """Python's unpickler with stand-ins, which fills only containers and what they made."""

    stack: list[Any]  # these are of the base class
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    read: Callable[[int], bytes]

    def __init__(self, file: _File, most_bytes: int) -> None:
        super().__init__(file, encoding="latin-1")
        self._left = most_bytes + 10 * len(file.getbuffer())  # bytes; each use of a value counts
        self._classes = {
            (_root(cls.__module__), cls.__qualname__): cls.__name__
            for cls in [*Optimizer.opt_registry.values(), *_all(Optimizer), *_all(LRScheduler)]
        }

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        """Return the stand-in of a name; import nothing."""
        module = _RENAMED.get(module, module)
        if (module, name) in _STAND_INS:
            return _STAND_INS[module, name]
        class_name = self._classes.get((_root(module), name))
        if class_name is not None:
            return lambda: _Unfinished("object", class_name)
        raise ValueError(
            f"it contains {module[:60]}.{name[:60]}, which is no optimizer, scheduler, array or "
            "plain container; it was refused, because it could run code. If it is your own "
            "optimizer or scheduler, define (and register) it before loading"
        )

    def load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        value = function(*arguments)  # nothing on the stack but stand-ins can be called
        self._count(sys.getsizeof(value))
        self.append(value)

    load_newobj = load_reduce

    def load_build(self) -> None:
        state, target = self.stack.pop(), self._top(_Unfinished)
        self._count(sys.getsizeof(state))
        target.fill(state, self._left)
        self._count(getattr(target.content, "nbytes", 0))

    def _count(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise ValueError(_TOO_LARGE)

    def _top(self, kind: Any) -> Any:
        if type(self.stack[-1]) is not kind:
            raise ValueError("it is damaged (its pickle fills what is no container)")
        return self.stack[-1]

    # --- keys are checked before they are hashed -----------------------------------------------

    def _set_items(self, items: list[Any]) -> None:
        keys = _keys(items[::2], "dict with keys that are neither numbers nor texts")
        self._top(dict).update(zip(keys, items[1::2]))

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self._set_items(items)

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._set_items(items)

    def load_additems(self) -> None:
        items = _keys(self.pop_mark())
        self._top(set).update(items)

    def load_frozenset(self) -> None:
        items = _keys(self.pop_mark())
        self.append(frozenset(items))

    # --- no memory is allocated for what a pickle only claims ----------------------------------

    def load_frame(self) -> None:
        self.read(8)

    def load_bytearray8(self) -> None:
        (size,) = struct.unpack("<Q", self.read(8))
        self.append(self.read(size))

    def load_long4(self) -> None:
        raise ValueError("it has a number with too many digits")


_Unpickler.dispatch = {
    code: getattr(_Unpickler, operation.__name__)
    for code, operation in pickle._Unpickler.dispatch.items()
    if operation.__name__[len("load_") :] not in _REFUSED
}


class _Finished:
    """Makes final values, without sharing and without cycles."""

    def __init__(self, reads: int, most_bytes: int) -> None:
        self._left = 10 * reads + 1000  # values; shared ones count each time
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
                raise ValueError(_TOO_LARGE)
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


def _root(module: str) -> str:
    """A module; all of MXNet's count as one, since 2.0 has one for each optimizer."""
    return "mxnet" if module.startswith("mxnet.") else module


def _all(cls: Any) -> Iterator[Any]:
    """A class and its subclasses that are already defined; nothing is imported."""
    yield cls
    for subclass in cls.__subclasses__():
        yield from _all(subclass)
