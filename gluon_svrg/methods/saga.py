"""SAGA and SAG: a table with the last gradient of each minibatch.

::

    v = g - r + c m

``g`` is the gradient of one minibatch at the current weights, ``r`` its row of the table, each the
*sum* over its ``c`` loss entries; ``m`` is the *mean* of the table per loss entry. After the
reduction, with ``V`` and ``C`` the sums of ``v`` and ``c`` over all devices, workers and
micro-batches, and ``N`` the loss entries of all rows::

    m += (V - C m) / N,      row = g

so that ``m`` stays the mean of the table. The optimizer gets ``V`` (SAGA [1]_) or ``C m`` with the
new ``m`` (SAG [2]_). Rows that were never visited are zero, and are not counted in ``N``. Stored is
``S = N m``, the sum of the rows, which needs fewer operations::

    S += V - (C / N) S

or, on one device of one worker, which has all of V itself::

    S += g - r

References
----------
.. [1] A. Defazio, F. Bach and S. Lacoste-Julien, "SAGA: A Fast Incremental Gradient Method With
   Support for Non-Strongly Convex Composite Objectives", NeurIPS 2014.
.. [2] M. Schmidt, N. Le Roux and F. Bach, "Minimizing Finite Sums with the Stochastic Average
   Gradient", Mathematical Programming 162, 2017.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Iterator, NamedTuple, Sequence

import numpy as np
from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from .. import _mxnet
from .._arguments import is_natural
from .._mxnet import Arrays
from ..passes import sketch
from ..passes.arrays import buffers_like, per_device
from ..passes.estimate import Estimate, Terms
from ..passes.estimate import Row as Reference
from ..passes.full_pass import FullGradient
from ..passes.memory import Growth, bytes_of_sums
from ..passes.multiples import assign_in_turn, combine
from ..passes.network import Network
from ..passes.points import Point, descriptions, what_changed
from . import checks
from .fields import ArrayPerParameter, Field, Fields, Flags, StoredGradients, assign, is_positive
from .interface import Changes, Live, Method
from .table import Table, check_counts

NO_ROW = (
    "{name}() needs {method} gradients: pass step(batch_size, closure=..., batch_index=...), "
    "or call correct_grads(closure, batch_index=...) before."
)


class Row(NamedTuple):
    """A row of the table."""

    grads: Arrays  # per parameter and device: sums over loss entries, of unscaled losses
    counts: Sequence[int]  # loss entries per device
    seed: int | None  # of the random numbers that it was taken with, where they are locked
    has_moved: bool = False  # before the update: whether the next sum has it already
    taken_at: tuple[Point, np.ndarray] | None = None  # its weights, a sketch of those of others

    def __reduce__(self) -> Any:
        """What makes a copy, which is not compared: it has other weights."""
        return Row, (self.grads, self.counts, self.seed, self.has_moved)


def _index(value: Any) -> Any:
    """An index from a file; 0.2.0 also wrote NumPy's integers."""
    is_numpy = isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind == "i"
    return value.item() if is_numpy else value


