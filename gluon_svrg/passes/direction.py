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

from functools import lru_cache
from math import prod
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.ndarray import CachedOp, NDArray

from .. import _mxnet
from .columns import columns, copy_rows
from .network import Network

#: The products of P^-1 d and of move, in rows, with d, move, slope, and the d of the step before.
SUMS = 2, 4


#: How many numbers of steps wait at once, more than are read late; and the last two d.
SLOTS = 6


@lru_cache(maxsize=8)
def _compiled(
    shapes: tuple[tuple[int, ...], ...], rank: int, has_snapshot: bool
) -> tuple[CachedOp, list[str]]:
    """The operator, and the names of its inputs."""
    F, given = mx.sym, mx.sym.Variable

    def one_row(letter: str) -> Any:
        rows = [F.reshape(given(f"{letter}{n}"), shape=(1, -1)) for n in range(len(shapes))]
        return F.concat(*rows, dim=1) if len(rows) > 1 else rows[0]

    weights = one_row("w")
    decay = F.broadcast_mul(weights, given("wd"))
    v = u = F.broadcast_add(F.broadcast_mul(one_row("g"), given("per_entry")), decay)
    if rank:
        inside = F.FullyConnected(v, given("U"), num_hidden=rank, no_bias=True)
        inside = F.dot(F.broadcast_mul(inside, given("b")), given("U"))
        u = F.broadcast_add(F.broadcast_mul(v, given("per_rho")), inside)
    if has_snapshot:
        move, d = F.broadcast_sub(weights, given("s")), F.broadcast_sub(v, given("slope"))
        solved = F.broadcast_sub(u, given("solved_slope"))
        right = F.concat(d, move, given("slope"), given("last_d"), dim=0)
        sums = F.dot(F.concat(solved, move, dim=0), right, transpose_b=True)
        squared = F.slice(sums, begin=(0, 0), end=(1, 1))
        along = F.relu(F.slice(sums, begin=(1, 0), end=(2, 1)))
        factor = F.minimum(F.broadcast_div(F.broadcast_mul(along, given("most")), squared), 1.0)
        factor, found = F.where(along, factor, given("one")), [sums, d]
    else:
        found = [F.dot(v, v, transpose_b=True)]
        factor = F.minimum(F.broadcast_div(given("most"), F.sqrt(found[0])), 1.0)
    handed = F.broadcast_sub(F.broadcast_mul(u, factor), decay)
    ends = np.cumsum([0, *map(prod, shapes)]).tolist()
    parts = [handed]
    if len(shapes) > 1:
        parts = [F.slice_axis(handed, axis=1, begin=a, end=b) for a, b in zip(ends, ends[1:])]
    graph = F.Group([*(F.reshape(x, shape=shape) for x, shape in zip(parts, shapes)), *found])
    flags = [("static_alloc", True), ("forward_bulk_size", 200)]
    return CachedOp(graph, flags), graph.list_inputs()


class Direction:
    """The direction of a network, with what stays from step to step."""

    def __init__(self, network: Network, decays: np.ndarray) -> None:
        self._grads, *self._others = network.live
        self._weights = columns(network.weights)[0]
        self._device, self._dtype = self._grads.device, self._grads.dtypes[0]
        self.given: dict[str, NDArray] = {}
        self.give(wd=decays, one=[1.0])

    def give(self, **rows: Any) -> None:
        """Put inputs in place, vectors or several as rows."""
        new = {name: self._row(values) for name, values in rows.items()}
        self.given = {**self.given, **new}  # copies of this object keep theirs
        self._calls: dict[tuple[float, float, int], Any] = {}
        self._slot = 0
        if "s" in rows:
            self._d = [self._row(0 * rows["s"]) for _ in range(2)]  # of the last two steps

    def _row(self, values: Any) -> NDArray:
        rows = np.atleast_2d(np.asarray(values, self._dtype))
        return _mxnet.to_ndarray(rows, self._device)

    @property
    def last_d(self) -> NDArray:
        """The d of the last step, where there is a snapshot."""
        return self._d[1 - self._slot % 2]

    def hand_over(self, entries: float | NDArray, scale: float, most: float) -> NDArray:
        """Replace reduced gradients, of so many loss entries, on all devices; the sums of the step.

        The gradients are scaled; entries are a number, or an array whose first one it is.
        """
        key = -1.0 if isinstance(entries, NDArray) else entries * scale, most, self._slot
        if key not in self._calls:
            if len(self._calls) > 64:
                self._calls.clear()
            self._calls[key] = self._prepared(1 / key[0], most or float(np.finfo("float32").max))
        call, per_entry, sums, _ = self._calls[key]
        if isinstance(entries, NDArray):
            per_entry[:] = (1 / (entries[:1] * scale)).as_in_context(self._device)
        call()
        copy_rows([self._grads] * len(self._others), self._others)
        return sums

    def _prepared(self, *numbers: float) -> tuple[Any, NDArray, NDArray, Any]:
        """A call, with the arrays of its first number, of its sums, and all others."""
        grads, given, has_snapshot = self._grads, self.given, "s" in self.given
        shapes = tuple(array.shape for array in grads)
        operator, names = _compiled(shapes, len(given.get("U", ())), has_snapshot)
        per_entry, most = (self._row([number]) for number in numbers)
        arrays = {**given, "per_entry": per_entry, "most": most}
        sums = self._row(np.zeros(SUMS if has_snapshot else 1))
        outputs = [*grads, sums]
        if has_snapshot:
            arrays["last_d"] = self.last_d
            outputs.append(self._d[self._slot % 2])
        for letter, column in (("g", grads), ("w", self._weights)):
            arrays.update((f"{letter}{n}", array) for n, array in enumerate(column))
        inputs = [arrays[name].handle.value for name in names]
        handles = [array.handle.value for array in outputs]
        call = _mxnet.prepared(operator, self._device, inputs, handles)
        return call, per_entry, sums, (arrays, outputs)

    def keep(self) -> None:
        """The last step was made: the next one compares with it."""
        self._slot = (self._slot + 1) % SLOTS
