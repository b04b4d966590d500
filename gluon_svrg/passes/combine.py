"""Sums of multiples of arrays, for all arrays of a network in one call.

A network has hundreds of parameters, most of them small. An operator for each would take longer
than its arithmetic: for 162 arrays of 16 by 16, a sum takes 1.2 ms by 162 calls and 0.4 ms by one.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, Callable, Iterable, Sequence, Tuple

import mxnet as mx
from mxnet.ndarray import CachedOp, NDArray

from .. import _mxnet
from .columns import SMALL, SUMMED_IN, Columns, DeviceArrays, dense, store

#: What to assign to an array, by its number in a row: a sum of terms, each a factor and an array.
Step = Tuple[int, Tuple[Tuple[Any, int], ...]]


def are_read(steps: tuple[Step, ...]) -> list[int]:
    """The numbers of the arrays that steps read before they assign to them."""
    assigned: set[int] = set()
    read: dict[int, None] = {}
    for target, terms in steps:
        read.update({number: None for _, number in terms if number not in assigned})
        assigned.add(target)
    return list(read)


def are_assigned(steps: tuple[Step, ...]) -> list[int]:
    """The numbers of the arrays to which steps assign, in the order of the last assignments."""
    return list({target: None for target, _ in reversed(steps)})[::-1]


def results(F: Any, steps: tuple[Step, ...], row: dict[int, Any], dtypes: tuple[str, ...]) -> Any:
    """What the steps assign, as `are_assigned`; F is `mx.nd` or `mx.sym`. Results are rounded."""
    values: dict[int, Any] = {}
    for target, terms in steps:
        wide, total = SUMMED_IN[dtypes[target]], None
        for factor, number in terms:
            x = values[number] if number in values else _cast(F, row[number], dtypes[number], wide)
            # Not `elemwise_add`, which takes twice the time on 1.9.1, and which oneDNN computes
            # wrongly where the result replaces its second argument.
            if total is None:
                total = x if is_one_of(factor, 1) else _times(F, factor, x)
            elif is_one_of(factor, -1):
                total = F.broadcast_sub(total, x)
            else:
                total = F.broadcast_add(total, x if is_one_of(factor, 1) else _times(F, factor, x))
        is_copy = len(terms) == 1 and is_one_of(terms[0][0], 1)
        values[target] = F.identity(total) if is_copy else total
    return [_cast(F, values[n], SUMMED_IN[dtypes[n]], dtypes[n]) for n in are_assigned(steps)]


def check_order(steps: tuple[Step, ...]) -> None:
    """Assert that MXNet may compute the steps: it merges equal subexpressions, and reorders.

    A column is assigned again only where each step after its first value, the last one included,
    uses that value; and no step begins with all terms of another one, unless that is a copy.
    """
    for n, (target, _) in enumerate(steps):
        again = next((k for k in range(n + 1, len(steps)) if steps[k][0] == target), n)
        for _, terms in steps[n + 1 : again + 1]:
            assert target in {number for _, number in terms}, steps
    known = [[(id(f) if isinstance(f, NDArray) else f, x) for f, x in terms] for _, terms in steps]
    for n, its in enumerate(known):
        is_copy = len(its) == 1 and is_one_of(its[0][0], 1)
        others = known[:n] + known[n + 1 :]
        assert is_copy or all(other[: len(its)] != its for other in others), steps


def is_one_of(factor: Any, *numbers: int) -> bool:
    """Whether a factor is a float, and one of these, which need no product: 1 or -1."""
    return isinstance(factor, float) and factor in numbers


def _cast(F: Any, x: Any, was: str, dtype: str) -> Any:
    return x if was == dtype else F.cast(x, dtype=dtype)


def _times(F: Any, factor: Any, x: Any) -> Any:
    """A multiple of x; the factor is a float, or an array of one number."""
    if isinstance(factor, float):
        return x * factor
    if F is mx.nd:
        factor = factor.as_in_context(x.context).astype(x.dtype).reshape((1, 1))
    # A product of matrices: 400,000 floats take 0.4 ms, by `broadcast_mul` up to 7 ms (2.0).
    return F.reshape_like(F.linalg_trmm(factor, F.reshape(x, shape=(1, -1))), x)


def products(steps: tuple[Step, ...]) -> list[Any]:
    """The factors that are not 1 or -1."""
    return [f for _, terms in steps for f, _ in terms if not is_one_of(f, 1, -1)]


def replaced(steps: tuple[Step, ...], factors: Iterable[Any]) -> tuple[Step, ...]:
    """Steps with others in the place of these factors."""
    left = iter(factors)

    def other(factor: Any) -> Any:
        return factor if is_one_of(factor, 1, -1) else next(left)

    return tuple((to, tuple((other(f), number) for f, number in terms)) for to, terms in steps)


class Compiled:
    """Compiled steps for columns of some kinds; factors are a part of it, or are passed to it."""

    def __init__(
        self, steps: tuple[Step, ...], columns: Sequence[DeviceArrays], *, varies: bool
    ) -> None:
        check_order(steps)
        read, heads, count = are_read(steps), [], len(products(steps)) if varies else 0
        given = [mx.sym.Variable(f"f{n}") for n in range(count)]
        cast = {wide: [mx.sym.cast(f, dtype=wide) for f in given] for wide in SUMMED_IN.values()}
        for dtypes in zip(*(column.dtypes for column in columns)):
            row = {number: mx.sym.Variable(str(number)) for number in read}
            its_steps = replaced(steps, cast[SUMMED_IN[dtypes[0]]]) if varies else steps
            heads += results(mx.sym, its_steps, row, dtypes)
        graph = mx.sym.Group(heads)
        names = graph.list_inputs()
        self._given = [(place, int(name[1:])) for place, name in enumerate(names) if name[0] == "f"]
        order = [int(name) for name in names if name[0] != "f"]  # as MXNet comes to them
        self._read = order[: len(read)]
        assert order == self._read * len(columns[0])
        self._touched = self._read + are_assigned(steps)
        # Memory of its own for intermediate results makes a call quicker, by a fifth. Each factor
        # has its operator, and each operator keeps its memory: so only where that is nothing.
        is_small = sum(array.size for array in columns[0]) <= SMALL
        flags = [("forward_bulk_size", len(heads) * 8), ("static_alloc", is_small)]
        self._operator = CachedOp(graph, flags)
        self._calls: dict[tuple[int, ...], Callable[[], None]] = {}  # by the columns

    def __call__(self, columns: Sequence[DeviceArrays], steps: tuple[Step, ...]) -> None:
        """Assign, in columns of these kinds; of the steps it takes the factors that vary."""
        key = tuple(map(_number_of, columns))
        call = self._calls.get(key)
        if call is None:
            device, handles = columns[0].device, [columns[n].handles for n in self._touched]
            factors = [_on_device(f, device) for f in products(steps)] if self._given else []
            inputs = list(chain(*zip(*handles[: len(self._read)])))
            outputs = list(chain(*zip(*handles[len(self._read) :])))
            for place, number in self._given:
                inputs.insert(place, factors[number].handle.value)
            call = _mxnet.prepared(self._operator, device, inputs, outputs)
            if len(self._calls) > _MOST:
                self._calls.clear()
            if not self._given:
                self._calls[key] = call
        call()


def _on_device(factor: Any, device: Any) -> NDArray:
    if isinstance(factor, NDArray):
        return factor.as_in_context(device).astype("float64").reshape((1, 1))
    if device not in _ones:
        _ones[device] = mx.nd.ones((1, 1), ctx=device, dtype="float64")
    return _ones[device] * factor  # `mx.nd.full` takes five times as long


_ones: dict[Any, NDArray] = {}  # by device
_MOST, _SEVERAL = 256, 8
#: By steps and columns: what is compiled, by the factors.
_known: dict[Any, dict[Any, Compiled]] = {}
_quick: dict[Any, Compiled] = {}  # by both, which takes a step less time to look up
_kind_of, _number_of = attrgetter("kind"), attrgetter("number")


def assign(columns: Sequence[DeviceArrays], *steps: Step) -> None:
    """Assign sums of multiples of columns, all of equal shapes and on one device, to columns.

    A factor is a float, or an array of one number, for which nobody waits. Later steps see what
    earlier ones have assigned. Only the first term of a step may be the column itself.

    What must not be assigned together is checked where steps are compiled, see `check_order`.

    Factors come again and again, and are a part of what is compiled; where several have come, all
    others are passed to it. Large arrays are added in a third of the time where at most the first
    factor of each step differs from 1 and -1.
    """
    (_compiled(columns, steps) or _one_by_one)(columns, steps)


def _one_by_one(columns: Sequence[DeviceArrays], steps: tuple[Step, ...]) -> None:
    """Assign array by array, sparse ones too."""
    for n in range(len(columns[0])):
        values = {number: dense(columns[number][n]) for number in are_read(steps)}
        dtypes = tuple(column.dtypes[n] for column in columns)
        assigned = results(mx.nd, steps, values, dtypes)
        for number, value in zip(are_assigned(steps), assigned):
            store(value, columns[number][n])


def _compiled(columns: Sequence[DeviceArrays], steps: tuple[Step, ...]) -> Compiled | None:
    """The compiled steps for such columns, unless some are sparse."""
    key = steps, *map(_kind_of, columns)
    if key in _quick:
        return _quick[key]
    if not columns[0] or not all(column.is_dense for column in columns):
        return None
    kind = replaced(steps, repeat(None)), key[1:]
    if len(_known) > _MOST:
        _known.clear()
        _quick.clear()
    by_factors = _known.setdefault(kind, {})
    factors: Any = tuple(products(steps))
    varies = any(isinstance(factor, NDArray) for factor in factors)
    if varies or (factors not in by_factors and len(by_factors) > _SEVERAL):
        varies, factors = True, None
    if factors not in by_factors:
        by_factors[factors] = Compiled(steps, columns, varies=varies)
    if not varies:
        _quick[key] = by_factors[factors]
    return by_factors[factors]


def copy(these: Columns, targets: Columns, factor: Any = 1.0) -> None:
    """Copy a multiple of columns to others of equal shapes."""
    for column, target in zip(these, targets):
        assign([target, column], (0, ((factor, 1),)))


@lru_cache(maxsize=8)
def _scaling_to_norm(dtypes: tuple[str, ...]) -> CachedOp:
    """An operator: ``x * min(1, most / norm(x))`` for each x, which results may replace."""
    most, heads = mx.sym.Variable("most"), []
    for n, dtype in enumerate(dtypes):
        x, wide = mx.sym.Variable(f"x{n}"), SUMMED_IN[dtype]
        row = _cast(mx.sym, x, dtype, wide)
        norm = mx.sym.sqrt(mx.sym.dot(row, row, transpose_b=True))
        factor = mx.sym.minimum(mx.sym.broadcast_div(mx.sym.cast(most, dtype=wide), norm), 1.0)
        product = _cast(mx.sym, mx.sym.dot(factor, row), wide, dtype)
        heads.append(mx.sym.identity(product))  # `dot` would write to x
    return CachedOp(mx.sym.Group(heads), [("forward_bulk_size", len(heads) * 12)])


def scale_to_norm(arrays: DeviceArrays, most: float, entries: float | NDArray) -> None:
    """Scale each array down whose norm exceeds ``most * entries``. Does not wait for the device."""
    if not arrays:
        return
    limit = _on_device(entries * most, arrays.device)
    rows = [dense(array).reshape((1, -1)) for array in arrays]
    _scaling_to_norm(arrays.dtypes)(limit, *rows, out=rows)
    for row, array in zip(rows, arrays):
        if array.stype != "default":
            store(row.reshape(array.shape), array)
