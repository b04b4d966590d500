"""Sums of multiples of arrays, for all arrays of a network in one call.

A network has hundreds of parameters, most of them small. An operator for each would take longer
than its arithmetic: for 162 arrays of 16 by 16, a sum takes 1.2 ms by 162 calls and 0.4 ms by one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Dict, Tuple

import mxnet as mx
from mxnet.ndarray import CachedOp

#: What to assign to an array, by its number in a row: a sum of terms, each a factor and an array.
Step = Tuple[int, Tuple[Tuple[Any, int], ...]]

#: Dtypes of parameters, and the dtypes in which their gradients are summed.
SUMMED_IN = {"float16": "float32", "float32": "float32", "float64": "float64"}


def are_read(steps: tuple[Step, ...]) -> list[int]:
    """The numbers of the arrays that steps read before they assign to them."""
    assigned: set[int] = set()
    found: dict[int, None] = {}
    for target, terms in steps:
        found.update({number: None for _, number in terms if number not in assigned})
        assigned.add(target)
    return list(found)


def are_assigned(steps: tuple[Step, ...]) -> list[int]:
    """The numbers of the arrays to which steps assign, in the order of the last assignments.

    An array may be overwritten only when all steps before it have read it.
    """
    return list({target: None for target, _ in reversed(steps)})[::-1]


def results(F: Any, steps: tuple[Step, ...], row: dict[int, Any], dtypes: tuple[str, ...]) -> Any:
    """What the steps assign, in the order of `are_assigned`.

    Nothing is rounded to a narrow dtype but the results.

    Parameters
    ----------
    F : module
        `mx.nd` or `mx.sym`.
    steps : tuple
        The steps. Later ones see what earlier ones have assigned. Only the first term of a step may
        be the array that it assigns to.
    row : dict
        The arrays that are read, by their numbers.
    dtypes : tuple of str
        The dtypes of all arrays of the row.
    """
    values: Dict[int, Any] = {}
    for target, terms in steps:
        wide, total = SUMMED_IN[dtypes[target]], None
        for factor, number in terms:
            x = values[number] if number in values else _cast(F, row[number], dtypes[number], wide)
            # Not `elemwise_add`, which takes twice the time on 1.9.1, and which oneDNN computes
            # wrongly where the result replaces its second argument.
            if total is None:
                total = x if _is(factor, 1) else _times(F, factor, x)
            elif _is(factor, -1):
                total = F.broadcast_sub(total, x)
            else:
                total = F.broadcast_add(total, x if _is(factor, 1) else _times(F, factor, x))
        is_copy = len(terms) == 1 and _is(terms[0][0], 1)
        values[target] = F.identity(total) if is_copy else total
    return [
        _cast(F, values[n], SUMMED_IN[dtypes[n]], dtypes[n]) for n in are_assigned(steps)
    ]


def _is(factor: Any, number: int) -> bool:
    return isinstance(factor, float) and factor == number


def _cast(F: Any, x: Any, was: str, dtype: str) -> Any:
    return x if was == dtype else F.cast(x, dtype=dtype)


def _times(F: Any, factor: Any, x: Any) -> Any:
    """A multiple of x; the factor is a number, or an array of one number on the device."""
    if isinstance(factor, float):
        return x * factor
    # A product of matrices: 400,000 floats take 0.2 ms, by `broadcast_mul` up to 2.8 ms (2.0).
    here = factor.as_in_context(x.context).astype(x.dtype).reshape((1, 1))
    return F.dot(here, x.reshape((1, -1))).reshape(x.shape)


@lru_cache(maxsize=64)
def assigning(steps: tuple[Step, ...], dtypes: tuple[tuple[str, ...], ...]) -> CachedOp:
    """An operator that makes steps for many rows of dense arrays; all factors are numbers.

    It takes the arrays of `are_read`, and gives those of `are_assigned`, row by row.

    Parameters
    ----------
    steps : tuple
        See `results`.
    dtypes : tuple of tuple of str
        The dtypes of all rows, for each array of a row.
    """
    heads = []
    for n, row_dtypes in enumerate(zip(*dtypes)):
        row = {number: mx.sym.Variable(f"x{n}_{number}") for number in are_read(steps)}
        heads += results(mx.sym, steps, row, row_dtypes)
    graph = mx.sym.Group(heads)
    order = [f"x{n}_{number}" for n in range(len(dtypes[0])) for number in are_read(steps)]
    assert graph.list_inputs() == order
    return CachedOp(graph, [("forward_bulk_size", len(heads) * 8)])


@lru_cache(maxsize=8)
def scaling_to_norm(count: int) -> CachedOp:
    """An operator for many products at once: ``x * min(1, most / norm(x))`` for each x.

    It takes ``most``, of shape (1, 1), then each x, of shape (1, n). All of it is products of
    matrices, see `_times`. Results may replace the x.
    """
    most, heads = mx.sym.Variable("most"), []
    for n in range(count):
        x = mx.sym.Variable(f"x{n}")
        norm = mx.sym.sqrt(mx.sym.dot(x, x, transpose_b=True))
        share = mx.sym.broadcast_div(most, norm)
        product = mx.sym.dot(mx.sym.broadcast_minimum(share, mx.sym.ones_like(share)), x)
        heads.append(mx.sym.identity(product))  # `dot` may not write to x
    return CachedOp(mx.sym.Group(heads), [("forward_bulk_size", len(heads) * 8)])
