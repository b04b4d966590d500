"""Arrays in the bytes of pickles and of ``.npy``, read without trusting the bytes.

No memory is allocated for the size in a header: arrays are views of existing bytes.
"""

from __future__ import annotations

import ast
import math
import re
import struct
from typing import Any, Sequence

import numpy as np

#: The dtypes of MXNet by number. NumPy does not have bfloat16.
_MXNET_DTYPES: dict[int, Any] = {
    0: "<f4", 1: "<f8", 2: "<f2", 3: "|u1", 4: "<i4", 5: "|i1", 6: "<i8", 7: "|b1", 8: "<i2",
    9: "<u2", 10: "<u4", 11: "<u8", 12: [("bfloat16", "<u2")],
}  # fmt: skip
_DTYPE = re.compile(r"[<>=|]?[a-zA-Z?]\w{,20}(\[\w{1,10}\])?")
_STYPES = {0: "default", 1: "row_sparse"}
_MAGIC = {0xF993FAC9: "legacy shape", 0xF993FACA: "NumPy shape"}
_MOST_DIMENSIONS = 32
_LONGEST_HEADER = 10_000


def dtype_of(name: Any) -> np.dtype:
    """The dtype of a name in a file.

    Raises
    ------
    ValueError
        If it is no dtype of numbers or strings.
    """
    if not (isinstance(name, str) and _DTYPE.fullmatch(name)):  # NumPy compiles some others
        raise ValueError(f"it has an array of dtype {str(name)[:40]!r}, which is no number")
    try:
        dtype = np.dtype([("bfloat16", "<u2")]) if name == "bfloat16" else np.dtype(name)
    except Exception as error:
        raise ValueError(f"it has an array of an unknown dtype, {str(name)[:40]!r}") from error
    plain = dtype.names is None and dtype.subdtype is None and dtype.kind in "biufcSUmM"
    if not (plain or dtype.names == ("bfloat16",)) or dtype.hasobject or not dtype.itemsize:
        raise ValueError(f"it has an array of dtype {str(name)[:40]!r}, which is no number")
    return dtype


def dtype_name(dtype: np.dtype) -> str:
    """The name of a dtype in a file."""
    return "bfloat16" if dtype.names == ("bfloat16",) else dtype.str


def view(
    content: Any, dtype: np.dtype, shape: Sequence[Any], in_fortran: bool = False
) -> np.ndarray:
    """View bytes as an array.

    Raises
    ------
    ValueError
        If the number of bytes is not exactly what the array needs.
    """
    sizes = tuple(shape)
    if len(sizes) > _MOST_DIMENSIONS or not all(type(n) is int and n >= 0 for n in sizes):
        raise ValueError("it has an array of an impossible shape")
    if math.prod(sizes) * dtype.itemsize != len(content):
        raise ValueError(
            f"it has an array of shape {sizes} and dtype {dtype}, which is not {len(content)} bytes"
        )
    if not len(content):
        return np.zeros(sizes, dtype)
    return np.frombuffer(content, dtype).reshape(sizes, order="F" if in_fortran else "C")


def from_mxnet(content: Any, most_bytes: int) -> tuple[np.ndarray, str]:
    """Read the bytes in which MXNet pickles an array.

    Parameters
    ----------
    content : bytes-like
        The bytes.
    most_bytes : int
        The largest size of a sparse array.

    Returns
    -------
    array : ndarray
        The array, dense.
    stype : str
        The storage type that it had.

    Raises
    ------
    ValueError
        If they are malformed or too short, or of an array that MXNet pickles in another form.
    """
    reader = _Reader(content)
    if reader.take("I")[0] not in _MAGIC:
        raise ValueError("it has an array in a form that no MXNet from 1.5 to 2.0 writes")
    stype = _STYPES.get(reader.take("i")[0])
    if stype is None:
        raise ValueError("it has an array of an unknown storage type (csr has no optimizer states)")
    if stype == "row_sparse":
        reader.shape()  # MXNet writes it before it is known; the shape of the indices is right
    shape = reader.shape()
    reader.take("ii")  # its device
    dtype = _mxnet_dtype(reader.take("i")[0])
    if stype == "default":
        return view(reader.rest(), dtype, shape), stype
    (index_type,), index_shape = reader.take("i"), reader.shape()
    if math.prod(shape) * dtype.itemsize > most_bytes:
        raise ValueError(
            f"it has a sparse array of shape {shape}, larger than the parameters allow"
        )
    stored = (*index_shape, *shape[1:])
    if any(size < 0 for size in stored):
        raise ValueError("it has an array of an impossible shape")
    rows = view(reader.bytes(math.prod(stored) * dtype.itemsize), dtype, stored)
    indices = view(reader.rest(), _mxnet_dtype(index_type), index_shape)
    dense = np.zeros(shape, dtype)
    if len(indices):
        if (
            indices.ndim != 1
            or indices.dtype.kind not in "iu"
            or not (int(indices.min()) >= 0 and int(indices.max()) < shape[0])
        ):
            raise ValueError("it has a sparse array with rows that do not exist")
        dense[indices] = rows
    return dense, stype


def _mxnet_dtype(number: int) -> np.dtype:
    if number not in _MXNET_DTYPES:
        raise ValueError("it has an array of an unknown dtype")
    return np.dtype(_MXNET_DTYPES[number])


class _Reader:
    """Takes numbers from the front of some bytes."""

    def __init__(self, content: Any) -> None:
        self._content, self._at = memoryview(content), 0

    def bytes(self, count: int) -> memoryview:
        if not 0 <= count <= len(self._content) - self._at:
            raise ValueError("it has an array with too few bytes")
        self._at += count
        return self._content[self._at - count : self._at]

    def take(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{layout}", self.bytes(struct.calcsize(f"<{layout}")))

    def shape(self) -> tuple[int, ...]:
        (dimensions,) = self.take("i")
        if not 0 <= dimensions <= _MOST_DIMENSIONS:
            raise ValueError("it has an array of an impossible shape")
        return self.take("q" * dimensions)

    def rest(self) -> memoryview:
        return self.bytes(len(self._content) - self._at)


def from_npy(content: Any) -> np.ndarray:
    """Read the bytes of a ``.npy``.

    Raises
    ------
    ValueError
        If they are malformed, too short or too long, or of objects.
    """
    reader = _Reader(content)
    magic, major, _ = reader.take("6sBB")
    if magic != b"\x93NUMPY" or major not in (1, 2, 3):
        raise ValueError("it has an array that is no .npy")
    (length,) = reader.take("H" if major == 1 else "I")
    if length > _LONGEST_HEADER:
        raise ValueError("it has an array with a header that is too long")
    try:
        header = ast.literal_eval(bytes(reader.bytes(length)).decode("latin1").strip())
        shape, in_fortran = header["shape"], header["fortran_order"]
        descr = header["descr"]
    except (SyntaxError, TypeError, KeyError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError("it has an array with a malformed header") from error
    dtype = dtype_of("bfloat16" if descr == [("bfloat16", "<u2")] else descr)
    if not isinstance(shape, tuple):
        raise ValueError("it has an array of an impossible shape")
    return view(reader.rest(), dtype, shape, bool(in_fortran))
