"""The preconditioned direction on the device, and what it tells of the curvature, in one call.

::

    v = V / C + wd w                   the estimate and the weight decay, per loss entry
    u = P^-1 v                         P^-1 v = v / rho + (v' U) b U'
    d = v - slope,   move = w - s      slope: the full gradient and the decay at the snapshot s
    f = min(1, L d'move / d'P^-1 d)    where d'move > 0; 1 elsewhere
    live = f u - wd w                  the optimizer adds wd w

The sums ``d'P^-1 d``, ``d'move`` and so on are read some steps later, so that nothing waits.
"""

from __future__ import annotations

from functools import lru_cache, partial
from math import prod
from typing import Any, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import CachedOp, NDArray

from .. import _mxnet
from .columns import columns, copy_rows
from .network import Network

#: The numbers of a step: products of two rows, see `_graph`. Without a snapshot, |v|^2 alone.
SUMS = 2, 4
SIZES = 64  # of minibatches, whose reciprocals are kept


@lru_cache(maxsize=8)
def _compiled(shapes: tuple[tuple[int, ...], ...], rank: int, has_snapshot: bool) -> Any:
    """The operator, and the names of its inputs."""
    graph = _graph(shapes, rank, has_snapshot)
    flags = [("static_alloc", True), ("forward_bulk_size", 200)]
    return CachedOp(graph, flags), graph.list_inputs()


def _graph(shapes: Sequence[tuple[int, ...]], rank: int, has_snapshot: bool) -> Any:
    given, count = mx.sym.Variable, range(len(shapes))

    def one_row(letter: str) -> Any:
        rows = [mx.sym.reshape(given(f"{letter}{n}"), shape=(1, -1)) for n in count]
        return mx.sym.concat(*rows, dim=1) if len(rows) > 1 else rows[0]

    weights = one_row("w")
    decay = mx.sym.broadcast_mul(weights, given("wd"))
    v = mx.sym.broadcast_add(mx.sym.broadcast_mul(one_row("g"), given("per_entry")), decay)
    u = v
    if rank:
        inside = mx.sym.FullyConnected(v, given("U"), num_hidden=rank, no_bias=True)
        inside = mx.sym.dot(mx.sym.broadcast_mul(inside, given("b")), given("U"))
        u = mx.sym.broadcast_add(mx.sym.broadcast_mul(v, given("per_rho")), inside)
    found = [mx.sym.dot(v, v, transpose_b=True)]
    if has_snapshot:
        move, d = mx.sym.broadcast_sub(weights, given("s")), mx.sym.broadcast_sub(v, given("slope"))
        solved = mx.sym.broadcast_sub(u, given("solved_slope"))  # P^-1 d
        left = mx.sym.concat(solved, move, dim=0)
        right = mx.sym.concat(d, move, given("slope"), given("last_d"), dim=0)
        sums = mx.sym.dot(left, right, transpose_b=True)
        squared = mx.sym.slice(sums, begin=(0, 0), end=(1, 1))
        along = mx.sym.relu(mx.sym.slice(sums, begin=(1, 0), end=(2, 1)))
        factor = mx.sym.broadcast_div(mx.sym.broadcast_mul(along, given("L")), squared)
        factor = mx.sym.where(along, mx.sym.minimum(factor, 1.0), given("one"))
        u, found = mx.sym.broadcast_mul(u, factor), [sums, d]
    handed = mx.sym.broadcast_sub(u, decay)
    ends = np.cumsum([0, *map(prod, shapes)]).tolist()
    parts = [mx.sym.slice_axis(handed, axis=1, begin=a, end=b) for a, b in zip(ends, ends[1:])]
    parts = [mx.sym.reshape(part, shape=shape) for part, shape in zip(parts, shapes)]
    return mx.sym.Group([*parts, *found])


class Direction:
    """The call for a network, with all that stays between two refreshes."""

    def __init__(self, network: Network, decays: np.ndarray) -> None:
        self._grads, others = network.live[0], network.live[1:]
        self._others, self._weights = others, columns(network.weights)[0]
        self._given = {"wd": self._row(decays), "one": self._row([1.0])}
        self._rank, self._shapes = 0, tuple(array.shape for array in self._grads)
        self._per_entry: dict[float, NDArray] = {}  # 1 / C by C, which comes again and again

    def _row(self, values: Any) -> NDArray:
        """A vector, or several as rows, as a classic array on the device."""
        like = self._grads[0]
        rows = np.atleast_2d(np.asarray(values, _mxnet.dtype_name(like)))
        return _mxnet.to_ndarray(rows, _mxnet.device_of(like))

    def set_metric(self, P: Any) -> None:
        """Multiply by the inverse of P."""
        rows = {"U": self._row(P.U), "b": self._row(P.b), "per_rho": self._row([1 / P.rho])}
        self._rank, self._given = len(P.U), {**self._given, **rows}

    def set_snapshot(self, weights: np.ndarray, slope: np.ndarray, solved: np.ndarray) -> None:
        """Compare with the slope at a snapshot."""
        vectors = {"s": weights, "slope": slope, "solved_slope": solved}
        vectors["last_d"] = np.zeros_like(slope)
        self._given = {**self._given, **{name: self._row(v) for name, v in vectors.items()}}

    def clear(self) -> None:
        """Forget the snapshot and the metric."""
        self._rank = 0
        self._given = {name: self._given[name] for name in ("wd", "one")}

    @property
    def last_d(self) -> np.ndarray | None:
        """The d of the last step, None without a snapshot. Waits for it."""
        kept = self._given.get("last_d")
        return None if kept is None else kept.asnumpy()[0]

    def set_last(self, d: np.ndarray) -> None:
        """Set the d of the last step."""
        self.keep(self._row(d))

    def keep(self, d: NDArray) -> None:
        """Keep the d of a step for the next one."""
        self._given = {**self._given, "last_d": d}

    def set_bound(self, L: float) -> None:
        """Shorten steps along which the curvature is larger; 0 stands for no bound."""
        self._given = {**self._given, "L": self._row([L or np.finfo("float32").max])}

    def hand_over(self, entries: float | NDArray, scale: float) -> tuple[NDArray, NDArray | None]:
        """Replace the reduced gradients on all devices; the sums, and d where there is a snapshot.

        The gradients are V times the scale, for so many loss entries: a number, or an array of it.
        """
        has_snapshot, grads = "s" in self._given, self._grads
        operator, names = _compiled(self._shapes, self._rank, has_snapshot)
        arrays = {f"g{n}": array for n, array in enumerate(grads)}
        arrays.update((f"w{n}", array) for n, array in enumerate(self._weights))
        arrays.update(self._given, per_entry=self._reciprocal(entries, scale))
        new = partial(mx.nd.empty, ctx=grads[0].ctx, dtype=grads[0].dtype)
        found = [new(SUMS), new(self._given["s"].shape)] if has_snapshot else [new((1, 1))]
        operator(*[arrays[name] for name in names], out=[*grads, *found])
        copy_rows([grads] * len(self._others), self._others)
        return found[0], found[1] if has_snapshot else None

    def _reciprocal(self, entries: float | NDArray, scale: float) -> NDArray:
        if isinstance(entries, NDArray):
            entries = entries[:1].as_in_context(self._grads[0].ctx).reshape((1, 1))
            return (1 / (entries * scale)).astype(self._grads[0].dtype)
        if len(self._per_entry) > SIZES:
            self._per_entry.clear()
        known = self._per_entry.get(entries * scale)
        if known is None:
            known = self._row([1 / (entries * scale)])
            self._per_entry[entries * scale] = known
        return known
