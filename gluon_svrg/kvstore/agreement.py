"""Workers fail together: if one raises an exception, all do, and none waits forever."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator, Mapping, Sequence

import numpy as np
from mxnet.ndarray import NDArray

from .workers import Workers


class Agreement:
    """One agreement of all workers on a vector of numbers, which is summed over them."""

    def __init__(self, workers: Workers, size: int) -> None:
        self._workers, self._size = workers, size
        self.is_pending = True

    def reach(self, numbers: Sequence[float]) -> Sequence[float]:
        """Give this worker's numbers, one at least, and get the sums; raise if others have."""
        self.is_pending = False
        padding = [0.0] * (self._size - len(numbers))
        sums = self._workers.sum_numbers([*numbers, *padding])[: len(numbers)]
        if np.isnan(sums[0]) and not np.isnan(numbers[0]):
            raise RuntimeError(
                "Another worker has failed during the full gradient, see its error. Nothing was "
                "changed here: a snapshot held before is still in force."
            )
        return sums.tolist()

    def sum(self, arrays: Mapping[int, NDArray]) -> None:
        """Replace arrays, each with the number of its parameter, by their sums over the workers."""
        self._workers.sum_arrays(arrays)


@contextmanager
def agreement(workers: Workers, size: int) -> Iterator[Agreement]:
    """Agree on at most `size` numbers; if the block raises before that, all workers raise."""
    wanted = Agreement(workers, size)
    try:
        yield wanted
    except BaseException:
        if wanted.is_pending:
            workers.sum_numbers([np.nan] * size)
        raise
