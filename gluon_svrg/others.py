"""Parameters that a closure reads and that are not the trainer's.

A network may have parameters that another trainer optimizes, or none, and BatchNorm layers whose
statistics nobody was given. A pass at the snapshot must leave no trace on them.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterable, Iterator

from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from . import _mxnet


class Others:
    """The parameters of others that were found so far.

    Parameters
    ----------
    own : iterable of Parameter
        The trainer's, which are not meant.
    """

    def __init__(self, own: Iterable[Parameter]) -> None:
        self._own = set(own)
        self._found: dict[Parameter, None] = {}

    @property
    def auxiliaries(self) -> list[Parameter]:
        """Those that operators write to by themselves."""
        return [parameter for parameter in self._found if _mxnet.is_auxiliary(parameter)]

    @contextmanager
    def protected(self, *, gradients: bool = True) -> Iterator[Protection]:
        """Leave their states and gradients as they are.

        Parameters
        ----------
        gradients : bool
            Whether to protect all gradients. Otherwise those that the next backward would not
            overwrite, because it adds to them.

        Yields
        ------
        Protection
        """
        protection = Protection(self, gradients)
        try:
            for parameter in self._found:
                protection.include(parameter)
            yield protection
        finally:
            protection.undo()

    def find(self, parameter: Parameter) -> bool:
        """Tell whether a parameter is one of others that is seen for the first time."""
        is_new = parameter not in self._own and parameter not in self._found
        if is_new:
            self._found[parameter] = None
        return is_new


class Protection:
    """What parameters of others were like.

    Parameters
    ----------
    others : Others
        The parameters.
    gradients : bool
        As for `Others.protected`.
    """

    def __init__(self, others: Others, gradients: bool) -> None:
        self._others = others
        self._gradients = gradients
        self._data: list[tuple[Parameter, list[NDArray]]] = []
        self._grads: list[tuple[list[NDArray], list[NDArray], list[NDArray], list[bool]]] = []

    def include(self, parameter: Parameter) -> None:
        """Remember a parameter, and let operators write to copies of its states."""
        weights = _mxnet.data(parameter)
        if _mxnet.is_auxiliary(parameter):
            self._data.append((parameter, weights))
            _mxnet.set_arrays(parameter, [value.copy() for value in weights])
        elif parameter.grad_req == "add" or (self._gradients and _mxnet.is_trainable(parameter)):
            grads = _mxnet.gradients(parameter)
            (fresh,) = _mxnet.fresh([weights])
            self._grads.append((weights, grads, [grad.copy() for grad in grads], fresh))

    @contextmanager
    def found(self) -> Iterator[None]:
        """Find those that are read inside, and protect them before their first use."""

        def note(parameter: Parameter) -> None:
            if self._others.find(parameter):
                self.include(parameter)

        with _mxnet.reads_noted(note):
            yield

    def undo(self) -> None:
        """Put back what was there."""
        for parameter, weights in self._data:
            _mxnet.set_arrays(parameter, weights)
        for weights, grads, before, fresh in self._grads:
            for grad, saved in zip(grads, before):
                saved.copyto(grad)
            _mxnet.take_fresh([weights])
            _mxnet.mark([weights], [fresh], fresh=True)
