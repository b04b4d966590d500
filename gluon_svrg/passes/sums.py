"""Sums of gradients, term by term.

Backward can add to a buffer (``grad_req='add'``), and multiply a gradient by a factor (the
gradient of its head). So a sum such as ``k c m + b r + g`` needs no separate buffer: the two passes
of a step compute it in the live gradients. `LiveSum` does that.

Some operators ignore the gradient of their head (SoftmaxOutput, MakeLoss), and custom operators
may ignore the request to add; `probe` detects both. oneDNN's operators add to large arrays more
slowly than they write, and take up to four times their memory as scratch. For these, and for sparse
and float16 gradients, `SeparateSum` adds in separate arrays, exactly by the formula.
"""

from __future__ import annotations

from functools import lru_cache
from math import frexp
from typing import Any, NamedTuple, Sequence

import numpy as np
from mxnet.ndarray import NDArray

from .. import _mxnet
from .._mxnet import Arrays, Flags
from . import sketch
from .arrays import buffers_like, copy, per_device, zero
from .closure import Recorded
from .multiples import Combination, Step, assign_in_turn, combine
from .network import Network
from .points import Point


class Observed(NamedTuple):
    """A gradient that was added to a sum, of unscaled losses."""

    sketch: np.ndarray
    rounding: float  # the norm of what the addition may have rounded


#: What an addition and a sketch round, relative to the sum, in units of its dtype.
_SUM_ROUNDING = 32


