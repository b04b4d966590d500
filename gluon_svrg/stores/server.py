"""The optimizer on the servers of a distributed kvstore, when these make the updates.

MXNet unpickles an optimizer there in the middle of ``import mxnet``, before Gluon exists: this
module imports the optimizers and nothing else. If that fails, MXNet only prints a line, and then
stores sums of gradients as weights. So the workers first push a probe and check its answer.
"""

from __future__ import annotations

import pickle
from typing import Any

from mxnet.optimizer import Optimizer

#: The answer of a server with this optimizer to a probe.
ANSWER = 42.0

_loaded: ServerOptimizer | None = None  # in the process of a server


class ServerOptimizer(Optimizer):
    """The user's optimizer for the keys of parameters; all other keys are assigned.

    Parameters
    ----------
    optimizer : Optimizer
        The user's optimizer.
    parameters : int
        The number of parameters, whose keys come first.
    probes : int
        The number of probes, whose keys come next.
    """

    def __init__(self, optimizer: Optimizer, parameters: int, probes: int) -> None:
        super().__init__(multi_precision=optimizer.multi_precision)
        self.aggregate_num = 0  # MXNet 1.9.1: one key at a time
        self._optimizer = optimizer
        self._parameters = parameters
        self._probes = probes
        self._states: dict[int, Any] = {}  # kept under new settings, unlike MXNet's own

    def __setstate__(self, state: dict[str, Any]) -> None:
        global _loaded
        super().__setstate__(state)
        _loaded = self

    def change(self, settings: dict[str, Any], scheduler: dict[str, Any]) -> None:
        """Assign new attributes to the user's optimizer and its scheduler."""
        vars(self._optimizer).update(settings)
        if scheduler:
            vars(self._optimizer.lr_scheduler).update(scheduler)

    def create_state(self, index: int, weight: Any) -> Any:
        """Make the user's state, once."""
        return self.create_state_multi_precision(index, weight)

    def create_state_multi_precision(self, index: int, weight: Any) -> Any:
        """Make the user's state, once."""
        if index >= self._parameters:
            return None
        if index not in self._states:
            self._states[index] = self._optimizer.create_state_multi_precision(index, weight)
        return self._states[index]

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Update or assign one key (MXNet 1.9.1) or lists of keys (2.0)."""
        if not isinstance(index, (list, tuple)):
            if index >= self._parameters:
                self._assign(index, weight, grad)
            else:
                self._optimizer.update_multi_precision(index, weight, grad, state)
            return
        for row in zip(index, weight, grad, state):
            if row[0] >= self._parameters:
                self._assign(*row[:3])
            else:
                self._optimizer.update_multi_precision(*[[item] for item in row])

    update = update_multi_precision

    def _assign(self, index: int, weight: Any, grad: Any) -> None:
        is_probe = index < self._parameters + self._probes
        weight[:] = grad * 0 + ANSWER if is_probe else grad


class Settings:
    """Attributes for the user's optimizer on a server, in the form of a pickle.

    MXNet's only such command to servers is a pickled optimizer. Unpickling this one changes the
    existing optimizer and returns it.
    """

    def __init__(self, settings: dict[str, Any], scheduler: dict[str, Any]) -> None:
        self._arguments = settings, scheduler

    def __reduce__(self) -> Any:
        return change_loaded, self._arguments

    def pickled(self) -> str:
        """The body of the command."""
        return pickle.dumps(self, 0).decode("ascii")


def change_loaded(settings: dict[str, Any], scheduler: dict[str, Any]) -> ServerOptimizer:
    """On a server: change the existing optimizer, and return it."""
    if _loaded is None:
        raise RuntimeError("There is no ServerOptimizer in this process.")
    _loaded.change(settings, scheduler)
    return _loaded
