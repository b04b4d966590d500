"""The optimizer on the servers of a distributed kvstore, when these make the updates.

Servers unpickle it inside ``import mxnet``, before Gluon exists: this module imports the optimizers
alone. If that fails, MXNet prints a traceback, and synchronous servers store sums of gradients as
weights. So workers first push a probe and check its answer.
"""

from __future__ import annotations

from typing import Any, Dict

from mxnet.optimizer import Optimizer

#: The answer of a server with this optimizer to a probe, which no sum of ones can be.
ANSWER = 42.5

_loaded: ServerOptimizer | None = None  # in the process of a server


class ServerOptimizer(Optimizer):
    """The user's optimizer for the keys of parameters; later keys are assigned, or are probes'."""

    def __init__(self, optimizer: Optimizer, probes: range) -> None:
        super().__init__(multi_precision=optimizer.multi_precision)
        self.optimizer, self._probes = optimizer, probes
        self._states: dict[int, Any] = {}  # kept under new settings, unlike MXNet's own

    def __setstate__(self, state: dict[str, Any]) -> None:
        global _loaded
        super().__setstate__(state)
        _loaded = self

    def create_state_multi_precision(self, index: int, weight: Any) -> Any:
        """Make the user's state, once."""
        if index >= self._probes.start:
            return None
        if index not in self._states:
            self._states[index] = self.optimizer.create_state_multi_precision(index, weight)
        return self._states[index]

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Update or assign one key (MXNet 1.9.1) or lists of keys (2.0)."""
        is_one = not isinstance(index, (list, tuple))
        rows = [(index, weight, grad, state)] if is_one else zip(index, weight, grad, state)
        for row in rows:
            key, value, pushed, _ = row
            if key < self._probes.start:
                self.optimizer.update_multi_precision(*(row if is_one else ([i] for i in row)))
            else:
                value[:] = ANSWER if key in self._probes else pushed


class Settings(Dict[str, Any]):
    """New attributes of the user's optimizer, which unpickling this changes and returns."""

    multi_precision = False  # or MXNet would send that, too

    def __reduce__(self) -> Any:
        return _changed, (dict(self),)


def _changed(settings: dict[str, Any]) -> ServerOptimizer:
    """On a server: change the existing optimizer, and return it."""
    assert _loaded is not None
    for name, value in settings.items():
        scheduler, _, attribute = name.rpartition(".")
        owner = _loaded.optimizer.lr_scheduler if scheduler else _loaded.optimizer
        setattr(owner, attribute, value)
    return _loaded
