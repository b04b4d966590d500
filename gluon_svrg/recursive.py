"""The base of SARAH, STORM and MARS, which compare a minibatch with the previous step.

The reference is the weights before the last step, and m comes from the last estimate. A step writes
both anew, and they take effect when the optimizer has moved the weights. So a step that is skipped,
or that raises an exception, changes nothing.
"""

from __future__ import annotations

from typing import Any, Iterator, NamedTuple, Sequence

from mxnet.ndarray import NDArray

from .passes import states
from .passes.arrays import Columns, zero
from .passes.combine import assign
from .passes.full_pass import FullGradient
from .passes.live_gradients import LiveGradients
from .passes.method import Method
from .passes.points import Point

NEEDS_CLOSURE = (
    "{name}() needs {method} gradients: pass step(batch_size, closure=...), or call "
    "correct_grads(closure) before. For the plain optimizer use gluon.Trainer."
)


class Next(NamedTuple):
    """The state that a step leaves for the next one, apart from the weights."""

    mean: Columns  # m
    in_objective: list[bool]  # per parameter: whether any loss so far depends on it


class Recursive(Method):
    """A method whose reference is the previous step.

    Frozen values are not kept: both passes of a step compute with the current ones.

    Attributes
    ----------
    keeps_weights, keeps_mean : bool
        Whether it needs the reference, and m.
    reference : Point or None
        The weights before the last step.
    """

    moves = True
    keeps_errors = True
    keeps_weights = True
    keeps_mean = True

    def __init__(self) -> None:
        super().__init__()
        # Replaced by each step: besides `mean`, which is m
        self.reference: Point | None = None
        self._reached: list[bool] = []  # per parameter: whether any loss so far depends on it
        self._other: Point | None = None  # memory for the next reference

    @property
    def has_reference(self) -> bool:
        """Whether there was a step, or a refresh, to compare the next minibatch with."""
        return bool(self._reached)

    @property
    def point(self) -> Point | None:
        """The weights before the last step."""
        return self.reference

    def bind(self) -> None:
        """Bind to new arrays of the parameters."""
        super().bind()
        self._other = None

    def discard(self) -> None:
        """Start over at the next step."""
        self.reference, self._other, self.mean = None, None, []
        self.in_objective, self._reached = (), []

    def treated(self) -> Sequence[bool] | None:
        """A flag for each parameter that the method treats; None if it treats all."""
        return None

    # --- the state after a step ----------------------------------------------------------------

    def refresh(self, full: FullGradient) -> None:
        """Start over at the current weights: m is the full gradient."""
        if self.keeps_weights and self.reference is None:
            self.reference = Point.copied(self.network, frozen=False)
        elif self.reference is not None:
            self.reference.move()
        if self.keeps_mean:
            self._leave_out(full.mean)
            self.mean = full.mean
        self._take(list(full.reached))

    def next_state(
        self, live: LiveGradients, scale: float, entries: float | NDArray
    ) -> Next | None:
        """Compute m for the next step."""
        if isinstance(entries, NDArray):  # the losses of other workers may depend on any parameter
            reached = [True] * len(self.network.trainable)
        else:
            before = self._reached or [False] * len(live.reached)
            reached = [a or b for a, b in zip(before, live.reached)]
        target: Columns = []
        if self.keeps_mean:
            target = self.network.take_spare()
            chosen = self.treated()
            for n, (total, mean) in enumerate(zip(live.total, target)):
                before = self.mean[n] if self.mean else mean
                row = [column.only(chosen) for column in (mean, total, before)]
                assign(row, (0, self.mean_terms(live.total_scale, entries)))
            self._leave_out(target)
        return Next(target, reached)

    def mean_terms(self, scale: float, entries: float | NDArray) -> Any:
        """The terms of ``m = V / C``, where V, the second column, has a scale."""
        return ((1.0 / (entries * scale), 1),)

    def _leave_out(self, mean: Columns) -> None:
        """Set the mean gradient of parameters to zero that the method does not treat."""
        chosen = self.treated()
        if chosen is not None:
            for column in mean:
                zero(array for array, is_treated in zip(column, chosen) if not is_treated)

    def before_update(self, following: Next) -> None:
        """Copy the weights, which are about to move, to the next reference."""
        if self.keeps_weights and self._other is None:
            self._other = Point.copied(self.network, frozen=False)
        elif self._other is not None:
            self._other.move()

    def moved(self, live: LiveGradients) -> None:
        """Put the next state in place of the last one, whose memory is used again."""
        self.reference, self._other = self._other, self.reference
        if self.keeps_mean:
            self.network.give_spare(self.mean)
            self.mean = live.following.mean
        self._take(live.following.in_objective)

    def _take(self, reached: list[bool]) -> None:
        self._reached = reached
        self.in_objective = reached if self.keeps_mean else ()

    # --- files ---------------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """The state, which is the same on all devices."""
        if not self.has_reference:
            return None
        weights, mean = None, None
        if self.reference is not None:
            weights = states.of_point(self.reference)
        if self.keeps_mean:
            mean = states.by_number(self.network, self.mean[0])
        flags = states.by_number(self.network, self._reached)
        return {"weights": weights, "mean": mean, "in_objective": flags}

    def problems(self, state: Any) -> Iterator[str]:
        """Tell why a state cannot be assigned."""
        for name, what, is_kept in (
            ("weights", "weights before the last step", self.keeps_weights),
            ("mean", "mean gradient", self.keeps_mean),
        ):
            if (state[name] is not None) != is_kept:
                verb = "lacks" if is_kept else "has"
                yield f"it {verb} the {what}, unlike this method as it is set up here"
            elif is_kept:
                yield from states.problems(self.network, state[name], what, summed=name == "mean")

    def assign(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        if self.keeps_weights:
            self.reference = states.to_point(self.network, state["weights"])
        if self.keeps_mean:
            self.mean = states.to_columns(self.network, state["mean"])
        self._take(states.in_order(self.network, state["in_objective"]))
