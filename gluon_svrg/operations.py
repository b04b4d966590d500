"""Operations on many arrays at once.

A network has hundreds of parameters, most of them small; an engine operation for each would cost
more than its arithmetic. All arrays of a list are on one device.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Iterable, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import CachedOp, NDArray

from . import _mxnet
from ._mxnet import classic

#: Dtypes of parameters, with those in which their gradients are summed up.
SUMMED_IN = {"float16": "float32", "float32": "float32", "float64": "float64"}


def all_finite(arrays: Iterable[NDArray]) -> bool:
    """Whether all entries are finite. Waits for the device."""
    return all(np.isfinite(piece).all() for array in arrays for piece in in_numpy(array))


def in_numpy(array: NDArray) -> Iterator[np.ndarray]:
    """The entries of an array, in pieces that need little memory. Waits for the device."""
    flat = dense(classic(array)).reshape((-1,))
    for start in range(0, flat.shape[0], _PIECE):
        yield flat[start : start + _PIECE].asnumpy()


_PIECE = 1 << 16


def zero(arrays: Sequence[NDArray]) -> None:
    """Set arrays to zero."""
    flat = [array for array in arrays if array.stype == "default"]
    if flat:
        mx.nd.reset_arrays(*dimensional(flat), num_arrays=len(flat))
    for array in arrays:
        if array.stype != "default":
            assign(mx.nd.zeros(array.shape, ctx=array.ctx, dtype=array.dtype), array)


def dense(array: NDArray) -> NDArray:
    """A sparse array as a dense one; dense arrays as they are."""
    return array if array.stype == "default" else array.tostype("default")


def assign(value: NDArray, target: NDArray) -> None:
    """Copy a dense array to one of any storage and dtype."""
    value.astype(target.dtype, copy=False).tostype(target.stype).copyto(target)


def divide(arrays: Sequence[NDArray], divisor: float) -> None:
    """Divide arrays, in place."""
    flat = [classic(array) for array in arrays]
    _division(len(flat), float(divisor))(*flat, out=flat)


@lru_cache(maxsize=8)
def _division(count: int, divisor: float) -> CachedOp:
    graph = _mxnet.Graph()
    attrs = {"scalar": repr(divisor)}
    return graph.compile(
        [graph.add("_div_scalar", [graph.argument()], attrs=attrs) for _ in range(count)]
    )


def copy(sources: Sequence[NDArray], targets: Sequence[NDArray]) -> None:
    """Copy arrays to others of equal shapes and dtypes, once."""
    Copy(sources, targets, again=False)()


class Copy:
    """Copy arrays to others of equal shapes and dtypes.

    Parameters
    ----------
    sources, targets : sequence of NDArray
        Pairs of arrays.
    again : bool
        Whether it will be done so often that it is worth to compile it.
    """

    def __init__(
        self, sources: Sequence[NDArray], targets: Sequence[NDArray], *, again: bool = True
    ) -> None:
        pairs, self._mixed = _split_mixed(zip(sources, targets))
        self._groups: dict[Any, Any] = {
            dtype: tuple(zip(*group)) for dtype, group in _by_dtype(pairs)
        }
        self._sum: Sum | None = None
        if again and np.float64 in self._groups:
            sources, targets = self._groups[np.float64]
            self._sum = Sum(targets, sources)

    def __call__(self) -> None:
        """Copy."""
        for source, target in self._mixed:
            if source.stype == target.stype:
                source.copyto(target)
            else:
                assign(dense(source), target)
        for dtype, (sources, targets) in self._groups.items():
            if dtype == np.float32:
                mx.nd.amp_multicast(*sources, num_outputs=len(sources), out=list(targets))
            elif dtype == np.float64 and self._sum:  # on CPU, amp_multicast has no float64
                zero(targets)
                self._sum.add()
                self._sum.finish()
            else:
                for source, target in zip(sources, targets):
                    source.copyto(target)


class Sum:
    """Sum up arrays, ``target += other``, again and again.

    Parameters
    ----------
    targets, others : sequence of NDArray
        Pairs of arrays of equal shape; targets may be wider. Between two additions the others are
        written.
    """

    # MXNet's addition is the fastest for an array, but costs an engine operation for each.
    _LARGE = 1 << 14

    def __init__(self, targets: Sequence[NDArray], others: Sequence[NDArray]) -> None:
        pairs, self._mixed = _split_mixed(zip(targets, others))
        self._large = [dimensional(pair) for pair in pairs if pair[0].size >= self._LARGE]
        small = [_columns(pair) for pair in pairs if pair[0].size < self._LARGE]
        rows = [(other, other, target) for target, other in small]
        self._small = [_InPlace(same, rate=-1, decay=0) for _, same in _by_dtype(rows)]

    def add(self) -> None:
        """Add the others, as they are now, to the targets."""
        for target, other in self._large:
            mx.nd.elemwise_add(target, other, out=target)
        for small in self._small:
            small.run()
        for target, other in self._mixed:
            target += dense(other).astype(target.dtype, copy=False)

    def finish(self) -> None:
        """Make the sums ready to be read."""
        for small in self._small:
            small.publish()


class ScaledSubtract:
    """In place, ``target -= rate * (minuend - decay * other)``.

    The arithmetic of a momentum SGD step, and MXNet's operator for it: one kernel per array that
    reads three arrays and writes one.

    Parameters
    ----------
    targets, minuends, others : sequence of NDArray
        Triples of equal shape. If targets are of another dtype, all is computed in that of the
        others. The minuends may be overwritten.
    rate, decay : float
        Taken in float32, as the hyperparameters of all optimizer operators.
    """

    def __init__(
        self,
        targets: Sequence[NDArray],
        minuends: Sequence[NDArray],
        others: Sequence[NDArray],
        rate: float,
        decay: float,
    ) -> None:
        triples, self._mixed = _split_mixed(zip(others, minuends, targets))
        self._rows = dict(_by_dtype(map(_columns, triples)))
        self._rate, self._decay = rate, decay
        self._compiled: list[_InPlace] = []

    def compile(self) -> None:
        """Make all further calls one engine operation each."""
        if not self._compiled:
            self._compiled = [_InPlace(r, self._rate, self._decay) for r in self._rows.values()]

    def __call__(self) -> None:
        """Subtract."""
        rate, decay = float(np.float32(self._rate)), float(np.float32(self._decay))
        for other, minuend, target in self._mixed:
            control_variate = rate * (minuend - decay * other)
            assign(dense(target).astype(other.dtype, copy=False) - control_variate, target)
        if self._compiled:
            for update in self._compiled:
                update.run()
                update.publish()
            return
        attributes = as_momentum_step(self._rate, self._decay)
        for rows in self._rows.values():
            for other, minuend, target in rows:
                mx.nd.sgd_mom_update(other, minuend, target, out=minuend, **attributes)


class _InPlace:
    """``target -= rate * (minuend - decay * other)``, compiled for all rows of arrays at once.

    Parameters
    ----------
    rows : sequence of (other, minuend, target)
        Columns of one dtype.
    rate, decay : float
        The constants.
    """

    # What the operator returns beside (other + target) is not wanted. Where MXNet cannot leave it
    # out, it goes to buffers of so many entries, which the cache can hold.
    _SCRATCH_ENTRIES = 1 << 18

    def __init__(self, rows: Sequence[Sequence[NDArray]], rate: float, decay: float) -> None:
        targets = [row[-1] for row in rows]
        if not _mxnet.can_discard_outputs():
            rows = [piece for row in rows for piece in _pieces(row, self._SCRATCH_ENTRIES)]
        graph = _mxnet.Graph()
        attrs = {name: repr(value) for name, value in as_momentum_step(rate, decay).items()}
        updates = [
            graph.add("sgd_mom_update", [graph.argument() for _ in row], attrs=attrs)
            for row in rows
        ]
        self._operator = graph.compile_for_effect(updates)
        self._arrays = [array for row in rows for array in row]
        with mx.util.np_shape(True):
            self._empty_views = [target[0:0] for target in targets]

    def run(self) -> None:
        """Update the targets."""
        self._operator(*self._arrays)

    def publish(self) -> None:
        """Let whoever reads the targets next wait for the update.

        MXNet takes what a static graph updates in place for arrays that are only read. So let a
        write of nothing follow, to an empty view of each, which it does see.
        """
        with mx.util.np_shape(True):
            mx.nd.reset_arrays(*self._empty_views, num_arrays=len(self._empty_views))


def as_momentum_step(rate: float, decay: float) -> dict[str, float]:
    """What makes `sgd_mom_update` out of the constants; the target is its momentum."""
    return {"momentum": 1.0, "lr": float(rate), "wd": -float(decay)}


def dimensional(arrays: Iterable[NDArray]) -> list[NDArray]:
    """The same memory with at least one dimension, which some operators demand."""
    flat = [classic(array) for array in arrays]
    return [array if array.shape else array.reshape((1,)) for array in flat]


def _columns(arrays: Iterable[NDArray]) -> list[NDArray]:
    """The same memory as columns."""
    return [classic(array).reshape((-1, 1)) for array in arrays]


def _pieces(columns: Sequence[NDArray], size: int) -> list[list[NDArray]]:
    """Views of columns of one length, of at most `size` entries."""
    starts = range(0, columns[0].shape[0], size)
    return [[column[start : start + size] for column in columns] for start in starts]


def _split_mixed(rows: Iterable[Sequence[NDArray]]) -> tuple[list[Any], list[Any]]:
    """Separate rows of dense arrays of one dtype from the rest."""
    same: list[Any] = []
    mixed: list[Any] = []
    for row in rows:
        is_same = all(a.dtype == row[0].dtype and a.stype == "default" for a in row)
        (same if is_same else mixed).append(dimensional(row))
    return same, mixed


def _by_dtype(rows: Iterable[Sequence[NDArray]]) -> list[tuple[Any, list[Any]]]:
    """Sort rows of arrays by their dtype."""
    groups: dict[Any, list[Any]] = {}
    for row in rows:
        groups.setdefault(row[0].dtype, []).append(row)
    return list(groups.items())
