"""A second set of gradient buffers, beside the parameters' own."""

from __future__ import annotations

import mxnet as mx
from mxnet.ndarray import NDArray

from . import _mxnet
from ._mxnet import Arrays
from .operations import SUMMED_IN, Copy, Sum, zero
from .snapshot import per_device


class GradientBuffer:
    """Arrays like the gradients, to keep gradients in or to sum them up.

    Parameters
    ----------
    grads : list of list of NDArray
        The gradient buffers of the parameters, per parameter and device.

    Attributes
    ----------
    arrays : list of list of NDArray
        The arrays, per parameter and device; dense, and for float16 in float32.
    """

    def __init__(self, grads: Arrays) -> None:
        self.arrays: Arrays = [[_zeros(grad) for grad in row] for row in grads]
        self.bind(grads)

    def bind(self, grads: Arrays) -> None:
        """Work with these gradients."""
        columns = list(zip(per_device(self.arrays), per_device(grads)))
        self._keep = [Copy(grads, kept) for kept, grads in columns]
        self._sums = [Sum(kept, grads) for kept, grads in columns]

    def keep(self) -> None:
        """Copy the gradients into the buffer."""
        for copy in self._keep:
            copy()

    def zero(self) -> None:
        """Start a sum."""
        for column in per_device(self.arrays):
            zero(column)

    def add(self, device: int) -> None:
        """Add the gradients of one device, newly computed, to the sum."""
        self._sums[device].add()

    def finish(self) -> None:
        """End a sum."""
        for total in self._sums:
            total.finish()


def _zeros(array: NDArray) -> NDArray:
    dtype = SUMMED_IN[_mxnet.dtype_name(array)]
    return mx.nd.zeros(array.shape, ctx=_mxnet.device_of(array), dtype=dtype)
