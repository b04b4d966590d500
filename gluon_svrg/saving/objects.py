"""Objects by their attributes: saved ones are compared with existing objects, and assigned."""

from __future__ import annotations

from inspect import signature
from typing import Any, Iterator, Sequence

import mxnet as mx
import numpy as np

from .values import SavedArray, SavedObject, by_attributes


def object_problems(saved: Any, current: Any, where: str) -> Iterator[str]:
    """Describe why a `SavedObject` cannot be assigned to an object, which messages name so."""
    was = saved.class_name if isinstance(saved, SavedObject) else "none"
    now = "none" if current is None else type(current).__name__
    if not isinstance(saved, SavedObject) or was != now:
        yield f"{where} was {was} and is {now} here: make it the same one before loading"
        return
    here = by_attributes(current).attributes
    for name, value in saved.attributes.items():
        of_class = getattr(type(current), name, None)
        is_taken = name in vars(current) or callable(of_class) or hasattr(of_class, "__get__")
        if is_taken and name not in here:
            yield f"{where} has an attribute {name!r} that a {now} cannot have"
        if SavedObject in (type(value), type(here.get(name))):
            yield from object_problems(value, getattr(current, name, None), f"its {name}")
        elif _has_object(value):
            yield f"its {name} contains objects, which this version does not load"


def assign_object(saved: SavedObject, current: Any) -> None:
    """Assign attributes in which `object_problems` has found nothing."""
    for name, value in saved.attributes.items():
        if isinstance(value, SavedObject):  # it is not created, but assigned to the one here
            assign_object(value, getattr(current, name))
        else:
            setattr(current, name, restored(value))


def restored(value: Any) -> Any:
    """Convert a value of a file for use."""
    if isinstance(value, SavedArray):
        if value.kind in ("nd", "np"):
            array = mx.nd.array(np.array(value), dtype=value.dtype)
            return array.as_np_ndarray() if value.kind == "np" else array.tostype(value.stype)
        return np.array(value)[()] if value.kind == "scalar" else np.array(value)
    if isinstance(value, dict):
        return {key: restored(item) for key, item in value.items()}
    return type(value)(map(restored, value)) if isinstance(value, (list, tuple)) else value


def _has_object(value: Any) -> bool:
    """Whether a value is a saved object, or contains one."""
    items = value.values() if isinstance(value, dict) else value
    is_container = isinstance(value, (dict, list, tuple))
    return isinstance(value, SavedObject) or (is_container and any(map(_has_object, items)))


class Registered:
    """Schedules, samplers and counts of epochs, told apart by their settings, or else by order."""

    def __init__(self) -> None:
        self._schedules: list[Any] = []
        self._waiting: list[SavedObject] = []  # from a file, for objects to come

    def add(self, schedule: Any) -> None:
        """Register a schedule, and give it its saved state."""
        if all(schedule is not known for known in self._schedules):
            found = "; ".join(self.problems(self._waiting, [schedule]))
            if found:
                raise ValueError(f"The loaded states do not fit: {found}. Nothing was changed.")
            self.assign(self._waiting, [schedule])
            self._schedules.append(schedule)

    def state(self) -> list[SavedObject]:
        """The attributes of all, in the order in which they were registered."""
        return [*map(by_attributes, self._schedules), *self._waiting]

    def problems(self, state: list[SavedObject], new: Sequence[Any] = ()) -> Iterator[str]:
        """Describe why a state cannot be assigned, to new schedules or those that are known."""
        for saved, current in _pairs(state, new or self._schedules):
            yield from object_problems(saved, current, "its schedule")

    def assign(self, state: list[SavedObject], new: Sequence[Any] = ()) -> None:
        """Give each schedule its saved state; the rest waits for later schedules."""
        pairs = _pairs(state, new or self._schedules)
        for saved, current in pairs:
            assign_object(saved, current)
        self._waiting = [saved for saved in state if all(saved is not s for s, _ in pairs)]


def _pairs(state: list[SavedObject], schedules: Sequence[Any]) -> list[tuple[SavedObject, Any]]:
    """Pair schedules with the saved states of their class that are most like them.

    What the constructor takes, as far as attributes have these names, counts before all else.
    """
    pairs: list[tuple[SavedObject, Any]] = []
    for current in schedules:
        name, here = by_attributes(current)
        settings = {*signature(type(current).__init__).parameters}

        def likeness(saved: SavedObject, here: Any = here, settings: Any = settings) -> Any:
            items = {*map(repr, here.items())}
            same = {key for key, value in saved.attributes.items() if repr((key, value)) in items}
            return len(same & settings), len(same)

        left = [s for s in state if s.class_name == name and all(s is not p for p, _ in pairs)]
        if left:
            pairs.append((max(left, key=likeness), current))
    return pairs


class EpochCount:
    """The number of epochs, over all calls of ``fit`` with a `FullGradHandler`."""

    def __init__(self) -> None:
        self.epochs = 0
