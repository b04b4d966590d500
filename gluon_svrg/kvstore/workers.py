"""The processes that train together: they sum, and fail together, so that none waits forever."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from .. import _mxnet

#: A key of a kvstore stands for arrays of one shape, so numbers are summed in blocks of this size.
BLOCK = 64


class Workers:
    """The processes that train together, each with its part of the data; here there is only one.

    The methods here are collective: every worker calls the same ones in the same order.

    What is summed travels in arrays of this object, one for each key. MXNet orders the exchanges of
    a key only through the array that is passed: with another one, a fast worker's push overtakes.
    """

    is_alone = True  # there is nothing to exchange
    has_servers = False  # there are parameter servers, which can hold and update weights
    reduces = True  # the gradients of all workers are summed before an update

    def __init__(self, kvstore: Any, first_free_key: int) -> None:
        self.kvstore = kvstore
        self.rank: int = 0 if self.is_alone else kvstore.rank
        self.size: int = 1 if self.is_alone else kvstore.num_workers
        self._first_key = first_free_key  # those below are taken
        self._travelling: dict[int, NDArray] = {}  # by key

    def sum_arrays(self, arrays: Mapping[int, NDArray]) -> None:
        """Replace arrays, by small numbers, by their sums, bitwise identical on all workers."""
        first = self._first_key + 1
        self._exchange({first + number: _mxnet.classic(array) for number, array in arrays.items()})

    def sum_numbers(self, numbers: Sequence[float]) -> np.ndarray:
        """Sum numbers over all workers in float64. Waits for them.

        MXNet sums in float32. So each worker puts its numbers, as parts of 16 bits, in a place of
        its own, and all are added here. A first number that is NaN says that its worker has failed:
        then the others raise an error.
        """
        total = np.array(numbers, dtype="float64")
        for start in range(0, 0 if self.is_alone else len(total), BLOCK):
            block = total[start : start + BLOCK]
            places = np.zeros((self.size, BLOCK, 4), dtype="float32")
            places[self.rank, : len(block)] = block.view("uint16").reshape(-1, 4)
            array = mx.nd.array(places)
            self._exchange({self._first_key: array})
            of_workers = array.asnumpy().astype("uint16").view("float64")
            block[:] = of_workers[:, : len(block), 0].sum(axis=0)
            if np.isnan(total[0]) and not np.isnan(numbers[0]):
                raise RuntimeError("Another worker has failed, see its error. Nothing has changed.")
        return total

    def share_weights(self, parameters: Sequence[Parameter]) -> None:
        """Give all workers the same weights again, in place, unless their updates are equal."""

    def wait(self) -> None:
        """Wait until all workers call this, and everything that they have sent has arrived."""

    def _exchange(self, arrays: Mapping[int, NDArray]) -> None:
        """Replace arrays, by their keys, by their sums over all workers."""
        if self.is_alone:
            return
        new = {k: mx.nd.zeros_like(a) for k, a in arrays.items() if k not in self._travelling}
        if new:
            self._travelling.update(new)
            self._initialize(new)
        travelling = {key: self._travelling[key] for key in arrays}
        for key, array in arrays.items():
            array.copyto(travelling[key])
        self._sum(travelling)
        for key, array in arrays.items():
            travelling[key].copyto(array)

    def _initialize(self, arrays: Mapping[int, NDArray]) -> None:
        """Make new keys known to the kvstore, with arrays of zeros."""

    def _sum(self, arrays: Mapping[int, NDArray]) -> None:
        """Replace the arrays that travel by their sums over all workers."""


class Agreement:
    """A block in which all workers agree on sums; if one raises before that, all of them raise."""

    def __init__(self, workers: Workers) -> None:
        self._workers, self._is_pending = workers, True
        self.sum = workers.sum_arrays

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        if kind is not None and self._is_pending:
            self._workers.sum_numbers([np.nan])

    def reach(self, numbers: Sequence[float]) -> Sequence[float]:
        """Give at least one number, and get the sums over all workers; raise if one has failed."""
        self._is_pending = False
        return self._workers.sum_numbers(numbers).tolist()
