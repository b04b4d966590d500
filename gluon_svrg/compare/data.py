"""The data of a comparison: the same minibatches for all methods, and large chunks."""

from __future__ import annotations

from itertools import zip_longest
from math import prod
from typing import Any, Iterable, Iterator, Sequence

import mxnet as mx
import numpy as np

from .. import _mxnet
from ..passes.columns import are_equal

Batch = Sequence[Any]

#: How large the first array of a chunk may be: large ones are faster, and take memory.
CHUNK_ROWS, CHUNK_SIZE = 65536, 2**20
CHANGES = (
    "{!r} keeps the gradient of each minibatch, and data(seed, epoch) gives other minibatches in "
    "each epoch. Pass arrays, or leave it out."
)


class Data:
    """Arrays that are shuffled and sliced, or a function that gives the minibatches of an epoch.

    Arrays of NumPy get the dtype of the network, as MXNet's own functions make all of one dtype.
    """

    def __init__(self, data: Any, batch_size: int, seed: int) -> None:
        self.size, self.seed = batch_size, seed
        self.dtype, self.device, self._chunks = "float32", mx.cpu(), []  # type: Any, Any, list
        self.function: Any = data if callable(data) else None
        arrays = () if self.function else data
        if not isinstance(arrays, (tuple, list)):
            raise TypeError(
                "data must be arrays, as in (X, y), or a function batches(seed, epoch) that "
                f"returns the minibatches of an epoch, got {type(data).__name__}."
            )
        self._arrays = [
            (each.asnumpy(), each.dtype) if _is_there(each) else (np.ascontiguousarray(each), None)
            for each in arrays
        ]
        lengths = [len(values) for values, _ in self._arrays]
        if self.function:
            lengths = [sum(len(batch[0]) for batch in self.batches(seed, 0))]
        if len({*lengths}) != 1 or not lengths[0]:
            raise ValueError(f"data must be arrays as long as each other, or give minibatches of "
                             f"them; the numbers of samples are {lengths}.")  # fmt: skip
        self.n = lengths[0]
        width = 1 if self.function else prod(self._arrays[0][0].shape[1:])
        self._rows = min(CHUNK_ROWS, CHUNK_SIZE // max(1, width))  # of a chunk

    def put_on(self, net: Any) -> None:
        """Let arrays have the dtype and the device of a network."""
        (parameter, *_) = net.collect_params().values()
        self.dtype, (self.device, *_) = _mxnet.dtype_of(parameter), _mxnet.devices(parameter)

    def batches(self, seed: int, epoch: int) -> Iterator[Batch]:
        """The minibatches of an epoch."""
        if self.function is None:
            return self._cut(np.random.RandomState([seed, epoch]).permutation(self.n), self.size)
        given = self.function(seed, epoch)
        return ([x if _is_there(x) else self._array(x) for x in batch] for batch in given)

    def chunks(self) -> Iterable[Batch]:
        """The whole data in large pieces, in the same order each time."""
        if self.function is not None:
            return self.batches(self.seed, 0)
        self._chunks = self._chunks or [*self._cut(np.arange(self.n), max(self.size, self._rows))]
        return self._chunks

    def fixed(self, seed: int, name: str) -> list[Batch]:
        """The minibatches of the first epoch, for a table; raise if others differ from them."""
        found = list(self.batches(seed, 0))
        for one, other in zip_longest(found, self.batches(seed, 1)) if self.function else ():
            if one is None or other is None or not are_equal(one, other):
                raise ValueError(CHANGES.format(name))
        return found

    def _cut(self, order: np.ndarray, size: int) -> Iterator[Batch]:
        """Slices of pieces that are copied one by one: of all at once, it would take far longer."""
        rows = max(1, self._rows // size) * size
        for piece in (order[start : start + rows] for start in range(0, self.n, rows)):
            arrays = [self._array(values[piece], dtype) for values, dtype in self._arrays]
            for start in range(0, len(piece), size):
                yield tuple(array[start : start + size] for array in arrays)

    def _array(self, values: Any, dtype: Any = None) -> Any:
        make = mx.np.array if mx.util.is_np_array() else mx.nd.array
        return make(values, ctx=self.device, dtype=dtype or self.dtype)


def _is_there(array: Any) -> bool:
    return isinstance(array, mx.nd.NDArray)
