"""Workers fail together: if one raises an exception, all do, and none waits forever."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator, Mapping, Sequence

import numpy as np
from mxnet.ndarray import NDArray

from .interface import Workers


class Agreement:
    """One agreement of all workers on a vector of numbers, which is summed over them.

    Parameters
    ----------
    workers : Workers
        The workers that must agree.
    size : int
        The largest length of the vector.
    """

    def __init__(self, workers: Workers, size: int) -> None:
        self._workers = workers
        self._size = size
        self._is_pending = True

    def reach(self, numbers: Sequence[float]) -> Sequence[float]:
        """Give this worker's numbers and get the sums.

        Parameters
        ----------
        numbers : sequence of float
            At least one number.

        Raises
        ------
        RuntimeError
            If another worker has failed.
        """
        self._is_pending = False
        vector = np.zeros(self._size)
        vector[: len(numbers)] = numbers
        sums = self._workers.sum_numbers(vector)[: len(numbers)]
        if np.isnan(sums[0]) and not np.isnan(numbers[0]):
            raise RuntimeError(
                "Another worker has failed during the full gradient, see its error. Nothing was "
                "changed here: a snapshot held before is still in force."
            )
        return sums.tolist()

    def sum(self, arrays: Mapping[int, NDArray]) -> None:
        """Replace arrays, each with the number of its parameter, by their sums over the workers."""
        self._workers.sum_arrays(arrays)

    def refuse(self) -> None:
        """Let the other workers know that this one has failed, unless it is too late."""
        if self._is_pending and self._workers.size > 1:
            self._workers.sum_numbers(np.full(self._size, np.nan))


@contextmanager
def agreement(workers: Workers, size: int) -> Iterator[Agreement]:
    """Agree with all workers; if the block raises an exception before that, all learn of it.

    Parameters
    ----------
    workers : Workers
        The workers that must agree.
    size : int
        The largest length of the vector.
    """
    wanted = Agreement(workers, size)
    try:
        yield wanted
    except BaseException:
        wanted.refuse()
        raise
