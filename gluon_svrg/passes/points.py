"""Points: the values at which a network can compute."""

from __future__ import annotations

import mxnet as mx
from mxnet.ndarray import NDArray

from .. import _mxnet
from .._mxnet import Arrays
from .columns import are_equal, columns
from .combine import copy
from .network import ParameterBuffers


class ParameterValues:
    """Values of all parameters of a network.

    The gradients of a pass there go to the live gradients of the parameters, the only ones that a
    network hybridized with ``static_shape=True`` can use.

    Frozen values that are not given are those at the time of each pass. Operators that change their
    own states, such as BatchNorm, do so on copies, unless the point may move states.
    """

    def __init__(
        self,
        network: ParameterBuffers,
        weights: Arrays,
        frozen: Arrays | None = None,
        *,
        moves_states: bool = False,
    ) -> None:
        self.network, self.weights, self.frozen = network, weights, frozen
        self._moves_states = moves_states
        self.is_elsewhere = weights is not network.aliases
        self.bind()

    @classmethod
    def here(cls, network: ParameterBuffers, *, moves_states: bool = False) -> ParameterValues:
        """The current weights, by reference; copies of sparse ones, unless states move here."""
        aliases, sparse = network.aliases, list(map(_mxnet.has_sparse_values, network.trainable))
        if any(sparse) and not moves_states:
            rows = zip(network.trainable, aliases, sparse)
            aliases = [_copies(_mxnet.all_rows(p)) if s else row for p, row, s in rows]
        return cls(network, aliases, moves_states=moves_states)

    @classmethod
    def copied(cls, network: ParameterBuffers, *, frozen: bool) -> ParameterValues:
        """Copies of the current weights, and perhaps of the frozen values."""
        weights = [_copies(_mxnet.all_rows(p)) for p in network.trainable]
        return cls(network, weights, list(map(_copies, network.frozen_values)) if frozen else None)

    def bind(self) -> None:
        """Use the gradient buffers that the parameters have now."""
        network = self.network
        if self.is_elsewhere:  # MXNet 2.0 has traced the arrays as those of another variable
            for row in (*self.weights, *(self.frozen or ())):
                row[:] = [value.detach() for value in row]
        rows = list(network.frozen_values if self.frozen is None else self.frozen)
        self._states: list[tuple[NDArray, NDArray]] = []  # those that operators change, and copies
        for i, parameter in enumerate(network.frozen):
            if _mxnet.is_auxiliary(parameter) and not self._moves_states:
                copies = _copies(rows[i])
                self._states += zip(rows[i], copies)
                rows[i] = copies
        self._parameters, self._arrays = list(network.trainable), list(self.weights)
        self._own = list(network.weights)
        if self.frozen or self._states:
            self._parameters += network.frozen
            self._arrays += rows
            self._own += network.frozen_values
        network.mark(self.weights)

    def is_current(self) -> bool:
        """Whether the parameters have the values of this point. Waits for the device."""
        network = self.network
        now = zip(network.trainable + network.frozen, self.weights + (self.frozen or []))
        return all(are_equal(_mxnet.data(p), values) for p, values in now)

    def move(self) -> None:
        """Copy the current weights, in place."""
        weights = list(map(_mxnet.all_rows, self.network.trainable))
        copy(columns(weights), columns(self.weights))

    def enter(self) -> None:
        """Let the network compute here, until `leave`; that may follow an interrupted call, too."""
        for value, copy_of_it in self._states:
            value.copyto(copy_of_it)
        self.network.at = self
        _mxnet.put(self._parameters, self._arrays)

    def leave(self) -> None:
        """Let the network compute with the parameters' own values again."""
        if mx.autograd.is_recording():  # an interrupt has come at the end of `autograd.record`
            mx.autograd.set_recording(False)
            mx.autograd.set_training(False)
        _mxnet.put(self._parameters, self._own)
        self.network.at = None


def _copies(arrays: list[NDArray]) -> list[NDArray]:
    return [array.copy() for array in arrays]
