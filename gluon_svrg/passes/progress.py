"""How far a training is: the counters of a trainer, and a line for each refresh."""

from __future__ import annotations

from typing import Any, Iterator

COUNTERS = ("num_snapshots", "inner_steps", "grad_evaluations", "steps")


class Progress:
    """The public counters of a trainer, and its history: a part of a file."""

    def __init__(self) -> None:
        self.num_snapshots = 0  # refreshes over the whole training
        self.inner_steps = 0  # steps since the last one; 0 without a snapshot
        self.steps = 0  # steps over the whole training
        self.grad_evaluations = 0  # loss entries that this worker has differentiated
        self.compared = False  # whether the losses of a step were compared since the last refresh
        self.history: list[dict[str, float | None]] = []  # what was measured at each refresh

    def begin_anew(self) -> None:
        """Count steps from here on."""
        self.inner_steps = 0

    def state(self) -> dict[str, Any]:
        """All counters, and the history."""
        return dict(vars(self))

    def problems(self, state: Any) -> Iterator[str]:
        """Tell why a state cannot be assigned. Version 0.3.0 counted no steps."""
        counts = [state.get(name, 0) for name in COUNTERS] if isinstance(state, dict) else [None]
        if not all(type(count) is int and 0 <= count < 2**62 for count in counts):
            yield "its counters have another form"
        elif not all(isinstance(line, dict) for line in state.get("history", [])):
            yield "its history has another form"

    def assign(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        for name in COUNTERS:
            setattr(self, name, state.get(name, 0))
        self.compared = bool(state.get("compared", False))
        self.history = list(state.get("history", []))
