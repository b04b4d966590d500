"""The direction, and the products that tell of the curvature: on the device in one call.

::

    v = V / b + (1 - C / b) mu + wd w       C: entries of this mini-batch, b: the most of any
    d = v - slope,   move = w - s           slope: the full gradient and the decay at the snapshot s
    solved = P^-1 d = d / rest +- T'T d     T: the directions of P, scaled
    u = P^-1 v = solved + P^-1 slope
    f = min(1, L d move / d solved)         where d move > 0; else 1: it shortens steps of more
    f = min(1, bound / |v|)                 without a snapshot, and then P is the identity
    grads = f u, times the scale of AMP     or 0, where d solved is not finite (NaN: AMP skips it)

V / b + (1 - C / b) mu is mu + (C / b) (V / C - mu): a mini-batch with fewer entries than others
corrects mu by its share. Without a snapshot mu is 0. The products are read some steps later, so
that nothing waits, except in short epochs. With penalties NumPy computes the same on the host,
which needs it at once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.ndarray import CachedOp, NDArray

from .. import _mxnet
from ..passes.columns import columns, copy_rows, split, vector
from ..passes.network import ParameterBuffers
from .nystrom import TINY
from .step_size import Sums

LAG = 4  # steps until their products are read
SLOTS = LAG + 2  # arrays of products and of d in turn: those that wait, the last, and the next
MOST = float(np.finfo("float32").max)


@lru_cache(maxsize=8)
def _compiled(
    sizes: tuple[int, ...],
    rest: tuple[float, float] | None,
    has_decay: bool,
    has_snapshot: bool,
    is_short: bool,
) -> tuple[CachedOp, list[str]]:
    """The operator, and the names of its inputs. Without a rest, P is the identity.

    All arrays are rows, as `reshape` would take as long as a product. MXNet 2.0 takes three times
    as long for `broadcast_mul` as for `linalg_trmm`, and as the operators of equal shapes.
    """
    F, given, times = mx.sym, mx.sym.Variable, mx.sym.linalg_trmm

    def one_row(letter: str) -> Any:
        rows = [given(f"{letter}{n}") for n in range(len(sizes))]
        return F.concat(*rows, dim=1) if len(rows) > 1 else rows[0]

    def inverse(x: Any) -> Any:
        if rest is None:
            return x
        inside, (beta, sign) = F.dot(x, given("T"), transpose_b=True), rest
        return F.linalg_gemm(inside, given("T"), x, alpha=sign, beta=beta)

    weights = one_row("w") if has_decay or has_snapshot else None
    v = times(given("per_entry"), one_row("g"))
    if is_short:
        v = F.broadcast_add(v, times(given("rest"), given("mu")))
    if has_decay:
        v = F.broadcast_add(v, F.elemwise_mul(weights, given("wd")))
    if has_snapshot:
        move, d = F.elemwise_sub(weights, given("s")), F.elemwise_sub(v, given("slope"))
        solved = inverse(d)
        u = F.broadcast_add(solved, given("solved_slope"))
        right = F.concat(d, move, given("slope"), given("last_d"), dim=0)
        sums = F.dot(F.concat(solved, move, dim=0), right, transpose_b=True)
        squared = F.slice(sums, begin=(0, 0), end=(1, 1))
        along = F.relu(F.slice(sums, begin=(1, 0), end=(2, 1)))
        factor = F.minimum(
            F.elemwise_div(F.elemwise_mul(along, given("bound")), squared), given("scale")
        )
        factor, outputs = F.where(along, factor, given("scale")), [sums, d]
    else:
        u = inverse(v)
        squared = F.dot(v, v, transpose_b=True)
        factor = F.minimum(F.elemwise_div(given("bound"), F.sqrt(squared)), given("scale"))
        outputs = [squared]
    is_finite = F.reshape(squared < MOST, shape=(1,))
    direction = F.where(is_finite, times(factor, u), given("left_out"))
    ends = np.cumsum([0, *sizes]).tolist()
    parts = [direction]
    if len(sizes) > 1:
        parts = [F.slice_axis(direction, axis=1, begin=a, end=b) for a, b in zip(ends, ends[1:])]
    graph = F.Group([*parts, *outputs])
    # Static shapes keep the operators between: those of inputs and outputs take any arrays.
    flags = [("static_alloc", True), ("static_shape", True), ("forward_bulk_size", 200)]
    return CachedOp(graph, flags), graph.list_inputs()


class Direction:
    """The direction of a network, with what stays from step to step."""

    def __init__(self, network: ParameterBuffers, decays: np.ndarray) -> None:
        self._grads, *self._others = network.grads
        self._weights = columns(network.weights)[0]
        self._device, self._dtype = self._grads.device, self._grads.dtypes[0]
        self.given: dict[str, Any] = {}
        self._rest: tuple[float, float] | None = None  # 1 / rest of P, and the sign of T'T
        self._has_decay = bool(decays.any())
        self.upload(wd=decays, zero=0 * decays, nan=np.nan * decays)

    def upload(self, rest: tuple[float, float] | None = None, **rows: Any) -> None:
        """Keep inputs, vectors or several as rows; copies of this object keep theirs.

        All d are zero after that.
        """
        new = {name: self._row(values) for name, values in rows.items()}
        self.given, self._rest = {**self.given, **new}, rest or self._rest
        self._calls: dict[Any, Any] = {}
        self.slot = 0
        self._d = [self._row(np.zeros(self.given["wd"].shape)) for _ in range(SLOTS)]

    def _row(self, values: Any) -> Any:
        """A vector, or several, as rows on the device."""
        rows = np.atleast_2d(np.asarray(values, self._dtype))
        return _mxnet.to_ndarray(rows, self._device)

    def d(self, steps_before: int) -> Any:
        """The d of an earlier step: 1 for the last one that was kept."""
        return self._d[(self.slot - steps_before) % SLOTS]

    def apply(
        self,
        entries: float | NDArray,
        most: float | NDArray,
        scale: float,
        bound: float,
        is_skipped: bool = False,
    ) -> NDArray:
        """Overwrite reduced gradients, of so many loss entries, with the direction; the products.

        The gradients are scaled. The entries, and the most of any mini-batch, are numbers, or
        arrays with one number first. The bound is L, or without a snapshot one of a norm. AMP may
        skip a direction that is left out.
        """
        vary, has_snapshot = isinstance(entries, NDArray), "s" in self.given
        is_short = has_snapshot and (vary or entries < most)
        key = None if vary else (entries, most), scale, bound, is_skipped, self.slot
        if key not in self._calls:
            if len(self._calls) > 64:
                self._calls.clear()
            self._calls[key] = self._prepared(scale, bound or MOST, is_short, is_skipped)
            if not vary:
                self._calls[key][1][:] = 1 / (most * scale)
                self._calls[key][2][:] = 1 - entries / most
        call, per_entry, rest, products, _ = self._calls[key]
        if isinstance(entries, NDArray) and isinstance(most, NDArray):
            per_entry[:] = (1 / (most * scale)).as_in_context(self._device)
            rest[:] = (1 - entries[:1] / most).as_in_context(self._device)
        call()
        copy_rows([self._grads] * len(self._others), self._others)
        return products

    def _prepared(
        self, scale: float, bound: float, is_short: bool, is_skipped: bool
    ) -> tuple[Any, ...]:
        """A call, with the arrays of its numbers and of its products, and all others."""
        given, has_snapshot = self.given, "s" in self.given
        grads, weights = ([x.reshape((1, -1)) for x in c] for c in (self._grads, self._weights))
        kind = self._rest, self._has_decay, has_snapshot, is_short
        operator, names = _compiled(tuple(row.size for row in grads), *kind)
        per_entry, rest, scale_row = (self._row([number]) for number in (0.0, 0.0, scale))
        arrays = {**given, "per_entry": per_entry, "rest": rest, "scale": scale_row}
        arrays["bound"] = self._row([min(bound * scale, MOST)])
        arrays["left_out"] = given["nan" if is_skipped else "zero"]
        products = self._row(np.zeros((2, 4) if has_snapshot else 1))
        outputs = [*grads, products]
        if has_snapshot:
            arrays["last_d"] = self.d(1)
            outputs.append(self._d[self.slot])
        for letter, column in (("g", grads), ("w", weights)):
            arrays.update((f"{letter}{n}", array) for n, array in enumerate(column))
        inputs = [arrays[name].handle.value for name in names]
        handles = [array.handle.value for array in outputs]
        call = _mxnet.prepared(operator, self._device, inputs, handles)
        return call, per_entry, rest, products, (arrays, outputs)


class HostDirection(Direction):
    """The same in NumPy and float64, for penalties, which replace the direction."""

    _shared: Any = None  # a row of NumPy, and its pieces as arrays in the same memory

    def _row(self, values: Any) -> np.ndarray:
        return np.asarray(values, "float64")

    def compute(
        self, w: np.ndarray, inverse: Any, entries: float, most: float, scale: float, bound: float
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """The products, f u at the weights w, and f: both are 0 where the direction is left out.

        It waits for the reduced gradients, which stay. The inverse is a function, that of P. Other
        arguments are those of `apply`.
        """
        given = self.given
        v = vector(self._grads) / (most * scale) + given["wd"] * w
        if "s" in given:
            v += (1 - entries / most) * given["mu"]
            move, d = w - given["s"], v - given["slope"]
            solved, self._d[self.slot] = inverse(d), d
            u = solved + given["solved_slope"]
            right = np.stack([d, move, given["slope"], self.d(1)])
            products = np.stack([solved, move]) @ right.T
            squared, along = products[0, 0], products[1, 0]
            factor = min(along * (bound or MOST) / squared, 1.0) if along > 0 else 1.0
        else:
            u, squared = inverse(v), v @ v
            products = np.array(squared)
            factor = min((bound or MOST) / max(squared**0.5, TINY), 1.0)
        if squared < MOST:
            return products, u * factor, factor
        return products, given["zero"], 0.0

    def replace(self, direction: np.ndarray) -> None:
        """Overwrite the gradients on all devices with another direction. Does not wait for them."""
        if self._shared is None:  # once: the last copy has ended before a next direction is known
            flat = np.empty(len(direction), self._dtype)
            pieces = split(flat, [array.size for array in self._grads])
            rows = [mx.nd.from_numpy(x.reshape(g.shape)) for g, x in zip(self._grads, pieces)]
            self._shared = flat, rows
        flat, rows = self._shared
        flat[:] = direction
        copy_rows([rows, *[self._grads] * len(self._others)], [self._grads, *self._others])


def as_sums(products: np.ndarray, rise_of_penalty: float = 0.0) -> Sums:
    """The products of a step by their names."""
    if products.size == 1:
        return Sums(float(products.ravel()[0]))
    squared, _, _, cross, along, moved, slope, _ = products.ravel().tolist()
    return Sums(squared, cross, along, moved, slope + rise_of_penalty)
