"""SAGA and SAG: a table with the last gradient of each mini-batch.

::

    v = g - r + c m

``g`` is the gradient of one mini-batch at the current weights, ``r`` its row of the table, each the
*sum* over its ``c`` loss entries; ``m`` is the *mean* of the table per loss entry. After the
reduction, with ``V`` and ``C`` the sums of ``v`` and ``c`` over all devices, workers and
micro-batches, and ``N`` the loss entries of all rows::

    N m += V - C m,      row = g

so that ``N m``, which is kept, stays the *sum* of the table. The optimizer gets ``V`` (SAGA) or
``C m`` with the new ``m`` (SAG). Rows that were never visited are zero, and are not counted in
``N``.
"""

from __future__ import annotations

from typing import Any, Iterator, Sequence

import numpy as np
from mxnet.ndarray import NDArray

from .passes import states
from .passes.columns import Columns, Mean, zeros_like
from .passes.combine import assign, copy
from .passes.estimate import Estimate, EstimateCoefficients
from .passes.full_pass import FullGradient
from .passes.method import Method
from .passes.pending_update import PendingUpdate
from .passes.points import ParameterValues
from .passes.random_lock import Losses
from .passes.rows import NO_ROW, StaleTableCheck, StoredGradient
from .trainer import VarianceReducedTrainer


class SAGA(Method):
    """The table, and its sum."""

    updates_every_step = True
    needs_table = True
    can_store_grads = True
    has_reference = True  # unvisited rows are zero
    keeps_mean = True
    mean_key = "sum"

    def __init__(self) -> None:
        super().__init__()
        # Replaced at each refresh; steps change the table, and `mean`, whose sum is N m
        self.table: dict[int, StoredGradient] = {}
        self._is_complete = False  # no more rows will come
        # Replaced with the network's arrays
        self._spare: list[Columns] = []  # memory for rows

    def terms(self, batch_index: int | None, rows: dict[int, Any]) -> EstimateCoefficients:
        """``v = g - r + c m``."""
        assert batch_index is not None
        if batch_index in rows:
            raise ValueError(
                f"batch_index={batch_index} was used since the last update: call step() before, "
                "without a closure."
            )
        stored = self.table.get(batch_index)
        if batch_index < 0 or (stored is None and self._is_complete):
            raise IndexError(NO_ROW.format(index=batch_index, count=len(self.table)))
        if not self._spare:
            self._spare.append(zeros_like(self.network.grads))
        # With one device the estimate adds to the sum, too, which is a call less.
        spare, is_alone = self._spare[-1], len(self.network.grads) == 1
        return EstimateCoefficients(
            b=-1.0, k=1.0, reference=stored, mean=self.mean, copy_to=spare, adds_to_sum=is_alone
        )

    def row(self, estimated: Estimate, index: int) -> StoredGradient:
        """g, which becomes a row when the weights have moved."""
        row = StoredGradient(index, self._spare.pop(), estimated.recorded.counts, estimated.seed)
        if self.table:
            return row
        here = ParameterValues.copied(self.network, frozen=True)
        self.taken_at = StaleTableCheck(here, visit=index)
        return row._replace(losses=Losses.of(estimated.recorded))

    def numbers(self, rows: dict[int, Any]) -> Sequence[float]:
        """The loss entries of rows that are not in the table yet."""
        return (sum(sum(row.counts) for index, row in rows.items() if index not in self.table),)

    def next_state(self, pending: PendingUpdate, scale: float, entries: float | NDArray) -> Any:
        """Compute N m and N after the step, and leave the optimizer its gradient."""
        network, mean = self.network, self.mean
        added: Any = self.numbers(pending.rows)[0]
        is_alone = len(network.grads) == len(pending.rows) == 1 and pending.total is network.grads
        if isinstance(entries, NDArray):
            (entries, added), is_alone = entries.split(2, axis=0), False
        sums = network.take_spare()
        # With one mini-batch on one device, V - C m is g - r, and `terms` made `estimate` add it.
        if mean is None and not is_alone:
            copy(pending.total, sums, 1.0 / pending.total_scale)
        elif mean is not None and not is_alone:
            # V - C m first: it is zero where g is the row, so that the sum does not drift.
            move = (-1.0 * (entries / mean.entries), 2), (1.0 / pending.total_scale, 1)
            for row in zip(sums, pending.total, mean.sums):
                assign(row, (0, move), (0, ((1.0, 0), (1.0, 2))))
        if mean is not None:
            added = mean.entries if self._is_complete else mean.entries + added
        if self.replaces_grads:
            copy(sums, network.grads, 1.0 * (entries * scale / added))
        return Mean(sums, added)

    def moved(self, pending: PendingUpdate) -> None:
        """Put the new rows and the new m in place of the old ones, whose memory is used again."""
        if not self._is_complete:  # a refresh knows all losses
            super().moved(pending)
        if self.taken_at is not None and self.taken_at.visit is None:
            self.taken_at = None  # the step after a refresh has checked it
        for index, row in pending.rows.items():
            last, self.table[index] = self.table.get(index, row), row
            self._spare += [last.grads] if last is not row else []
        before, self.mean, pending.next_state = self.mean, pending.next_state, None
        if before is not None:
            self.network.give_spare(before.sums)

    def refresh(self, full: FullGradient) -> None:
        """Take over the gradients of all mini-batches at the current weights."""
        self.discard()
        self.table = {row.position: row for row in full.rows}
        super().refresh(full)
        self.mean, self._is_complete = Mean(full.mean.sums, float(full.all_entries)), True
        for column in self.mean.sums:
            assign([column], (0, ((self.mean.entries / full.mean.entries, 0),)))
        self.taken_at = StaleTableCheck(ParameterValues.copied(self.network, frozen=True))

    def discard(self) -> None:
        """Start over with an empty table, and free its memory."""
        super().discard()
        self.table, self._spare = {}, []
        self._is_complete = False

    def bind(self) -> None:
        self._spare, self.taken_at = [], None

    def state(self) -> dict[str, Any] | None:
        """The table and its sum; None if it is empty."""
        state = super().state()
        return state and {
            **state,
            "is_complete": self._is_complete,
            "indices": list(self.table),
            "table": states.table_state(self.network, list(self.table.values())),
        }

    def problems(self, state: Any) -> Iterator[str]:
        yield from states.table_problems(self.network, state["table"])
        yield from super().problems(state)

    def assign(self, state: dict[str, Any]) -> None:
        self.discard()
        super().assign(state)
        self._is_complete = state["is_complete"]
        rows = states.rows_of(self.network, state["table"], state["indices"])
        self.table = {row.position: row for row in rows}


