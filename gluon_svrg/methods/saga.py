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

from collections import deque
from functools import partial
from itertools import starmap
from math import isfinite
from typing import Any, Iterator, NamedTuple, Sequence

import numpy as np
from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from .. import _mxnet
from .._mxnet import Arrays
from ..passes import sketch
from ..passes.arrays import buffers_like, per_device
from ..passes.estimate import Estimate, Row, Terms
from ..passes.full_pass import FullGradient
from ..passes.memory import Growth, bytes_of_sums
from ..passes.multiples import Assignment, assign_in_turn, combine
from ..passes.network import Network
from ..passes.points import Point, descriptions, what_changed
from ..saving.values import ByParameter
from . import checks
from .interface import Method
from .svrg import assign_array
from .table import Table, check_counts


class Stored(NamedTuple):
    """A row of the table."""

    grads: Arrays  # per parameter and device: sums over loss entries, of unscaled losses
    counts: Sequence[int]  # loss entries per device
    seed: int | None  # of the random numbers that it was taken with, where they are locked


class SAGA(Method):
    """The table, its mean, and their next values."""

    needs_reduced = True
    needs_table = True

    def __init__(self) -> None:
        # Replaced at each refresh, changed by each step.
        self._rows: dict[int, Stored] = {}
        self._sum: Arrays = []  # S
        self._entries: float | NDArray = 0.0  # N; an array if there are several workers
        self._in_objective: list[bool] = []
        # Replaced at each refresh.
        self._is_complete = False  # no more rows will come
        self._weights_then: np.ndarray | None = None  # a sketch; None if no row is to be checked
        # Since the last update.
        self._new_rows: dict[int, Stored] = {}
        self._reached: list[bool] = []
        self._has_moved = False  # whether the next sum has the new row already
        self._new_entries: float | NDArray | None = None  # N after the update, once V is known
        # Replaced with the network's arrays.
        self._network: Network | None = None
        self._were: dict[Parameter, str] = {}
        self._next_sum: Arrays = []  # memory for S after the update
        self._spare: list[Arrays] = []  # memory for rows
        self._growth = Growth()

    # --- what a step adds to g -----------------------------------------------------------------

    @property
    def has_reference(self) -> bool:
        """Always true: unvisited rows are zero."""
        return True

    @property
    def in_objective(self) -> Sequence[bool]:
        """Per trainable parameter: whether the loss of any row depends on it."""
        return self._in_objective

    @property
    def full_grads(self) -> Arrays:
        """m, per trainable parameter and device. Waits for the device."""
        if not self._rows:
            return []
        entries = self._entries_seen()
        return [[array / entries for array in row] for row in self._sum]

    @property
    def num_rows(self) -> int:
        """How many gradients of minibatches are stored."""
        return len(self._rows)

    def terms(self, batch_index: int | None = None) -> Terms:
        """What to add to g: ``- row + c m``, with ``m = S / N``.

        Raises
        ------
        IndexError
            If the table has no such row and cannot add it.
        ValueError
            If the row is part of the estimate already.
        RuntimeError
            If some gradients accumulate over minibatches, and others do not.
        """
        assert batch_index is not None and self._network is not None
        self._allocate(self._network)
        if batch_index in self._new_rows:
            raise ValueError(
                f"batch_index={batch_index} was used since the last update already, and a row "
                "moves once an update. Call update(), or step() without a closure, before."
            )
        if self._new_rows and len(self._network.accumulated()) < len(self._network.trainable):
            raise RuntimeError(
                "Some parameters have grad_req='add' and others 'write', so that only some "
                "gradients would be sums over this minibatch and the last ones. Give all the same "
                "grad_req, or update after each minibatch."
            )
        stored = self._rows.get(batch_index)
        if stored is None:
            self._check_new(batch_index)
        if not self._spare:
            self._growth.take(bytes_of_sums(self._network.live_grads))
            self._spare.append(buffers_like(self._network.live_grads))
        entries = self._entries
        is_shared = isinstance(entries, NDArray)
        k = 1 / entries if is_shared or entries else 0.0
        has_all = not is_shared and len(self._network.devices) == 1 and not self._new_rows
        then = partial(self._move, stored is None) if has_all else None
        terms = Terms(k=k, mean=self._sum, copy_to=self._spare[-1], moved=self._next_sum,
                      then=then)  # fmt: skip
        if stored is None:
            return terms
        check = partial(check_counts, batch_index, stored.counts)
        row = Row(batch_index, stored.grads, check, stored.seed, self._point_to_check())
        return terms._replace(b=-1.0, reference=row)

    def _move(self, is_new: bool, device: int) -> list[Assignment]:
        """What replaces a row in the sum: ``(g - r) + S``, where g - r is known; g for a new row.

        Not ``(S + g) - r``: late in training g is nearly r, and their difference is nearly exact.
        """
        arrays = self._spare[-1] if is_new else self._next_sum, self._sum, self._next_sum
        moves, sums, targets = (per_device(each)[device] for each in arrays)
        return [(targets, [(1.0, moves), (1.0, sums)])]

    def _check_new(self, batch_index: int) -> None:
        """Raise if a row cannot be added to the table."""
        if batch_index < 0 or self._is_complete:
            kept = len(self._rows)
            known = f"the gradients of {kept} minibatches are stored: 0 to {kept - 1}, by"
            raise IndexError(
                f"batch_index is {batch_index}, and "
                + (known if self._is_complete else "it must be")
                + " their position in the data."
            )

    def _point_to_check(self) -> Point | None:
        """The point to compute a row again, to check the data; once per refresh."""
        if self._weights_then is None or self._network is None:
            return None
        if not np.array_equal(_sketch_of_weights(self._network), self._weights_then):
            self._weights_then = None  # the user has moved them
            return None
        return Point.untouched(self._network)

    def confirm(self, batch_index: int) -> None:
        """Trust the rows: one was computed again, and was the same."""
        self._weights_then = None

    def estimated(self, batch_index: int | None, terms: Terms, found: Estimate) -> None:
        """Keep g, which becomes a row when the weights have moved."""
        assert batch_index is not None and terms.copy_to is self._spare[-1]
        self._new_rows[batch_index] = Stored(self._spare.pop(), tuple(found.counts), found.seed)
        self._has_moved = terms.then is not None
        self._reached = _either(self._reached, found.reached)

    # --- the state that changes with a step ----------------------------------------------------

    @property
    def numbers(self) -> Sequence[float]:
        """The loss entries of rows that are not in the table yet."""
        rows = self._new_rows.items()
        return (sum(sum(row.counts) for index, row in rows if index not in self._rows),)

    def reduced(self, network: Network, scale: float, entries: float | NDArray) -> None:
        """Compute the sum of the rows after the step, and leave the optimizer its gradient."""
        if isinstance(entries, NDArray):
            entries, added = entries.astype("float64").split(2, axis=0)
        else:
            (added,) = self.numbers
        before = self._entries
        if isinstance(entries, NDArray) or not self._has_moved:
            self._move_by(network, scale, entries)
        self._new_entries = before if self._is_complete else before + added
        self._give(network, scale * entries / self._new_entries)

    def _move_by(self, network: Network, scale: float, entries: float | NDArray) -> None:
        """Compute ``S + V - (C / N) S`` from the reduced V."""
        before = self._entries
        share = entries / before if isinstance(before, NDArray) or before else 0.0
        columns = map(per_device, (network.live_grads, self._sum, self._next_sum))
        for estimates, sums, targets in zip(*columns):
            # Not (1 - share) S: 1 - share is rounded the same way in each step, which adds up.
            assign_in_turn(
                (targets, [(-share, sums)]),
                (targets, [(1.0, targets), (1.0, sums)]),
                (targets, [(1.0, targets), (1 / scale, estimates)]),
            )

    def _give(self, network: Network, share: float | NDArray) -> None:
        """Leave V, the estimate, to the optimizer."""

    def updated(self) -> None:
        """Put the new rows and the new m in place."""
        freed = [self._rows[index].grads for index in self._new_rows if index in self._rows]
        moved: dict[str, Any] = {
            "_sum": self._next_sum,
            "_next_sum": self._sum,
            "_entries": self._new_entries,
            "_in_objective": _either(self._in_objective, self._reached),
            "_weights_then": None,
            "_new_rows": {},
            "_reached": [],
            "_new_entries": None,
            "_spare": self._spare + freed,
        }
        # One bytecode, in C, which no interrupt can split: S stays the sum of the rows.
        deque(starmap(dict.update, [(self._rows, self._new_rows), (vars(self), moved)]), 0)

    def not_updated(self) -> None:
        """Forget the new rows and m."""
        self._spare += [row.grads for row in self._new_rows.values()]
        self._new_rows, self._reached, self._new_entries = {}, [], None

    # --- a new table ---------------------------------------------------------------------------

    def refresh(self, network: Network, full: FullGradient, table: Table | None) -> None:
        """Take over the gradients of all minibatches at the current weights."""
        assert table is not None
        self.not_updated()
        self._allocate(network)
        for means, sums in zip(per_device(full.mean), per_device(self._sum)):
            combine([float(full.all_entries)], [means], sums)
        rows = map(Stored, table.rows, table.counts, table.seeds)
        self._rows, self._spare = dict(enumerate(rows)), []
        self._entries, self._in_objective = float(full.all_entries), full.in_objective
        self._is_complete = True
        self._weights_then = _sketch_of_weights(network)

    def discard(self) -> None:
        """Start over with an empty table, and free its memory."""
        self._rows, self._sum, self._next_sum, self._spare = {}, [], [], []
        self._new_rows, self._reached, self._new_entries = {}, [], None
        self._entries, self._in_objective = 0.0, []
        self._is_complete, self._weights_then = False, None

    def difference(self, network: Network) -> str:
        """Describe how the parameters have changed; empty if they have not."""
        return what_changed(self._were, network) if self._rows else ""

    def bind(self, network: Network) -> None:
        """Bind to the arrays of the network."""
        self._network = network
        self._were = descriptions(network)
        if not self._rows:
            self.discard()

    def _allocate(self, network: Network) -> None:
        """Allocate memory for the sum."""
        if not self._sum:
            self._sum, self._next_sum = (buffers_like(network.live_grads) for _ in range(2))

    def _entries_seen(self) -> float:
        entries = self._entries
        return float(entries.asscalar() if isinstance(entries, NDArray) else entries)

    # --- its state, to be saved with the trainer -----------------------------------------------

    def state(self) -> Any:
        """The values of the table and its sum; None if it is empty."""
        if not self._rows or self._network is None:
            return None
        table, network = Table(), self._network
        table.rows, table.counts, table.seeds = map(list, zip(*self._rows.values()))
        number = {p: n for n, p in enumerate(network.parameters)}
        trainable = [number[p] for p in network.trainable]
        return {
            "sum": ByParameter(zip(trainable, (row[0] for row in self._sum))),
            "entries": self._entries_seen(),
            "in_objective": ByParameter(zip(trainable, self._in_objective)),
            "is_complete": self._is_complete,
            "indices": list(self._rows),
            "table": table.state(trainable),
        }

    def problems(self, state: Any, network: Network) -> Iterator[str]:
        """Describe why a state cannot be assigned."""
        if state is None:
            return
        names = {"sum", "entries", "in_objective", "is_complete", "indices", "table"}
        if not isinstance(state, dict) or set(state) != names or state["table"] is None:
            yield "its table has another form"
            return
        chosen = checks.numbers_of(network.parameters, trainable=True)
        yield from checks.by_parameter(
            state["sum"], "sum of the table", network.parameters, chosen, summed=True
        )
        yield from checks.flags(state["in_objective"], chosen)
        wrong = list(
            checks.table(state["table"], network.parameters, chosen, len(network.devices), "")
        )
        yield from wrong
        indices, entries = state["indices"], state["entries"]
        if not (
            isinstance(indices, list)
            and all(checks.is_natural(index, 2**63) for index in indices)
            and len(set(indices)) == len(indices)
            and (wrong or len(indices) == len(state["table"]["counts"]))
        ):
            yield "its rows belong to other minibatches"
        if not isinstance(state["is_complete"], bool):
            yield "it does not say whether its table is complete"
        if not (isinstance(entries, float) and isfinite(entries) and entries > 0):
            yield "its table has no loss entries"

    def assign(self, state: Any, network: Network) -> None:
        """Take over a state that has no problems."""
        self.discard()
        if state is None:
            return
        self.bind(network)
        self._allocate(network)
        number = {p: n for n, p in enumerate(network.parameters)}
        trainable = [number[p] for p in network.trainable]
        for n, sums in zip(trainable, self._sum):
            assign_array([state["sum"][n]], sums)
        table = Table.of_state(state["table"], trainable, network.devices)
        rows = map(Stored, table.rows, table.counts, table.seeds)
        self._rows = dict(zip(state["indices"], rows))
        self._entries, self._is_complete = state["entries"], state["is_complete"]
        self._in_objective = [state["in_objective"][n] for n in trainable]


class SAG(SAGA):
    """The optimizer gets the mean of the table."""

    def handed_over(
        self, v: list[np.ndarray], entries: int, batch_index: int | None
    ) -> list[np.ndarray]:
        """The mean of the table when the row has moved."""
        before = self._entries_seen()
        after = before + (entries if batch_index not in self._rows else 0)
        sums = [row[0].asnumpy().astype("float64").ravel() for row in self._sum]
        share = entries / before if before else 0.0
        return [(s + entries * x - share * s) / after for s, x in zip(sums, v)]

    def _give(self, network: Network, share: float | NDArray) -> None:
        """Leave ``C m = (C / N) S``, with the new S, to the optimizer."""
        for sums, targets in zip(per_device(self._next_sum), per_device(network.live_grads)):
            combine([share], [sums], targets)


def _either(these: Sequence[bool], those: Sequence[bool]) -> list[bool]:
    return [a or b for a, b in zip(these, those)] if these else list(those)


def _sketch_of_weights(network: Network) -> np.ndarray:
    """A sketch that shows whether weights or frozen values have changed. Waits for the device."""
    still = [_mxnet.data(p) for p in network.frozen if not _mxnet.is_auxiliary(p)]
    return sketch.sketch(network.weights + still)
