"""The snapshot: the weights and auxiliary states at which the full gradient is taken."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator, Sequence

import numpy as np
from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from . import _mxnet
from ._mxnet import Arrays
from .operations import Copy, copy, in_numpy, zero


class Snapshot:
    """Weights, with the auxiliary states of that moment, at which gradients can be taken.

    The gradients go to the buffers of the parameters themselves: a network hybridized with
    ``static_shape=True`` knows no others.

    Parameters
    ----------
    parameters : sequence of Parameter
        All parameters of the trainer, initialized.
    own : bool
        Whether to copy the weights. Otherwise the snapshot is valid while they do not change.

    Attributes
    ----------
    parameters : list of Parameter
        Those with gradients.
    weights : list of list of NDArray
        Their values, per device.
    auxiliaries : list of Parameter
        Those that operators write to by themselves, as BatchNorm's running statistics.
    states : list of list of NDArray
        Their values, per device.
    """

    def __init__(self, parameters: Sequence[Parameter], *, own: bool) -> None:
        self._all = list(parameters)
        self.parameters: list[Parameter] = [p for p in parameters if _mxnet.is_trainable(p)]
        self.auxiliaries: list[Parameter] = [p for p in parameters if _mxnet.is_auxiliary(p)]
        self.weights: Arrays = [
            _mxnet.all_rows(p)
            if own or _mxnet.has_sparse_values(p)
            else [value.detach() for value in _mxnet.data(p)]
            for p in self.parameters
        ]
        self.states: Arrays = [[v.copy() for v in _mxnet.data(p)] for p in self.auxiliaries]
        # Passes write to the auxiliary states, so they get copies of them.
        self._scratch: Arrays = [[v.copy() for v in _mxnet.data(p)] for p in self.auxiliaries]
        pairs = zip(per_device(self.states), per_device(self._scratch))
        self._reset_scratch = [Copy(states, scratch) for states, scratch in pairs]
        self.bind()

    def bind(self) -> None:
        """Let backward at the snapshot write to the gradient buffers that the parameters have."""
        self.buffers: Arrays = [_mxnet.gradients(p) for p in self.parameters]
        self._all_buffers = [_mxnet.gradients(p) for p in self._all]
        _mxnet.put_gradients_into(self.weights, self.buffers, self.parameters)
        self._accumulating: Arrays = [
            buffers for p, buffers in zip(self.parameters, self.buffers) if p.grad_req == "add"
        ]

    def is_bound(self) -> bool:
        """Whether the parameters still have the gradient buffers that are known here."""
        return _mxnet.have_buffers(self._all, self._all_buffers)

    def difference(self) -> str:
        """What about the parameters is not as it was, in words; empty if nothing."""
        for parameter in self._all:
            was, is_now = parameter in self.parameters, _mxnet.is_trainable(parameter)
            if was and not is_now:
                return f"{parameter.name} has grad_req='null' now"
            if is_now and not was:
                return f"{parameter.name} had grad_req='null' then"
        for parameter, weights in zip(self.parameters, self.weights):
            now, then = map(_description, (_mxnet.data(parameter), weights))
            if now != then:
                return f"{parameter.name} is {now} now and was {then} then"
        return ""

    def is_current(self) -> bool:
        """Whether the network is, to the last bit, where the snapshot was taken. Waits."""
        live = map(_mxnet.data, self.parameters + self.auxiliaries)
        return all(
            np.array_equal(*pieces)
            for rows in zip(live, self.weights + self.states)
            for now_and_then in zip(*rows)
            for pieces in zip(*map(in_numpy, now_and_then))
        )

    def replace(self, other: Snapshot) -> None:
        """Take over the values of another snapshot of the same parameters, in place."""
        copy_all(other.weights, self.weights)
        copy_all(other.states, self.states)

    def clear_accumulated(self) -> None:
        """Set those gradients to zero to which `backward` adds (``grad_req='add'``)."""
        for column in per_device(self._accumulating):
            zero(column)

    @contextmanager
    def accumulation(self) -> Iterator[None]:
        """Take the gradients of this block by themselves, then add them to those before it.

        Where gradients accumulate. If the block raises, they are as before.
        """
        before = [[buffer.copy() for buffer in row] for row in self._accumulating]
        try:
            yield
        except BaseException:
            copy_all(before, self._accumulating)
            raise
        for row, addends in zip(self._accumulating, before):
            for buffer, addend in zip(row, addends):
                buffer += addend

    def holds(self, arrays: Sequence[NDArray]) -> bool:
        """Whether arrays are weights held here."""
        return any(arrays[0] is array for row in self.weights for array in row)

    def forget_gradients(self) -> None:
        """Take no notice of gradients that were taken at the snapshot."""
        _mxnet.take_fresh(self.weights)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let the network compute at the snapshot; it cannot change the states held here."""
        for reset in self._reset_scratch:
            reset()
        parameters = self.parameters + self.auxiliaries
        with _mxnet.data_replaced(parameters, self.weights + self._scratch):
            yield


def per_device(arrays: Arrays) -> Arrays:
    """Turn lists per parameter into lists per device."""
    return [list(on_device) for on_device in zip(*arrays)]


def copy_all(sources: Arrays, targets: Arrays) -> None:
    """Copy arrays per parameter and device."""
    for column, target_column in zip(per_device(sources), per_device(targets)):
        copy(column, target_column)


def _description(arrays: Sequence[NDArray]) -> str:
    where = ", ".join(str(_mxnet.device_of(array)) for array in arrays)
    return f"{_mxnet.dtype_name(arrays[0])} {tuple(arrays[0].shape)} on {where}"
