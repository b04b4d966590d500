"""Points: the values at which a network can compute."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Sequence, TypeVar

import numpy as np
from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from .. import _mxnet
from .._mxnet import Arrays, Flags
from .arrays import copies, copy_all
from .entries import in_numpy
from .network import Network

_T = TypeVar("_T")


class Point:
    """Values of all parameters of a network.

    The gradients of a pass at a point go to the live gradients of the parameters, the only ones
    that a network hybridized with ``static_shape=True`` can use.

    Parameters
    ----------
    network : Network
        The network.
    weights : list of list of NDArray
        The values of the trainable parameters, per device, in separate arrays.
    frozen : list of list of NDArray, optional
        The values of the frozen parameters; by default, their values at the time of each pass.
    protected : bool, default True
        Whether operators that change their own states, such as BatchNorm, do so on copies.
    """

    def __init__(
        self,
        network: Network,
        weights: Arrays,
        frozen: Arrays | None = None,
        *,
        protected: bool = True,
    ) -> None:
        self.network = network
        self.weights = weights
        self.frozen = frozen
        self._protected = protected
        self._is_elsewhere = weights is not network.aliases
        self.bind()

    def __getstate__(self) -> dict[str, Any]:
        """What a copy keeps: it binds to the arrays of its own network."""
        kept = ("network", "weights", "frozen", "_protected", "_is_elsewhere")
        return {name: vars(self)[name] for name in kept}

    @classmethod
    def current(cls, network: Network) -> Point:
        """The current weights and states, where a step computes its gradient."""
        return cls(network, network.aliases, protected=False)

    @classmethod
    def untouched(cls, network: Network) -> Point:
        """The current weights, by reference, and copies of states that operators change.

        Sparse weights have all rows.
        """
        sparse = [_mxnet.has_sparse_values(p) for p in network.trainable]
        if not any(sparse):
            return cls(network, network.aliases)
        rows = zip(network.trainable, network.aliases, sparse)
        return cls(network, [_mxnet.all_rows(p) if is_sparse else a for p, a, is_sparse in rows])

    @classmethod
    def copied(cls, network: Network) -> Point:
        """Copies of the current weights and frozen values."""
        weights = [list(map(_mxnet.guard, _mxnet.all_rows(p))) for p in network.trainable]
        return cls(network, weights, copies([_mxnet.data(p) for p in network.frozen]))

    def bind(self) -> None:
        """Use the gradient buffers that the parameters have now."""
        if self._is_elsewhere:  # MXNet 2.0 has traced the arrays as those of another variable
            for row in self.weights:
                row[:] = [_mxnet.guard(_mxnet.unguarded(value).detach()) for value in row]
            for row in self.frozen or ():
                row[:] = [value.detach() for value in row]
        self._moving = [i for i, p in enumerate(self.network.frozen) if _mxnet.is_auxiliary(p)]
        moved = [_mxnet.data(self.network.frozen[i]) for i in self._moving]
        self._scratch = copies(moved) if self._protected else []
        self._fixed: Any = None  # the replacements of each pass, if they are always the same
        if self.frozen is None and not self._scratch:
            self._fixed = self._replacements()
        self.network.mark(self.weights)

    def move(self) -> None:
        """Copy the values of the network's parameters, in place."""
        network = self.network
        live = [
            _mxnet.all_rows(p) if _mxnet.has_sparse_values(p) else _mxnet.data(p)
            for p in network.parameters
        ]
        values = dict(zip(network.parameters, live))
        copy_all([values[p] for p in network.trainable], self.weights)
        copy_all([values[p] for p in network.frozen], self.frozen or [])

    def at(self, work: Callable[..., _T], *args: Any) -> _T:
        """Call a function while the network computes here."""
        network = self.network
        parameters, arrays = self._fixed or self._replacements()
        there = _mxnet.replacing(parameters, arrays)
        back = _mxnet.replacing(parameters, list(map(_mxnet.data, parameters)))
        with network.lock:
            was_elsewhere = network.is_elsewhere
            # An interrupt reaches Python between two bytecodes: each `deque` is one, and before
            # Python 3.11 one can come between a block and its `finally`, hence two of these.
            try:
                try:
                    deque(there, 0)
                    network.is_elsewhere = self._is_elsewhere
                    return work(*args)
                finally:
                    deque(back, 0)
            finally:
                deque(back, 0)  # it is used up, unless an interrupt has come
                network.is_elsewhere = was_elsewhere

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let the network compute here inside the user's block.

        Backward writes or adds gradients as the user has set.
        """
        network = self.network
        parameters, arrays = self._replacements()
        live = [_mxnet.data(parameter) for parameter in parameters]
        with network.lock:
            for p, weights, grads in zip(network.trainable, self.weights, network.live_grads):
                _mxnet.put_gradients_into([weights], [grads], p.grad_req)
            deque(_mxnet.replacing(parameters, arrays), 0)
            network.is_elsewhere = True
            try:
                yield
            finally:
                deque(_mxnet.replacing(parameters, live), 0)
                network.is_elsewhere = False
                network.mark(self.weights)

    def _replacements(self) -> tuple[list[Any], list[list[NDArray]]]:
        network = self.network
        parameters, arrays = list(network.trainable), list(self.weights)
        if self.frozen is not None:
            parameters += network.frozen
            arrays += self.frozen
        if self._protected and self._moving:
            frozen = self.frozen or [_mxnet.data(p) for p in network.frozen]
            copy_all([frozen[i] for i in self._moving], self._scratch)
            parameters += [network.frozen[i] for i in self._moving]
            arrays += self._scratch
        return parameters, arrays

    # --- what backward reaches -----------------------------------------------------------------

    def take_touched(self) -> Flags:
        """Tell which of the weights here backward has reached, and clear the marks."""
        return _mxnet.take_fresh(self.weights)

    # --- compared with the network -------------------------------------------------------------

    def difference(self) -> str:
        """Describe how the parameters have changed; empty if they have not."""
        network = self.network
        for parameter in network.parameters:
            was, is_now = parameter in network.trainable, _mxnet.is_trainable(parameter)
            if was and not is_now:
                return f"{parameter.name} has grad_req='null' now"
            if is_now and not was:
                return f"{parameter.name} had grad_req='null' then"
        known = zip(network.trainable + network.frozen, self.weights + (self.frozen or []))
        for parameter, values in known:
            now, then = map(description, (_mxnet.data(parameter), values))
            if now != then:
                return f"{parameter.name} is {now} now and was {then} then"
        return ""

    def is_current(self) -> bool:
        """Whether the network is at this point, to the last bit. Waits for the device."""
        network = self.network
        live = map(_mxnet.data, network.trainable + network.frozen)
        return all(
            np.array_equal(*pieces)
            for rows in zip(live, self.weights + (self.frozen or []))
            for now_and_then in zip(*rows)
            for pieces in zip(*map(in_numpy, now_and_then))
        )


def descriptions(network: Network) -> dict[Parameter, str]:
    """Descriptions of the current trainable parameters."""
    trainable = filter(_mxnet.is_trainable, network.parameters)
    return {p: description(_mxnet.data(p)) for p in trainable}


def what_changed(before: dict[Parameter, str], network: Network) -> str:
    """Describe how the trainable parameters have changed; empty if they have not."""
    now, null = descriptions(network), "of grad_req='null'"
    for p in network.parameters:
        was, is_now = before.get(p), now.get(p)
        if was != is_now:
            return f"{p.name} is {is_now or null} now and was {was or null} then"
    return ""


def description(arrays: Sequence[NDArray]) -> str:
    """The dtype, shape and devices of a parameter's arrays."""
    where = ", ".join(str(_mxnet.device_of(array)) for array in arrays)
    return f"{_mxnet.dtype_name(arrays[0])} {tuple(arrays[0].shape)} on {where}"
