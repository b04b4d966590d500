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
from typing import Sequence

from mxnet.ndarray import NDArray

from ._mxnet import Arrays
from .buffer import GradientBuffer
from .operations import ScaledSubtract
from .snapshot import Snapshot, copy_all, per_device
from .stored import StoredGradients


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
