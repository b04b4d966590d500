"""The preconditioned direction on the device, and what it tells of the curvature, in one call.

::

    v = V / C + wd w                  the estimate and the weight decay, per loss entry
    u = P^-1 v                        P^-1 v = v / rho + U b U'v
    d = v - slope,   move = w - s     slope: the full gradient and the decay at the snapshot s
    f = min(1, L d move / d P^-1 d)   where d move > 0; else 1: it shortens steps of more curvature
    f = min(1, most / |v|)            without a snapshot, and then P is the unit matrix
    live = f u - wd w                 the optimizer adds wd w

The sums ``d P^-1 d``, ``d move`` and so on are read some steps later, so that nothing waits.
"""

from __future__ import annotations

from functools import lru_cache, partial
from math import prod
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.ndarray import CachedOp, NDArray

from .. import _mxnet
from .columns import columns, copy_rows
from .combine import on_device
from .network import Network

#: The products of P^-1 d and of move, in rows, with d, move, slope, and the d of the step before.
SUMS = 2, 4


@lru_cache(maxsize=8)
def _compiled(
    shapes: tuple[tuple[int, ...], ...], dtype: str, rank: int, has_snapshot: bool
) -> tuple[CachedOp, list[str]]:
    """The operator, and the names of its inputs."""
    F, given = mx.sym, mx.sym.Variable

    def one_row(letter: str) -> Any:
        rows = [F.reshape(given(f"{letter}{n}"), shape=(1, -1)) for n in range(len(shapes))]
        return F.concat(*rows, dim=1)

    weights = one_row("w")
    decay = F.broadcast_mul(weights, given("wd"))
    per_entry = F.cast(given("per_entry"), dtype=dtype)
    v = u = F.broadcast_add(F.broadcast_mul(one_row("g"), per_entry), decay)
    if rank:
        inside = F.FullyConnected(v, given("U"), num_hidden=rank, no_bias=True)
        inside = F.dot(F.broadcast_mul(inside, given("b")), given("U"))
        u = F.broadcast_add(F.broadcast_mul(v, given("per_rho")), inside)
    most = F.cast(given("most"), dtype=dtype)
    if not has_snapshot:
        found = [F.dot(v, v, transpose_b=True)]
        factor = F.minimum(F.broadcast_div(most, F.sqrt(found[0])), 1.0)
    else:
        move, d = F.broadcast_sub(weights, given("s")), F.broadcast_sub(v, given("slope"))
        solved = F.broadcast_sub(u, given("solved_slope"))
        right = F.concat(d, move, given("slope"), given("last_d"), dim=0)
        sums = F.dot(F.concat(solved, move, dim=0), right, transpose_b=True)
        squared = F.slice(sums, begin=(0, 0), end=(1, 1))
        along = F.relu(F.slice(sums, begin=(1, 0), end=(2, 1)))
        factor = F.minimum(F.broadcast_div(F.broadcast_mul(along, most), squared), 1.0)
        factor, found = F.where(along, factor, given("one")), [sums, d]
    handed = F.broadcast_sub(F.broadcast_mul(u, factor), decay)
    ends = np.cumsum([0, *map(prod, shapes)]).tolist()
    parts = [F.slice_axis(handed, axis=1, begin=a, end=b) for a, b in zip(ends, ends[1:])]
    graph = F.Group([*(F.reshape(x, shape=shape) for x, shape in zip(parts, shapes)), *found])
    flags = [("static_alloc", True), ("forward_bulk_size", 200)]
    return CachedOp(graph, flags), graph.list_inputs()


class Direction:
    """The direction of a network, with what stays from step to step."""

    def __init__(self, network: Network, decays: np.ndarray) -> None:
        self._grads, *self._others = network.live
        self._weights = columns(network.weights)[0]
        self._shapes = tuple(array.shape for array in self._grads)
        self._device = self._grads.device
        self.given: dict[str, NDArray] = {}
        self.give(wd=decays, one=[1.0])

    def give(self, **rows: Any) -> None:
        """Put inputs in place, vectors or several as rows."""
        dtype = self._grads.dtypes[0]
        arrays = {name: np.atleast_2d(np.asarray(x, dtype)) for name, x in rows.items()}
        new = {name: _mxnet.to_ndarray(x, self._device) for name, x in arrays.items()}
        self.given = {**self.given, **new}  # copies of this object keep theirs

    def hand_over(self, entries: float | NDArray, scale: float, most: float) -> tuple[NDArray, ...]:
        """Replace reduced gradients, of so many loss entries, on all devices; the sums, and d.

        The gradients are scaled; entries are a number, or an array whose first one it is.
        """
        grads, given, has_snapshot = self._grads, self.given, "s" in self.given
        entries = entries[:1] if isinstance(entries, NDArray) else entries
        rank, dtype = len(given.get("U", ())), grads.dtypes[0]
        operator, names = _compiled(self._shapes, dtype, rank, has_snapshot)
        arrays = dict(given, per_entry=on_device(1 / (entries * scale), self._device))
        arrays["most"] = on_device(most or float(np.finfo("float32").max), self._device)
        for letter, column in (("g", grads), ("w", self._weights)):
            arrays.update((f"{letter}{n}", array) for n, array in enumerate(column))
        new = partial(mx.nd.empty, ctx=self._device, dtype=dtype)
        found = (new(SUMS), new(given["s"].shape)) if has_snapshot else (new((1, 1)),)
        operator(*[arrays[name] for name in names], out=[*grads, *found])
        copy_rows([grads] * len(self._others), self._others)
        return found
