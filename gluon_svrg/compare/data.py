"""The data of a comparison: the same minibatches for all methods, and large chunks."""

from __future__ import annotations

from itertools import zip_longest
from math import prod
from typing import Any, Iterable, Iterator, Sequence

import mxnet as mx
import numpy as np

Batch = Sequence[Any]

#: How large the first array of a chunk may be: large ones are faster, and take memory.
CHUNK_ROWS, CHUNK_SIZE = 65536, 2**20


class Data:
    """Arrays that are shuffled and sliced, or a function that gives the minibatches of an epoch.

    Arrays of NumPy get the dtype of the network, as whole numbers do in MXNet's own functions.
    """

    def __init__(self, data: Any, batch_size: int, first_seed: int) -> None:
        self.batch_size, self.first_seed = batch_size, first_seed
        self.batches_of = data if callable(data) else None
        self.arrays: list[Any] = []
        self._chunks: list[Batch] | None = None
        self.dtype, self.device = "float32", mx.cpu()
        if self.batches_of is None:
            if not isinstance(data, (tuple, list)):
                raise TypeError(
                    "data must be arrays, as in (X, y), or a function batches(seed, epoch) that "
                    f"returns the minibatches of an epoch, got {type(data).__name__}."
                )
            self._kinds = [getattr(a, "dtype", None) if _is_mxnet(a) else None for a in data]
            self.arrays = [a.asnumpy() if _is_mxnet(a) else np.asarray(a) for a in data]
            lengths = [len(array) for array in self.arrays]
            if len({*lengths}) != 1 or not lengths[0]:
                raise ValueError(f"The arrays of data must be as long as each other, got {lengths}")
            self.n = lengths[0]
        else:
            self.n = sum(len(batch[0]) for batch in self.batches(first_seed, 0))
            if not self.n:
                raise ValueError("data(seed, epoch) gives no minibatch.")

    def put_on(self, net: Any) -> None:
        """Let arrays have the dtype and the device of a network."""
        (parameter, *_) = net.collect_params().values()
        self.dtype, self.device = np.dtype(parameter.dtype).name, parameter.list_ctx()[0]

    def batches(self, seed: int, epoch: int) -> Iterator[Batch]:
        """The minibatches of an epoch."""
        if self.batches_of is None:
            order = np.random.RandomState([seed, epoch]).permutation(self.n)
            return self._cut(order, self.batch_size)
        return map(self._checked, self.batches_of(seed, epoch))

    def chunks(self, fixed: Sequence[Batch] | None = None) -> Iterable[Batch]:
        """The whole data in large pieces, in the same order each time."""
        if self.batches_of is not None:
            return self.batches(self.first_seed, 0)
        if self._chunks is None:
            rows = CHUNK_SIZE // max(1, prod(self.arrays[0].shape[1:]))
            rows = max(self.batch_size, min(CHUNK_ROWS, rows))
            self._chunks = list(self._cut(slice(None), rows))
        return self._chunks

    def fixed(self, seed: int, name: str) -> list[Batch]:
        """The minibatches of the first epoch, for a table; raise if others differ from them."""
        found = list(self.batches(seed, 0))
        if self.batches_of is not None:
            for one, other in zip_longest(found, self.batches(seed, 1)):
                if one is None or other is None or not all(map(_are_equal, one, other)):
                    raise ValueError(
                        f"{name!r} keeps the gradient of each minibatch, and data(seed, epoch) "
                        "gives other minibatches in each epoch. Pass arrays, or leave it out."
                    )
        return found

    def _cut(self, order: Any, size: int) -> Iterator[Batch]:
        arrays = [self._array(a[order], kind) for a, kind in zip(self.arrays, self._kinds)]
        for start in range(0, self.n, size):
            yield tuple(array[start : start + size] for array in arrays)

    def _checked(self, batch: Any) -> Batch:
        if not isinstance(batch, (tuple, list)):
            raise TypeError(
                "data(seed, epoch) must give minibatches that are tuples of arrays, as in (X, y), "
                f"got {type(batch).__name__}."
            )
        return tuple(part if _is_mxnet(part) else self._array(part) for part in batch)

    def _array(self, values: Any, dtype: Any = None) -> Any:
        make = mx.np.array if mx.util.is_np_array() else mx.nd.array
        if dtype is None:
            is_short = self.dtype == "float16" and values.dtype.kind != "f"
            dtype = "float32" if is_short else self.dtype
        return make(values, ctx=self.device, dtype=dtype)


def _is_mxnet(array: Any) -> bool:
    return isinstance(array, mx.nd.NDArray)


def _are_equal(one: Any, other: Any) -> bool:
    return np.array_equal(one.asnumpy(), other.asnumpy())
