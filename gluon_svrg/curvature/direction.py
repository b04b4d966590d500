"""The direction, and the products that tell of the curvature: on the device in one call.

::

    v = V / b + (1 - C / b) mu + wd w       C: entries of this mini-batch, b: the most of any
    d = v - slope,   move = w - s           slope: the full gradient and the decay at the snapshot s
    solved = P^-1 d = beta d + T'T d        T: the directions of P, scaled; or - T'T if some lack
    u = P^-1 v = solved + P^-1 slope
    f = L / max(d solved / d move, L)       where d move > 0; else 1: it shortens steps of more
    f = L / max(|v|, L)                     without a snapshot, and then L is the largest norm
    grads = f u, times the scale of AMP     or 0 (NaN: AMP skips it), where d solved, or |v|^2, is
                                            not below the largest number of float32

V / b + (1 - C / b) mu is mu + (C / b) (V / C - mu): a mini-batch with fewer entries than others
corrects mu by its share. Without a snapshot mu is 0. The products are read some steps later, so
that nothing waits, except in short epochs. With penalties NumPy computes the same on the host,
which needs it at once.
"""

from __future__ import annotations

from typing import Any, Callable

import mxnet as mx
import numpy as np
from mxnet.ndarray import CachedOp, NDArray

from .. import _mxnet
from ..passes.columns import SMALL, columns, copy_rows, split, vector_reader
from ..passes.network import ParameterBuffers
from .nystrom import TINY
from .step_size import MOST, Sums

LAG = 4  # steps until their products are read
SLOTS = LAG + 2  # rows of d and products in turn: those that wait, the last, and the next
PRODUCTS = len(Sums._fields)
SMALLEST = float(np.finfo("float32").tiny)
_from_json = getattr(mx.sym, "load_json", None) or mx.sym.fromjson  # 1.9.1, 2.0


def _compiled(
    sizes: tuple[int, ...],
    dtype: str,
    beta: float | None,
    rank: int,
    has_decay: bool,
    has_snapshot: bool,
    is_short: bool,
) -> tuple[CachedOp, list[str]]:
    """The operator, and the names of its inputs. Without a beta, P is the identity.

    Operators are chosen by their time: `FullyConnected` multiplies one row up to five times as fast
    as `dot`, and MXNet 2.0 takes four times as long for `broadcast_add` as for `plus`; as to
    `elemwise_add`, see `combine`.
    """
    F, given, times, size = mx.sym, mx.sym.Variable, mx.sym.linalg_trmm, sum(sizes)

    def one_row(letter: str) -> Any:
        rows = [given(f"{letter}{n}") for n in range(len(sizes))]
        if size > SMALL:  # oneDNN joins copies in a quarter of the time of rows that are views
            rows = [F.identity(row) for row in rows]
        return F.concat(*rows, dim=1) if len(rows) > 1 else rows[0]

    def plus(x: Any, y: Any) -> Any:
        return F.elemwise_sub(x, F.negative(y))

    def inverse(x: Any) -> Any:
        if beta is None:
            return x
        inside = F.FullyConnected(x, given("T"), no_bias=True, num_hidden=rank)
        return plus(
            x * beta, F.FullyConnected(inside, given("back"), no_bias=True, num_hidden=size)
        )

    def flat(x: Any) -> Any:
        return F.squeeze(x, axis=0)

    weights = one_row("w") if has_decay or has_snapshot else None
    v = times(given("per_entry"), one_row("g"))
    if is_short:
        v = plus(v, times(given("rest"), given("mu")))
    if has_decay:
        v = plus(v, F.elemwise_mul(weights, given("wd")))
    if has_snapshot:
        move, d = F.elemwise_sub(weights, given("s")), F.elemwise_sub(v, given("slope"))
        solved = inverse(d)
        u = plus(solved, given("solved_slope"))
        in_P, d, move, slope = map(flat, (solved, d, move, given("slope")))
        squared, along = F.dot(in_P, d), F.dot(move, d)
        secant = F.elemwise_div(squared, along - SMALLEST)  # negative where d move is 0 as well
        kept = [d, squared, along, F.dot(move, move), F.dot(move, slope)]
        kept.append(F.dot(in_P, given("last_d")))
    else:
        u = inverse(v)
        squared = F.dot(flat(v), flat(v))
        secant = F.sqrt(squared)
        kept = [squared]
    factor = F.elemwise_div(given("bound"), F.maximum(secant, given("bound")))
    factor = F.reshape_like(F.elemwise_mul(factor, given("scale")), given("per_entry"))
    direction = F.where(squared < MOST, times(factor, u), given("left_out"))
    parts, ends = [direction], np.cumsum([0, *sizes]).tolist()
    if len(sizes) > 1:
        parts = [F.slice_axis(direction, axis=1, begin=a, end=b) for a, b in zip(ends, ends[1:])]
    # AMP casts the inputs of products to 16 bits; MXNet's JSON leaves these casts out
    heads = list(_from_json(F.Group([*parts, *kept]).tojson()))
    last = [heads.pop()] if has_snapshot else []
    # What reads the d of the step before, whose array changes, is the last operator.
    return _operator(_copies(heads, dtype) + last, "last_d" if has_snapshot else "")


