"""Format 2: a manifest in JSON and the bytes of arrays, behind a checksum.

::

    gluon_svrg states 2
    <sha256 of all that follows, in hexadecimal>
    <length of the manifest, in bytes>
    <manifest><array 0><array 1>...

The manifest is ``{"header": ..., "parts": ..., "arrays": [[dtype, shape], ...]}``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from .raw_arrays import dtype_name, dtype_of, view
from .values import malformed

#: The first line of a file; what follows is the number of its format.
MAGIC = b"gluon_svrg states "
VERSION = 2
#: A manifest takes up to 20 times as much memory as it has bytes.
LONGEST_MANIFEST = 16 * 2**20
_MOST_DIGITS = 1000


class Content(NamedTuple):
    """What stands in a file."""

    header: dict[str, Any]
    parts: dict[str, Any]  # encoded
    arrays: list[np.ndarray]


def pack(header: dict[str, Any], parts: dict[str, Any], arrays: Sequence[np.ndarray]) -> list[Any]:
    """Make the chunks of bytes of a file.

    Parameters
    ----------
    header, parts : dict
        What JSON can hold.
    arrays : sequence of ndarray
        What it cannot.
    """
    shapes = [[dtype_name(array.dtype), list(array.shape)] for array in arrays]
    for name, _ in shapes:
        dtype_of(name)
    manifest = {"header": header, "parts": parts, "arrays": shapes}
    text = json.dumps(manifest, separators=(",", ":")).encode()
    if len(text) > LONGEST_MANIFEST:
        raise ValueError(
            f"The state has {len(text)} bytes beside its arrays, more than the {LONGEST_MANIFEST} "
            "that can be read again. Keep long lists of numbers as arrays."
        )
    chunks: list[Any] = [b"%d\n" % len(text), text]
    chunks += [np.asarray(array, order="C").reshape(-1).view(np.uint8).data for array in arrays]
    checksum = hashlib.sha256()
    for chunk in chunks:
        checksum.update(chunk)
    return [MAGIC + b"%d\n" % VERSION + checksum.hexdigest().encode() + b"\n", *chunks]


def is_own(start: bytes) -> bool:
    """Whether a file begins as one that is written here, of whatever format."""
    return start.startswith(MAGIC)


def first_lines(file: Any) -> tuple[str, bytes]:
    """Read the format and the checksum.

    Raises
    ------
    ValueError
        If it is a format that is not known.
    """
    format_ = file.readline(100)[len(MAGIC) :].strip().decode(errors="replace")
    if format_ not in ("1", "2"):
        raise ValueError(
            f"it has format {format_[:20]}, and this version of gluon_svrg reads formats 1 and 2: "
            "load it with the version that wrote it, or a later one"
        )
    return format_, file.readline(100).strip()


def unpack(
    file: Any, checksum: bytes, allow: Callable[[np.dtype, tuple[int, ...]], bool]
) -> Content:
    """Read what follows the first two lines.

    Parameters
    ----------
    file : file
        Behind these lines.
    checksum : bytes
        What they say.
    allow : callable
        Tells whether an array of a dtype and shape may be that large. It is asked before arrays
        are read.

    Raises
    ------
    ValueError
        If it is damaged or malformed.
    """
    digest = hashlib.sha256()
    line = file.readline(20)
    digest.update(line)
    if not (line.endswith(b"\n") and line[:-1].isdigit() and int(line) <= LONGEST_MANIFEST):
        raise ValueError(DAMAGED)
    text = file.read(int(line))
    digest.update(text)
    left = os.fstat(file.fileno()).st_size - file.tell()
    try:
        manifest = parse_json(text)
        specs = [(dtype_of(name), tuple(shape)) for name, shape in manifest["arrays"]]
        sizes = [view_size(dtype, shape) for dtype, shape in specs]
    except (ValueError, TypeError, KeyError) as error:
        if left < 2**30:  # is it only damaged?
            digest.update(file.read())
            check(digest, checksum)
        if isinstance(error, ValueError):
            raise
        raise malformed(f"{type(error).__name__}: {error}") from error
    if sum(sizes) != left or not all(allow(*spec) for spec in specs):
        if sum(sizes) == left:
            raise ValueError(TOO_LARGE)
        raise ValueError(DAMAGED)
    body = file.read(left)
    digest.update(body)
    check(digest, checksum)
    if not isinstance(manifest.get("header"), dict) or not isinstance(manifest.get("parts"), dict):
        raise malformed("it has no header or no parts")
    arrays, at = [], 0
    for (dtype, shape), size in zip(specs, sizes):
        arrays.append(view(memoryview(body)[at : at + size], dtype, shape))
        at += size
    return Content(manifest["header"], manifest["parts"], arrays)


DAMAGED = "its checksum is wrong: it is damaged or was not copied completely. Copy it again"
TOO_LARGE = "it has arrays that are larger than the parameters of this trainer allow"


def check(digest: Any, checksum: bytes) -> None:
    """Raise a ValueError if a checksum is another."""
    if digest.hexdigest().encode() != checksum:
        raise ValueError(DAMAGED)


def view_size(dtype: np.dtype, shape: tuple[Any, ...]) -> int:
    """The bytes of an array."""
    if len(shape) > 32 or not all(type(size) is int and size >= 0 for size in shape):
        raise malformed("the shape of an array")
    return math.prod(shape) * dtype.itemsize


def parse_json(text: bytes) -> Any:
    """Parse JSON that may be nested too deep or hold numbers that are too long."""
    try:
        return json.loads(text.decode(), parse_int=_integer)
    except RecursionError as error:
        raise malformed("it is nested too deep") from error
    except ValueError as error:
        raise malformed(str(error)) from error


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError("a number has too many digits")
    return int(digits)