def _are_indices(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    indices = list(map(_index, value))
    return all(is_natural(i, 2**63) for i in indices) and len(set(indices)) == len(indices)


class TableFields(Fields):
    """Fields with a table and the indices of its rows, which belong together."""

    def problems(self, data: Any, network: Network) -> Iterator[str]:
        """Describe what is wrong with data from a file."""
        if isinstance(data, dict) and data.get("table", ...) is None:
            data = {}
        found = list(super().problems(data, network))
        yield from found
        if data and not found and len(data["indices"]) != len(data["table"]["counts"]):
            yield "its rows belong to other minibatches"


class SAGA(Method):
    """The table, its mean, and their next values."""

    needs_reduced = True
    keeps_errors = True
    needs_table = True
    can_store_grads = True
    not_corrected = NO_ROW
    has_reference = True  # unvisited rows are zero
    has_snapshot = False

    def __init__(self) -> None:
        super().__init__()
        # Replaced at each refresh, changed by each step.
        self.table: dict[int, Row] = {}
        self._sum: Arrays = []  # S
        self._entries: float | NDArray = 0.0  # N; an array if there are several workers
        # Replaced at each refresh.
        self._is_complete = False  # no more rows will come
        self._weights_then: np.ndarray | None = None  # a sketch; None if no row is to be checked
        self._outside_then: np.ndarray | None = None  # the same of others' weights
        # Replaced with the network's arrays.
        self._network: Network | None = None
        self._parameters: dict[Parameter, str] = {}  # descriptions of those of the table
        self._next_sum: Arrays = []  # memory for S after the update
        self._spare: list[Arrays] = []  # memory for rows
        self._growth = Growth()
        self._is_first = False  # the minibatch that is computed will be the first row

    # --- a minibatch ---------------------------------------------------------------------------

    def terms(self, batch_index: int | None = None, live: Live | None = None) -> Terms:
        """What to add to g: ``- row + c m``, with ``m = S / N``.

        Raises
        ------
        IndexError
            If the table has no such row and cannot add it.
        ValueError
            If the row is part of the estimate already.
        """
        assert batch_index is not None and self._network is not None
        self._allocate(self._network)
        pending = {} if live is None else live.rows
        if batch_index in pending:
            raise ValueError(
                f"batch_index={batch_index} was used since the last update already, and a row "
                "moves once an update. Call update(), or step() without a closure, before."
            )
        stored = self.table.get(batch_index)
        if stored is None:
            self._check_new(batch_index)
        self._is_first = not (self.table or pending)
        if not self._spare:
            self._growth.take(bytes_of_sums(self._network.live_grads))
            self._spare.append(buffers_like(self._network.live_grads))
        entries = self._entries
        is_shared = isinstance(entries, NDArray)
        k = 1 / entries if is_shared or entries else 0.0
        has_all = not is_shared and len(self._network.devices) == 1 and not pending
        return Terms(
            b=0.0 if stored is None else -1.0,
            k=k,
            reference=None if stored is None else self._reference(batch_index, stored),
            mean=self._sum,
            copy_to=self._spare[-1],
            moved=self._next_sum,
            mean_moves=has_all,
        )

    def _reference(self, batch_index: int, stored: Row) -> Reference:
        """The reference gradient that a row is."""
        check = partial(check_counts, batch_index, stored.counts)
        point, is_old = self._point_to_check(stored), stored.taken_at is not None
        return Reference(batch_index, stored.grads, check, stored.seed, point, is_old=is_old)

    def _check_new(self, batch_index: int) -> None:
        """Raise if a row cannot be added to the table."""
        if self._is_complete:
            kept = len(self.table)
            raise IndexError(
                f"batch_index is {batch_index}, and the gradients of {kept} minibatches are "
                f"stored: 0 to {kept - 1}, by their position in the data."
            )
        if batch_index < 0:
            raise IndexError(
                f"batch_index is {batch_index}. It must be the position of the minibatch in the "
                "data, 0 or more."
            )

    def _point_to_check(self, stored: Row) -> Point | None:
        """The point to compute a row again, to check the data; once per refresh.

        Without one, the first row is computed again when its minibatch comes again.
        """
        assert self._network is not None
        if stored.taken_at is not None:
            point, outside = stored.taken_at
            return point if self._network.outside.is_as(outside) else None
        if self._weights_then is None:
            return None
        is_same = np.array_equal(_sketch_of_weights(self._network), self._weights_then)
        if not is_same or not self._network.outside.is_as(self._outside_then):
            return None  # the user, or another trainer, has moved them
        return Point.untouched(self._network)

    def confirm(self, batch_index: int) -> None:
        """Trust the rows: one was computed again, and was the same."""
        self._weights_then = None

    def row(self, terms: Terms, found: Estimate) -> Row:
        """g, which becomes a row when the weights have moved."""
        assert terms.copy_to is self._spare[-1] and self._network is not None
        taken_at = None
        if self._is_first:
            outside = sketch.sketch(self._network.outside.weights)
            taken_at = Point.copied(self._network), outside
        row = self._spare.pop(), tuple(found.counts), found.seed, terms.mean_moves
        return Row(*row, taken_at)

    # --- the state that changes with a step ----------------------------------------------------

    def numbers(self, live: Live) -> Sequence[float]:
        """The loss entries of rows that are not in the table yet."""
        if self._is_complete:
            return (0,)
        rows = live.rows.items()
        return (sum(sum(row.counts) for index, row in rows if index not in self.table),)

    def reduced(
        self, network: Network, live: Live, scale: float, entries: float | NDArray
    ) -> float | NDArray:
        """Compute the sum of the rows after the step, and leave the optimizer its gradient.

        Returns
        -------
        float or NDArray
            N after the step.
        """
        if isinstance(entries, NDArray):
            entries, added = entries.astype("float64").split(2, axis=0)
        else:
            (added,) = self.numbers(live)
        if isinstance(entries, NDArray) or not all(row.has_moved for row in live.rows.values()):
            self._move_by(live.total, live.total_scale or scale, entries)
        after = self._entries if self._is_complete else self._entries + added
        self._give(network, scale * entries / after)
        return after

    def _move_by(self, total: Arrays, scale: float, entries: float | NDArray) -> None:
        """Compute ``S + V - (C / N) S`` from the reduced V."""
        before = self._entries
        share = entries / before if isinstance(before, NDArray) or before else 0.0
        columns = map(per_device, (total, self._sum, self._next_sum))
        for estimates, sums, targets in zip(*columns):
            # Not (1 - share) S: 1 - share is rounded the same way in each step, which adds up.
            steps = (
                (0, ((-share, 1),)),
                (0, ((1.0, 0), (1.0, 1))),
                (0, ((1.0, 0), (1 / scale, 2))),
            )
            assign_in_turn([targets, sums, estimates], steps)

    def _give(self, network: Network, share: float | NDArray) -> None:
        """Leave V, the estimate, to the optimizer."""

    def changes(self, live: Live) -> Changes:
        """The new rows and the new m; S stays the sum of the rows."""
        if live.following is None:
            return ()
        freed = [self.table[index].grads for index in live.rows if index in self.table]
        return [
            (self.table, live.rows),
            (
                vars(self),
                {
                    "_sum": self._next_sum,
                    "_next_sum": self._sum,
                    "_entries": live.following,
                    "in_objective": either(self.in_objective, live.reached),
                    "_weights_then": None,
                    "_spare": self._spare + freed,
                },
            ),
        ]

    def dropped(self, live: Live) -> Changes:
        """Use the memory of the new rows again, unless it is for other arrays."""
        freed = [row.grads for row in live.rows.values()] if self._sum else []
        return [(vars(self), {"_spare": self._spare + freed})]

    # --- a new table ---------------------------------------------------------------------------

    def refresh(self, network: Network, full: FullGradient, table: Table | None) -> None:
        """Take over the gradients of all minibatches at the current weights."""
        assert table is not None
        self._allocate(network)
        for means, sums in zip(per_device(full.mean), per_device(self._sum)):
            combine([float(full.all_entries)], [means], sums)
        self._fill(range(len(table)), table)
        self._spare = []
        self._entries, self.in_objective = float(full.all_entries), full.in_objective
        self._is_complete = True
        self._weights_then = _sketch_of_weights(network)
        self._outside_then = sketch.sketch(network.outside.weights)

    def _fill(self, indices: Sequence[int], table: Table) -> None:
        self.table = dict(zip(indices, map(Row, table.rows, table.counts, table.seeds)))

    def discard(self) -> None:
        """Start over with an empty table, and free its memory."""
        self.table, self._sum, self._next_sum, self._spare = {}, [], [], []
        self._entries, self.in_objective = 0.0, []
        self._is_complete, self._weights_then = False, None

    def difference(self, network: Network) -> str:
        """Describe how the parameters have changed; empty if they have not."""
        return what_changed(self._parameters, network) if self.table else ""

    def bind(self, network: Network) -> None:
        """Bind to the arrays of the network."""
        if not self.table and what_changed(self._parameters, network):
            self.discard()  # its memory is for other arrays
        self._network = network
        self._parameters = descriptions(network)
        self.table = {i: row._replace(taken_at=None) for i, row in self.table.items()}

    def _allocate(self, network: Network) -> None:
        """Allocate memory for the sum."""
        if not self._sum:
            self._sum, self._next_sum = (buffers_like(network.live_grads) for _ in range(2))

    @property
    def full_grads(self) -> Arrays:
        """m, per trainable parameter and device. Waits for the device."""
        if not self.table:
            return []
        entries = self._entries_seen()
        return [[array / entries for array in row] for row in self._sum]

    def _entries_seen(self) -> float:
        entries = self._entries
        return float(entries.asscalar() if isinstance(entries, NDArray) else entries)

    # --- files ---------------------------------------------------------------------------------

    @property
    def fields(self) -> Fields:
        """What of the state a file holds."""
        return TableFields(
            "its table has another form",
            sum=ArrayPerParameter("sum of the table", summed=True),
            in_objective=Flags(),
            table=StoredGradients(),
            indices=Field(_are_indices, "its rows belong to other minibatches"),
            is_complete=Field(
                lambda value: isinstance(value, bool),
                "it does not say whether its table is complete",
            ),
            entries=Field(is_positive, "its table has no loss entries"),
            weights_then=Field(
                checks.is_sketch, "it does not say at which weights its table begins", default=None
            ),
        )

    def values(self) -> dict[str, Any] | None:
        """The table and its sum; None if it is empty."""
        if not self.table:
            return None
        table = Table()
        rows = ((row.grads, row.counts, row.seed) for row in self.table.values())
        table.rows, table.counts, table.seeds = map(list, zip(*rows))
        table.outside = self._outside_then
        return {
            "sum": self._sum,
            "entries": self._entries_seen(),
            "in_objective": self.in_objective,
            "is_complete": self._is_complete,
            "indices": list(self.table),
            "table": table,
            "weights_then": self._weights_then,
        }

    def take(self, values: dict[str, Any], network: Network) -> None:
        """Take over a table."""
        self.bind(network)
        self._allocate(network)
        assign(values["sum"], self._sum)
        self._fill(list(map(_index, values["indices"])), values["table"])
        self._outside_then = values["table"].outside
        self._entries, self._is_complete = values["entries"], values["is_complete"]
        self.in_objective, self._weights_then = values["in_objective"], values["weights_then"]


class SAG(SAGA):
    """The optimizer gets the mean of the table."""

    replaces_grads = True

    def handed_over(
        self, v: list[np.ndarray], entries: int, batch_index: int | None
    ) -> list[np.ndarray]:
        """The mean of the table when the row has moved."""
        before = self._entries_seen()
        after = before + (entries if batch_index not in self.table else 0)
        sums = [row[0].asnumpy().astype("float64").ravel() for row in self._sum]
        share = entries / before if before else 0.0
        return [(s + entries * x - share * s) / after for s, x in zip(sums, v)]

    def _give(self, network: Network, share: float | NDArray) -> None:
        """Leave ``C m = (C / N) S``, with the new S, to the optimizer."""
        for sums, targets in zip(per_device(self._next_sum), per_device(network.live_grads)):
            combine([share], [sums], targets)


def either(these: Sequence[bool], those: Sequence[bool]) -> Sequence[bool]:
    """Which flags are set in one of two lists; an empty list has none."""
    if these and all(these):
        return these
    return [a or b for a, b in zip(these, those)] if these else list(those)


def _sketch_of_weights(network: Network) -> np.ndarray:
    """A sketch that shows whether weights or frozen values have changed. Waits for the device."""
    still = [_mxnet.data(p) for p in network.frozen if not _mxnet.is_auxiliary(p)]
    return sketch.sketch(network.weights + still)
