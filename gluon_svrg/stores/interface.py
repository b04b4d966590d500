"""The interface between a trainer and the processes that train together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Callable, Iterable, Mapping, Sequence

import numpy as np
from mxnet.ndarray import NDArray

#: A key of a kvstore stands for arrays of one shape, so numbers are summed in blocks of this size.
BLOCK = 64


class Workers(ABC):
    """The processes that train together, each with its part of the data.

    All methods are collective: every worker calls the same ones in the same order. A subclass says
    in class attributes what its kind can do, which is asked before there are any workers.

    Parameters
    ----------
    kvstore : KVStoreBase, str or None
        The kvstore; a name or None stands for one in this process.
    first_free_key : int
        Keys below this one are the parameters'.
    updates : bool
        Whether the kvstore updates the weights.

    Attributes
    ----------
    is_alone : bool
        Whether there are no other processes, so that nothing is exchanged.
    has_servers : bool
        Whether parameter servers hold the weights, and can update them.
    reduces : bool
        Whether the gradients of all workers are summed before an update.
    can_update : bool
        Whether the kvstore can update.
    can_compress : bool
        Whether the kvstore may compress gradients.
    rank : int
        The number of this worker, from 0.
    size : int
        The number of workers.
    updates : bool
        Whether servers update the weights. `allreduce_grads` is not possible then.
    """

    is_alone: bool = False
    has_servers: bool = False
    reduces: bool = True
    can_update: bool = False
    can_compress: bool = True

    def __init__(self, kvstore: Any, first_free_key: int, updates: bool) -> None:
        self.kvstore = kvstore
        self.rank: int = 0 if self.is_alone else kvstore.rank
        self.size: int = 1 if self.is_alone else kvstore.num_workers
        self.updates = updates and self.has_servers
        self._first_key = first_free_key

    # --- the start -----------------------------------------------------------------------------

    def prepare_servers(self, optimizer: Callable[[], Any]) -> None:
        """Give servers what they need before the weights.

        Parameters
        ----------
        optimizer : callable
            Returns the optimizer for the kvstore.
        """
        return

    def server_optimizer(self, optimizer: Any) -> Any:
        """The form of the user's optimizer that servers need."""
        return optimizer

    def check_servers(self) -> None:
        """Raise unless all servers are ready to update. All workers raise alike."""
        return

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

    # --- sums ----------------------------------------------------------------------------------

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

    # --- updates on servers --------------------------------------------------------------------

    def prepare_push(
        self,
        optimizer: Any,
        multipliers: Mapping[str, Mapping[int, float]],
        gradients: Iterable[NDArray],
        batch_size: float,
    ) -> float:
        """Make servers use the current settings for the next push. Only called if they update.

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
