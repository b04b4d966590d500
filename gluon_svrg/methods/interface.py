"""What a method is, for a trainer.

A trainer calls, in this order::

    refresh(...)               at update_full_grads
    bind(network)              when there are arrays of parameters that it does not know
    terms(batch_index)         before each minibatch: v = g + b r + k c m
    estimated(...)             when an estimate stands in the live gradients
    reduced(V, C)              when v is summed up over devices and workers: what moves, moves now,
    before_update()            just before the optimizer moves the weights,
    updated()                  and takes effect when it has moved them; if it has not,
    not_updated()              all is as before
"""

from __future__ import annotations

from typing import Any, Iterator, Sequence

import numpy as np
from mxnet.ndarray import NDArray

from .._mxnet import Arrays
from ..passes.estimate import Estimate, Terms
from ..passes.network import Network
from ..passes.points import Point
from .table import Table


class Method:
    """A method without variance reduction: v = g. Others override what they need.

    Attributes
    ----------
    needs_reduced : bool
        Whether something moves with a step, so that the kvstore must hand the reduced gradient
        back.
    needs_table : bool
        Whether a refresh keeps the gradient of each minibatch.
    needs_closure : bool
        Whether it needs all minibatches, also while there is no reference.
    has_reference : bool
        Whether there is something that a minibatch's gradient is compared with.
    """

    needs_reduced = False
    coefficient = 1.0  # how much of the correction is used, where a method has a choice
    needs_table = False
    needs_closure = False

    @property
    def has_reference(self) -> bool:
        """Whether a refresh has been made, and is in force."""
        return False

    @property
    def in_objective(self) -> Sequence[bool]:
        """Per trainable parameter: whether the mean gradient moves it; empty if there is none."""
        return ()

    @property
    def full_grads(self) -> Arrays:
        """The mean gradient, per trainable parameter and device."""
        return []

    @property
    def num_rows(self) -> int:
        """How many gradients of minibatches are stored."""
        return 0

    def refresh(
        self,
        network: Network,
        mean: Arrays,
        in_objective: list[bool],
        entries: int,
        table: Table | None,
    ) -> None:
        """Take the current weights for the reference, and the full gradient there.

        Parameters
        ----------
        network : Network
            Whose weights they are.
        mean : list of list of NDArray
            The full gradient, per parameter and device; its memory is used again afterwards.
        in_objective : list of bool
            Per parameter: whether any loss depends on it.
        entries : int
            N: the loss entries of all data, over all workers.
        table : Table, optional
            The gradient of each minibatch, if it was to be kept.
        """

    def discard(self) -> None:
        """Forget the reference and free its memory."""

    def terms(self, batch_index: int | None = None) -> Terms:
        """What to add to the gradient of the next minibatch."""
        return Terms()

    def confirm(self, batch_index: int) -> None:
        """Trust the stored gradients: that of a minibatch was taken anew, and is the same."""

    def points(self) -> Iterator[Point]:
        """The points that are held, the reference first; they are bound anew to new arrays."""
        return iter(())

    def difference(self, network: Network) -> str:
        """What about the parameters is not as it was, in words; empty if nothing."""
        return next(filter(None, (point.difference() for point in self.points())), "")

    def bind(self, network: Network) -> None:
        """Get to know arrays of the parameters that are new."""
        for point in self.points():
            point.bind()

    # --- what moves with a step ----------------------------------------------------------------

    @property
    def numbers(self) -> Sequence[float]:
        """What else is to be summed up over the workers, if there are several."""
        return ()

    def estimated(self, batch_index: int | None, terms: Terms, found: Estimate) -> None:
        """Get to know an estimate, or a plain gradient, that stands in the live gradients.

        Parameters
        ----------
        batch_index : int or None
            The minibatch, as for `terms`.
        terms : Terms
            What was added to g.
        found : Estimate
            What the minibatch gave.
        """

    def reduced(self, network: Network, scale: float, entries: float | NDArray) -> None:
        """Look at the reduced estimate V in the live gradients, and perhaps change it.

        Parameters
        ----------
        network : Network
            Whose live gradients hold V, on every device, times the scale.
        scale : float
            Of the losses.
        entries : float or NDArray
            C: the loss entries over all devices, workers and micro-batches since the last update.
            With several workers an array of C and the sums of `numbers`.
        """

    def handed_over(
        self, v: list[np.ndarray], entries: int, batch_index: int | None
    ) -> list[np.ndarray]:
        """What the optimizer would get of the estimate v of one minibatch alone; nothing moves.

        Parameters
        ----------
        v : list of ndarray
            Per trainable parameter, flat, the mean over the minibatch's loss entries.
        entries : int
            These.
        batch_index : int or None
            The minibatch, as for `terms`.
        """
        return v

    def before_update(self, network: Network) -> None:
        """Look at the weights just before the optimizer moves them."""

    def updated(self) -> None:
        """Let what moves take effect."""

    def not_updated(self) -> None:
        """Leave all as it is: the update was skipped, or failed."""

    # --- its state, to be saved with the trainer -----------------------------------------------

    def state(self) -> Any:
        """What a file holds of it: plain data and arrays, with parameters by their numbers."""
        return None

    def problems(self, state: Any, network: Network) -> Iterator[str]:
        """Tell why a state cannot be assigned, in words."""
        if state is not None:
            yield "it holds a state of another method"

    def assign(self, state: Any, network: Network) -> None:
        """Take over a state."""
