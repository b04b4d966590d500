"""The interface of a method.

A trainer calls, in this order::

    prepared(full, table)      at update_full_grads, when the full gradient is known
    refresh(...)               right after it; must not be interrupted
    bind(network)              when parameters have new arrays
    terms(batch_index, live)   before each minibatch: v = g + b r + k c m
    row(terms, found)          when v is computed: what to keep of the minibatch until the update
    reduced(...)               when v is summed over devices and workers: computes the next state
    before_update(...)         just before the optimizer moves the weights
    changes(live)              after it has moved them: what puts the next state in place
    dropped(live)              instead, if there was no update: the next state is forgotten

Only `changes`, `refresh`, `take` and `discard` change what a file holds. What is known of a step
before its update is in the `LiveGradients`, which is dropped as a whole.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any, Iterator, Protocol, Sequence, Sized

import numpy as np
from mxnet.ndarray import NDArray

from .._mxnet import Arrays
from ..passes.estimate import Estimate, Terms
from ..passes.full_pass import FullGradient
from ..passes.network import Network
from ..passes.points import Point
from .coefficient import Coefficient
from .fields import Fields
from .table import Table

#: What to put in place when the weights have moved: attributes, and their new values.
Changes = Sequence[Any]


NOT_CORRECTED = (
    "{name}() needs {method} gradients while a snapshot is held: pass "
    "step(batch_size, closure=...), or call correct_grads(closure) before. To go on with the "
    "plain optimizer, call discard_snapshot()."
)


class Live(Protocol):
    """What a method sees of the live gradients: the minibatches since the last update."""

    @property
    def rows(self) -> dict[int, Any]:
        """What `Method.row` has returned, by the index of the minibatch."""

    @property
    def reached(self) -> list[bool]:
        """Per trainable parameter: whether the loss of any minibatch depends on it."""

    @property
    def total(self) -> Arrays:
        """V as it was computed, per trainable parameter and device."""

    @property
    def total_scale(self) -> float | None:
        """The scale of the total; None if it is that of the live gradients."""

    @property
    def following(self) -> Any:
        """What `Method.reduced` has returned; None before that."""


class Method:
    """A method without variance reduction: v = g. Other methods override what they need.

    Attributes
    ----------
    needs_reduced : bool
        Whether the method has a state that changes with a step, so that the kvstore must return
        the reduced gradient.
    keeps_errors : bool
        Whether an error of the reduction, as of compression, would stay in that state.
    replaces_grads : bool
        Whether `reduced` computes the gradient of the optimizer.
    needs_table : bool
        Whether a refresh keeps the gradient of each minibatch, and each minibatch has an index.
    needs_refresh : bool
        Whether the method is the plain optimizer until the first refresh.
    can_store_grads : bool
        Whether gradients of minibatches can be stored.
    needs_closure : bool
        Whether the method needs a closure for every step, even without a reference.
    not_corrected : str
        The message if a step begins without an estimate.
    settings : tuple of str
        The hyperparameters, as ``repr`` shows them.
    coefficient : Coefficient or None
        How much of the correction is used, where a method has a choice.
    table : sized or None
        The gradients of minibatches that are stored.
    in_objective : sequence of bool
        Per trainable parameter: whether the mean gradient moves it; empty without a mean.
    """

    needs_reduced = False
    keeps_errors = False
    replaces_grads = False
    needs_table = False
    needs_refresh = False
    can_store_grads = False
    needs_closure = False
    not_corrected = NOT_CORRECTED

    def __init__(self) -> None:
        self.settings: tuple[str, ...] = ()
        self.coefficient: Coefficient | None = None
        self.table: Sized | None = None
        self.in_objective: Sequence[bool] = ()

    # --- the arguments of its trainer ----------------------------------------------------------

    def check_compression(self, compression_params: Any, trainer: str) -> None:
        """Raise if gradients must not be compressed."""
        if compression_params and self.keeps_errors:
            raise ValueError(
                f"{trainer} cannot compress gradients: its mean gradient moves by each reduced "
                "gradient, so an error would stay forever. Leave compression_params out."
            )

    def checked_index(self, index: Any, name: str, trainer: str) -> int | None:
        """The index of a minibatch as Python's own integer; raise if it cannot be one."""
        if index is None and self.needs_table:
            raise TypeError(
                f"{name}() needs batch_index=..., the position of the minibatch, with the closure: "
                "it names the row of the table that holds the last gradient of this minibatch, and "
                "that this step replaces. Keep the minibatches in a list, and shuffle their "
                "positions."
            )
        if index is None:
            return None
        if not self.can_store_grads:
            raise TypeError(
                f"batch_index names a stored gradient, and {trainer} has none. Leave it out."
            )
        if type(index) is int:  # the others take Python longer to tell
            return index
        if isinstance(index, bool) or not isinstance(index, Integral):
            raise TypeError(
                f"batch_index must be the position of a minibatch, an integer, got "
                f"{type(index).__name__}."
            )
        return int(index)

    def check_store_grads(self, store_grads: bool, trainer: str) -> None:
        """Raise if gradients are to be stored, and the method has no use for them."""
        if store_grads and not self.can_store_grads:
            raise ValueError(
                f"store_grads=True: {trainer} compares each minibatch with the step before, and "
                "has no use for stored gradients. Leave it out."
            )

    # --- the reference -------------------------------------------------------------------------

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference to compare a minibatch's gradient with."""
        return False

    @property
    def has_snapshot(self) -> bool:
        """Whether the reference is of one point, for users to look at."""
        return self.has_reference

    @property
    def full_grads(self) -> Arrays:
        """A copy of the mean gradient, per trainable parameter and device."""
        return []

    def prepared(self, full: FullGradient, table: Table | None) -> FullGradient:
        """Change the results of a pass before they are taken over, in their own memory."""
        return full

    def refresh(self, network: Network, full: FullGradient, table: Table | None) -> None:
        """Make the current weights the reference, with the full gradient there.

        Parameters
        ----------
        network : Network
            The network at these weights.
        full : FullGradient
            What `prepared` has returned; its memory is reused afterwards.
        table : Table, optional
            The gradient of each minibatch, if they were stored.
        """

    def discard(self) -> None:
        """Forget the reference and free its memory."""

    def points(self) -> Iterator[Point]:
        """The points that the method keeps, the reference first, to be bound to new arrays."""
        return iter(())

    def difference(self, network: Network) -> str:
        """Describe how the parameters differ from those at the reference; empty if they do not."""
        return next(filter(None, (point.difference() for point in self.points())), "")

    def bind(self, network: Network) -> None:
        """Bind to new arrays of the parameters."""
        for point in self.points():
            point.bind()

    # --- a minibatch ---------------------------------------------------------------------------

    def terms(self, batch_index: int | None = None, live: Live | None = None) -> Terms:
        """What to add to the gradient of the next minibatch.

        Parameters
        ----------
        batch_index : int, optional
            The position of the minibatch in the data.
        live : Live, optional
            What the live gradients hold already, if v will be added to it.
        """
        return Terms()

    def confirm(self, batch_index: int) -> None:
        """Trust the stored gradients: one was computed again, and was the same."""

    def row(self, terms: Terms, found: Estimate) -> Any:
        """What to keep of a minibatch with an index until the update."""
        return None

    # --- the state that changes with a step ----------------------------------------------------

    def numbers(self, live: Live) -> Sequence[float]:
        """More numbers to sum over the workers, if there are several."""
        return ()

    def reduced(self, network: Network, live: Live, scale: float, entries: float | NDArray) -> Any:
        """Use the reduced estimate V, and perhaps change the live gradients.

        Parameters
        ----------
        network : Network
            The network, whose live gradients hold V times the scale, on every device, or what the
            user has made of it.
        live : Live
            The minibatches of V, and V as it was computed.
        scale : float
            The scale of the live gradients.
        entries : float or NDArray
            C: the loss entries over all devices, workers and micro-batches since the last update.
            With several workers an array of C and the sums of `numbers`.

        Returns
        -------
        object
            The next state, for `changes`; None if the state stays.
        """
        return None

    def before_update(self, network: Network, following: Any) -> None:
        """Complete the next state with the weights, just before the optimizer moves them."""

    def changes(self, live: Live) -> Changes:
        """Pairs of a dict, such as the attributes of the method, and its new values.

        The trainer assigns them in one call into C, which no interrupt can split.
        """
        return ()

    def dropped(self, live: Live) -> Changes:
        """As `changes`, if no update has come: what takes back the memory of the step."""
        return ()

    def handed_over(
        self, v: list[np.ndarray], entries: int, batch_index: int | None
    ) -> list[np.ndarray]:
        """What the optimizer would get for the estimate v of one minibatch; nothing changes.

        Parameters
        ----------
        v : list of ndarray
            Per trainable parameter, flat, the mean over the minibatch's loss entries.
        entries : int
            The number of loss entries.
        batch_index : int or None
            The minibatch, as for `terms`.
        """
        return v

    # --- files ---------------------------------------------------------------------------------

    @property
    def fields(self) -> Fields:
        """What of the state a file holds."""
        return Fields("it holds a state of another method")

    def values(self) -> dict[str, Any] | None:
        """The values of `fields`; None if there is no reference."""
        return None

    def take(self, values: dict[str, Any], network: Network) -> None:
        """Take over the values of `fields` from a file."""
