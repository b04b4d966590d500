"""SVRG: stochastic variance-reduced gradient.

::

    v = g - alpha ( r - c mu )

``g`` and ``r`` are the gradients of one mini-batch at the current weights and at the snapshot, each
the *sum* over its ``c`` loss entries; ``mu`` is the full gradient at the snapshot, the *mean* over
all entries of all data. With a coefficient ``alpha`` of 1 this is SVRG, below it alpha-SVRG.

With stored gradients, a table has ``r - c mu`` of each mini-batch, and a step with its index takes
``g`` alone.
"""

from __future__ import annotations

from typing import Any, Iterator

from . import saving
from .curvature.preconditioner import Nystrom, Preconditioned
from .passes import states
from .passes.combine import assign
from .passes.estimate import PLAIN_GRADIENT, EstimateCoefficients
from .passes.full_pass import FullGradient
from .passes.method import Method
from .passes.rows import NO_ROW, StaleTableCheck, StoredGradient
from .schedule import Coefficient, Schedule
from .trainer import VarianceReducedTrainer


class SVRG(Method):
    """The snapshot, the full gradient there, and the coefficient, which is rounded to float32."""

    needs_refresh = True
    can_store_grads = True
    keeps_weights = keeps_frozen = keeps_mean = True
    mean_key = "full_grads"

    def __init__(self, coefficient: Schedule = 1.0) -> None:
        super().__init__()
        self.coefficient: Coefficient = Coefficient(coefficient)
        self.table: list[StoredGradient] | None = None  # r - c mu of all mini-batches

    def terms(self, batch_index: int | None, rows: dict[int, Any]) -> EstimateCoefficients:
        """``v = g - alpha r + alpha c mu``, or ``v = g - alpha (r - c mu)`` with a table."""
        alpha = self.coefficient.rounded
        if self.point is None or not alpha:
            return PLAIN_GRADIENT
        if batch_index is None:
            return EstimateCoefficients(b=-alpha, k=alpha, reference=self.point, mean=self.mean)
        return EstimateCoefficients(b=-alpha, reference=self._row(batch_index))

    def _row(self, index: int) -> StoredGradient:
        if self.table is None:
            raise RuntimeError(
                "batch_index needs the gradients of all mini-batches at the snapshot. Call "
                "update_full_grads(closure, data, store_grads=True), or leave batch_index out."
            )
        if not 0 <= index < len(self.table):
            raise IndexError(NO_ROW.format(index=index, count=len(self.table)))
        return self.table[index]

    def refresh(self, full: FullGradient) -> None:
        """Take a snapshot of the current weights, and keep the full gradient there."""
        for row in full.rows:  # which becomes r - c mu
            for count, grads, sums in zip(row.counts, row.grads, full.mean.sums):
                assign([grads, sums], (0, ((1.0, 0), (-count / full.mean.entries, 1))))
        super().refresh(full)
        self.table = full.rows or None
        self.taken_at = StaleTableCheck(self.point) if self.point and full.rows else None

    def state(self) -> dict[str, Any] | None:
        """The snapshot. Devices hold the same, but for the table and operators' states."""
        state = super().state()
        if state is None or self.point is None:
            return None
        state.update(states.point_state(self.network, self.point))
        state["table"] = None
        if self.table is not None and self.taken_at is not None:
            table = states.table_state(self.network, self.table)
            state["table"] = {**table, "outside": self.taken_at.outside}
        return state

    def problems(self, state: Any) -> Iterator[str]:
        """Tell why a state cannot be assigned."""
        yield from super().problems(state)
        frozen = states.parameters(self.network, trainable=False)
        frozen = {n: p for n, p in frozen.items() if n in state["frozen"]}
        yield from saving.array_problems(state["frozen"], "frozen values", frozen)
        if state["table"] is not None:
            hint = " (save after update_full_grads() without store_grads=True)"
            yield from states.table_problems(self.network, state["table"], hint)

    def assign(self, state: dict[str, Any]) -> None:
        """Take over a snapshot. Its table is checked again: the data may have changed."""
        super().assign(state)
        table = state["table"]
        if table is not None and self.point is not None:
            self.table = states.rows_of(self.network, table, range(len(table["counts"])))
            self.taken_at = StaleTableCheck(self.point, outside=table["outside"])


