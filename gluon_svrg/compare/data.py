"""The data of a comparison: mini-batches, by seed, epoch and size alone, and large chunks."""

from __future__ import annotations

import warnings
from itertools import zip_longest
from math import log2, prod
from typing import Any, Iterable, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from .. import _mxnet
from ..passes.columns import are_equal
from ..passes.data import NO_DATA, arguments

Batch = Sequence[Any]

#: The largest first array of a chunk, in rows and in numbers: a larger one takes much memory.
CHUNK_ROWS, CHUNK_SIZE = 65536, 2**20
#: The default mini-batch: a power of two from LEAST to MOST, for about 128 to 256 steps.
LEAST, MOST, STEPS = 32, 1024, 128
ARRAYS = (NDArray, np.ndarray)
KINDS = (
    "data must be a tuple of arrays, as in (X, y), a DataLoader, a list of mini-batches or a "
    "function batches(seed, epoch), got {}."
)


class Data:
    """Arrays that are shuffled and sliced, or a function that gives the mini-batches of an epoch.

    A DataLoader, or a list of mini-batches, is read once, into arrays of NumPy. These get the dtype
    of the network, as MXNet's own functions make all of one dtype.
    """

    def __init__(self, data: Any, batch_size: int | None, seed: int) -> None:
        self.seed, self.device = seed, mx.cpu()
        self.dtype, self._chunks = "float32", []  # type: Any, list
        self.function: Any = data if callable(data) else None
        given, size = ([], 0) if self.function else _arrays(data)
        lengths = [len(each) for each in given]
        if self.function:
            sizes = [len(batch[0]) for batch in self.batches(seed, 0)]
            lengths, batch_size = [sum(sizes)], max(sizes)
        if len({*lengths}) != 1 or not lengths[0]:
            raise ValueError(f"The arrays of data must be equally long, not empty, got {lengths}.")
        self.n = lengths[0]
        own = 2 ** int(log2(1 + self.n / STEPS))
        self.size = batch_size or size or min(max(LEAST, own), MOST)
        # About 32 steps an epoch took at most 1.2 times the fewest seconds; 16 are needed.
        few = min(max(min(16, self.n / 23), self.n / 32), 8192)
        self.preconditioned_size = batch_size or size or 2 ** round(log2(max(1, few)))
        self._columns = [_checked(each, number) for number, each in enumerate(given)]
        classes = np.unique(self._columns[-1][0]) if len(given) > 1 else np.zeros(0)
        if len(classes) and np.array_equal(classes, range(1, len(classes) + 1)):
            text = f"The labels are 1 to {len(classes)}. If they are classes, number them from 0"
            warnings.warn(f"{text}: pass y - 1.", stacklevel=3)
        width = prod(self._columns[0][0].shape[1:]) if given else 1
        self._rows = min(CHUNK_ROWS, CHUNK_SIZE // max(1, width))  # of a chunk

    def put_on(self, net: Any) -> None:
        """Give the arrays the dtype and the device of a network."""
        (parameter, *_) = net.collect_params().values()
        self.dtype, (self.device, *more) = _mxnet.dtype_of(parameter), _mxnet.devices(parameter)
        if more:
            raise ValueError("compare trains on one device: initialize the network on one alone.")

    def batches(self, seed: int, epoch: int, size: int = 0) -> Iterator[Batch]:
        """The mini-batches of an epoch, of arrays in a size, or in the default size."""
        if self.function is None:
            order = np.random.RandomState([seed, epoch]).permutation(self.n)
            yield from self._cut(order, size or self.size)
            return
        batch = None
        for batch in self.function(seed, epoch):
            yield [x if isinstance(x, NDArray) else self.array(x) for x in batch]
        if batch is None:
            raise ValueError(f"data({seed}, {epoch}) gave no mini-batch: return a new generator.")

    def chunks(self) -> Iterable[Batch]:
        """The whole data, of arrays in large pieces, in the same order each time."""
        if self.function is not None:
            return self.batches(self.seed, 0)
        self._chunks = self._chunks or [*self._cut(np.arange(self.n), max(self.size, self._rows))]
        return self._chunks

    def fixed(self, seed: int, name: str, size: int) -> list[Batch]:
        """The mini-batches of the first epoch, for a table; raise if the second differs."""
        first = list(self.batches(seed, 0, size))
        for one, other in zip_longest(first, self.batches(seed, 1)) if self.function else ():
            if one is None or other is None or not are_equal(one, other):
                raise ValueError(
                    f"{name!r} keeps the gradient of each mini-batch, and data(seed, epoch) gives "
                    "other mini-batches in each epoch. Pass arrays, or leave it out."
                )
        return first

    def _cut(self, order: np.ndarray, size: int) -> Iterator[Batch]:
        """Slice mini-batches from large pieces: to copy single mini-batches takes far longer."""
        rows = max(1, self._rows // size) * size
        for piece in (order[start : start + rows] for start in range(0, self.n, rows)):
            arrays = [self.array(values[piece], dtype) for values, dtype in self._columns]
            for start in range(0, len(piece), size):
                yield tuple(array[start : start + size] for array in arrays)

    def array(self, values: Any, dtype: Any = None) -> Any:
        """An array of MXNet, on the device of the network."""
        make = mx.np.array if mx.util.is_np_array() else mx.nd.array
        return make(values, ctx=self.device, dtype=dtype or self.dtype)


def _arrays(data: Any) -> tuple[list[Any], int]:
    """The arrays, one for each argument, and the size of mini-batches that they were read from."""
    if isinstance(data, ARRAYS) or not hasattr(data, "__iter__"):
        raise TypeError(KINDS.format(type(data).__name__))
    if isinstance(data, (tuple, list)) and data and not all(map(_is_minibatch, data)):
        return [each.toarray() if hasattr(each, "toarray") else each for each in data], 0
    batches = [arguments(batch) for batch in data]
    if not batches:
        raise ValueError(NO_DATA)
    if not all(map(_is_minibatch, batches)):
        raise TypeError(KINDS.format(f"a {type(data).__name__} of {type(batches[0][0]).__name__}"))
    columns = [[_numpy(each) for each in column] for column in zip(*batches)]
    return [np.concatenate(column) for column in columns], len(batches[0][0])


def _is_minibatch(batch: Any) -> bool:
    return isinstance(batch, (tuple, list)) and all(isinstance(each, ARRAYS) for each in batch)


def _checked(array: Any, number: int) -> tuple[np.ndarray, Any]:
    """The numbers of an array, which must be finite, and the dtype of an array of MXNet."""
    values = np.ascontiguousarray(_numpy(array))
    if values.dtype.kind not in "biuf" or not np.isfinite(values).all():
        raise ValueError(
            f"Array {number} of data needs finite numbers. For texts pass "
            "np.unique(texts, return_inverse=True)[1]."
        )
    return values, array.dtype if isinstance(array, NDArray) else None


def _numpy(array: Any) -> Any:
    return array.asnumpy() if isinstance(array, NDArray) else array
