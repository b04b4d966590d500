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
import os
import secrets
import shutil
from pathlib import Path
from typing import Any, Mapping

import numpy as np

from .values import encode

MAGIC = b"gluon_svrg states "  # the beginning of a file, before the number of its format
FORMAT = b"2"


def write(path: Any, header: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Write a file of a header, which JSON can hold, and the states of parts by name."""
    arrays: list[np.ndarray] = []
    try:
        parts = {name: encode(state, arrays, f"its {name}") for name, state in states.items()}
    except RecursionError as error:
        raise TypeError("An attribute contains itself, and cannot be saved.") from error
    shapes = [[array.dtype.str, array.shape] for array in arrays]
    manifest = {"header": header, "parts": parts, "arrays": shapes}
    text = json.dumps(manifest, separators=(",", ":")).encode()
    chunks: list[Any] = [b"%d\n" % len(text), text]
    chunks += [array.reshape(-1).view(np.uint8).data for array in arrays]
    checksum = hashlib.sha256()
    for chunk in chunks:
        checksum.update(chunk)
    lines = b"%s%s\n%s\n" % (MAGIC, FORMAT, checksum.hexdigest().encode())
    write_bytes(path, lines, *chunks)


def unpack(content: bytes) -> tuple[dict[str, Any], dict[str, Any], list[np.ndarray]]:
    """Take a file apart: header, states as they were encoded, and arrays, which are views of it."""
    first = content.find(b"\n") + 1
    format_ = content[len(MAGIC) : first].strip()
    if first and format_ != FORMAT:
        raise ValueError(
            f"it has format {format_.decode(errors='replace')[:20]}, and this version of "
            f"gluon_svrg reads format {FORMAT.decode()}: load it with the version that wrote it"
        )
    second = content.find(b"\n", first) + 1
    checksum = hashlib.sha256(memoryview(content)[second:]).hexdigest().encode()
    if not first or content[first : second - 1] != checksum:
        raise ValueError("its checksum is wrong: it is damaged or incomplete. Copy it again")
    third = content.find(b"\n", second) + 1
    end = third + int(content[second:third])
    manifest = json.loads(content[third:end])
    arrays: list[np.ndarray] = []
    for name, shape in manifest["arrays"]:
        arrays.append(np.ndarray(shape, np.dtype(name), content, end))
        end += arrays[-1].nbytes
    return manifest["header"], manifest["parts"], arrays


def write_bytes(path: str | os.PathLike[str], *chunks: Any) -> None:
    """Write a file beside the old one and rename it. A symbolic link and permissions stay."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise OSError(f"{path} is a folder, a device or a pipe. Name a file.")
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            if target.exists():
                shutil.copymode(target, temporary)
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # which the user knows
        raise
