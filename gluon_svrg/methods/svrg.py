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

from typing import Any, Iterator, Sequence

import numpy as np

from .. import _mxnet
from .._mxnet import Arrays
from ..passes.arrays import copies, copy_all, zeros_to_sum
from ..passes.estimate import Row, Terms
from ..passes.network import Network
from ..passes.points import Point
from .interface import Method
from .table import Table


class SVRG(Method):
    """The snapshot, the full gradient there, and the coefficient.

    Attributes
    ----------
    coefficient : float
        alpha; it is rounded to float32, as MXNet rounds the hyperparameters of its optimizers.
    snapshot : Point or None
        The weights and frozen values at which the full gradient was taken.
    table : Table or None
        The gradients of all minibatches at the snapshot.
    """

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient
        # Replaced at each refresh, in place.
        self.snapshot: Point | None = None
        self._full_grads: Arrays = []
        self.table: Table | None = None
        self._in_objective: list[bool] = []

    @property
    def has_reference(self) -> bool:
        """Whether there is a snapshot."""
        return self.snapshot is not None

    @property
    def in_objective(self) -> Sequence[bool]:
        """Per trainable parameter: whether the full gradient moves it."""
        return self._in_objective if self.has_reference and self.coefficient else ()

    @property
    def full_grads(self) -> Arrays:
        """mu, per trainable parameter and device."""
        return self._full_grads

    @property
    def num_rows(self) -> int:
        """How many gradients of minibatches are stored."""
        return len(self.table or ())

    def terms(self, batch_index: int | None = None) -> Terms:
        """What to add to g: ``- alpha r + alpha c mu``."""
        alpha = float(np.float32(self.coefficient))
        if self.snapshot is None or not alpha:
            return Terms()
        reference: Point | Row = self.snapshot
        if batch_index is not None:
            reference = self.stored().reference(batch_index)
        return Terms(b=-alpha, k=alpha, reference=reference, mean=self._full_grads)

    def stored(self) -> Table:
        """The gradients of all minibatches; raise if they were not stored."""
        if self.table is None:
            raise RuntimeError(
                "batch_index needs the gradients of all minibatches at the snapshot. Call "
                "update_full_grads(closure, data, store_grads=True), or leave batch_index out."
            )
        return self.table

    def refresh(
        self, network: Network, mean: Arrays, in_objective: list[bool], table: Table | None
    ) -> None:
        """Take a snapshot of the current weights, and the full gradient there."""
        if self.snapshot is None:
            full_grads = copies(mean)
            self.snapshot, self._full_grads = Point.copied(network), full_grads
        else:
            self.snapshot.move()
            copy_all(mean, self._full_grads)
        self._in_objective = in_objective
        self.table = table

    def discard(self) -> None:
        """Forget the snapshot and free its memory."""
        self.snapshot, self.table, self._full_grads, self._in_objective = None, None, [], []

    def points(self) -> Iterator[Point]:
        """The snapshot, if there is one."""
        if self.snapshot is not None:
            yield self.snapshot

    # --- its state, to be saved with the trainer -----------------------------------------------

    def state(self) -> Any:
        """What the snapshot, the full gradient and the table hold; the first device has it all.

        States that operators move by themselves differ between devices.
        """
        if self.snapshot is None:
            return None
        network = self.snapshot.network
        number = {p: n for n, p in enumerate(network.parameters)}
        frozen = zip(network.frozen, self.snapshot.frozen or ())
        return {
            "weights": _first(map(number.get, network.trainable), self.snapshot.weights),
            "full_grads": _first(map(number.get, network.trainable), self._full_grads),
            "frozen": {
                number[p]: list(values) if _mxnet.is_auxiliary(p) else list(values[:1])
                for p, values in frozen
            },
            "in_objective": {
                number[p]: flag for p, flag in zip(network.trainable, self._in_objective)
            },
            "table": None if self.table is None else self.table.state(),
        }

    def assign(self, state: Any, network: Network) -> None:
        """Take over a state that has no problems."""
        self.discard()
        if state is None:
            return
        number = {p: n for n, p in enumerate(network.parameters)}
        snapshot = Point.copied(network)
        full_grads = [[zeros_to_sum(grad) for grad in row] for row in network.live_grads]
        for p, weights, means in zip(network.trainable, snapshot.weights, full_grads):
            for targets, name in ((weights, "weights"), (means, "full_grads")):
                value = _mxnet.classic(state[name][number[p]])
                for target in targets:
                    value.copyto(_mxnet.classic(target))
        for p, targets in zip(network.frozen, snapshot.frozen or ()):
            values = state["frozen"].get(number[p])  # a file of 0.1.0 has some of them
            for n, target in enumerate(targets if values else ()):
                value = values[n] if n < len(values) else values[0]
                _mxnet.classic(value).copyto(_mxnet.classic(target))
        self._in_objective = [bool(state["in_objective"][number[p]]) for p in network.trainable]
        if state["table"] is not None:
            self.table = Table.of_state(state["table"], network.devices)
        self._full_grads, self.snapshot = full_grads, snapshot


def _first(numbers: Any, arrays: Arrays) -> dict[int, Any]:
    return {number: row[0] for number, row in zip(numbers, arrays)}
