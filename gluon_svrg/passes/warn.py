"""Warnings that point to the user's line."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1])


def warn(message: str) -> None:
    """Warn at the innermost line outside this package and MXNet."""
    level, frame, name = 1, sys._getframe(), __file__
    while frame.f_back is not None and (name.startswith(_PACKAGE) or "mxnet" in Path(name).parts):
        level, frame = level + 1, frame.f_back
        name = frame.f_code.co_filename
    warnings.warn(message, stacklevel=level)
