"""Sums of gradients, term by term.

Backward can add to a buffer (``grad_req='add'``), and multiply a gradient by a factor (the
gradient of its head). So a sum such as ``k c m + b r + g`` needs no separate buffer: the two passes
of a step compute it in the live gradients. `AddingSum` does that.

Some operators ignore the gradient of their head (SoftmaxOutput, MakeLoss), and custom operators
may ignore the request to add; `probe` detects both. For these, and for sparse and float16
gradients, `SeparateSum` adds in separate arrays, exactly by the formula.
"""

from __future__ import annotations

from typing import Sequence

from .._mxnet import Arrays, Flags
from .arrays import Multiple, combine, copy, copy_all, per_device, zero, zeros_to_sum
from .closure import Recorded
from .network import Network


class AddingSum:
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
    """

    # An operator is compiled for a count when that comes again. Most data have two, the size of a
    # minibatch and that of the last one; where each minibatch has another, none is worth it.
    _MAX_MULTIPLES = 8

    def __init__(self, network: Network, scale: float) -> None:
        self.scale = scale
        self.arrays: Arrays = network.live_grads
        self._multiples = network.multiples

    def put(
        self,
        counts: Sequence[int] = (),
        k: float = 0.0,
        mean: Arrays | None = None,
        b: float = 0.0,
        row: Arrays | None = None,
        *,
        keep: bool = False,
    ) -> None:
        """Begin with ``k c m + b row``, or with zero.

        Parameters
        ----------
        counts : sequence of int
            The c of each device.
        k, b : float
            The factors.
        mean, row : list of list of NDArray, optional
            The terms, per parameter and device, for unscaled losses.
        keep : bool
            Whether to add them to the sum so far.
        """
        for device, targets in enumerate(per_device(self.arrays)):
            if row is None and not keep and mean is not None and k and counts[device]:
                self._put_multiple(device, k * counts[device] * self.scale, mean)
                continue
            terms = [(1.0, targets)] if keep else []
            if mean is not None and k and counts[device]:
                terms.append((k * counts[device] * self.scale, [m[device] for m in mean]))
            if row is not None and b:
                terms.append((b * self.scale, [r[device] for r in row]))
            if terms:
                factors, sources = zip(*terms)
                combine(factors, sources, targets)
            else:
                zero(targets)

    def _put_multiple(self, device: int, factor: float, mean: Arrays) -> None:
        """Begin with a multiple of arrays, by an operator that is kept for reuse."""
        key = device, factor, id(mean), id(self.arrays)
        if key not in self._multiples:
            means, targets = ([row[device] for row in rows] for rows in (mean, self.arrays))
            self._multiples[key] = Multiple(factor, means, targets, (mean, self.arrays))
            if len(self._multiples) > self._MAX_MULTIPLES:
                self._multiples.popitem(last=False)
        self._multiples.move_to_end(key)
        self._multiples[key]()

    def add(self, recorded: Recorded, factor: float = 1.0) -> None:
        """Add the gradient of losses, times a factor."""
        recorded.backward(factor * self.scale)

    def begin(self, recorded: Recorded) -> None:
        """Begin with the gradient of losses, recorded where backward writes.

        What it does not reach is to be cleared.
        """
        self.add(recorded)

    def clear(self, kept: Flags) -> None:
        """Set the sum to zero for the parameters and devices that are not kept."""
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

    def finish(self) -> None:
        """Leave the sum in the live gradients, where it is."""


class SeparateSum(AddingSum):
    """A sum in separate arrays: each gradient is written to the live gradients, then added.

    The arrays are kept. New ones for each sum would pile up while steps are queued.
    """

    def __init__(self, network: Network, scale: float) -> None:
        super().__init__(network, scale)
        self._live_grads = network.live_grads
        if not network.sums:
            network.sums = [[zeros_to_sum(grad) for grad in row] for row in network.live_grads]
        self.arrays = network.sums

    def add(self, recorded: Recorded, factor: float = 1.0) -> None:
        """Add the gradient of losses, times a factor."""
        live = per_device(self._live_grads)
        for column in live:  # parameters that backward does not reach have no gradient
            zero(column)
        recorded.backward(self.scale)
        for totals, grads in zip(per_device(self.arrays), live):
            combine((1, factor), (totals, grads), totals)

    def begin(self, recorded: Recorded) -> None:
        """Begin with the gradient of losses."""
        self.put()
        self.add(recorded)

    def finish(self) -> None:
        """Leave the sum in the live gradients."""
        copy_all(self.arrays, self._live_grads)


def new_sum(network: Network, scale: float) -> AddingSum:
    """Make a sum of gradients of a network, of the right kind."""
    return (AddingSum if network.adds else SeparateSum)(network, scale)
