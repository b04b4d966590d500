"""Writing a file completely or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import Any


def write_bytes(path: str | os.PathLike[str], *chunks: Any) -> None:
    """Write a file beside the old one, flush it to disk, and rename it.

    If this is interrupted, the old file or the new one is complete. A symbolic link stays, and the
    file that it names is replaced; its permissions stay too.

    If the folder accepts no new file but the file itself can be written, it is written in place.
    An interrupt can then leave an incomplete file, which does not load. The same holds for special
    files (a pipe, ``/dev/stdout``).

    Parameters
    ----------
    path : path
        The file.
    *chunks : bytes-like
        Its content.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        if target.is_dir():
            raise IsADirectoryError(f"{path} is a folder: name a file in it.")
        _write(os.open(target, os.O_WRONLY), chunks, flush=False)
        return
    try:
        temporary = _new_file_beside(target)
    except PermissionError:
        if not (target.exists() and os.access(target, os.W_OK)):
            raise
        _write(os.open(target, os.O_WRONLY | os.O_TRUNC), chunks)
        return
    try:
        handle = os.open(temporary, os.O_WRONLY)
        if target.exists():
            os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))
        _write(handle, chunks)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    if hasattr(os, "O_DIRECTORY"):  # flush the rename itself, if the system can flush a folder
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _new_file_beside(target: Path) -> str:
    """Create an empty file, with the system's permissions for new files.

    `tempfile.mkstemp` gives no permissions to other users, and a process cannot read its umask
    without changing it for all threads.
    """
    temporary = os.path.join(target.parent, f".{target.name[:100]}.{secrets.token_hex(8)}")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except OSError as error:
        error.filename = str(target)  # which the user knows
        raise
    return temporary


def _write(handle: int, chunks: Any, flush: bool = True) -> None:
    with os.fdopen(handle, "wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        if flush:
            os.fsync(file.fileno())
