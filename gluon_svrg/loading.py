"""States that were loaded from a file, and wait until the parameters are initialized."""

from __future__ import annotations

import os
from typing import Any, Mapping, Sequence

from mxnet.gluon import Parameter

from . import saving

#: The parts whose arrays are those of the parameters.
DEFERRED = ("optimizer_states", "method")


class LoadedStates:
    """The states from a file that are not applied yet.

    Weights may be loaded after the states, or before. So these parts wait until they are needed.

    Parameters
    ----------
    params : ParameterDict, dict, list or tuple of Parameter
        The trainer's parameters, as it was given them.
    """

    def __init__(self, params: Any) -> None:
        keys = getattr(params, "keys", None)
        self._given = None if keys is None else {key: params[key] for key in keys()}
        self.waiting: saving.Saved | None = None

    def header(self, method: str, parameters: Sequence[Parameter], devices: int) -> dict[str, Any]:
        """Describe the trainer, see `saving.header`."""
        return saving.header(method, parameters, self._given or None, devices)

    def load(
        self,
        fname: str | os.PathLike[str],
        header: Mapping[str, Any],
        parts: Mapping[str, Any],
        parameters: Sequence[Parameter],
    ) -> None:
        """Read and check a file, and apply what needs no arrays."""
        limit = saving.most_bytes(parts["optimizer_states"].expected_bytes(), parameters)
        loaded = saving.read(fname, header, limit)
        loaded.check(parts, header)
        loaded.assign({name: part for name, part in parts.items() if name not in DEFERRED})
        if loaded.is_empty("counters"):
            parts["counters"].begin_anew()
        self.waiting = loaded

    def apply(self, header: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
        """Apply the rest, now that the parameters are initialized."""
        assert self.waiting is not None
        self.waiting.check(parts, header)
        self.waiting.assign({name: parts[name] for name in DEFERRED})
        self.waiting = None

    def save(
        self, fname: str | os.PathLike[str], header: dict[str, Any], parts: Mapping[str, Any]
    ) -> None:
        """Write all parts to a file, those that wait as they were loaded."""
        waiting = self.waiting
        late = {} if waiting is None else {name: waiting.part(name) for name in DEFERRED}
        saving.write(fname, header, {**parts, **late})

    @property
    def has_snapshot(self) -> bool:
        """Whether a snapshot waits."""
        return self.waiting is not None and not self.waiting.is_empty("method")

    def drop_snapshot(self) -> None:
        """Forget the snapshot that waits."""
        if self.waiting is not None:
            self.waiting.drop("method")
