"""Schedules, samplers and counts of epochs, which are saved with a trainer."""

from __future__ import annotations

from typing import Any, Iterator

from . import saving


class Registered:
    """Schedules, samplers and counts of epochs whose states are saved with a trainer.

    Several objects of one class are distinguished by their settings, or else by the order in which
    they were registered.
    """

    def __init__(self) -> None:
        self._live: list[Any] = []
        self._waiting: list[saving.SavedObject] = []  # from a file, for later schedules

    @property
    def has_refreshes(self) -> bool:
        """Whether a refresh schedule is registered."""
        return any(hasattr(live, "due") for live in self._live)

    def add(self, schedule: Any) -> None:
        """Register a schedule, and give it its saved state."""
        if any(schedule is known for known in self._live):
            return
        saved = _best(self._waiting, schedule)
        if saved is not None:
            found = list(saving.object_problems(saved, schedule, "the schedule"))
            if found:
                raise ValueError(f"The states that were loaded do not fit: {'; '.join(found)}.")
            saving.assign_object(saved, schedule)
            self._waiting = [other for other in self._waiting if other is not saved]
        self._live.append(schedule)

    def shared(self, kind: Any) -> Any:
        """Return the registered object of a class; register a new one if there is none."""
        found = next((live for live in self._live if type(live) is kind), None)
        if found is None:
            found = kind()
            self.add(found)
        return found

    def state(self) -> list[saving.SavedObject]:
        """The attributes of all, in the order in which they were registered."""
        return [saving.by_attributes(schedule) for schedule in self._live] + self._waiting

    def problems(self, state: Any) -> Iterator[str]:
        """Tell why a state cannot be assigned."""
        if not isinstance(state, list) or not all(
            isinstance(saved, saving.SavedObject) for saved in state
        ):
            yield "its schedules have another form"
            return
        for saved, live in self._pairs(state):
            yield from saving.object_problems(saved, live, "its schedule")

    def assign(self, state: list[saving.SavedObject]) -> None:
        """Give each schedule its saved state; the rest waits for later schedules."""
        pairs = self._pairs(state)
        for saved, live in pairs:
            saving.assign_object(saved, live)
        taken = [id(saved) for saved, _ in pairs]
        self._waiting = [saved for saved in state if id(saved) not in taken]

    def _pairs(self, state: list[saving.SavedObject]) -> list[tuple[saving.SavedObject, Any]]:
        """Pair saved states with schedules, by class and order."""
        pairs, left = [], list(state)
        for live in self._live:
            saved = _best(left, live)
            if saved is not None:
                left = [other for other in left if other is not saved]
                pairs.append((saved, live))
        return pairs


def _best(candidates: list[saving.SavedObject], live: Any) -> saving.SavedObject | None:
    """The saved state with the most attributes in common with an object; of equals the first."""
    here = saving.by_attributes(live).attributes

    def in_common(saved: saving.SavedObject) -> int:
        return sum(repr(saved.attributes.get(name)) == repr(here[name]) for name in here)

    chosen = [saved for saved in candidates if saved.class_name == type(live).__name__]
    return max(chosen, key=in_common, default=None)


class EpochCount:
    """The number of epochs, over all calls of ``fit`` with a `FullGradHandler`."""

    def __init__(self) -> None:
        self.epochs = 0
