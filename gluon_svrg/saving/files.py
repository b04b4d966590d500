"""Files of arrays and plain data: written whole or not at all, read whole or not at all."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

#: The first line of a file; the number is that of the format.
MAGIC = b"gluon_svrg states "
VERSION = 1
_MANIFEST = "manifest"


def write(path: str | os.PathLike[str], manifest: Any, arrays: list[np.ndarray]) -> None:
    """Write a file: beside the old one, flushed to disk, then renamed.

    Whenever this is interrupted, the old file or the new one is whole.

    Parameters
    ----------
    path : path
        The file.
    manifest : object
        What JSON can hold.
    arrays : list of ndarray
        What it cannot.
    """
    content = io.BytesIO()
    text = np.frombuffer(json.dumps(manifest).encode(), dtype=np.uint8)
    named = {str(number): array for number, array in enumerate(arrays)}
    np.savez(content, **{_MANIFEST: text}, **named)
    payload = content.getbuffer()
    checksum = hashlib.sha256(payload).hexdigest().encode()
    write_bytes(path, MAGIC + str(VERSION).encode() + b"\n" + checksum + b"\n", payload)


def write_bytes(path: str | os.PathLike[str], *parts: Any) -> None:
    """Write a file beside the old one, flush it to disk, and rename it."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, _permissions(path))
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    if hasattr(os, "O_DIRECTORY"):  # the rename itself, where a folder can be flushed
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def is_own(content: bytes) -> bool:
    """Whether this is the content of a file written here, of whatever format."""
    return content.startswith(MAGIC)


def parse(content: bytes) -> tuple[Any, list[np.ndarray]]:
    """Read the content of a file.

    Returns
    -------
    manifest : object
    arrays : list of ndarray

    Raises
    ------
    ValueError
        If it is not whole, or of another format.
    """
    head, _, rest = content[len(MAGIC) :].partition(b"\n")
    checksum, _, payload = rest.partition(b"\n")
    if head != str(VERSION).encode():
        raise ValueError(
            f"it has format {head[:20].decode(errors='replace')}, and this version of gluon_svrg "
            f"reads format {VERSION}"
        )
    if hashlib.sha256(payload).hexdigest().encode() != checksum:
        raise ValueError("its checksum is wrong: it is damaged or was not copied completely")
    with np.load(io.BytesIO(payload), allow_pickle=False) as file:
        manifest = json.loads(file[_MANIFEST].tobytes().decode())
        arrays = [file[str(number)] for number in range(len(file.files) - 1)]
    return manifest, arrays


def _permissions(path: Path) -> int:
    """Those of the file before, or those of a new one."""
    if path.exists():
        return path.stat().st_mode & 0o7777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