class SAG(SAGA):
    """The optimizer gets the mean of the table."""

    replaces_grads = True

    def optimizer_gradient(self, v: np.ndarray, count: int, batch_index: int | None) -> np.ndarray:
        """The mean of the table when the row has moved."""
        assert self.mean is not None
        before, mean = self.mean.divisor(), self.mean.vector()
        after = before + (0 if batch_index in self.table else count)
        return (before * mean + count * (v - mean)) / after


class SAGATrainer(VarianceReducedTrainer):
    """A `gluon.Trainer` whose gradients are variance-reduced by SAGA [1]_.

    A table keeps the last gradient of each mini-batch. A step replaces the gradient ``g``, the
    *sum* over the ``count`` loss entries of its mini-batch, by::

        g - row + count * mean

    ``row`` is the last gradient of the mini-batch, and ``mean`` the mean of the table per loss
    entry; both change with the step. A step computes one gradient. The table has a gradient for
    each mini-batch: use it for small models and fixed mini-batches, in any order.

    See Also
    --------
    SAGTrainer : Passes the mean of the table to the optimizer.

    Notes
    -----
    - `update_full_grads` fills the table with all gradients at the current weights. Otherwise the
      steps fill it: unvisited rows are zero, and the mean is over the entries of visited ones.
    - There is no snapshot, and `at_snapshot` raises an error. `full_grads` is the mean of the
      table. `discard_snapshot` begins a new one.
    - Workers share the mean of the table, and each has the rows of its own mini-batches.
    - The memory is one gradient per device for each mini-batch, and three more (four with
      `correct_grads`); for a while a copy of the weights too. While `update_full_grads` runs, there
      are two tables.
    - With ``grad_req='add'`` several mini-batches make one update. Each needs its own index.
    - Save and load each worker's states separately: only its own file has its rows.

    References
    ----------
    .. [1] A. Defazio, F. Bach and S. Lacoste-Julien, "SAGA: A Fast Incremental Gradient Method
       With Support for Non-Strongly Convex Composite Objectives", NeurIPS 2014.

    Examples
    --------
    >>> import numpy as np
    >>> from mxnet import gluon
    >>> from gluon_svrg import SAGATrainer
    >>> samples = np.random.rand(20, 3).astype('float32')
    >>> labels = samples.sum(axis=1, keepdims=True)
    >>> data = gluon.data.DataLoader(gluon.data.ArrayDataset(samples, labels), batch_size=4)
    >>> minibatches = list(data)
    >>> net = gluon.nn.Dense(1)
    >>> net.initialize()
    >>> loss_fn = gluon.loss.L2Loss()
    >>> trainer = SAGATrainer(net.collect_params(), 'sgd', {'learning_rate': 0.1})
    >>> for epoch in range(4):
    ...     for i in np.random.permutation(len(minibatches)):
    ...         X, y = minibatches[i]
    ...         loss = trainer.step(len(X), closure=lambda: loss_fn(net(X), y), batch_index=i)
    >>> trainer.num_snapshots, trainer.inner_steps, trainer.grad_evaluations
    (0, 20, 80)
    """

    _method_class = SAGA


class SAGTrainer(VarianceReducedTrainer):
    """A `gluon.Trainer` whose gradients are variance-reduced by SAG [1]_.

    This is like `SAGATrainer`, but the optimizer gets ``count * mean`` of the table with the new
    gradient: a biased estimate, but with less variance.

    See Also
    --------
    SAGATrainer : Describes the table and its methods, which are the same here.

    References
    ----------
    .. [1] M. Schmidt, N. Le Roux and F. Bach, "Minimizing Finite Sums with the Stochastic Average
       Gradient", Mathematical Programming 162, 2017.

    Examples
    --------
    A loop as for `SAGATrainer`. Draw the mini-batches with replacement, once all were visited:

    >>> import random
    >>> from mxnet import gluon
    >>> from gluon_svrg import SAGTrainer
    >>> net = gluon.nn.Dense(1)
    >>> net.initialize()
    >>> trainer = SAGTrainer(net.collect_params(), 'sgd', {'learning_rate': 0.01})
    >>> indices = [*range(4), *random.choices(range(4), k=8)]
    """

    _method_class = SAG
