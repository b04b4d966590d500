"""The interface of a method.

A trainer calls, in this order::

    prepared(full)             at update_full_grads, when the full gradient is known
    refresh(...)               right after it; must not be interrupted
    bind(network)              when parameters have new arrays
    terms(batch_index)         before each minibatch: v = g + b r + k c m
    estimated(...)             when the live gradients hold an estimate
    reduced(V, C)              when v is summed over devices and workers: computes the next state
    before_update()            just before the optimizer moves the weights
    updated()                  after it has moved them: the next state takes effect
    not_updated()              instead, if the update was skipped or failed: nothing changes
"""

from __future__ import annotations

from typing import Any, Iterator, Sequence

import numpy as np
from mxnet.ndarray import NDArray

from .._mxnet import Arrays
from ..passes.estimate import Estimate, Terms
from ..passes.full_pass import FullGradient
from ..passes.network import Network
from ..passes.points import Point
from .table import Table


class Method:
    """A method without variance reduction: v = g. Other methods override what they need.

    Attributes
    ----------
    needs_reduced : bool
        Whether the method has a state that changes with a step, so that the kvstore must return
        the reduced gradient.
    needs_table : bool
        Whether a refresh keeps the gradient of each minibatch.
    needs_closure : bool
        Whether the method needs a closure for every step, even without a reference.
    has_reference : bool
        Whether there is a reference to compare a minibatch's gradient with.
    """

    needs_reduced = False
    coefficient = 1.0  # how much of the correction is used, where a method has a choice
    needs_table = False
    needs_closure = False

    @property
    def has_reference(self) -> bool:
        """Whether a refresh was made and not discarded."""
        return False

    @property
    def in_objective(self) -> Sequence[bool]:
        """Per trainable parameter: whether the mean gradient moves it; empty without a mean."""
        return ()

    @property
    def full_grads(self) -> Arrays:
        """A copy of the mean gradient, per trainable parameter and device."""
        return []

    @property
    def num_rows(self) -> int:
        """How many gradients of minibatches are stored."""
        return 0

    def prepared(self, full: FullGradient) -> FullGradient:
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

    def terms(self, batch_index: int | None = None) -> Terms:
        """What to add to the gradient of the next minibatch."""
        return Terms()

    def confirm(self, batch_index: int) -> None:
        """Trust the stored gradients: one was computed again, and was the same."""

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

    # --- the state that changes with a step ----------------------------------------------------

    @property
    def numbers(self) -> Sequence[float]:
        """More numbers to sum over the workers, if there are several."""
        return ()

    def estimated(self, batch_index: int | None, terms: Terms, found: Estimate) -> None:
        """Use an estimate, or a plain gradient, that is in the live gradients.

        Parameters
        ----------
        batch_index : int or None
            The minibatch, as for `terms`.
        terms : Terms
            The terms that were added to g.
        found : Estimate
            The other results of the minibatch.
        """

    def reduced(self, network: Network, scale: float, entries: float | NDArray) -> None:
        """Use the reduced estimate V in the live gradients, and perhaps change it.

        Parameters
        ----------
        network : Network
            The network, whose live gradients hold V times the scale, on every device.
        scale : float
            The scale of the losses.
        entries : float or NDArray
            C: the loss entries over all devices, workers and micro-batches since the last update.
            With several workers an array of C and the sums of `numbers`.
        """

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

    def before_update(self, network: Network) -> None:
        """Use the weights just before the optimizer moves them."""

    def updated(self) -> None:
        """Let the next state take effect."""

    def not_updated(self) -> None:
        """Keep the old state: the update was skipped, or failed."""

    # --- its state, to be saved with the trainer -----------------------------------------------

    def state(self) -> Any:
        """The state for a file: plain data and arrays, with parameters by their numbers."""
        return None

    def problems(self, state: Any, network: Network) -> Iterator[str]:
        """Describe why a state cannot be assigned."""
        if state is not None:
            yield "it holds a state of another method"

    def assign(self, state: Any, network: Network) -> None:
        """Take over a state."""