def _copies(these: list[Any], dtype: str) -> list[Any]:
    """Copies of symbols, as outputs of an operator."""
    if dtype == "float32":  # one operator for all; it fails in float64
        return list(mx.sym.amp_multicast(*these, num_outputs=len(these)))
    return list(map(mx.sym.identity, these))


def _operator(heads: list[Any], changing: str = "") -> tuple[CachedOp, list[str]]:
    """An operator for arrays that stay from call to call, all or all but the last.

    The engine queues it as two entries: the arithmetic, and then the operators that write outputs,
    or read the array that changes.
    """
    graph = mx.sym.Group(heads)
    names = graph.list_inputs()
    stay = len(names) - bool(changing)
    assert changing not in names[:stay]
    flags = [
        ("static_alloc", True),
        ("static_shape", True),
        ("forward_bulk_size", 200),
        ("data_indices", [*range(stay, len(names))]),
        ("param_indices", [*range(stay)]),
    ]
    return CachedOp(graph, flags), names


class Direction:
    """The direction of a network, with what stays from step to step."""

    slot: int  # of the ring, for the next step
    _ring: list[tuple[Any, Any]]  # d and products
    _read: list[Callable[[], np.ndarray]]  # the products

    def __init__(self, network: ParameterBuffers, decays: np.ndarray) -> None:
        self._grads, *self._others = network.grads
        self._weights = columns(network.weights)[0]
        self._device, self._dtype = self._grads.device, self._grads.dtypes[0]
        self.given: dict[str, Any] = {}
        self._beta: float | None = None  # 1 / rest of P
        self._has_decay = bool(decays.any())
        self._operators: dict[Any, Any] = {}
        self._calls: dict[Any, Any] = {}
        self._numbers = {name: self._zeros(1) for name in ("bound", "scale", "per_entry", "rest")}
        self._values: dict[str, float] = {}  # of the numbers
        self.upload(wd=decays, zero=0 * decays, nan=np.nan * decays)

    def upload(self, beta: float | None = None, **rows: Any) -> None:
        """Keep inputs, vectors or several as rows; copies of this object keep theirs.

        All d are zero after that.
        """
        given = {**self.given, **{name: self._row(values) for name, values in rows.items()}}
        size = given["wd"].size
        ring = [(self._zeros(size), self._zeros(PRODUCTS)) for _ in range(SLOTS)]
        read = [self._reader(products) for _, products in ring]
        operators = self._operators if beta is None else {}
        beta = self._beta if beta is None else beta
        # In one line, as an interrupt comes between lines
        vars(self).update(
            given=given, _ring=ring, _read=read, _operators=operators, _beta=beta, _calls={}, slot=0
        )

    def _zeros(self, size: int) -> Any:
        return mx.nd.zeros(size, ctx=self._device, dtype=self._dtype)

    def _row(self, values: Any) -> Any:
        """A vector, or several, as rows on the device."""
        return _mxnet.to_ndarray(np.atleast_2d(np.asarray(values, self._dtype)), self._device)

    def _reader(self, products: Any) -> Callable[[], np.ndarray]:
        return _mxnet.reader(products, np.empty(PRODUCTS, self._dtype))

    def d(self, steps_before: int) -> Any:
        """The d of an earlier step: 1 for the last one that was kept."""
        return self._ring[(self.slot - steps_before) % SLOTS][0]

    def products(self, steps_before: int) -> Any:
        """The products of an earlier step, as `Sums` has them."""
        return self._ring[(self.slot - steps_before) % SLOTS][1]

    def sums(self, steps_before: int) -> Sums:
        """The products of an earlier step by their names. Waits for them."""
        return Sums(*self._read[(self.slot - steps_before) % SLOTS]().tolist())

    def apply(
        self,
        entries: float | NDArray,
        most: float | NDArray,
        scale: float,
        bound: float,
        is_skipped: bool = False,
    ) -> None:
        """Overwrite reduced gradients, of so many loss entries, with the direction.

        Its d and its products go to the present slot. The gradients are scaled. The entries, and
        the most of any mini-batch, are numbers, or arrays with one number first. The bound is L, or
        without a snapshot one of a norm. AMP may skip a direction that is left out.
        """
        is_short = "s" in self.given and (isinstance(entries, NDArray) or entries < most)
        key = is_short, is_skipped, self.slot
        if key not in self._calls:
            self._calls[key] = self._prepared(*key)
        first = entries[:1] if isinstance(entries, NDArray) else entries
        self._assign("per_entry", 1 / (most * scale))
        self._assign("rest", 1 - first / most)
        self._assign("scale", scale)
        self._assign("bound", min(max(bound or MOST, SMALLEST), MOST))
        self._calls[key][0]()
        copy_rows([self._grads] * len(self._others), self._others)

    def _assign(self, name: str, value: float | NDArray) -> None:
        """Assign to an array of one number, unless it has that value."""
        if isinstance(value, NDArray):
            self._values.pop(name, None)
            self._numbers[name][:] = value.as_in_context(self._device)
        elif self._values.get(name) != value:
            self._values.pop(name, None)  # an interrupt may come before the next line
            self._numbers[name][:] = value
            self._values[name] = value

    def _prepared(self, is_short: bool, is_skipped: bool, slot: int) -> Any:
        """A call for the arrays as they are."""
        given, has_snapshot = self.given, "s" in self.given
        grads, weights = ([x.reshape((1, -1)) for x in c] for c in (self._grads, self._weights))
        rank = len(given["T"]) if "T" in given else 0
        kind = has_snapshot, is_short
        if kind not in self._operators:
            sizes = tuple(row.size for row in grads)
            about = sizes, self._dtype, self._beta, rank, self._has_decay
            self._operators[kind] = _compiled(*about, *kind)
        operator, names = self._operators[kind]
        arrays = {**given, **self._numbers, "last_d": self.d(1)}
        arrays.update((name, arrays[name].reshape((1, 1))) for name in ("per_entry", "rest"))
        arrays["left_out"] = given["nan" if is_skipped else "zero"]
        for letter, column in (("g", grads), ("w", weights)):
            arrays.update((f"{letter}{n}", array) for n, array in enumerate(column))
        d, products = self._ring[slot]
        each = [products[n : n + 1] for n in range(PRODUCTS)]
        outputs = [d, *each] if has_snapshot else each[:1]
        used = [*map(arrays.get, names), *grads, *outputs]
        handles = [array.handle.value for array in used]
        count = len(names)
        call = _mxnet.prepared(operator, self._device, handles[:count], handles[count:])
        return call, used


