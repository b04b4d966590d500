"""The coefficient of SVRG, and its schedule."""

from __future__ import annotations

import math
from typing import Any, Callable, Iterator, Union

from .. import _arguments, saving

#: A number, or a function from the snapshot's index to a number.
Schedule = Union[float, Callable[[int], float]]

_NAME = "coefficient (1 is SVRG, 0 the plain optimizer)"  # for messages


class Coefficient:
    """The coefficient in force, and the schedule of the next ones: a part of a file.

    Parameters
    ----------
    schedule : float or callable
        A number, or a function from the snapshot's index to a number.

    Attributes
    ----------
    value : float
        The coefficient in force.
    """

    def __init__(self, schedule: Schedule) -> None:
        check_schedule(schedule)
        self._schedule, self.value = schedule, _at(schedule, 0)
        self._next = self.value

    def change(self, schedule: Schedule, index: int) -> None:
        """Change to another schedule, in force for the snapshot of an index."""
        check_schedule(schedule)
        self.value, self._schedule = _at(schedule, index), schedule

    def ask(self, index: int) -> None:
        """Ask the schedule for the coefficient of the next snapshot, before its pass."""
        self._next = _at(self._schedule, index)

    def advance(self) -> None:
        """Put the coefficient of the next snapshot in force."""
        self.value = self._next

    def is_over(self, num_snapshots: int) -> bool:
        """Whether the schedule wants no more snapshots."""
        is_over = getattr(self._schedule, "is_over", None)
        return is_over is not None and bool(is_over(num_snapshots))

    # --- a part of a file ----------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The coefficient, and its schedule: a number, an object, or the word "function"."""
        schedule: Any = self._schedule
        if not callable(schedule):
            schedule = float(schedule)
        elif hasattr(schedule, "__name__"):
            schedule = "function"
        return {"schedule": schedule, "coefficient": self.value}

    def problems(self, state: Any) -> Iterator[str]:
        """Tell why a state cannot be assigned."""
        if not isinstance(state, dict) or set(state) != {"schedule", "coefficient"}:
            yield "its coefficient has another form"
            return
        for value in (state["coefficient"], state["schedule"]):
            if isinstance(value, float) and not 0 <= value < math.inf:
                yield f"its coefficient is {value}"
        if not isinstance(state["coefficient"], float):
            yield "its coefficient is no number"
        saved, live = state["schedule"], self.state()["schedule"]
        was, is_now = map(_kind, (saved, live))
        if was != is_now:
            yield f"the coefficient was {was} and is {is_now} here"
        elif isinstance(saved, saving.SavedObject):
            yield from saving.object_problems(saved, live, "the coefficient")

    def assign(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        schedule = state["schedule"]
        if isinstance(schedule, saving.SavedObject):
            saving.assign_object(schedule, self._schedule)
        elif isinstance(schedule, float):
            self._schedule = schedule
        self.value = state["coefficient"]


def check_schedule(schedule: Any) -> None:
    """Raise unless a coefficient is a number or a callable that returns numbers."""
    if not callable(schedule):
        _arguments.number(schedule, _NAME)


def _at(schedule: Schedule, index: int) -> float:
    value = schedule(index) if callable(schedule) else schedule
    return _arguments.number(value, _NAME)


def _kind(schedule: Any) -> str:
    if isinstance(schedule, saving.SavedObject):
        return schedule.class_name
    if isinstance(schedule, (float, str)):
        return "a number" if isinstance(schedule, float) else schedule
    return type(schedule).__name__
