"""A table: the gradients of all minibatches, one row for each."""

from __future__ import annotations

from functools import partial
from typing import Any, Sequence

import numpy as np

from .. import _mxnet
from .._mxnet import Arrays
from ..passes.arrays import Buffers, buffers_like, copies, per_device
from ..passes.estimate import Row
from ..passes.multiples import combine
from ..passes.sums import LiveSum
from ..saving.values import ByParameter


class Table:
    """The gradients of minibatches, by their positions in the data of a full pass.

    Attributes
    ----------
    rows : list of list of list of NDArray
        Per minibatch, parameter and device: the *sum* r over the loss entries, of unscaled losses;
        ``d = r - c mu`` after `center`.
    is_centered : bool
        Whether the rows are d.
    counts : list of tuple of int
        The number of loss entries, per minibatch and device.
    seeds : list of int or None
        The seed of each minibatch's random numbers, if these are locked.
    is_confirmed : bool
        Whether a row has been computed again and was the same, or none can be.
    was_confirmed : bool
        Whether this was so in the file that the table comes from, and was counted there.
    outside : ndarray or None
        A sketch of the weights of others that the closure used in the full pass.
    """

    def __init__(self) -> None:
        self.rows: list[Arrays] = []
        self.counts: list[tuple[int, ...]] = []
        self.seeds: list[int | None] = []
        self.is_centered = False
        self.is_confirmed = False
        self.was_confirmed = False
        self.outside: np.ndarray | None = None
        self._references: dict[int, Row] = {}  # made when they are needed

    def __len__(self) -> int:
        return len(self.rows)

    def append(self, v: LiveSum, counts: Sequence[int], seed: int | None) -> None:
        """Append a gradient, which is the current sum."""
        row = buffers_like(v.arrays)
        v.copy_to(row)
        self.rows.append(row)
        self.counts.append(tuple(counts))
        self.seeds.append(seed)

    def add_to(self, v: LiveSum) -> None:
        """Add all rows to a sum."""
        for row in self.rows:
            for totals, grads in zip(per_device(v.arrays), per_device(row)):
                combine((1.0, v.scale), (totals, grads), totals)

    def center(self, mean: Arrays, multiple: int) -> None:
        """Turn each row r into ``d = r - c mu``, in place: between refreshes, only g changes then.

        Parameters
        ----------
        mean : list of list of NDArray
            mu times the multiple, per parameter and device.
        multiple : int
            Which multiple this is.
        """
        for row, counts in zip(self.rows, self.counts):
            for count, grads, means in zip(counts, per_device(row), per_device(mean)):
                combine([1.0, -count / multiple], [grads, means], grads)
        self.is_centered = True

    def uncentered(self, index: int, mean: Arrays, multiple: int) -> Arrays:
        """A copy of r, the gradient of a minibatch; the parameters are those of `center`."""
        row, counts = copies(self.rows[index]), self.counts[index]
        for count, grads, means in zip(counts, per_device(row), per_device(mean)):
            combine([1.0, count / multiple], [grads, means], grads)
        return row

    def reference(self, index: int) -> Row:
        """The row of a minibatch, which is its reference gradient.

        Raises
        ------
        IndexError
            If there is no such row.
        """
        known = self._references.get(index)
        if known is not None:
            return known
        if not 0 <= index < len(self):
            raise IndexError(
                f"batch_index is {index}, and the gradients of {len(self)} minibatches are stored: "
                f"0 to {len(self) - 1}, by their position in the data of update_full_grads()."
            )
        check = partial(check_counts, index, self.counts[index])
        row = Row(index, self.rows[index], check, self.seeds[index])
        self._references[index] = row
        return row

    # --- its state, to be saved with the method ------------------------------------------------

    def state(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Arrays over all minibatches, by the number of the parameter, one per device."""
        together = [
            [np.stack([grad.asnumpy() for grad in minibatches]) for minibatches in zip(*arrays)]
            for arrays in zip(*self.rows)
        ]
        return {
            "rows": ByParameter(zip(numbers, together)),
            "counts": [list(counts) for counts in self.counts],
            "seeds": list(self.seeds),
            "is_centered": self.is_centered,
            "is_confirmed": self.is_confirmed or self.was_confirmed,
            "outside": self.outside,
        }

    @classmethod
    def of_state(
        cls, state: dict[str, Any], numbers: Sequence[int], devices: Sequence[Any]
    ) -> Table:
        """Make a table from a state. It is confirmed again: the data may have changed."""
        table = cls()
        table.is_centered = state.get("is_centered", False)
        table.was_confirmed = state.get("is_confirmed", False)
        outside = state.get("outside")
        table.outside = None if outside is None else np.asarray(outside)
        table.counts = [tuple(counts) for counts in state["counts"]]
        table.seeds = list(state["seeds"])
        over = [state["rows"][number] for number in numbers]
        table.rows = [
            Buffers(
                [_mxnet.to_ndarray(np.asarray(values[n]), device)
                 for values, device in zip(arrays, devices)]
                for arrays in over
            )
            for n in range(len(table.counts))
        ]  # fmt: skip
        return table


def check_counts(index: int, then: Sequence[int], counts: Sequence[int]) -> None:
    """Raise a ValueError if the loss entries of a minibatch differ from those of its row."""
    if tuple(counts) != tuple(then):
        raise ValueError(
            f"Minibatch {index} had {_entries(then)} when its gradient was stored, and the closure "
            f"returned {_entries(counts)}. batch_index must be the minibatch's position in the "
            "data: was it reshuffled?"
        )


def _entries(counts: Sequence[int]) -> str:
    total = f"{sum(counts)} loss entries"
    return total if len(counts) < 2 else f"{total} ({', '.join(map(str, counts))} per device)"
