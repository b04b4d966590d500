"""Checks of a method's state from a file.

Each function accepts any object, and yields a description of each problem.
"""

from __future__ import annotations

from typing import Any, Iterator, Sequence

import numpy as np
from mxnet.gluon import Parameter

from .. import _mxnet
from .._arguments import is_natural
from ..passes.arrays import SUMMED_IN


def by_parameter(
    state: Any, what: str, parameters: Sequence[Parameter], chosen: Sequence[int], *, summed: bool
) -> Iterator[str]:
    """Check for an array for each chosen parameter, of its shape and dtype.

    Parameters
    ----------
    state : object
        A dict of arrays by the number of the parameter.
    what : str
        The name of the arrays, for the message.
    parameters : sequence of Parameter
        The trainer's parameters.
    chosen : sequence of int
        The numbers of the parameters that must have an array.
    summed : bool
        Whether the arrays are sums of gradients, which are wider than float16.
    """
    if not isinstance(state, dict) or set(state) != set(chosen):
        yield f"its {what} belong to other parameters"
        return
    for number in chosen:
        yield from array(state[number], f"{what} of", parameters[number], summed=summed)


def array(
    value: Any, what: str, parameter: Parameter, *, summed: bool, rows: int | None = None
) -> Iterator[str]:
    """Check for an array like a parameter, or for several rows of such arrays."""
    if not isinstance(value, np.ndarray):
        yield f"its {what} {parameter.name} is no array"
        return
    dtype = str(np.dtype(parameter.dtype))
    expected = SUMMED_IN.get(dtype, dtype) if summed else dtype
    shape = tuple(parameter.shape or ()) if _mxnet.has_data(parameter) else value.shape
    if rows is not None and _mxnet.has_data(parameter):
        shape = (rows, *shape)
    if value.shape != shape or str(value.dtype) != expected:
        yield (
            f"its {what} {parameter.name} is {value.dtype} {value.shape}, expected {expected} "
            f"{shape}"
        )
    elif not np.isfinite(value).all():
        yield f"its {what} {parameter.name} is not finite"


def table(
    state: Any,
    parameters: Sequence[Parameter],
    chosen: Sequence[int],
    devices: int,
    hint: str,
) -> Iterator[str]:
    """Check stored gradients, by parameter and device, with counts and seeds by minibatch."""
    if state is None:
        return
    if not (
        isinstance(state, dict)
        and {"rows", "counts", "seeds"} <= set(state)
        and set(state) <= {"rows", "counts", "seeds", "is_centered", "is_confirmed", "outside"}
        and isinstance(state.get("is_centered", False), bool)
        and isinstance(state.get("is_confirmed", False), bool)
        and is_sketch(state.get("outside"))
        and isinstance(state["counts"], list)
        and isinstance(state["seeds"], list)
        and isinstance(state["rows"], dict)
        and len(state["counts"]) == len(state["seeds"]) > 0
    ):
        yield "its stored gradients have another form"
        return
    for counts in state["counts"]:
        if not (isinstance(counts, list) and all(is_natural(c, 2**53) for c in counts)):
            yield "its stored gradients have other numbers of loss entries"
            return
        if len(counts) != devices:
            yield (
                f"its stored gradients are for {len(counts)} devices, and there are {devices} here"
                f"{hint}"
            )
            return
    if not all(seed is None or is_natural(seed, 2**31 - 1) for seed in state["seeds"]):
        yield "its stored gradients have other seeds"
    if set(state["rows"]) != set(chosen):
        yield "its stored gradients belong to other parameters"
        return
    for number in chosen:
        values = state["rows"][number]
        if not isinstance(values, list) or len(values) != devices:
            yield f"its stored gradients of {parameters[number].name} belong to other devices"
            continue
        for value in values:
            rows = len(state["counts"])
            yield from array(
                value, "stored gradient of", parameters[number], summed=True, rows=rows
            )


def flags(state: Any, chosen: Sequence[int]) -> Iterator[str]:
    """Check for a bool for each chosen parameter: whether the loss depends on it."""
    if not (
        isinstance(state, dict)
        and set(state) == set(chosen)
        and all(isinstance(flag, bool) for flag in state.values())
    ):
        yield "it does not say on which parameters its loss depends"


def numbers_of(parameters: Sequence[Parameter], *, trainable: bool) -> list[int]:
    """The numbers of the parameters with gradients, or without."""
    return [n for n, p in enumerate(parameters) if _mxnet.is_trainable(p) is trainable]


def is_sketch(value: Any) -> bool:
    """Whether a value is None, or a sketch of weights."""
    return value is None or (
        isinstance(value, np.ndarray) and value.ndim == 1 and str(value.dtype) == "float64"
    )
