"""Arrays of methods as plain data, for files.

A file has arrays by the number of their parameter. What is the same on all devices is there once.
"""

from __future__ import annotations

from typing import Any, Iterator, Sequence

import numpy as np
from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from .. import _mxnet, saving
from .._arguments import is_natural
from .arrays import SUMMED_IN, Column, Columns
from .network import Network
from .random_lock import Losses
from .table import Row


def numbers(network: Network, *, trainable: bool = True) -> list[int]:
    """The numbers of the parameters with gradients, or of those without."""
    parameters = enumerate(network.parameters)
    return [n for n, p in parameters if _mxnet.is_trainable(p) is trainable]


def by_number(network: Network, values: Sequence[Any]) -> saving.ByParameter:
    """Values of the trainable parameters, by number."""
    return saving.ByParameter(zip(numbers(network), values))


def to_columns(network: Network, state: dict[int, Any]) -> Columns:
    """New columns with the arrays of a state, the same on all devices."""
    arrays = [np.asarray(state[n]) for n in numbers(network)]
    return [Column(_mxnet.to_ndarray(a, device) for a in arrays) for device in network.devices]


def put(values: Sequence[Any], arrays: Sequence[NDArray]) -> None:
    """Assign values to the arrays of a parameter: the first value where there are too few."""
    for n, array in enumerate(arrays):
        value = np.asarray(values[min(n, len(values) - 1)])
        _mxnet.to_ndarray(value, _mxnet.device_of(array)).copyto(_mxnet.classic(array))


# --- checks ------------------------------------------------------------------------------------


def array_problems(
    network: Network, state: Any, what: str, *, summed: bool = False, rows: int | None = None
) -> Iterator[str]:
    """Check a state for an array of each trainable parameter, by its number.

    Sums of gradients are wider than float16. With a number of rows, there is a list of arrays, one
    for each device, each of so many rows.
    """
    if not isinstance(state, dict) or set(state) != set(numbers(network)):
        yield f"its {what} belongs to other parameters"
        return
    for number in state:
        parameter, values = network.parameters[number], state[number]
        if rows is None:
            values = [values]
        elif not isinstance(values, list) or len(values) != len(network.devices):
            yield f"its {what} of {parameter.name} belongs to other devices"
            continue
        for value in values:
            yield from array_problem(value, f"{what} of", parameter, summed=summed, rows=rows)


def array_problem(
    value: Any, what: str, parameter: Parameter, *, summed: bool = False, rows: int | None = None
) -> Iterator[str]:
    """Check for an array like a parameter, or of rows like it."""
    dtype = str(np.dtype(parameter.dtype))
    dtype = SUMMED_IN.get(dtype, dtype) if summed else dtype
    name = f"its {what} {parameter.name}"
    if not isinstance(value, np.ndarray):
        yield f"{name} is no array"
        return
    shape = value.shape
    if _mxnet.has_data(parameter):
        shape = (*([] if rows is None else [rows]), *parameter.shape)
    if value.shape != shape or str(value.dtype) != dtype:
        yield f"{name} is {value.dtype} {value.shape}, expected {dtype} {shape}"
    elif not np.isfinite(value).all():
        yield f"{name} is not finite"


# --- tables ------------------------------------------------------------------------------------


def table_state(network: Network, rows: Sequence[Row]) -> dict[str, Any]:
    """Rows as plain data: arrays over all minibatches, for each parameter and device."""
    together = [
        [
            np.stack([row.grads[device][n].asnumpy() for row in rows])
            for device in range(len(network.devices))
        ]
        for n in range(len(network.trainable))
    ]
    return {
        "rows": by_number(network, together),
        "counts": [list(row.counts) for row in rows],
        "seeds": [row.seed for row in rows],
        "losses": [None if row.losses is None else list(row.losses) for row in rows],
    }


def table_problems(network: Network, state: Any, hint: str = "") -> Iterator[str]:
    """Tell why `rows_of` cannot make rows of a state."""
    has_form = isinstance(state, dict) and {"rows", "counts", "seeds"} <= set(state)
    if not has_form or not all(isinstance(state[k], list) for k in ("counts", "seeds")):
        yield "its stored gradients have another form"
        return
    counts, devices = state["counts"], len(network.devices)
    if not all(isinstance(c, list) and all(is_natural(n, 2**53) for n in c) for c in counts):
        yield "its stored gradients have other numbers of loss entries"
    elif any(len(c) != devices for c in counts):
        yield (
            f"its stored gradients are for {len(counts[0])} devices, and there are {devices} here"
            f"{hint}"
        )
    else:
        what, rows = "stored gradient", len(counts)
        yield from array_problems(network, state["rows"], what, summed=True, rows=rows)


def rows_of(network: Network, state: dict[str, Any], indices: Sequence[int]) -> list[Row]:
    """The rows of a state, of minibatches with some indices. Version 0.3.0 stored no losses."""
    arrays = [[np.asarray(a) for a in state["rows"][n]] for n in numbers(network)]
    losses = state.get("losses") or [None] * len(state["counts"])
    return [
        Row(
            index,
            [
                Column(_mxnet.to_ndarray(values[d][n], device) for values in arrays)
                for d, device in enumerate(network.devices)
            ],
            tuple(state["counts"][n]),
            state["seeds"][n],
            None if losses[n] is None else Losses(*losses[n]),
        )
        for n, index in enumerate(indices)
    ]
