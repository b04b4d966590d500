"""SVRG: stochastic variance-reduced gradient.

::

    v = g - alpha ( r - c mu )

``g`` and ``r`` are the gradients of one minibatch at the current weights and at the snapshot, each
the *sum* over its ``c`` loss entries; ``mu`` is the full gradient at the snapshot, the *mean* over
all entries of all data [1]_. With a coefficient ``alpha`` of 1 this is SVRG, with 0 the plain
gradient, in between alpha-SVRG [2]_.

References
----------
.. [1] R. Johnson and T. Zhang, "Accelerating Stochastic Gradient Descent using Predictive Variance
   Reduction", NeurIPS 2013.
.. [2] Y. Yin, Z. Xu, Z. Li, T. Darrell and Z. Liu, "A Coefficient Makes SVRG Effective",
   ICLR 2025, arXiv:2311.05589.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, Iterator, Sequence

import numpy as np

from .. import _mxnet
from .._mxnet import Arrays
from ..passes import sketch
from ..passes.arrays import Buffers, buffers_like, copies, copy_all, per_device
from ..passes.estimate import Row, Terms
from ..passes.full_pass import FullGradient
from ..passes.multiples import combine
from ..passes.network import Network
from ..passes.points import Point
from . import barzilai_borwein
from .coefficient import Coefficient, Schedule
from .fields import ArrayPerParameter, Fields, Flags, FrozenValues, StoredGradients, assign
from .interface import Live, Method
from .table import Table


@lru_cache(maxsize=8)
def _rounded(value: float) -> float:
    """A number as MXNet rounds the hyperparameters of its optimizers."""
    return float(np.float32(value))


class SVRG(Method):
    """The snapshot, the full gradient there, and the coefficient.

    Parameters
    ----------
    coefficient : float or callable
        alpha, or a function from the snapshot's index to it; it is rounded to float32, as MXNet
        rounds the hyperparameters of its optimizers.
    """

    needs_refresh = True
    can_store_grads = True

    def __init__(self, coefficient: Schedule) -> None:
        super().__init__()
        self.coefficient: Coefficient = Coefficient(coefficient)
        # Replaced at each refresh, in place.
        self.snapshot: Point | None = None  # the weights and frozen values
        self._full_grads: Arrays = []  # mu there, times `_multiple`
        self._multiple = 1
        self.table: Table | None = None  # the gradients of all minibatches there

    # --- a minibatch ---------------------------------------------------------------------------

    def terms(self, batch_index: int | None = None, live: Live | None = None) -> Terms:
        """What to add to g: ``- alpha r + alpha c mu``, where a multiple of mu is kept.

        With a table, ``- alpha (r - c mu)``, which is the row.
        """
        alpha = _rounded(self.coefficient.value)
        if self.snapshot is None or not alpha:
            return Terms()
        if batch_index is not None:
            return Terms(b=-alpha, reference=self._row(batch_index))
        k, mean = alpha / self._multiple, self._full_grads
        return Terms(b=-alpha, k=k, reference=self.snapshot, mean=mean)

    def _row(self, index: int) -> Row:
        """The row ``r - c mu`` of a minibatch."""
        table = self._stored()
        assert self.snapshot is not None
        if not table.is_confirmed and not self.snapshot.network.outside.is_as(table.outside):
            table.is_confirmed = True  # another trainer has moved what the closure uses
        row = table.reference(index)
        if table.is_confirmed:
            return row
        stored = partial(table.uncentered, index, self._full_grads, self._multiple)
        again = table.was_confirmed
        return row._replace(point=self.snapshot, stored=stored, is_checked_again=again)

    def confirm(self, batch_index: int) -> None:
        """Trust the stored gradients: one was computed again, and was the same."""
        self._stored().is_confirmed = True

    def _stored(self) -> Table:
        if self.table is None:
            raise RuntimeError(
                "batch_index needs the gradients of all minibatches at the snapshot. Call "
                "update_full_grads(closure, data, store_grads=True), or leave batch_index out."
            )
        return self.table

    # --- the snapshot --------------------------------------------------------------------------

    def prepared(self, full: FullGradient, table: Table | None) -> FullGradient:
        """Multiply mu by the loss entries of a minibatch, if this rounds nothing; center a table.

        Most minibatches have as many entries c as the first. With c mu instead of mu, steps need
        not multiply.
        """
        multiple = full.of_first
        if not multiple & (multiple - 1):  # a power of two
            for means in per_device(full.mean):
                combine([float(multiple)], [means], means)
            full = full._replace(multiple=multiple)
        if table is not None:
            table.center(full.mean, full.multiple)
        return full

    def refresh(self, network: Network, full: FullGradient, table: Table | None) -> None:
        """Take a snapshot of the current weights, and keep the full gradient there."""
        if self.snapshot is None:
            full_grads = Buffers(copies(full.mean))
            self.snapshot, self._full_grads = Point.copied(network), full_grads
        else:
            self.snapshot.move()
            copy_all(full.mean, self._full_grads)
        self._multiple, self.in_objective = full.multiple, full.in_objective
        self.table = table
        if table is not None:
            table.outside = sketch.sketch(network.outside.weights)

    def learning_rate(
        self, network: Network, full: FullGradient, wds: Sequence[float], steps: int
    ) -> float | None:
        """The Barzilai-Borwein rate for a refresh at the current weights, or None."""
        if self.snapshot is None:
            return None
        weights = (row[0] for row in map(_mxnet.all_rows, network.trainable))
        before = (row[0] for row in self.snapshot.weights), (row[0] for row in self._full_grads)
        now = weights, (row[0] for row in full.mean)
        multiples = self._multiple, full.multiple
        return barzilai_borwein.learning_rate(before, now, multiples, wds, steps)

    def discard(self) -> None:
        """Forget the snapshot and free its memory."""
        self.snapshot, self.table, self._full_grads, self.in_objective = None, None, [], []
        self._multiple = 1

    def points(self) -> Iterator[Point]:
        """The snapshot, if there is one."""
        if self.snapshot is not None:
            yield self.snapshot

    # --- what can be asked ---------------------------------------------------------------------

    @property
    def has_reference(self) -> bool:
        """Whether there is a snapshot."""
        return self.snapshot is not None

    @property
    def full_grads(self) -> Arrays:
        """A copy of mu, per trainable parameter and device."""
        return [[multiple / self._multiple for multiple in row] for row in self._full_grads]

    # --- files ---------------------------------------------------------------------------------

    @property
    def fields(self) -> Fields:
        """What of the state a file holds."""
        return Fields(
            "its snapshot has another form",
            weights=ArrayPerParameter("snapshot", summed=False),
            full_grads=ArrayPerParameter("full gradient", summed=True),
            frozen=FrozenValues(),
            in_objective=Flags(),
            table=StoredGradients(" (save after update_full_grads() without store_grads=True)"),
        )

    def values(self) -> dict[str, Any] | None:
        """The snapshot. All devices hold the same, except for states that operators change."""
        if self.snapshot is None:
            return None
        return {
            "weights": self.snapshot.weights,
            "full_grads": [[row[0] / self._multiple] for row in self._full_grads],
            "frozen": self.snapshot.frozen,
            "in_objective": self.in_objective,
            "table": self.table,
        }

    def take(self, values: dict[str, Any], network: Network) -> None:
        """Take over a snapshot."""
        snapshot, full_grads = Point.copied(network), buffers_like(network.live_grads)
        assign(values["weights"], snapshot.weights)
        assign(values["full_grads"], full_grads)
        assign(values["frozen"], snapshot.frozen or [])
        self.in_objective, self.table = values["in_objective"], values["table"]
        if self.table is not None and not self.table.is_centered:  # of a file before 0.3.0
            self.table.center(full_grads, 1)
        self._full_grads, self.snapshot = full_grads, snapshot
