"""The direction on the device, and the products that tell of the curvature, in one call.

::

    v = V / b + (1 - C / b) mu + wd w       C: entries of this mini-batch, b: the most of any
    d = v - slope,   move = w - s           slope: the full gradient and the decay at the snapshot s
    solved = P^-1 d = d / rest +- T'T d     T: the directions of P, scaled
    u = P^-1 v = solved + P^-1 slope
    f = min(1, L d move / d solved)         where d move > 0; else 1: it shortens steps of more
    f = min(1, bound / |v|)                 without a snapshot, and then P is the identity
    grads = f u                             or 0, where d solved is not finite (NaN: AMP skips it)

V / b + (1 - C / b) mu is mu + (C / b) (V / C - mu): a mini-batch with fewer entries than others
corrects mu by its share. Without a snapshot mu is 0. The products are read some steps later, so
that nothing waits.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.ndarray import CachedOp, NDArray

from .. import _mxnet
from ..passes.columns import DeviceArrays, columns, copy_rows, split
from ..passes.combine import copy
from ..passes.network import ParameterBuffers
from .step_size import Sums

LAG = 4  # steps until their products are read
SLOTS = LAG + 2  # arrays of products and of d in turn: those that wait, the last, and the next


@lru_cache(maxsize=8)
def _compiled(
    shapes: tuple[tuple[int, ...], ...],
    rest: tuple[float, float] | None,
    has_decay: bool,
    has_snapshot: bool,
    is_short: bool,
    gathers: bool,
) -> tuple[CachedOp, list[str]]:
    """The operator, and the names of its inputs. Without a rest, P is the identity.

    It may gather the direction, the weights and f in one row, to be read at once. There f is 0 or
    NaN where the direction is left out.
    """
    F, given = mx.sym, mx.sym.Variable

    def one_row(letter: str) -> Any:
        rows = [F.reshape(given(f"{letter}{n}"), shape=(1, -1)) for n in range(len(shapes))]
        return F.concat(*rows, dim=1) if len(rows) > 1 else rows[0]

    def inverse(x: Any) -> Any:
        if rest is None:
            return x
        inside, (beta, sign) = F.dot(x, given("T"), transpose_b=True), rest
        return F.linalg_gemm(inside, given("T"), x, alpha=sign, beta=beta)

    weights = one_row("w") if has_decay or has_snapshot or gathers else None
    v = F.broadcast_mul(one_row("g"), given("per_entry"))
    if is_short:
        v = F.broadcast_add(v, F.broadcast_mul(given("mu"), given("rest")))
    if has_decay:
        v = F.broadcast_add(v, F.broadcast_mul(weights, given("wd")))
    if has_snapshot:
        move, d = F.broadcast_sub(weights, given("s")), F.broadcast_sub(v, given("slope"))
        solved = inverse(d)
        u = F.broadcast_add(solved, given("solved_slope"))
        right = F.concat(d, move, given("slope"), given("last_d"), dim=0)
        sums = F.dot(F.concat(solved, move, dim=0), right, transpose_b=True)
        squared, _, _, _, along, *_ = F.split(F.reshape(sums, shape=(1, -1)), num_outputs=8, axis=1)
        along = F.relu(along)
        factor = F.minimum(F.broadcast_div(F.broadcast_mul(along, given("bound")), squared), 1.0)
        factor, outputs = F.where(along, factor, given("one")), [sums, d]
    else:
        u = inverse(v)
        squared = F.dot(v, v, transpose_b=True)
        factor = F.minimum(F.broadcast_div(given("bound"), F.sqrt(squared)), 1.0)
        outputs = [squared]
    is_finite = squared < float(np.finfo("float32").max)
    full = F.broadcast_mul(u, factor)
    direction = F.where(F.reshape(is_finite, shape=(1,)), full, given("left_out"))
    if gathers:
        outputs.append(F.concat(direction, weights, F.broadcast_mul(factor, is_finite), dim=1))
    ends = np.cumsum([0, *map(prod, shapes)]).tolist()
    parts = [direction]
    if len(shapes) > 1:
        parts = [F.slice_axis(direction, axis=1, begin=a, end=b) for a, b in zip(ends, ends[1:])]
    graph = F.Group([*(F.reshape(x, shape=shape) for x, shape in zip(parts, shapes)), *outputs])
    flags = [("static_alloc", True), ("forward_bulk_size", 200)]
    return CachedOp(graph, flags), graph.list_inputs()


class Direction:
    """The direction of a network, with what stays from step to step."""

    def __init__(self, network: ParameterBuffers, decays: np.ndarray, gathers: bool) -> None:
        self._gathers = gathers
        self._grads, *self._others = network.grads
        self._weights = columns(network.weights)[0]
        self._device, self._dtype = self._grads.device, self._grads.dtypes[0]
        self.given: dict[str, NDArray] = {}
        self._rest: tuple[float, float] | None = None  # 1 / rest of P, and the sign of T'T
        self._shared: Any = None  # a row of NumPy, and its pieces as arrays in the same memory
        self._has_decay = bool(decays.any())
        self.upload(wd=decays, zero=0 * decays, nan=np.nan * decays, one=[1.0])

    def upload(self, rest: tuple[float, float] | None = None, **rows: Any) -> None:
        """Put inputs on the device, vectors or several as rows; copies of this object keep theirs.

        All d are zero after that.
        """
        new = {name: self._row(values) for name, values in rows.items()}
        self.given, self._rest = {**self.given, **new}, rest or self._rest
        self._calls: dict[Any, Any] = {}
        self.slot = 0
        self._d = [self._row(np.zeros(self.given["wd"].shape)) for _ in range(SLOTS)]

    def _row(self, values: Any) -> NDArray:
        rows = np.atleast_2d(np.asarray(values, self._dtype))
        return _mxnet.to_ndarray(rows, self._device)

    def d(self, steps_before: int) -> NDArray:
        """The d of an earlier step: 1 for the last one that was kept."""
        return self._d[(self.slot - steps_before) % SLOTS]

    def apply(
        self, entries: float | NDArray, most: float | NDArray, scale: float, bound: float
    ) -> tuple[NDArray, NDArray]:
        """Overwrite reduced gradients, of so many loss entries, with the direction.

        It returns the products, and what was gathered.

        The gradients are scaled. The entries, and the most of any mini-batch, are numbers, or
        arrays with one number first. The bound is L, or without a snapshot one of a norm.
        """
        vary, has_snapshot = isinstance(entries, NDArray), "s" in self.given
        is_short = has_snapshot and (vary or entries < most)
        key = None if vary else (entries, most), scale, bound, self.slot
        if key not in self._calls:
            if len(self._calls) > 64:
                self._calls.clear()
            most_bound = bound or float(np.finfo("float32").max)
            left_out = "zero" if scale == 1 else "nan"
            self._calls[key] = self._prepared(most_bound, is_short, self.given[left_out])
            if not vary:
                self._calls[key][1][:] = 1 / (most * scale)
                self._calls[key][2][:] = 1 - entries / most
        call, per_entry, rest, products, gathered, _ = self._calls[key]
        if isinstance(entries, NDArray) and isinstance(most, NDArray):
            per_entry[:] = (1 / (most * scale)).as_in_context(self._device)
            rest[:] = (1 - entries[:1] / most).as_in_context(self._device)
        call()
        copy_rows([self._grads] * len(self._others), self._others)
        return products, gathered

    def replace(self, direction: np.ndarray) -> None:
        """Overwrite the gradients on all devices with another direction. Does not wait for them."""
        if self._shared is None:  # once: the last copy has ended before a next direction is known
            flat = np.empty(len(direction), self._dtype)
            pieces = split(flat, [array.size for array in self._grads])
            rows = [mx.nd.from_numpy(x.reshape(g.shape)) for g, x in zip(self._grads, pieces)]
            self._shared = flat, DeviceArrays(rows)
        flat, rows = self._shared
        flat[:] = direction
        if rows.device == self._device:
            copy([rows], [self._grads])
        else:
            copy_rows([rows], [self._grads])
        copy_rows([self._grads] * len(self._others), self._others)

    def _prepared(self, bound: float, is_short: bool, left_out: NDArray) -> tuple[Any, ...]:
        """A call, with the arrays of its numbers and of its products, and all others."""
        grads, given, has_snapshot = self._grads, self.given, "s" in self.given
        shapes = tuple(array.shape for array in grads)
        kind = self._rest, self._has_decay, has_snapshot, is_short, self._gathers
        operator, names = _compiled(shapes, *kind)
        per_entry, rest, bound_row = (self._row([number]) for number in (0.0, 0.0, bound))
        arrays = {**given, "per_entry": per_entry, "rest": rest, "bound": bound_row}
        arrays["left_out"] = left_out
        products = self._row(np.zeros((2, 4) if has_snapshot else 1))
        gathered = self._row(np.zeros(2 * given["wd"].size + 1 if self._gathers else 0))
        outputs = [*grads, products]
        if has_snapshot:
            arrays["last_d"] = self.d(1)
            outputs.append(self._d[self.slot])
        if self._gathers:
            outputs.append(gathered)
        for letter, column in (("g", grads), ("w", self._weights)):
            arrays.update((f"{letter}{n}", array) for n, array in enumerate(column))
        inputs = [arrays[name].handle.value for name in names]
        handles = [array.handle.value for array in outputs]
        call = _mxnet.prepared(operator, self._device, inputs, handles)
        return call, per_entry, rest, products, gathered, (arrays, outputs)


def as_sums(products: np.ndarray, rise_of_penalty: float = 0.0) -> Sums:
    """The products of a step by their names."""
    if products.size == 1:
        return Sums(float(products.ravel()[0]))
    squared, _, _, cross, along, moved, slope, _ = products.ravel().tolist()
    return Sums(squared, cross, along, moved, slope + rise_of_penalty)