class LiveSum:
    """A sum in the live gradients.

    Parameters
    ----------
    network : Network
        The network whose gradients are summed.
    scale : float
        The factor of the losses (mixed precision).

    Attributes
    ----------
    arrays : list of list of NDArray
        The sum so far, per parameter and device.
    observed : list of Observed or None
        If it is a list, gradients that are added are observed, which waits for the device.
    """

    # An operator is compiled for a count when that comes again. Most data have two, the size of a
    # minibatch and that of the last one; where each minibatch has another, none is worth it.
    _MAX_KEPT = 8  # per device

    def __init__(self, network: Network, scale: float) -> None:
        self.scale = scale
        self._live_grads = network.live_grads
        self.arrays: Arrays = self._live_grads
        self._kept = network.combinations
        self.observed: list[Observed] | None = None

    def start(self, counts: Sequence[int] = (), k: float = 0.0, mean: Arrays | None = None) -> None:
        """Begin with ``k c m``, or with zero.

        Parameters
        ----------
        counts : sequence of int
            The c of each device.
        k : float
            The factor.
        mean : list of list of NDArray, optional
            m, per parameter and device, for unscaled losses.
        """
        for device, targets in enumerate(per_device(self.arrays)):
            if mean is not None and k and counts[device]:
                self._combine(device, (k * counts[device] * self.scale,), (mean,), self.arrays)
            else:
                zero(targets)

    def add_terms(
        self,
        counts: Sequence[int],
        k: float | NDArray = 0.0,
        mean: Arrays | None = None,
        b: float = 0.0,
        row: Arrays | None = None,
    ) -> None:
        """Add ``b row + k c m`` to the sum.

        Parameters
        ----------
        counts : sequence of int
            The c of each device.
        k : float or NDArray
            The factor of the mean, perhaps known only on the device.
        mean, row : list of list of NDArray, optional
            The terms, per parameter and device, for unscaled losses.
        b : float
            The factor of the row.
        """
        for device, sums in enumerate(per_device(self.arrays)):
            columns, terms = [sums], [(1.0, 0)]
            if row is not None:
                terms.append((b * self.scale, 1))
                columns.append(per_device(row)[device])
            if mean is not None and counts[device]:
                terms.append((k * counts[device] * self.scale, len(columns)))
                columns.append(per_device(mean)[device])
            assign_in_turn(columns, _sum_of(terms, self._live_grads.columns[device].is_narrow))

    def add_terms_keeping(
        self,
        counts: Sequence[int],
        k: float | NDArray,
        mean: Arrays,
        b: float,
        row: Arrays | None,
        copy_to: Arrays,
        moved: Arrays,
        mean_moves: bool,
    ) -> None:
        """As `add_terms`, and keep the sum before, g, and the move ``g + b row``.

        The move is computed first, and used again: the time of sums of large arrays is that of
        reading and writing memory. A call of an operator takes longer than the arithmetic of small
        arrays, so one call makes all assignments.

        Parameters
        ----------
        counts, k, mean, b, row
            As for `add_terms`.
        copy_to, moved : list of list of NDArray
            Where to keep g, and the move, both for unscaled losses. Without a row, the move is g,
            and is not copied.
        mean_moves : bool
            Whether to add the mean to the move at the end. Not ``(mean + g) + b row``: late in
            training g is nearly the row, and their difference is nearly exact.
        """
        for device, sums in enumerate(per_device(self.arrays)):
            arrays = copy_to, mean, copy_to if row is None else row, moved
            columns = [sums, *(per_device(each)[device] for each in arrays)]
            factor = k * counts[device] * self.scale if counts[device] else None
            live = self._live_grads.columns[device]
            # An array as a factor is another one each time.
            steps = steps_keeping.__wrapped__ if isinstance(k, NDArray) else steps_keeping
            b_row = None if row is None else b
            how = live.is_narrow, live.by_products
            assign_in_turn(columns, steps(self.scale, b_row, factor, mean_moves, *how))

    def _combine(
        self, device: int, factors: tuple[float, ...], sources: Sequence[Arrays], targets: Arrays
    ) -> None:
        """Assign a combination of arrays on a device, by an operator that is kept for reuse."""
        key = device, factors, id(targets), *map(id, sources)
        if key not in self._kept:
            *columns, target = ([row[device] for row in rows] for rows in (*sources, targets))
            self._kept[key] = Combination(factors, columns, target, (sources, targets))
            if len(self._kept) > self._MAX_KEPT * len(targets[0]):
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        self._kept[key]()

    def add(self, recorded: Recorded, point: Point, factor: float = 1.0) -> Flags:
        """Add the gradient of losses at a point, times a factor, and tell what backward reached."""
        before = None if self.observed is None else sketch.sketch(self.arrays)
        if self.rounds_alike(factor) or not recorded.rounds(factor, self._live_grads.epsilon):
            recorded.backward(factor * self.scale)
        else:  # v + f g = f (v / f + g)
            self._multiply(1 / factor)
            recorded.backward(self.scale)
            self._multiply(factor)
        if before is not None:
            self._observe(before, factor * self.scale)
        return point.take_touched()

    def _multiply(self, factor: float) -> None:
        for sums in per_device(self.arrays):
            combine([factor], [sums], sums)

    def rounds_alike(self, factor: float) -> bool:
        """Whether backward rounds a gradient times a factor as it rounds the gradient."""
        return abs(frexp(factor)[0]) == 0.5

    def _observe(self, before: np.ndarray | float, scale: float) -> None:
        """Observe what was added to a sum since its sketch was taken."""
        assert self.observed is not None
        epsilon = max(np.finfo(array.dtype).eps for row in self.arrays for array in row)
        with np.errstate(invalid="ignore", over="ignore"):
            added = (sketch.sketch(self.arrays) - before) / scale
            rounding = _SUM_ROUNDING * float(epsilon * np.linalg.norm(before)) / abs(scale)
        self.observed.append(Observed(added, rounding))

    def set_to(self, recorded: Recorded, weights: Arrays) -> Flags:
        """Begin with the gradient of losses at weights where backward writes."""
        self.arrays = self._live_grads
        recorded.backward(self.scale)
        touched = _mxnet.take_fresh(weights)
        self.clear(touched)
        if self.observed is not None:
            self._observe(0.0, self.scale)
        return touched

    def add_last(self, recorded: Recorded, point: Point) -> Flags:
        """Add the gradient of losses at a point, and leave the sum in the live gradients."""
        return self.add(recorded, point)

    def clear(self, kept: Flags) -> None:
        """Set the sum to zero for the parameters and devices that are not kept."""
        if all(map(all, kept)):
            return
        for column, flags in zip(per_device(self.arrays), zip(*kept)):
            lost = [array for array, is_kept in zip(column, flags) if not is_kept]
            if lost:
                zero(lost)

    def copy_to(self, arrays: Arrays) -> None:
        """Copy the sum so far, for unscaled losses."""
        for totals, targets in zip(per_device(self.arrays), per_device(arrays)):
            if self.scale == 1:
                copy(totals, targets)
            else:
                combine([1 / self.scale], [totals], targets)


