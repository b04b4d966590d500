"""The interface of a method: its formula, and its state.

A trainer calls::

    bind()                     when parameters have new arrays, and after a discard
    prepare_refresh(draws)     at update_full_grads, before its pass
    accepts(full)              when the full gradient is known, of a copy of the method
    refresh(full), refuse()    whether it was accepted or not
    end_epoch()                then, for a line of `history`
    terms(batch_index, rows)   before each mini-batch: v = a g + b r + k c m
    row(estimated, index)      when v is computed: what to keep of the mini-batch
    numbers(rows)              what to sum over the workers
    next_state(pending, ...)   when v is summed over devices and workers
    before_update(next_state, scale)  just before the optimizer moves the weights
    after_update()             when it has, or has failed
    moved(pending)             after it has moved them: the next state takes effect

Only `moved`, `refresh`, `refuse`, `assign` and `discard` change what a file stores, but what a
preconditioner has learned. Almost all that is known of a step before its update is in the
`PendingUpdate`, which is dropped if no update follows.
"""

from __future__ import annotations

from functools import partial
from operator import attrgetter, or_
from typing import Any, Iterator, Sequence, Sized

import numpy as np
from mxnet.ndarray import NDArray

from .. import _arguments, saving
from . import states
from .columns import Mean
from .estimate import PLAIN_GRADIENT, Estimate, EstimateCoefficients
from .full_pass import NOT_FINITE, FullGradient
from .network import ParameterBuffers
from .points import ParameterValues
from .rows import StaleTableCheck, StoredGradient


