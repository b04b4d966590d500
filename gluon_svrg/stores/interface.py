"""What a trainer needs from the processes that train together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Iterable, Mapping, Sequence

import numpy as np
from mxnet.ndarray import NDArray

#: A key of a kvstore stands for arrays of one shape: numbers are summed up so many at a time.
BLOCK = 64


class Workers(ABC):
    """The processes that train together, each with its part of the data.

    All methods are collective: every worker calls the same ones in the same order.

    Attributes
    ----------
    rank : int
        The number of this worker, from 0.
    size : int
        The number of workers.
    updates : bool
        Whether the kvstore updates the weights itself. `allreduce_grads` is not possible then.
    """

    rank: int = 0
    size: int = 1
    updates: bool = False

    def share_weights(self, weights: Mapping[int, Sequence[NDArray]]) -> None:
        """Let all workers have the same weights again, and wait for them.

        They begin with the same ones, see `KVStoreTrainer`. Where all make the same updates, there
        is nothing to do.

        Parameters
        ----------
        weights : dict of sequence of NDArray
            By the key of the parameter, its value on each device. Written in place.
        """
        return

    @abstractmethod
    def sum_arrays(self, arrays: Mapping[int, NDArray]) -> None:
        """Replace arrays by their sums over all workers, with the same bits on all of them.

        Parameters
        ----------
        arrays : dict of NDArray
            By any numbers from 0 on. A number always stands for arrays of one shape and dtype.
            Small numbers are best: each takes a key of the kvstore.
        """

    def sum_numbers(self, numbers: np.ndarray) -> np.ndarray:
        """Sum up a vector of float64 over all workers, and wait for the result.

        Parameters
        ----------
        numbers : ndarray of float64
            Of the same length on all workers.
        """
        total = np.array(numbers, dtype="float64")
        for start in range(0, len(total), BLOCK):
            block = total[start : start + BLOCK]
            padded = np.zeros(BLOCK)
            padded[: len(block)] = block
            block[:] = self.sum_block(padded)[: len(block)]
        return total

    @abstractmethod
    def sum_block(self, numbers: np.ndarray) -> np.ndarray:
        """Sum up `BLOCK` numbers over all workers, and wait for the result."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until all workers are here, and all that they have sent has arrived."""

    def prepare_push(
        self,
        optimizer: Any,
        multipliers: Mapping[str, Mapping[int, float]],
        gradients: Iterable[NDArray],
        batch_size: float,
    ) -> float:
        """Let servers that update use the settings of this moment for the next push.

        Parameters
        ----------
        optimizer : Optimizer
            The user's.
        multipliers : dict of dict of float
            ``lr_mult`` and ``wd_mult``, by the key of the parameter.
        gradients : iterable of NDArray
            What will be pushed.
        batch_size : float
            What the gradients are to be divided by.

        Returns
        -------
        float
            The batch size that is left to divide by.
        """
        return batch_size
