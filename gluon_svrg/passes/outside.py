"""Parameters that a closure reads but that are not the trainer's.

A network may have parameters that another trainer, or no trainer, optimizes, and BatchNorm layers
whose statistics belong to no trainer. A pass at a reference must not change them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Iterable, Iterator

import numpy as np
from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from .. import _mxnet
from .arrays import put_back
from .sketch import sketch

_NOTHING = nullcontext()


class Outside:
    """The parameters outside a trainer that were found so far.

    They are found while a closure runs: at the first minibatch of each refresh, and at the first
    pass of a trainer that was loaded from a file.

    Parameters
    ----------
    inside : iterable of Parameter
        The trainer's parameters, which are excluded.
    """

    def __init__(self, inside: Iterable[Parameter]) -> None:
        self._inside = set(inside)
        self._found: dict[Parameter, None] = {}
        self._searched = False

    @property
    def auxiliaries(self) -> list[Parameter]:
        """The parameters that operators write to by themselves."""
        return [parameter for parameter in self._found if _mxnet.is_auxiliary(parameter)]

    def is_as(self, then: np.ndarray | None) -> bool:
        """Whether the values are those of a sketch; before the first pass they may be."""
        return then is None or not self._searched or np.array_equal(sketch(self.weights), then)

    @property
    def weights(self) -> list[list[NDArray]]:
        """The values of the parameters that operators do not write to."""
        return [_mxnet.data(p) for p in self._found if not _mxnet.is_auxiliary(p)]

    def protected(
        self, *, gradients: bool = True, search: bool = False
    ) -> AbstractContextManager[None]:
        """Restore their states and gradients at the end of a block.

        Parameters
        ----------
        gradients : bool
            Whether to protect all gradients. Otherwise only those to which the next backward adds.
        search : bool
            Whether to look for parameters that the block reads, and to protect them before their
            first use. The first call always does.
        """
        search = search or not self._searched
        return self._protected(gradients, search) if search or self._found else _NOTHING

    @contextmanager
    def _protected(self, gradients: bool, search: bool) -> Iterator[None]:
        protection = _Protection(gradients)
        try:
            for parameter in self._found:
                protection.include(parameter)
            if not search:
                yield
                return

            def note(parameter: Parameter) -> None:
                if parameter not in self._inside and parameter not in self._found:
                    self._found[parameter] = None
                    protection.include(parameter)

            with _mxnet.reads_noted(note):
                yield
            self._searched = True
        finally:
            protection.undo()


class _Protection:
    """The earlier state of parameters outside the trainer.

    Parameters
    ----------
    gradients : bool
        As for `Outside.protected`.
    """

    def __init__(self, gradients: bool) -> None:
        self._gradients = gradients
        self._data: list[tuple[Parameter, list[NDArray]]] = []
        self._grads: list[tuple[list[NDArray], list[NDArray], list[NDArray], list[bool]]] = []

    def include(self, parameter: Parameter) -> None:
        """Remember a parameter, and let operators write to copies of its states."""
        weights = _mxnet.data(parameter)
        if _mxnet.is_auxiliary(parameter):
            self._data.append((parameter, weights))
            list(_mxnet.replacing([parameter], [[value.copy() for value in weights]]))
        elif parameter.grad_req == "add" or (self._gradients and _mxnet.is_trainable(parameter)):
            grads = _mxnet.gradients(parameter)
            (fresh,) = _mxnet.fresh([weights])
            self._grads.append((weights, grads, [grad.copy() for grad in grads], fresh))

    def undo(self) -> None:
        """Restore the earlier state."""
        for parameter, weights in self._data:
            list(_mxnet.replacing([parameter], [weights]))
        for weights, grads, before, fresh in self._grads:
            put_back([before], [grads])
            _mxnet.take_fresh([weights])
            _mxnet.mark([weights], [fresh], fresh=True)
