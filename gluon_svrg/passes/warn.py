"""Warnings that point to the user's line."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1])


def warn(message: str) -> None:
    """Warn at the innermost line outside this package and MXNet."""
    depth, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_library(frame.f_back.f_code.co_filename):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, stacklevel=depth + 1)


def _is_library(filename: str) -> bool:
    return filename.startswith(_PACKAGE) or "mxnet" in Path(filename).parts
