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
from ..passes.arrays import Buffers, buffers_like, copies, copy_all, per_device
from ..passes.estimate import Row, Terms
from ..passes.full_pass import FullGradient
from ..passes.multiples import combine
from ..passes.network import Network
from ..passes.points import Point
from ..saving.values import ByParameter
from . import barzilai_borwein, checks
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
        self._full_grads: Arrays = []  # times `_multiple`
        self._multiple = 1
        self.table: Table | None = None
        self._in_objective: list[bool] = []

    @property
    def has_reference(self) -> bool:
        """Whether there is a snapshot."""
        return self.snapshot is not None

    @property
    def in_objective(self) -> Sequence[bool]:
        """Per trainable parameter: whether the full gradient moves it."""
        return self._in_objective

    @property
    def full_grads(self) -> Arrays:
        """A copy of mu, per trainable parameter and device."""
        return [[multiple / self._multiple for multiple in row] for row in self._full_grads]

    @property
    def num_rows(self) -> int:
        """How many gradients of minibatches are stored."""
        return len(self.table or ())

    def terms(self, batch_index: int | None = None) -> Terms:
        """What to add to g: ``- alpha r + alpha c mu``, where a multiple of mu is kept."""
        alpha = float(np.float32(self.coefficient))
        if self.snapshot is None or not alpha:
            return Terms()
        reference: Point | Row = self.snapshot
        if batch_index is not None:
            reference = self.stored().reference(batch_index)
            if not self.stored().is_confirmed:
                reference = reference._replace(point=self.snapshot)
        mean = self._full_grads
        return Terms(b=-alpha, k=alpha / self._multiple, reference=reference, mean=mean)

    def stored(self) -> Table:
        """The gradients of all minibatches. Raises if they were not stored."""
        if self.table is None:
            raise RuntimeError(
                "batch_index needs the gradients of all minibatches at the snapshot. Call "
                "update_full_grads(closure, data, store_grads=True), or leave batch_index out."
            )
        return self.table

    def prepared(self, full: FullGradient) -> FullGradient:
        """Multiply mu by the loss entries of a minibatch, if this rounds nothing.

        Most minibatches have as many entries c as the first. With c mu instead of mu, steps need
        not multiply.
        """
        multiple = full.of_first
        if multiple & (multiple - 1):  # no power of two
            return full
        for means in per_device(full.mean):
            combine([float(multiple)], [means], means)
        return full._replace(multiple=multiple)

    def refresh(self, network: Network, full: FullGradient, table: Table | None) -> None:
        """Take a snapshot of the current weights, and keep the full gradient there."""
        if self.snapshot is None:
            full_grads = Buffers(copies(full.mean))
            self.snapshot, self._full_grads = Point.copied(network), full_grads
        else:
            self.snapshot.move()
            copy_all(full.mean, self._full_grads)
        self._multiple, self._in_objective = full.multiple, full.in_objective
        self.table = table

    def learning_rate(
        self, network: Network, full: FullGradient, wds: Sequence[float], steps: int
    ) -> Any:
        """The Barzilai-Borwein rate for a refresh at the current weights, or None."""
        if self.snapshot is None:
            return None
        weights = (row[0] for row in map(_mxnet.all_rows, network.trainable))
        before = (row[0] for row in self.snapshot.weights), (row[0] for row in self._full_grads)
        now = weights, (row[0] for row in full.mean)
        multiples = self._multiple, full.multiple
        return barzilai_borwein.learning_rate(before, now, multiples, wds, steps)

    def confirm(self, batch_index: int) -> None:
        """Trust the stored gradients: one was computed again, and was the same."""
        self.stored().is_confirmed = True

    def discard(self) -> None:
        """Forget the snapshot and free its memory."""
        self.snapshot, self.table, self._full_grads, self._in_objective = None, None, [], []
        self._multiple = 1

    def points(self) -> Iterator[Point]:
        """The snapshot, if there is one."""
        if self.snapshot is not None:
            yield self.snapshot

    # --- its state, to be saved with the trainer -----------------------------------------------

    def state(self) -> Any:
        """The values of the snapshot, the full gradient and the table.

        All devices hold the same values, except for states that operators change by themselves.
        """
        if self.snapshot is None:
            return None
        network = self.snapshot.network
        number = {p: n for n, p in enumerate(network.parameters)}
        trainable = [number[p] for p in network.trainable]
        frozen = zip(network.frozen, self.snapshot.frozen or ())
        return {
            "weights": ByParameter(zip(trainable, (row[0] for row in self.snapshot.weights))),
            "full_grads": ByParameter(
                zip(trainable, (row[0] / self._multiple for row in self._full_grads))
            ),
            "frozen": ByParameter(
                (number[p], list(values if _mxnet.is_auxiliary(p) else values[:1]))
                for p, values in frozen
            ),
            "in_objective": ByParameter(zip(trainable, self._in_objective)),
            "table": None if self.table is None else self.table.state(trainable),
        }

    def problems(self, state: Any, network: Network) -> Iterator[str]:
        """Describe why a state cannot be assigned."""
        if state is None:
            return
        names = {"weights", "full_grads", "frozen", "in_objective", "table"}
        if not isinstance(state, dict) or set(state) != names:
            yield "its snapshot has another form"
            return
        parameters = network.parameters
        chosen = checks.numbers_of(parameters, trainable=True)
        yield from checks.by_parameter(
            state["weights"], "snapshot", parameters, chosen, summed=False
        )
        yield from checks.by_parameter(
            state["full_grads"], "full gradient", parameters, chosen, summed=True
        )
        frozen, is_frozen = state["frozen"], checks.numbers_of(parameters, trainable=False)
        if not isinstance(frozen, dict) or not set(frozen) <= set(is_frozen):
            yield "its frozen values belong to other parameters"
        else:
            for n, values in frozen.items():
                for value in values if isinstance(values, list) and values else [None]:
                    yield from checks.array(value, "frozen value", parameters[n], summed=False)
        yield from checks.flags(state["in_objective"], chosen)
        yield from checks.table(state["table"], parameters, chosen, len(network.devices))

    def assign(self, state: Any, network: Network) -> None:
        """Take over a state that has no problems."""
        self.discard()
        if state is None:
            return
        number = {p: n for n, p in enumerate(network.parameters)}
        snapshot = Point.copied(network)
        full_grads = buffers_like(network.live_grads)
        for p, weights, means in zip(network.trainable, snapshot.weights, full_grads):
            assign_array([state["weights"][number[p]]], weights)
            assign_array([state["full_grads"][number[p]]], means)
        for p, targets in zip(network.frozen, snapshot.frozen or ()):
            if number[p] in state["frozen"]:  # a file of 0.1.0 has only some of them
                assign_array(state["frozen"][number[p]], targets)
        self._in_objective = [state["in_objective"][number[p]] for p in network.trainable]
        if state["table"] is not None:
            trainable = [number[p] for p in network.trainable]
            self.table = Table.of_state(state["table"], trainable, network.devices)
        self._full_grads, self.snapshot = full_grads, snapshot


def assign_array(values: Sequence[Any], targets: Sequence[Any]) -> None:
    """Assign values to the arrays of all devices; the first value if there are too few."""
    for n, target in enumerate(targets):
        value = np.asarray(values[n] if n < len(values) else values[0])
        _mxnet.to_ndarray(value, _mxnet.device_of(target)).copyto(_mxnet.classic(target))
