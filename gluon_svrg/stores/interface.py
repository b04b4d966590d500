"""The interface between a trainer and the processes that train together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Iterable, Mapping, Sequence

import numpy as np
from mxnet.ndarray import NDArray

#: A key of a kvstore stands for arrays of one shape, so numbers are summed in blocks of this size.
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
        """Give all workers the same weights again, and wait for them.

        They begin with the same weights, see `KVStoreTrainer`. If all make the same updates, there
        is nothing to do.

        Parameters
        ----------
        weights : dict of sequence of NDArray
            The value on each device, by the key of the parameter. Written in place.
        """
        return

    @abstractmethod
    def sum_arrays(self, arrays: Mapping[int, NDArray]) -> None:
        """Replace arrays by their sums over all workers, with the same bits on all of them.

        Parameters
        ----------
        arrays : dict of NDArray
            The arrays, by any numbers from 0. A number always stands for arrays of one shape and
            dtype. Use small numbers: each takes a key of the kvstore.
        """

    def sum_numbers(self, numbers: np.ndarray) -> np.ndarray:
        """Sum a vector of float64 over all workers, and wait for the result.

        Parameters
        ----------
        numbers : ndarray of float64
            The vector, of the same length on all workers.
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
        """Sum `BLOCK` numbers over all workers, and wait for the result."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until all workers call this, and everything that they have sent has arrived."""

    def prepare_push(
        self,
        optimizer: Any,
        multipliers: Mapping[str, Mapping[int, float]],
        gradients: Iterable[NDArray],
        batch_size: float,
    ) -> float:
        """Make servers that update use the current settings for the next push.

        Parameters
        ----------
        optimizer : Optimizer
            The user's optimizer.
        multipliers : dict of dict of float
            ``lr_mult`` and ``wd_mult``, by the key of the parameter.
        gradients : iterable of NDArray
            The gradients that will be pushed.
        batch_size : float
            The divisor of the gradients.

        Returns
        -------
        float
            The divisor that remains.
        """
        return batch_size
