"""The optimizer as two parts of a file: its settings, and its states per parameter.

Both refer to parameters by position, so a file fits a trainer with another order. The settings are
the attributes of the optimizer and its scheduler. The counts of updates are separate, because
MXNet keeps them per device. Adam computes its correction from them, so a device without them would
drift apart.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter

from .. import _mxnet
from .._mxnet import optimizers
from . import objects
from .values import ByParameter, SavedArray, SavedObject, arrays_in, by_attributes


class OptimizerSettings:
    """The attributes of an optimizer and its scheduler, with the counts of updates.

    Parameters
    ----------
    optimizer : Optimizer
        The optimizer of the trainer.
    parameters : sequence of Parameter
        The parameters of the trainer, in its order.
    """

    def __init__(self, optimizer: Any, parameters: Sequence[Parameter]) -> None:
        self._optimizer, self._parameters = optimizer, list(parameters)

    def state(self) -> dict[str, Any]:
        """The settings as plain data."""
        place = partial(_of_parameters, len(self._parameters))
        found = settings(by_attributes(self._optimizer), mx.__version__, place)
        return {**found, "counts": _up_to_date(found["counts"], self._devices())}

    def problems(self, state: Any) -> Iterator[str]:
        """Describe why a state cannot be assigned."""
        saved, generation, counts, by_index = _take_apart(state)
        same = generation == optimizers.here()
        saved = _renamed(saved, generation)
        found = [*objects.problems(saved, self._optimizer, "the optimizer", complete=same)]
        if not found:
            num_update = saved.attributes.get("num_update")
            found += optimizers.count_problems(self._optimizer, num_update, counts)
            found += self._index_problems([*(counts or {}).values(), *by_index.values()])
            for name, values in by_index.items():
                found += _value_problems(name, values)
        if not found:
            found += self._trial(state)
        yield from found

    def assign(self, state: Any) -> None:
        """Take over a state. A device without counts gets those of the others."""
        self._assign(state, self._optimizer)

    def _assign(self, state: Any, optimizer: Any) -> None:
        saved, generation, counts, by_index = _take_apart(state)
        objects.assign(self._settable(_renamed(saved, generation), generation), optimizer)
        for name, values in by_index.items():
            live = getattr(optimizer, name, None)
            if isinstance(live, dict):
                other = {k: v for k, v in live.items() if type(k) is not int}
                setattr(optimizer, name, {**other, **objects.restored(values)})
        if counts is not None:
            devices = self._devices()
            optimizers.put_counts(optimizer, _for_devices(counts, devices), devices[0])

    def _settable(self, saved: SavedObject, generation: str) -> SavedObject:
        """From another generation of MXNet, only the attributes that this one has too."""
        if generation == optimizers.here() or not optimizers.is_of_mxnet(self._optimizer):
            return saved
        here = vars(self._optimizer)
        attributes = {name: value for name, value in saved.attributes.items() if name in here}
        return SavedObject(saved.class_name, attributes)

    def _devices(self) -> list[int]:
        """The numbers by which an optimizer knows the devices."""
        return [device.device_id for device in _mxnet.devices(self._parameters[0])]

    def _index_problems(self, rows: list[Any]) -> Iterator[str]:
        for row in rows:
            for position in row:
                if type(position) is not int or not 0 <= position < len(self._parameters):
                    yield (
                        f"its optimizer has parameter {position!r}, and there are "
                        f"{len(self._parameters)}"
                    )
                    return

    def _trial(self, state: Any) -> Iterator[str]:
        """Try the next update on a copy: a failure there would be one in the next step."""
        try:
            problem = self._tried(state)
        except Exception as error:
            problem = f"its optimizer does not work ({type(error).__name__}: {str(error)[:200]})"
        if problem:
            yield problem

    def _tried(self, state: Any) -> str:
        """Try an optimizer of MXNet, or only a scheduler: others may do more than update."""
        if optimizers.is_of_mxnet(self._optimizer):
            copied = optimizers.scratch(self._optimizer)
            if copied is None:
                return ""
            self._assign(state, copied)
            return optimizers.update_problem(copied)
        saved = _take_apart(state)[0].attributes
        copied = optimizers.scratch(getattr(self._optimizer, "lr_scheduler", None))
        if copied is None:
            return ""
        objects.assign(saved["lr_scheduler"], copied)
        return optimizers.scheduler_problem(copied, saved["num_update"])


def _of_parameters(count: int, by_index: dict[Any, Any]) -> ByParameter:
    """Values of the parameters, without those of parameters that another trainer has had."""
    return ByParameter({index: by_index[index] for index in range(count) if index in by_index})


def settings(saved: SavedObject, version: str, positions: Any = None) -> dict[str, Any]:
    """Split the attributes of an optimizer into common ones, counts, and those by index.

    Parameters
    ----------
    saved : SavedObject
        The optimizer.
    version : str
        The version of its MXNet.
    positions : callable, optional
        Converts values by index to values by position.
    """
    attributes = dict(saved.attributes)
    counts = attributes.pop(optimizers.COUNTS[0], None)
    attributes.pop(optimizers.COUNTS[1], None)
    by_index = {
        name: {key: value for key, value in attributes.pop(name).items() if type(key) is int}
        for name in optimizers.BY_INDEX
        if isinstance(attributes.get(name), dict)
    }
    place = positions or dict
    return {
        "mxnet": version,
        "attributes": SavedObject(saved.class_name, attributes),
        "counts": counts and {device: place(row) for device, row in counts.items()},
        "by_index": {name: place(values) for name, values in by_index.items()},
    }


def _take_apart(state: Any) -> tuple[SavedObject, str, Any, dict[str, Any]]:
    """Check the outer structure of a state."""
    if not (
        isinstance(state, dict)
        and state.keys() == {"mxnet", "attributes", "counts", "by_index"}
        and isinstance(state["attributes"], SavedObject)
        and isinstance(state["mxnet"], str)
        and isinstance(state["by_index"], dict)
        and all(isinstance(values, dict) for values in state["by_index"].values())
        and {*state["by_index"]} <= {*optimizers.BY_INDEX}
        and isinstance(state["counts"], (dict, type(None)))
    ):
        raise ValueError("its optimizer is malformed")
    generation = optimizers.generation(state["mxnet"])
    return state["attributes"], generation, state["counts"], state["by_index"]


def _renamed(saved: SavedObject, generation: str) -> SavedObject:
    names = optimizers.renamed(saved.class_name, generation, optimizers.here())
    attributes = {names.get(name, name): value for name, value in saved.attributes.items()}
    return SavedObject(saved.class_name, attributes)


def _value_problems(name: str, values: dict[Any, Any]) -> Iterator[str]:
    """Describe what is wrong with values by index."""
    for value in values.values():
        if name.endswith("_mult") and not objects.is_numeric(value):
            yield f"its {name} has {str(value)[:40]!r}, which is no number"
        if name == "idx2name" and not isinstance(value, str):
            yield f"its {name} has {str(value)[:40]!r}, which is no name"


def _most(rows: dict[int, Any]) -> dict[int, int]:
    """The largest count of any device, by parameter."""
    most: dict[int, int] = {}
    for row in rows.values():
        for key, count in row.items():
            most[key] = max(count, most.get(key, count))
    return most


def _up_to_date(rows: dict[int, Any], devices: Sequence[int]) -> dict[int, Any]:
    """Drop the counts of devices that are no longer used for training.

    A kvstore counts on its own devices, each for some of the parameters: those counts stay.
    """
    most = _most(rows)
    return {
        device: ByParameter(
            {key: n for key, n in row.items() if device in devices or n == most[key]}
        )
        for device, row in rows.items()
    }


def _for_devices(rows: dict[int, dict[int, int]], devices: Sequence[int]) -> dict[int, Any]:
    """Counts for the current devices: their own, or else the largest of any device."""
    most = _most(rows)
    used = sorted(device for device, row in rows.items() if row)
    if len(used) == len(devices) and not {*devices} <= {*used}:  # equally many, with other numbers
        rows = {device: rows[was] for device, was in zip(devices, used)}
    return {**rows, **{device: {**most, **rows.get(device, {})} for device in devices}}


class OptimizerStates:
    """An optimizer's states per parameter: momentum, master copies. All devices have the same.

    Parameters
    ----------
    optimizer : Optimizer
        The optimizer of the trainer.
    updaters : sequence of Updater
        The updaters of the devices, or the one of the kvstore.
    parameters : sequence of Parameter
        The parameters of the trainer, in its order.
    """

    def __init__(
        self, optimizer: Any, updaters: Sequence[Any], parameters: Sequence[Parameter]
    ) -> None:
        self._optimizer, self._updaters = optimizer, list(updaters)
        self._parameters = list(parameters)

    def state(self) -> dict[str, Any]:
        """The states of the first device, as plain data."""
        by_index = optimizers.states(self._updaters[0]) if self._updaters else {}
        return {
            "mxnet": mx.__version__,
            "optimizer": type(self._optimizer).__name__,
            "states": _of_parameters(len(self._parameters), by_index),
        }

    def problems(self, state: Any) -> Iterator[str]:
        """Compare a state with the states that the optimizer would begin with now."""
        for position, (saved, expected) in self._expected(state):
            if not 0 <= position < len(self._parameters):
                count = len(self._parameters)
                yield f"it has a state for parameter {position!r}, and there are {count}"
                continue
            name = f"parameter {position} ({self._parameters[position].name})"
            if saved is _UNKNOWN_ORDER:
                yield (
                    f"the optimizer's state of {name} comes from another MXNet, which may order "
                    "momentum and master copy differently: load it with that one"
                )
            elif expected is not _UNKNOWN and not _fits(saved, expected):
                found, wanted = objects.described(saved), objects.described(expected)
                is_one_none = found is None or wanted is None
                hint = ": was it saved with another momentum?" if is_one_none else ""
                yield f"the optimizer's state of {name} is {found} and must be {wanted}{hint}"

    def assign(self, state: Any) -> None:
        """Assign a state to all devices."""
        found = {position: saved for position, (saved, _) in self._expected(state, shapes=False)}
        for updater in self._updaters:
            values = {position: objects.restored(saved) for position, saved in found.items()}
            optimizers.put_states(updater, values)

    def expected_bytes(self) -> int | None:
        """The memory of all states, or None while parameters are not initialized."""
        if not all(map(_mxnet.has_data, self._parameters)):
            return None
        return sum(
            int(np.prod(array.shape)) * 8
            for position in range(len(self._parameters))
            for array in arrays_in(self._new(position))
        )

    def _new(self, position: int) -> Any:
        weight = _mxnet.classic(_mxnet.data(self._parameters[position])[0])
        return optimizers.new_state(self._optimizer, position, weight)

    def _expected(self, state: Any, shapes: bool = True) -> Iterator[tuple[int, tuple[Any, Any]]]:
        """The saved state, in the form of this MXNet, and the expected one, by position."""
        if not (
            isinstance(state, dict)
            and state.keys() == {"mxnet", "optimizer", "states"}
            and isinstance(state["mxnet"], str)
            and isinstance(state["states"], dict)
            and all(type(key) is int for key in state["states"])
        ):
            raise ValueError("its optimizer's states are malformed")
        was = optimizers.generation(state["mxnet"])
        for position, saved in state["states"].items():
            expected: Any = _UNKNOWN
            if 0 <= position < len(self._parameters):
                parameter = self._parameters[position]
                if shapes and _mxnet.has_data(parameter):
                    expected = self._new(position)
                saved = self._converted(saved, was, parameter)
            yield position, (saved, expected)

    def _converted(self, saved: Any, was: str, parameter: Parameter) -> Any:
        """Put momentum and master copy into the order of this MXNet."""
        has_master_copy = (
            self._optimizer.multi_precision and np.dtype(parameter.dtype) == np.float16
        )
        if was == optimizers.here() or not has_master_copy:
            return saved
        if not (isinstance(saved, tuple) and len(saved) == 2 and was in ("1", "2")):
            return _UNKNOWN_ORDER
        if not optimizers.is_of_mxnet(self._optimizer):
            return _UNKNOWN_ORDER
        name = type(self._optimizer).__name__
        return optimizers.with_master_copy(saved, name, was, optimizers.here())


_UNKNOWN, _UNKNOWN_ORDER = object(), object()


def _fits(saved: Any, expected: Any) -> bool:
    """Whether a saved state can replace one of this optimizer."""
    if isinstance(expected, (list, tuple)):
        return (
            isinstance(saved, (list, tuple))
            and len(saved) == len(expected)
            and all(map(_fits, saved, expected))
        )
    if isinstance(expected, mx.nd.NDArray):
        is_array = isinstance(saved, (SavedArray, mx.nd.NDArray))
        return is_array and objects.described(saved) == objects.described(expected)
    if objects.is_numeric(expected):
        return objects.is_numeric(saved)
    return type(saved) is type(expected) or objects.described(saved) == objects.described(expected)
