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
from .passes.network import Network
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
        self._has_state = False
        self._reached: list[bool] = []  # per parameter: whether any loss so far depends on it
        self._other: Point | None = None  # memory for the next reference

    @property
    def has_reference(self) -> bool:
        """Whether there was a step, or a refresh, to compare the next minibatch with."""
        return self._has_state

    @property
    def point(self) -> Point | None:
        """The weights before the last step."""
        return self.reference

    def bind(self, network: Network) -> None:
        """Bind to new arrays of the parameters."""
        super().bind(network)
        self._other = None

    def discard(self) -> None:
        """Start over at the next step."""
        self.reference, self._other, self.mean = None, None, []
        self._has_state, self.in_objective, self._reached = False, (), []

    def treated(self, network: Network) -> Sequence[bool] | None:
        """A flag for each parameter that the method treats; None if it treats all."""
        return None

    # --- the state after a step ----------------------------------------------------------------

    def refresh(self, network: Network, full: FullGradient) -> None:
        """Start over at the current weights: m is the full gradient."""
        if self.keeps_weights and self.reference is None:
            self.reference = Point.copied(network, frozen=False)
        elif self.reference is not None:
            self.reference.move()
        if self.keeps_mean:
            self._leave_out(network, full.mean)
            self.mean = full.mean
        self._take(list(full.reached))

    def next_state(
        self, network: Network, live: LiveGradients, scale: float, entries: float | NDArray
    ) -> Next | None:
        """Compute m for the next step."""
        if isinstance(entries, NDArray):  # the losses of other workers may depend on any parameter
            reached = [True] * len(network.trainable)
        else:
            before = self._reached or [False] * len(live.reached)
            reached = [a or b for a, b in zip(before, live.reached)]
        target: Columns = []
        if self.keeps_mean:
            target = network.take_spare()
            chosen = self.treated(network)
            for n, (total, mean) in enumerate(zip(live.total, target)):
                before = self.mean[n] if self.mean else mean
                row = [column.only(chosen) for column in (mean, total, before)]
                assign(row, (0, self.mean_terms(live.total_scale, entries)))
            self._leave_out(network, target)
        return Next(target, reached)

    def mean_terms(self, scale: float, entries: float | NDArray) -> Any:
        """The terms of ``m = V / C``, where V, the second column, has a scale."""
        return ((1.0 / (entries * scale), 1),)

    def _leave_out(self, network: Network, mean: Columns) -> None:
        """Set the mean gradient of parameters to zero that the method does not treat."""
        chosen = self.treated(network)
        if chosen is not None:
            for column in mean:
                zero(array for array, is_treated in zip(column, chosen) if not is_treated)

    def before_update(self, network: Network, following: Next) -> None:
        """Copy the weights, which are about to move, to the next reference."""
        if self.keeps_weights and self._other is None:
            self._other = Point.copied(network, frozen=False)
        elif self._other is not None:
            self._other.move()

    def moved(self, network: Network, live: LiveGradients) -> None:
        """Put the next state in place of the last one, whose memory is used again."""
        self.reference, self._other = self._other, self.reference
        if self.keeps_mean:
            network.give_spare(self.mean)
            self.mean = live.following.mean
        self._take(live.following.in_objective)

    def _take(self, reached: list[bool]) -> None:
        self._has_state, self._reached = True, reached
        self.in_objective = reached if self.keeps_mean else ()

    def dropped(self, network: Network, live: LiveGradients) -> None:
        """Give the memory of the next state back."""
        if live.following is not None and network.fits(live.following.mean):
            network.give_spare(live.following.mean)

    # --- files ---------------------------------------------------------------------------------

    def state(self, network: Network) -> dict[str, Any] | None:
        """The state, which is the same on all devices."""
        if not self._has_state:
            return None
        weights, mean = None, None
        if self.reference is not None:
            weights = states.by_number(network, [row[0] for row in self.reference.weights])
        if self.keeps_mean:
            mean = states.by_number(network, self.mean[0])
        flags = states.by_number(network, self._reached)
        return {"weights": weights, "mean": mean, "in_objective": flags}

    def problems(self, network: Network, state: Any) -> Iterator[str]:
        """Tell why a state cannot be assigned."""
        for name, what, is_kept in (
            ("weights", "weights before the last step", self.keeps_weights),
            ("mean", "mean gradient", self.keeps_mean),
        ):
            if (state[name] is not None) != is_kept:
                has, keeps = ("lacks", "keeps") if is_kept else ("has", "does not keep")
                yield f"it {has} the {what}, which this method {keeps} as it is set up here"
            elif is_kept:
                summed = name == "mean"
                yield from states.problems(network, state[name], what, summed=summed)

    def assign(self, network: Network, state: dict[str, Any]) -> None:
        """Take over a state."""
        if self.keeps_weights:
            self.reference = Point.copied(network, frozen=False)
            values = states.in_order(network, state["weights"])
            for value, weights in zip(values, self.reference.weights):
                states.put([value], weights)
        if self.keeps_mean:
            self.mean = states.to_columns(network, state["mean"])
        self._take(states.in_order(network, state["in_objective"]))
