"""A single process, which shares with no other."""

from __future__ import annotations

from typing import Mapping

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from .interface import Workers


class Alone(Workers):
    """One process, with one device or several."""

    is_alone = True
    can_update = True

    def sum_arrays(self, arrays: Mapping[int, NDArray]) -> None:
        """Leave the arrays as they are."""

    def sum_block(self, numbers: np.ndarray) -> np.ndarray:
        """Return the numbers."""
        return numbers

    def wait(self) -> None:
        """Wait for this process's own arrays."""
        mx.nd.waitall()