class PreconditionedSVRG(Preconditioned, SVRG):
    """SVRG whose estimate becomes the direction of a preconditioner."""

    name = "SVRG"


def _svrg(coefficient: Schedule = 1.0, preconditioner: Nystrom | None = None) -> SVRG:
    if preconditioner is None:
        return SVRG(coefficient)
    return PreconditionedSVRG(coefficient, preconditioner)


class SVRGTrainer(VarianceReducedTrainer):
    """A `gluon.Trainer` whose gradients are variance-reduced by SVRG [1]_.

    From time to time, `update_full_grads` takes a snapshot of the parameters, and computes the full
    gradient there. Between snapshots, `step` replaces the gradient of each mini-batch by::

        g - coefficient * (g_snapshot - count * full_grad)

    ``g`` and ``g_snapshot`` are its gradients at the current weights and at the snapshot, each the
    *sum* over its ``count`` loss entries: the numbers that the closure returns, usually one for
    each sample, of shape ``(batch,)``. ``full_grad`` is the *mean* over the loss entries of all
    data. The result goes to the kvstore and the optimizer as in `gluon.Trainer`. Without a
    snapshot or a preconditioner, this is a `gluon.Trainer`.

    Parameters
    ----------
    coefficient : float or callable, default 1.0
        The factor of the correction: 1 is SVRG, 0 the plain optimizer, and values in between are
        alpha-SVRG [2]_. A callable is called with the index of each snapshot (0, 1, ...), perhaps
        more than once, and returns its coefficient.
    preconditioner : Nystrom, optional
        Learns the curvature of the loss, and sets the learning rate and the momentum [3]_, which
        must be left out. For convex losses, with SGD or NAG. If the loss rises, the weights return
        to the last snapshot, or to the start.

    References
    ----------
    .. [1] R. Johnson and T. Zhang, "Accelerating Stochastic Gradient Descent using Predictive
       Variance Reduction", NeurIPS 2013.
    .. [2] Y. Yin, Z. Xu, Z. Li, T. Darrell and Z. Liu, "A Coefficient Makes SVRG Effective",
       ICLR 2025, arXiv:2311.05589.
    .. [3] Z. Frangella, P. Rathore, S. Zhao and M. Udell, "PROMISE: Preconditioned Stochastic
       Optimization Methods by Incorporating Scalable Curvature Estimates", JMLR 25(346), 2024.

    Examples
    --------
    >>> import numpy as np
    >>> from mxnet import gluon
    >>> from gluon_svrg import SVRGTrainer
    >>> samples = np.random.rand(20, 3).astype('float32')
    >>> labels = samples.sum(axis=1, keepdims=True)
    >>> data = gluon.data.DataLoader(gluon.data.ArrayDataset(samples, labels), batch_size=4)
    >>> net = gluon.nn.Dense(1)
    >>> net.initialize()
    >>> loss_fn = gluon.loss.L2Loss()
    >>> trainer = SVRGTrainer(net.collect_params(), 'sgd', {'learning_rate': 0.1})
    >>> def loss_of(X, y):
    ...     return loss_fn(net(X), y)
    >>> for epoch in range(4):
    ...     if epoch % 2 == 0:
    ...         mean_loss = trainer.update_full_grads(loss_of, data)
    ...     for X, y in data:
    ...         loss = trainer.step(len(X), closure=lambda: loss_of(X, y))
    >>> trainer.num_snapshots, trainer.inner_steps, trainer.grad_evaluations
    (2, 10, 200)
    """

    _method: SVRG
    _method_class = staticmethod(_svrg)  # type: ignore[assignment]

    @property
    def coefficient(self) -> float:
        """The factor of the correction in force. Can be set to a number or a callable."""
        return self._method.coefficient.value

    @coefficient.setter
    def coefficient(self, value: Schedule) -> None:
        self._method.check_coefficient(value)
        self._method.coefficient.change(value, max(self.num_snapshots - 1, 0))

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate, as `gluon.Trainer`.

        Parameters
        ----------
        lr : float
            The learning rate.

        Raises
        ------
        RuntimeError
            With a preconditioner, which sets the learning rate itself.
        """
        self._method.check_rate_is_free()
        super().set_learning_rate(lr)
