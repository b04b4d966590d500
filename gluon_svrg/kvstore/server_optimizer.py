"""The optimizer on the servers of a distributed kvstore, when these make the updates.

MXNet unpickles an optimizer there in the middle of ``import mxnet``, before Gluon exists: this
module imports the optimizers and nothing else. If that fails, MXNet only prints a line, and then
stores sums of gradients as weights. So the workers first push a probe and check its answer.
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

from mxnet.optimizer import Optimizer

#: The answer of a server with this optimizer to a probe, which no sum of ones can be.
ANSWER = 42.5

_loaded: ServerOptimizer | None = None  # in the process of a server


class ServerOptimizer(Optimizer):
    """The user's optimizer for the keys of parameters; later keys are assigned, or are probes'."""

    def __init__(self, optimizer: Optimizer, parameters: int, probes: int) -> None:
        super().__init__(multi_precision=optimizer.multi_precision)
        self.aggregate_num = 0  # MXNet 1.9.1: one key at a time
        self.optimizer = optimizer
        self._parameters = parameters
        self._probes = probes
        self._states: dict[int, Any] = {}  # kept under new settings, unlike MXNet's own

    def __setstate__(self, state: dict[str, Any]) -> None:
        global _loaded
        super().__setstate__(state)
        _loaded = self

    def create_state_multi_precision(self, index: int, weight: Any) -> Any:
        """Make the user's state, once."""
        if index >= self._parameters:
            return None
        if index not in self._states:
            self._states[index] = self.optimizer.create_state_multi_precision(index, weight)
        return self._states[index]

    create_state = create_state_multi_precision

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Update or assign one key (MXNet 1.9.1) or lists of keys (2.0)."""
        is_one = not isinstance(index, (list, tuple))
        rows = [(index, weight, grad, state)] if is_one else zip(index, weight, grad, state)
        for row in rows:
            if row[0] >= self._parameters:
                self._assign(*row[:3])
            else:
                self.optimizer.update_multi_precision(*(row if is_one else ([i] for i in row)))

    update = update_multi_precision

    def _assign(self, index: int, weight: Any, grad: Any) -> None:
        is_probe = index < self._parameters + self._probes
        weight[:] = grad * 0 + ANSWER if is_probe else grad


class Settings(NamedTuple):
    """New attributes of the user's optimizer and of its scheduler.

    MXNet's only such command to servers is a pickled optimizer. Unpickling this one changes the
    existing optimizer and returns it.
    """

    optimizer: dict[str, Any]
    scheduler: dict[str, Any]

    def __reduce__(self) -> Any:
        return _changed, (self.optimizer, self.scheduler)

    def pickled(self) -> str:
        """The text of the command."""
        return pickle.dumps(self, 0).decode("ascii")


def _changed(optimizer: dict[str, Any], scheduler: dict[str, Any]) -> ServerOptimizer:
    """On a server: change the existing optimizer, and return it."""
    if _loaded is None:
        raise RuntimeError("There is no ServerOptimizer in this process.")
    vars(_loaded.optimizer).update(optimizer)
    if scheduler:
        vars(_loaded.optimizer.lr_scheduler).update(scheduler)
    return _loaded
