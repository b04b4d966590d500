"""What a trainer counts."""

from __future__ import annotations

from typing import Any, Iterator


class Counters:
    """The numbers that a trainer shows, and whether the first step of a snapshot was checked.

    Attributes
    ----------
    num_snapshots : int
        Refreshes, over the whole training.
    inner_steps : int
        Steps since the last refresh; 0 without a snapshot.
    grad_evaluations : int
        Loss entries that this worker has differentiated.
    compared : bool
        Whether there is no need to compare the gradients at the snapshot and at the weights.
    """

    def __init__(self) -> None:
        self.num_snapshots = 0
        self.inner_steps = 0
        self.grad_evaluations = 0
        self.compared = True

    def state(self) -> dict[str, Any]:
        """All of them."""
        return dict(vars(self))

    def problems(self, state: Any) -> Iterator[str]:
        """Tell why a state cannot be assigned."""
        expected = {name: type(value) for name, value in vars(self).items()}
        if not (
            isinstance(state, dict)
            and {name: type(value) for name, value in state.items()} == expected
            and all(0 <= value < 2**62 for value in state.values())
        ):
            yield "its counters are of another form"

    def assign(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        vars(self).update(state)