class HostDirection(Direction):
    """The same in NumPy and float64, for penalties, which replace the direction."""

    _shared: Any = None  # a row of NumPy, its pieces as arrays, and what copies these

    def __init__(self, network: ParameterBuffers, decays: np.ndarray) -> None:
        super().__init__(network, decays)
        self.weights, self._gradient = map(vector_reader, (self._weights, self._grads))

    def _zeros(self, size: int) -> np.ndarray:
        return np.zeros(size)

    def _row(self, values: Any) -> np.ndarray:
        return np.asarray(values, "float64")

    def _reader(self, products: np.ndarray) -> Callable[[], np.ndarray]:
        return lambda: products

    def compute(
        self,
        w: np.ndarray,
        inverse: Any,
        entries: float,
        most: float,
        scale: float,
        bound: float,
        is_skipped: bool = False,
    ) -> tuple[np.ndarray, float]:
        """Compute f u at the weights w, and f, which is 0 where the direction is left out.

        Its d and its products go to the present slot. It waits for the reduced gradients, which
        stay. The inverse is a function that multiplies by P^-1. Other arguments are those of
        `apply`.
        """
        given, (kept, products) = self.given, self._ring[self.slot]
        left_out = given["nan" if is_skipped else "zero"], 0.0
        gradient = self._gradient()
        if not np.isfinite(gradient).all():
            products[:] = np.nan
            return left_out
        v = gradient / (most * scale)
        if self._has_decay:
            v += given["wd"] * w
        if "s" in given:
            if entries < most:
                v += (1 - entries / most) * given["mu"]
            move, d = w - given["s"], v - given["slope"]
            solved = inverse(d)
            u = solved + given["solved_slope"]
            squared, along = solved @ d, move @ d
            kept[:] = d
            products[:] = squared, along, move @ move, move @ given["slope"], solved @ self.d(1)
            factor = min(along * (bound or MOST) / squared, 1.0) if along > 0 else 1.0
        else:
            u, squared = inverse(v), v @ v
            products[:] = squared, 0.0, 0.0, 0.0, 0.0
            factor = min((bound or MOST) / max(float(squared) ** 0.5, TINY), 1.0)
        return (u * factor, factor) if squared < MOST else left_out

    def replace(self, direction: np.ndarray) -> None:
        """Overwrite the gradients on all devices with another direction. Does not wait for them."""
        if self._shared is None:  # once: the last copy has ended before a next direction is known
            flat = np.empty(len(direction), self._dtype)
            pieces = split(flat, [array.size for array in self._grads])
            rows = [mx.nd.from_numpy(x.reshape(g.shape)) for g, x in zip(self._grads, pieces)]
            names = [mx.sym.Variable(str(n)) for n in range(len(rows))]
            operator, _ = _operator(_copies(names, self._dtype))
            handles = [row.handle.value for row in rows], self._grads.handles
            self._shared = flat, rows, _mxnet.prepared(operator, self._device, *handles)
        flat, _, copy = self._shared
        flat[:] = direction
        copy()
        copy_rows([self._grads] * len(self._others), self._others)
