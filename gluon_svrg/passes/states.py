"""Arrays of methods as plain data, for files.

A file has arrays by the number of their parameter. What is the same on all devices is there once.
"""

from __future__ import annotations

from typing import Any, Iterable, Iterator, Sequence

import numpy as np
from mxnet.gluon import Parameter

from .. import _mxnet, saving
from .columns import Columns, DeviceArrays
from .network import ParameterBuffers
from .points import ParameterValues
from .random_lock import Losses
from .rows import StoredGradient


def parameters(network: ParameterBuffers, *, trainable: bool = True) -> dict[int, Parameter]:
    """The parameters with gradients, or those without, by number."""
    numbered = enumerate(network.parameters)
    return {n: p for n, p in numbered if _mxnet.is_trainable(p) is trainable}


def by_number(network: ParameterBuffers, values: Iterable[Any]) -> saving.ByParameter:
    """Values of the trainable parameters, by number."""
    return saving.ByParameter(zip(parameters(network), values))


def in_order(network: ParameterBuffers, state: dict[int, Any]) -> list[Any]:
    """The values of a state in the order of the trainable parameters."""
    return [state[n] for n in parameters(network)]


def to_columns(network: ParameterBuffers, state: dict[int, Any]) -> Columns:
    """New columns with the arrays of a state, the same on all devices."""
    arrays, devices = in_order(network, state), network.devices
    return [DeviceArrays(_mxnet.to_ndarray(a, device) for a in arrays) for device in devices]


def point_state(network: ParameterBuffers, point: ParameterValues) -> dict[str, Any]:
    """The values of a point: weights; frozen values, of each device if operators change them."""
    frozen = zip(parameters(network, trainable=False).items(), point.frozen or ())
    values = ((n, list(row if _mxnet.is_auxiliary(p) else row[:1])) for (n, p), row in frozen)
    weights = by_number(network, [row[0] for row in point.weights])
    return {"weights": weights, "frozen": saving.ByParameter(values)}


def to_point(network: ParameterBuffers, weights: Any, frozen: Any = None) -> ParameterValues:
    """A new point with the weights and frozen values of a state: one for all devices, or each."""
    point = ParameterValues.copied(network, frozen=frozen is not None)
    kept = [([value], row) for value, row in zip(in_order(network, weights), point.weights)]
    rows = zip(parameters(network, trainable=False), point.frozen or ())
    kept += [(frozen[number], row) for number, row in rows if number in frozen]
    for values, row in kept:
        for array, value in zip(row, values * len(row)):
            new = _mxnet.to_ndarray(value, _mxnet.device_of(array))
            new.copyto(_mxnet.classic(array))
    return point


def table_state(network: ParameterBuffers, rows: Sequence[StoredGradient]) -> dict[str, Any]:
    """Rows as plain data: arrays over all mini-batches, for each parameter and device."""
    devices = range(len(network.devices))

    def together(n: int) -> list[np.ndarray]:
        return [np.stack([row.grads[d][n].asnumpy() for row in rows]) for d in devices]

    return {
        "rows": by_number(network, map(together, range(len(network.trainable)))),
        "counts": [list(row.counts) for row in rows],
        "seeds": [row.seed for row in rows],
        "losses": [row.losses and list(row.losses[1:]) for row in rows],
    }


def table_problems(network: ParameterBuffers, state: Any, hint: str = "") -> Iterator[str]:
    """Tell why `rows_of` cannot make rows of a state."""
    counts, devices = state["counts"], len(network.devices)
    if counts and len(counts[0]) != devices:
        stored = f"its stored gradients are for {len(counts[0])} devices"
        yield f"{stored}, and there are {devices} here{hint}"
        return
    wanted = parameters(network), True, len(counts)
    yield from saving.array_problems(state["rows"], "stored gradient", *wanted)


def rows_of(
    network: ParameterBuffers, state: dict[str, Any], indices: Sequence[int]
) -> list[StoredGradient]:
    """The rows of a state, of mini-batches with some indices."""
    arrays, rows = in_order(network, state["rows"]), []
    each = zip(indices, state["counts"], state["seeds"], state["losses"])
    for n, (index, stored_counts, seed, losses) in enumerate(each):
        counts = tuple(stored_counts)
        grads = [
            DeviceArrays(_mxnet.to_ndarray(values[d][n], device) for values in arrays)
            for d, device in enumerate(network.devices)
        ]
        of_row = losses and Losses(counts, *losses)
        rows.append(StoredGradient(index, grads, counts, seed, of_row))
    return rows
