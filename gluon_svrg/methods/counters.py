"""The counters of a trainer."""

from __future__ import annotations

from typing import Any, Iterator


class Counters:
    """The public counters of a trainer, and whether the first step of a snapshot was checked.

    Attributes
    ----------
    num_snapshots : int
        Refreshes over the whole training.
    inner_steps : int
        Steps since the last refresh; 0 without a snapshot.
    grad_evaluations : int
        Loss entries that this worker has differentiated.
    compared : bool
        Whether the gradients at the snapshot and at the weights need no more comparison.
    adds : bool
        Whether gradients were seen to add up in the live gradients.
    probed : bool
        Whether this was tested. A file of 0.1.0 does not say.
    """

    def __init__(self, *, compared: bool) -> None:
        self.num_snapshots = 0
        self.inner_steps = 0
        self.grad_evaluations = 0
        self.compared = compared
        self.adds = True
        self.probed = False

    def begin_anew(self) -> None:
        """Count steps from here on."""
        self.inner_steps = 0

    def state(self) -> dict[str, Any]:
        """Return all counters."""
        return dict(vars(self))

    def problems(self, state: Any) -> Iterator[str]:
        """Tell why a state cannot be assigned."""
        expected = {name: type(value) for name, value in vars(self).items()}
        if not (
            isinstance(state, dict)
            and {**expected, **{name: type(value) for name, value in state.items()}} == expected
            and set(expected) - set(state) <= {"adds", "probed"}
            and all(0 <= value < 2**62 for value in state.values())
        ):
            yield "its counters have another form"

    def assign(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        vars(self).update({"adds": True, "probed": False, **state})
