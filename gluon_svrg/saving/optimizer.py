"""The optimizer as two parts of a file: its settings, and its states per parameter.

Both refer to parameters by position. The counts of updates are apart from other settings, because
MXNet keeps them per device: Adam on a device without them would drift apart.
"""

from __future__ import annotations

import warnings
from typing import Any, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter

from .. import _mxnet
from .._mxnet import optimizers
from .objects import assign_object, object_problems, restored
from .values import ByParameter, SavedObject, by_attributes


class OptimizerSettings:
    """The attributes of an optimizer and its scheduler, with the counts of updates."""

    def __init__(self, optimizer: Any, parameters: Sequence[Parameter]) -> None:
        self._optimizer, self._parameters = optimizer, parameters

    def state(self) -> dict[str, Any]:
        """The settings, without multipliers by name, or of parameters of other trainers."""
        return settings(by_attributes(self._optimizer), self._parameters)

    def problems(self, state: Any) -> Iterator[str]:
        yield from object_problems(state["attributes"], self._optimizer, "the optimizer")

    def assign(self, state: Any) -> None:
        assign_object(state["attributes"], self._optimizer)
        for name, row in state["by_index"].items():
            current = getattr(self._optimizer, name, {})
            others = {key: value for key, value in current.items() if type(key) is not int}
            setattr(self._optimizer, name, {**others, **restored(row)})
        counts = self._counts(state)
        for name, value in zip(optimizers.COUNTS, (counts, counts[self._devices()[0]])):
            setattr(self._optimizer, name, value)

    def _counts(self, state: Any) -> dict[int, dict[int, int]]:
        """The largest count of each parameter, for each device."""
        most: dict[int, int] = {}
        for row in state["counts"].values():
            most = {n: max(row.get(n, 0), most.get(n, 0)) for n in {**row, **most}}
        return {device: dict(most) for device in (*state["counts"], *self._devices())}

    def _devices(self) -> list[int]:
        """The numbers by which an optimizer knows the devices."""
        return [device.device_id for device in _mxnet.devices(self._parameters[0])]


def settings(optimizer: SavedObject, parameters: Sequence[Parameter]) -> dict[str, Any]:
    """Split the attributes of an optimizer into common ones, counts, and those by index."""
    attributes = dict(optimizer.attributes)
    counts, _ = (attributes.pop(name) for name in optimizers.COUNTS)
    names = [name for name in optimizers.BY_INDEX if isinstance(attributes.get(name), dict)]
    return {
        "by_index": {name: _own(attributes.pop(name), parameters) for name in names},
        "attributes": optimizer._replace(attributes=attributes),
        "counts": {device: _own(row, parameters) for device, row in counts.items()},
    }


def _own(row: dict[Any, Any], parameters: Sequence[Parameter]) -> ByParameter:
    return ByParameter({n: row[n] for n in range(len(parameters)) if n in row})


class OptimizerStates:
    """An optimizer's states per parameter: momentum, master copies. All updaters have the same."""

    def __init__(self, optimizer: Any, updaters: Any, parameters: Sequence[Parameter]) -> None:
        self._optimizer, self._updaters, self._parameters = optimizer, updaters, parameters

    def state(self) -> dict[str, Any]:
        """The states of the first device."""
        states = self._updaters[0].states if self._updaters else {}
        return {"states": _own(states, self._parameters)}

    def problems(self, state: Any) -> Iterator[str]:
        """Compare a state with the states that the optimizer would begin with now."""
        own = _own(state["states"], self._parameters)
        if len(own) < len(state["states"]):
            last, count = max(state["states"]), len(self._parameters)
            yield f"it has a state for parameter {last}, and there are {count}"
        for position, saved in own.items():
            parameter, expected = self._parameters[position], saved
            if _mxnet.has_data(parameter):
                weight = _mxnet.classic(_mxnet.data(parameter)[0])
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # those of the first update
                    expected = self._optimizer.create_state_multi_precision(position, weight)
            if not self._fits(saved, expected):
                name = _mxnet.name_of(parameter)
                yield (
                    f"the state of parameter {position} ({name}) is {_described(saved)!s:.200} and "
                    f"must be {_described(expected)}: was it saved with another momentum?"
                )

    def assign(self, state: Any) -> None:
        """Assign a state to all devices; each updater moves it there when it uses it."""
        for updater in self._updaters:
            updater.states = restored(_own(state["states"], self._parameters))
            updater.states_synced = dict.fromkeys(updater.states, False)

    def _fits(self, saved: Any, expected: Any) -> bool:
        """Whether a saved state can replace one of this optimizer."""
        if isinstance(expected, (list, tuple)) and isinstance(saved, (list, tuple)):
            return len(saved) == len(expected) and all(map(self._fits, saved, expected))
        if expected is None and not type(self._optimizer).__module__.startswith("mxnet."):
            return True  # an optimizer of the user's may fill it later
        return bool(_described(saved) == _described(expected))


def _described(state: Any) -> Any:
    """Storage types, dtypes and shapes of arrays, in the same containers."""
    if isinstance(state, (list, tuple)):
        return [*map(_described, state)]
    if isinstance(state, dict):
        return {key: _described(item) for key, item in state.items()}
    if isinstance(state, (np.ndarray, mx.nd.NDArray)):
        stype = getattr(state, "stype", "default").replace("default", "")
        return f"{stype} {np.dtype(state.dtype)} {tuple(state.shape)}".strip()
    return "a number" if isinstance(state, (bool, int, float)) else state
