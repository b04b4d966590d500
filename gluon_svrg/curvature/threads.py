"""NumPy's products in one thread.

The threads of OpenBLAS wait for work in a busy loop, and so do those of MXNet's OpenMP. Where both
have several, a step with a penalty took three times as long.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Iterator

import numpy as np


@lru_cache(maxsize=1)
def openblas() -> tuple[Any, Any] | None:
    """The functions that get and set the threads of NumPy's OpenBLAS, if NumPy has that."""
    library = ctypes.CDLL(np.core._multiarray_umath.__file__)  # knows those that it is linked to
    for end in ("64_", ""):
        if hasattr(library, f"openblas_set_num_threads{end}"):
            get, assign = (library[f"openblas_{do}_num_threads{end}"] for do in ("get", "set"))
            return get, assign
    return None


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread inside the block, where that can be set."""
    get, assign = openblas() or (int, int)  # int() is 0
    before = get()
    try:
        assign(1)
        yield
    finally:
        assign(before)
