"""The formula: what SVRG makes of a minibatch gradient.

::

    g  <-  g - coefficient * ( g~ - count * mu )

``g`` and ``g~`` are the gradients of one minibatch at the current weights and at the snapshot,
each the *sum* over its loss entries; ``count`` is the number of these; ``mu`` is the full gradient
at the snapshot, the *mean* over all entries of all data [1]_. With ``coefficient`` 1 this is SVRG,
with 0 the plain gradient, in between alpha-SVRG [2]_.

References
----------
.. [1] R. Johnson and T. Zhang, "Accelerating Stochastic Gradient Descent using Predictive Variance
   Reduction", NeurIPS 2013.
.. [2] Y. Yin, Z. Xu, Z. Li, T. Darrell and Z. Liu, "A Coefficient Makes SVRG Effective",
   ICLR 2025, arXiv:2311.05589.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Sequence

from mxnet.ndarray import NDArray

from . import comparison
from ._mxnet import Arrays
from .buffer import GradientBuffer
from .operations import ScaledSubtract
from .snapshot import Snapshot, copy_all, per_device
from .stored import StoredGradients
from .stored_subtract import StoredSubtract, for_storage


def subtract(
    grads: Sequence[NDArray],
    snapshot_grads: Sequence[NDArray],
    full_grads: Sequence[NDArray],
    count: int,
    coefficient: float,
) -> None:
    """Subtract the control variate from gradients in place, as the formula says it.

    The readable twin of what `ControlVariate` runs as one operation.
    """
    for grad, snapshot_grad, full_grad in zip(grads, snapshot_grads, full_grads):
        grad -= coefficient * (snapshot_grad - count * full_grad)


class ControlVariate:
    """All that a snapshot leaves behind, and the formula over all parameters as one operation.

    Parameters
    ----------
    snapshot : Snapshot
        Where the full gradient was taken, with its own copy of the weights.
    full_grads : list of list of NDArray
        The full gradient, per parameter and device: the mean.
    buffer : GradientBuffer
        Where to keep the gradient at the snapshot.
    in_objective : list of bool
        Per parameter: whether any loss depends on it.
    stored : StoredGradients, optional
        The gradients of all minibatches at the snapshot.
    """

    # A compiled operation is bound to its count. Most data sets have two, the size of a minibatch
    # and that of the last one; where each minibatch has another, nothing is worth compiling.
    _MAX_OPERATIONS = 8
    _MAX_OF_STORED = 2  # per device: each holds as much as the full gradient

    def __init__(
        self,
        snapshot: Snapshot,
        full_grads: Arrays,
        buffer: GradientBuffer,
        in_objective: Sequence[bool],
        stored: StoredGradients | None = None,
    ) -> None:
        self.snapshot = snapshot
        self.full_grads = full_grads
        self.buffer = buffer
        self.in_objective = in_objective
        self.stored = stored
        self._forget_operations()

    def _forget_operations(self) -> None:
        self._operations: OrderedDict[tuple[int, float, float], ScaledSubtract] = OrderedDict()
        self._operations_of_stored: OrderedDict[Any, StoredSubtract] = OrderedDict()

    def bind(self) -> None:
        """Work on the gradient buffers that the parameters have now."""
        self.snapshot.bind()
        self.buffer.bind(self.snapshot.buffers)
        self._forget_operations()

    def replace(
        self,
        snapshot: Snapshot,
        full_grads: Arrays,
        in_objective: Sequence[bool],
        stored: StoredGradients | None,
    ) -> None:
        """Take over a snapshot of the same parameters, in place."""
        self.snapshot.replace(snapshot)
        copy_all(full_grads, self.full_grads)
        self.in_objective = in_objective
        self.stored = stored
        self._operations_of_stored.clear()

    def check_stored(self, index: int) -> StoredGradients:
        """Get the stored gradients, which hold that of a minibatch; raise if not."""
        if self.stored is None:
            raise RuntimeError(
                "batch_index needs the gradients of all minibatches at the snapshot. Call "
                "update_full_grads(closure, data, store=True), or leave batch_index out."
            )
        self.stored.check_index(index)
        return self.stored

    def subtract_from_grads(
        self, counts: Sequence[int], coefficient: float, scale: float = 1.0
    ) -> None:
        """Turn the gradients in the buffers into the SVRG estimate, in place.

        The gradient at the snapshot has been kept in the buffer, and is lost.

        Parameters
        ----------
        counts : sequence of int
            The number of loss entries per device.
        coefficient : float
            Rounded to float32, as MXNet rounds all scalars of its optimizers.
        scale : float
            Of the losses, and so of both gradients; not of the full gradient.
        """
        for device, count in enumerate(counts):
            if count:  # without entries both gradients are zero
                self._operation(device, count * scale, coefficient)()

    def subtract_stored_from_grads(
        self, index: int, counts: Sequence[int], coefficient: float, scale: float = 1.0
    ) -> None:
        """Do the same with the stored gradient of a minibatch at the snapshot."""
        stored = self.check_stored(index)
        for device, count in enumerate(counts):
            if count:
                operation = self._operation_of_stored(device, count, coefficient, scale)
                operation(stored.grads[index][device])

    def difference_to_stored(self, index: int, scale: float) -> float:
        """How much the gradients in the buffers differ from the stored one of a minibatch."""
        stored = self.check_stored(index)
        columns, to_scale = per_device(self.snapshot.buffers), stored.scale / scale
        gradient = [[for_storage(grad) * to_scale for grad in column] for column in columns]
        again = StoredGradients(stored.scale)
        again.grads.append([[grad.copy() for grad in column] for column in gradient])
        again.counts.append(stored.counts[index])
        if stored.prepared:
            again.prepare(self.full_grads)
        return comparison.difference(again.grads[0], stored.grads[index], gradient)

    def _operation(self, device: int, count: float, coefficient: float) -> ScaledSubtract:
        """The operation for a count, compiled when it comes for the second time."""
        key = device, count, coefficient
        if key in self._operations:
            self._operations[key].compile()
        else:
            arrays = (self.snapshot.buffers, self.buffer.arrays, self.full_grads)
            grads, snapshot_grads, full_grads = (per_device(rows)[device] for rows in arrays)
            self._operations[key] = ScaledSubtract(
                grads, snapshot_grads, full_grads, rate=coefficient, decay=count
            )
            if len(self._operations) > self._MAX_OPERATIONS:
                self._operations.popitem(last=False)
        self._operations.move_to_end(key)
        return self._operations[key]

    def _operation_of_stored(
        self, device: int, count: int, coefficient: float, scale: float
    ) -> StoredSubtract:
        """The operation for a count, for all minibatches that have so many entries."""
        stored = self.stored
        if stored is not None and stored.prepared:
            count = 0  # is in what is stored
        key = device, count, coefficient, scale
        if stored is not None and key not in self._operations_of_stored:
            arrays = (self.snapshot.buffers, self.full_grads)
            grads, full_grads = (per_device(rows)[device] for rows in arrays)
            self._operations_of_stored[key] = StoredSubtract(
                grads,
                full_grads,
                coefficient,
                count * scale,
                factor=scale / stored.scale,
                prepared=stored.prepared,
            )
            if len(self._operations_of_stored) > self._MAX_OF_STORED * len(self.full_grads[0]):
                self._operations_of_stored.popitem(last=False)
        self._operations_of_stored.move_to_end(key)
        return self._operations_of_stored[key]
