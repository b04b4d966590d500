"""Workers of a kvstore in Python that can only broadcast and add."""

from __future__ import annotations

from typing import Any, Mapping

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from .. import _mxnet
from .interface import Workers


class Collective(Workers):
    """Workers of a `KVStoreBase` with several workers.

    It has `broadcast`, and `pushpull` whose sums have the same bits on all workers. The parameters
    are those of `Workers`.
    """

    def __init__(self, kvstore: Any, first_free_key: int, updates: bool) -> None:
        super().__init__(kvstore, first_free_key, updates)
        self._known: set[int] = set()

    def sum_arrays(self, arrays: Mapping[int, NDArray]) -> None:
        """Replace arrays by their sums over all workers."""
        first = self._first_key + 1
        for number, array in arrays.items():
            self._sum(first + number, _mxnet.classic(array))

    def sum_block(self, numbers: np.ndarray) -> np.ndarray:
        """Sum `BLOCK` numbers over all workers, and wait for the result."""
        array = mx.nd.array(numbers, dtype="float64")
        self._sum(self._first_key, array)
        return array.asnumpy()

    def wait(self) -> None:
        """Wait until all workers call this, and everything that they have sent has arrived."""
        mx.nd.waitall()
        self.sum_numbers(np.zeros(1))

    def _sum(self, key: int, array: NDArray) -> None:
        """Sum an array over the workers, as `gluon.Trainer` does with gradients."""
        if key not in self._known:  # `gluon.Trainer` also broadcasts a key before it uses it
            self.kvstore.broadcast(key, mx.nd.zeros_like(array), [mx.nd.zeros_like(array)])
            self._known.add(key)
        self.kvstore.pushpull(key, [array], out=[array])
