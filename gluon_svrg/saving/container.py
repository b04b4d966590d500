"""Format 2: a manifest in JSON and the bytes of arrays, behind a checksum.

::

    gluon_svrg states 2
    <sha256 of everything that follows, in hexadecimal>
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

#: The beginning of a file, before the number of its format.
MAGIC = b"gluon_svrg states "
VERSION = 2
#: A manifest takes up to 20 times its size in memory.
LONGEST_MANIFEST = 16 * 2**20
_MOST_DIGITS = 1000


class Content(NamedTuple):
    """The content of a file."""

    header: dict[str, Any]
    parts: dict[str, Any]  # encoded
    arrays: list[np.ndarray]


def pack(header: dict[str, Any], parts: dict[str, Any], arrays: Sequence[np.ndarray]) -> list[Any]:
    """Make the chunks of bytes of a file.

    Parameters
    ----------
    header, parts : dict
        The values that JSON can hold.
    arrays : sequence of ndarray
        The arrays, which JSON cannot hold.
    """
    shapes = [[dtype_name(array.dtype), list(array.shape)] for array in arrays]
    for name, _ in shapes:
        dtype_of(name)
    manifest = {"header": header, "parts": parts, "arrays": shapes}
    text = json.dumps(manifest, separators=(",", ":")).encode()
    if len(text) > LONGEST_MANIFEST:
        raise ValueError(
            f"The state has {len(text)} bytes besides its arrays, more than the {LONGEST_MANIFEST} "
            "that can be read again. Keep long lists of numbers as arrays."
        )
    chunks: list[Any] = [b"%d\n" % len(text), text]
    chunks += [np.asarray(array, order="C").reshape(-1).view(np.uint8).data for array in arrays]
    checksum = hashlib.sha256()
    for chunk in chunks:
        checksum.update(chunk)
    return [MAGIC + b"%d\n" % VERSION + checksum.hexdigest().encode() + b"\n", *chunks]


def is_own(start: bytes) -> bool:
    """Whether a file begins like one of this package, in any format."""
    return start.startswith(MAGIC)


def first_lines(file: Any) -> tuple[str, bytes]:
    """Read the format and the checksum.

    Raises
    ------
    ValueError
        If the format is unknown.
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
        The file, after these lines.
    checksum : bytes
        The checksum from these lines.
    allow : callable
        Whether an array of a dtype and shape may be that large. It is called before arrays are
        read.

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
        if left < 2**30:  # perhaps the file is only damaged
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
    """Raise a ValueError if a checksum differs."""
    if digest.hexdigest().encode() != checksum:
        raise ValueError(DAMAGED)


def view_size(dtype: np.dtype, shape: tuple[Any, ...]) -> int:
    """The bytes of an array."""
    if len(shape) > 32 or not all(type(size) is int and size >= 0 for size in shape):
        raise malformed("the shape of an array")
    return math.prod(shape) * dtype.itemsize


def parse_json(text: bytes) -> Any:
    """Parse JSON that may be nested too deeply or hold numbers that are too long."""
    try:
        return json.loads(text.decode(), parse_int=_integer)
    except RecursionError as error:
        raise malformed("it is nested too deeply") from error
    except ValueError as error:
        raise malformed(str(error)) from error


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError("a number has too many digits")
    return int(digits)