class SeparateSum(LiveSum):
    """A sum in separate arrays: each gradient is written to the live gradients, then added.

    The arrays are kept. New ones for each sum would pile up while steps are queued.
    """

    def __init__(self, network: Network, scale: float) -> None:
        super().__init__(network, scale)
        if not network.sums:
            network.sums = buffers_like(network.live_grads)
        self.arrays = self._sums = network.sums

    def start(self, counts: Sequence[int] = (), k: float = 0.0, mean: Arrays | None = None) -> None:
        """Begin with ``k c m``, or with zero, see `LiveSum.start`."""
        if mean is not None and all(k * count * self.scale == 1 for count in counts):
            self.arrays = mean  # the first gradient is added to it in the separate arrays
        else:
            self.arrays = self._sums
            super().start(counts, k, mean)

    def add(self, recorded: Recorded, point: Point, factor: float = 1.0) -> Flags:
        """Add the gradient of losses at a point, times a factor, and tell what backward reached."""
        before, touched = self.arrays, self.set_to(recorded, point.weights)
        self.arrays = self._sums
        for device in range(len(touched[0])):
            sources = before, self._live_grads
            self._combine(device, (1.0, factor), sources, self._sums)
        return touched

    def rounds_alike(self, factor: float) -> bool:
        """Always: backward takes no factor."""
        return True

    def add_last(self, recorded: Recorded, point: Point) -> Flags:
        """Add the gradient of losses at a point, and leave the sum in the live gradients."""
        touched = self.set_to(recorded, point.weights)
        for device in range(len(touched[0])):
            sources = self._live_grads, self._sums
            self._combine(device, (1.0, 1.0), sources, self._live_grads)
        return touched


def new_sum(network: Network, scale: float) -> LiveSum:
    """Make a sum of gradients of a network, of the right kind."""
    return (LiveSum if network.adds else SeparateSum)(network, scale)


def _sum_of(terms: list[Any], is_narrow: bool) -> tuple[Step, ...]:
    """Make the sum of terms that of column 0; only the first term may be this column."""
    if is_narrow:  # round once
        return ((0, tuple(terms)),)
    first, *rest = terms  # no intermediate sums, which would need memory
    factor, number = first  # the factor may be an array, which must not be looked at
    steps = () if number == 0 and factor == 1.0 else ((0, (first,)),)
    return steps + tuple((0, ((1.0, 0), term)) for term in rest)


@lru_cache(maxsize=32)
def steps_keeping(
    scale: float,
    b: float | None,
    mean: Any,
    mean_moves: bool,
    is_narrow: bool,
    by_products: bool,
) -> tuple[Step, ...]:
    """The steps of `LiveSum.add_terms_keeping`, with the factors of the row and of the mean.

    The columns are v, which is g, then the copy of g, the mean, the row, and the move.
    """
    v, g, m, r, move = range(5)
    kept: Step = (g, ((1 / scale, v),))
    if by_products and scale == 1 and b is not None:  # a product adds a multiple in place
        moved = ((1.0, v), (1.0, m)) if mean_moves else ((1.0, v),)
        steps = [kept, (v, ((1.0, v), (b, r))), (move, moved)]
        return (*steps, *([] if mean is None else [(v, ((1.0, v), (mean, m)))]))
    steps = [kept]
    if b is not None:
        steps.append((move, ((1.0, g), (b, r))))
    last = g if b is None else move
    terms = [] if mean is None else [(mean, m)]
    steps += _sum_of([*terms, (scale, last)], is_narrow)
    if mean_moves:
        steps.append((move, ((1.0, last), (1.0, m))))
    return tuple(steps)
