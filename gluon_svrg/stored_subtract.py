"""`ScaledSubtract` for gradients that are stored: the same result, and they stay as they are."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import CachedOp, NDArray

from . import _mxnet
from ._mxnet import classic
from .operations import SUMMED_IN, as_momentum_step, assign, dense, dimensional


class StoredSubtract:
    """In place, ``target -= rate * (minuend - decay * other)``, for minuends that come and go.

    Equal to `ScaledSubtract` to the last bit. The minuends come with their signs changed.

    Parameters
    ----------
    targets, others : sequence of NDArray
        Pairs of equal shape.
    rate, decay : float
        As for `ScaledSubtract`.
    factor : float
        What is stored is multiplied by it.
    prepared : bool
        Whether the others have been added to what is stored, see `prepare`.
    """

    def __init__(
        self,
        targets: Sequence[NDArray],
        others: Sequence[NDArray],
        rate: float,
        decay: float,
        factor: float,
        prepared: bool,
    ) -> None:
        rows = list(zip(map(classic, targets), map(classic, others)))
        same = [t.stype == "default" and t.dtype == other.dtype for t, other in rows]
        self._same = [number for number, is_same in enumerate(same) if is_same]
        self._mixed = {n: row for n, (row, is_same) in enumerate(zip(rows, same)) if not is_same}
        self._rate, self._decay = float(np.float32(rate)), float(np.float32(decay))
        self._factor, self._prepared = factor, prepared
        self._targets = dimensional(rows[number][0] for number in self._same)
        self._others = []
        if not prepared:
            chosen = dimensional(rows[number][1] for number in self._same)
            self._others = [o * _product(self._rate, self._decay, o.dtype) for o in chosen]
        operator = _pairs if prepared else _triples
        self._operator = operator(len(self._same), self._rate * factor)

    def __call__(self, stored: Sequence[NDArray]) -> None:
        """Subtract."""
        for number, (target, other) in self._mixed.items():
            addend = self._factor * stored[number].reshape(other.shape)
            if not self._prepared:
                addend = addend + self._decay * other
            assign(dense(target).astype(other.dtype) + self._rate * addend, target)
        if self._same:
            chosen = [stored[number] for number in self._same]
            columns = [self._targets, chosen] if self._prepared else [chosen, self._targets]
            rows = zip(*columns, self._others) if self._others else zip(*columns)
            self._operator(*(array for row in rows for array in row), out=self._targets)


def for_storage(array: NDArray) -> NDArray:
    """What `StoredSubtract` takes for a minuend: dense, in the dtype of sums, its sign changed."""
    value = -dense(classic(array)).astype(SUMMED_IN[_mxnet.dtype_name(array)], copy=False)
    return value if value.shape else value.reshape((1,))


def prepare(stored: Sequence[NDArray], others: Sequence[NDArray], decay: float) -> None:
    """Add the others to what is stored, so that `StoredSubtract` has less to do."""
    arrays = [array for row in zip(stored, dimensional(others)) for array in row]
    _pairs_of_a_pass(len(stored), float(np.float32(decay)))(*arrays, out=list(stored))


def _product(first: float, second: float, dtype: Any) -> float:
    """A product as an operator of a dtype computes it."""
    return float(np.dtype(dtype).type(first) * np.dtype(dtype).type(second))


def _pairs(count: int, rate: float) -> CachedOp:
    """Compute ``first + rate * second`` for pairs of arrays.

    The result may go to the first; if it went to the second, oneDNN would read it too late.
    """
    graph = _mxnet.Graph()
    rows = [(graph.argument(), graph.argument()) for _ in range(count)]
    return graph.compile(
        [graph.add("elemwise_add", [first, _scaled(graph, second, rate)]) for first, second in rows]
    )


_pairs_of_a_pass = lru_cache(maxsize=2)(_pairs)  # a full minibatch, and the last one


def _triples(count: int, rate: float) -> CachedOp:
    """Compute ``rate * first + (second + third)`` for triples of arrays.

    This is the order in which MXNet 1.9.1 adds them. The result may go to any of them.
    """
    graph = _mxnet.Graph()
    rows = [[graph.argument() for _ in range(3)] for _ in range(count)]
    return graph.compile(
        [
            graph.add("add_n", [_scaled(graph, first, rate), *rest], attrs={"num_args": "3"})
            for first, *rest in rows
        ]
    )


def _scaled(graph: _mxnet.Graph, node: int, rate: float) -> int:
    return node if rate == 1 else graph.add("_mul_scalar", [node], attrs={"scalar": repr(rate)})


@lru_cache(maxsize=None)
def can_prepare() -> bool:
    """Whether that changes no bit: `sgd_mom_update` computes in the order of the formula.

    That of MXNet 2.0 does; that of 1.9.1 adds the other to the target first.
    """
    target, minuend, other = (mx.nd.array([value]) for value in (1e-8, 1.0, 1.0))
    mx.nd.sgd_mom_update(other, minuend, target, out=minuend, **as_momentum_step(1.0, 1.0))
    return bool(target.asscalar())  # 1e-8 - (1 - 1), and not (1e-8 + 1) - 1
