"""How far a training is: the counters of a trainer, and a line for each refresh."""

from __future__ import annotations

from typing import Any


class Progress:
    """The public counters of a trainer, and its history: a part of a file."""

    def __init__(self) -> None:
        self.num_snapshots = 0  # refreshes over the whole training
        self.inner_steps = 0  # steps since the last one; 0 without a snapshot
        self.steps = 0  # steps over the whole training
        self.grad_evaluations = 0  # loss entries that this worker has differentiated
        self.compared = False  # whether the losses of a step were compared since the last refresh
        self.history: list[dict[str, float | None]] = []  # what was measured at each refresh

    def state(self) -> dict[str, Any]:
        """All counters, and the history."""
        return dict(vars(self))

    def assign(self, state: dict[str, Any]) -> None:
        """Take over a state. Version 0.3.0 counted no steps, and had no history."""
        for name, default in vars(Progress()).items():
            setattr(self, name, state.get(name, default))