class Method:
    """A method without variance reduction: v = g. Other methods override what they need."""

    # Whether its state changes with each step, so that it needs the reduced gradient
    updates_every_step = False
    replaces_grads = False  # whether `next_state` computes the gradient of the optimizer
    needs_table = False  # whether each mini-batch has an index, and a refresh keeps its gradient
    needs_refresh = False  # whether it has no reference until the first refresh
    can_store_grads = False  # whether gradients of mini-batches can be stored
    needs_closure = False  # whether it needs a closure for every step, even without a reference
    sets_rate = False  # whether it sets the rate of the optimizer, and measures for that
    keeps_weights = False  # whether it keeps a point
    keeps_frozen = False  # whether that has frozen values too
    keeps_mean = False  # whether it keeps m
    mean_key = "mean"  # in a file

    network: ParameterBuffers  # its parameters, from the trainer
    optimizer: Any  # from the trainer, too
    name: str  # in messages and files
    preconditioner: Any = None  # sets the rate, if `sets_rate`; saved as a part of its own

    def __init_subclass__(cls) -> None:
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def __init__(self) -> None:
        self.settings: tuple[str, ...] = ()  # the hyperparameters, as ``repr`` shows them
        self.file_signature: tuple[str, ...] = ()  # those without which no file fits
        self.coefficient: Any = None  # how much of the correction is used, if there is a choice
        self.table: Sized | None = None  # the stored gradients of mini-batches
        # Where the rows of the table were taken, if one is to be checked
        self.taken_at: StaleTableCheck | None = None
        self.point: ParameterValues | None = None  # the weights of the reference, if it keeps them
        self.mean: Mean | None = None  # m, if it keeps that
        self.ever_reached: list[bool] = []  # per parameter: whether m may differ from zero

    def check_arguments(self, trainer: str, optimizer: Any, settings: Any, compressed: Any) -> None:
        """Raise if the method does not work with the arguments of its trainer."""
        if compressed and self.updates_every_step and self.keeps_mean:
            raise ValueError(
                f"{trainer} cannot compress gradients: its mean gradient would keep the errors. "
                "Leave compression_params out."
            )

    def take_operators(self, operators: Any) -> Any:
        """Take over proximal operators, if the method can; those that are left to the trainer."""
        return operators

    def checked_index(self, index: Any, name: str, trainer: str) -> int:
        """The index of a mini-batch as Python's own integer; raise if it cannot be one."""
        if index is None:
            raise TypeError(
                f"{name}() needs batch_index=..., the position of the mini-batch, with the "
                "closure: the row of the table with its last gradient. Keep the mini-batches in a "
                "list, and shuffle their positions."
            )
        if not self.can_store_grads:
            raise TypeError(
                f"batch_index names a stored gradient, and {trainer} has none. Leave it out."
            )
        return _arguments.whole(index, "batch_index, the position of a mini-batch,", float("-inf"))

    def check_coefficient(self, value: Any) -> None:
        """Raise if the coefficient cannot be set to a value."""

    def check_rate_is_free(self) -> None:
        """Raise if the learning rate cannot be set."""

    #: Whether the method keeps a reference or a mean, which belong to the parameters' arrays.
    has_state: Any = property(attrgetter("ever_reached"))
    #: Whether there is a reference or a mean to correct with.
    has_reference: Any = has_state

    def prepare_refresh(self, draws: bool) -> tuple[ParameterValues | None, bool]:
        """Where a refused refresh goes back to, and whether it compares the losses of both places.

        The flag tells whether random numbers are locked.
        """
        return None, False

    def accepts(self, full: FullGradient) -> bool:
        """Whether a refresh may take a snapshot; raise a FloatingPointError if nothing can follow.

        It is asked of a copy of the method, which is kept if nothing is raised until the end.
        """
        if not np.isfinite(full.norm):
            raise FloatingPointError(NOT_FINITE)
        return True

    def refresh(self, full: FullGradient) -> None:
        """Make the current weights the reference, with the full gradient there."""
        if self.keeps_weights:
            self.point = ParameterValues.copied(self.network, frozen=self.keeps_frozen)
        if self.keeps_mean:
            self.mean = full.mean
        self.ever_reached = full.reached

    def refuse(self) -> None:
        """A refresh was refused: the weights are those of the snapshot again, or of the start."""

    def end_epoch(self) -> dict[str, float]:
        """Begin to count steps anew, after a refresh; what `history` has in addition."""
        return {}

    def discard(self) -> None:
        """Forget the reference and free its memory."""
        self.point, self.mean, self.ever_reached = None, None, []
        self.table, self.taken_at = None, None

    def bind(self) -> None:
        if self.point is not None:
            self.point.bind()

    def terms(self, batch_index: int | None, rows: dict[int, Any]) -> EstimateCoefficients:
        return PLAIN_GRADIENT

    def row(self, estimated: Estimate, index: int) -> StoredGradient | None:
        return None

    def numbers(self, rows: dict[int, Any]) -> Sequence[float]:
        return ()

    def next_state(self, pending: Any, scale: float, entries: float | NDArray) -> Any:
        """Compute the state after the step, for `moved`; None if it stays.

        The live gradients hold V times the scale on every device, or what the user has made of it,
        and may be changed; ``pending.total`` is V as it was computed, times ``total_scale``. C, the
        loss entries of all, is a number; with several workers it is an array, of C and the sums of
        `numbers`.
        """
        return None

    def before_update(self, next_state: Any, scale: float) -> None:
        """Complete the next state with the weights, just before the optimizer moves them.

        The scale is that of the gradients now.
        """

    def after_update(self) -> None:
        """Give the optimizer its weight decay back; it can be called again."""

    def moved(self, pending: Any) -> None:
        """Let the next state take effect; it can be called again after an interrupt."""
        self.ever_reached = list(map(or_, self.ever_reached or pending.reached, pending.reached))

    def optimizer_gradient(self, v: np.ndarray, count: int, batch_index: int | None) -> np.ndarray:
        """What the optimizer gets for v, the *mean* over a mini-batch's entries: a vector."""
        return v

    def state(self) -> dict[str, Any] | None:
        """The state as plain data; None if there is none. All devices hold the same."""
        if not self.has_state:
            return None
        point, mean, by_number = self.point, self.mean, partial(states.by_number, self.network)
        return {
            "weights": point and by_number([row[0] for row in point.weights]),
            self.mean_key: mean and by_number(mean.sums[0]),
            "entries": mean and mean.divisor(),
            "in_objective": by_number(self.ever_reached),
        }

    def problems(self, state: Any) -> Iterator[str]:
        """Tell why a state from a file cannot be assigned."""
        for name, is_kept in (("weights", self.keeps_weights), (self.mean_key, self.keeps_mean)):
            if (state.get(name) is not None) != is_kept:
                verb = "lacks" if is_kept else "has"
                yield f"it {verb} {name}, unlike this method as it is set up here"
            elif is_kept:
                parameters, is_mean = states.parameters(self.network), name != "weights"
                yield from saving.array_problems(state[name], name, parameters, is_mean)

    def assign(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        if self.keeps_weights:
            self.point = states.to_point(self.network, state["weights"], state.get("frozen"))
        if self.keeps_mean:
            sums = states.to_columns(self.network, state[self.mean_key])
            self.mean = Mean(sums, state["entries"])
        self.ever_reached = states.in_order(self.network, state["in_objective"])
