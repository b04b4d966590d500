"""Many workers: what they agree on and sum up over a distributed store.

MXNet's distributed stores are parameter servers: what all workers push on a key is summed there.
The parameters have the keys 0, 1, ...; what is summed here has keys of its own, after these.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from . import launch
from ._mxnet import classic


def is_distributed(kvstore: Any) -> bool:
    """Whether a store, or the name of one, is shared by several processes."""
    return "dist" in str(getattr(kvstore, "type", kvstore))


def is_synchronous(kvstore: Any) -> bool:
    """Whether a distributed store waits for all workers at each push."""
    return is_distributed(kvstore) and "async" not in str(getattr(kvstore, "type", kvstore))


class Workers:
    """All workers of a distributed store.

    Parameters
    ----------
    store : KVStore
        The store.
    first_key : int
        The first key that is free.
    """

    def __init__(self, store: Any, first_key: int) -> None:
        self.store = store
        self._first_key = first_key
        self._initialized: set[int] = set()
        launch.tell("rank", str(store.rank))

    def wait(self) -> None:
        """Wait until all workers are here, and all that they have pushed and pulled has arrived."""
        mx.nd.waitall()
        self.store._barrier()

    @contextmanager
    def agreement(self, size: int) -> Iterator[Agreement]:
        """Sum up numbers over the workers, or learn that one has failed.

        All workers do. If the block raises before it has reached the agreement, they all know.

        Parameters
        ----------
        size : int
            How many numbers there are.
        """
        agreement = Agreement(self, size)
        try:
            yield agreement
        except BaseException:
            agreement.refuse()
            raise

    def sum(self, arrays: Sequence[NDArray], offset: int = 1) -> None:
        """Replace arrays by their sums over the workers."""
        for number, array in enumerate(arrays):
            self._sum(self._first_key + offset + number, classic(array))

    def sum_numbers(self, numbers: np.ndarray) -> np.ndarray:
        """Sum up a vector of float64 over the workers. Waits."""
        vector = mx.nd.array(numbers, dtype="float64")
        self._sum(self._first_key, vector)
        return vector.asnumpy()

    def _sum(self, key: int, array: NDArray) -> None:
        if key not in self._initialized:  # collective, once per key
            self.store.init(key, mx.nd.zeros_like(array))
            self._initialized.add(key)
        scratch = array.copy()  # what is pushed is overwritten
        self.store.pushpull(key, scratch, out=scratch)
        scratch.copyto(array)


class Agreement:
    """One vector of numbers, summed up over the workers once."""

    def __init__(self, workers: Workers, size: int) -> None:
        self._workers = workers
        self._size = size
        self._pending = True

    def reach(self, numbers: Sequence[float]) -> np.ndarray:
        """Give this worker's numbers and get the sums.

        Raises
        ------
        RuntimeError
            If another worker has failed.
        """
        self._pending = False
        sums = self._workers.sum_numbers(np.array(numbers, dtype="float64"))
        if np.isnan(sums[0]):
            raise RuntimeError(
                "Another worker has failed during the full gradient, see its error. Nothing was "
                "changed here: a snapshot held before is still in force."
            )
        return sums

    def refuse(self) -> None:
        """Let the others know that this worker has failed, unless it is too late."""
        if self._pending:
            self._pending = False
            self._workers.sum_numbers(np.full(self._size, np.nan))
