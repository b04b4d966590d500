"""The files of one trainer: what fits it, and what waits until its parameters are initialized."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Mapping, Sequence

import mxnet as mx
from mxnet.gluon import Parameter

from .. import __version__, _mxnet
from . import file_format, pickles
from .optimizer import settings
from .parameters import Description, match, misfits
from .values import decode

#: The parts whose arrays are those of the parameters.
DEFERRED = ("optimizer_states", "method", "preconditioner")
UNCHANGED = "Nothing was changed."


class StateFiles:
    """Writes and reads the parts of a trainer; those of `DEFERRED` wait until they can be used."""

    def __init__(self, method: str, parameters: Sequence[Parameter], given: Any) -> None:
        self._method, self._parameters = method, list(parameters)
        keys = sorted(given.keys(), reverse=True) if hasattr(given, "keys") else []
        self._keys = {id(given[key]): key for key in keys}  # shared parameters get the first
        self.waiting: dict[str, Any] = {}  # states by part, of `DEFERRED`
        self._file: Any = "", []  # the path of what waits, and what the parameters were in it

    def save(self, path: str | os.PathLike[str], parts: Mapping[str, Any]) -> None:
        """Write the states of all parts to a file; those that wait as they were loaded."""
        header: dict[str, Any] = {"gluon_svrg": __version__, "mxnet": mx.__version__}
        header.update(method=self._method, parameters=self._described())
        states = {name: part.state() for name, part in parts.items()}
        file_format.write(path, header, {**states, **self.waiting})

    def load(self, path: str | os.PathLike[str], parts: Mapping[str, Any]) -> set[str]:
        """Check a file, or change nothing; assign what needs no arrays; the names of its parts."""
        content = Path(path).read_bytes()
        try:
            states, then = self._read(content)
        except Exception as error:
            said = str(error) if isinstance(error, ValueError) else f"it is damaged: {error!r}"
            raise ValueError(f"{path} cannot be loaded: {said}. {UNCHANGED}") from error
        states = {name: state for name, state in states.items() if state is not None}
        self._check(states, parts, path, then)
        self.waiting = {name: states[name] for name in DEFERRED if name in states}
        self._file = path, then
        for name, state in states.items():
            if name not in DEFERRED:
                parts[name].assign(state)
        return {*states}

    def apply(self, parts: Mapping[str, Any]) -> None:
        """Check and assign what waits, now that the parameters are initialized; as `load`."""
        hint = "Its settings are in force. Call discard_snapshot() to train on without the rest."
        path, then = self._file
        self._check(self.waiting, parts, path, then, hint)
        for name, state in self.waiting.items():
            parts[name].assign(state)
        self.waiting = {}

    def discard_method(self, parts: Mapping[str, Any]) -> None:
        """Forget the state of a method, and what waits beside it if that fits no more."""
        for name in ("method", "preconditioner"):
            self.waiting.pop(name, None)
        if self._problems(self.waiting, parts, self._file[1]):
            self.waiting = {}

    def _described(self) -> list[Description]:
        """The parameters as they are now."""
        key = self._keys.get
        return [
            Description(p.name, key(id(p)), p.shape, _mxnet.dtype_of(p), _mxnet.is_trainable(p))
            for p in self._parameters
        ]

    def _read(self, content: bytes) -> tuple[dict[str, Any], list[Description]]:
        """The states, and what the parameters of this trainer were in the file."""
        if content.startswith(file_format.MAGIC):
            header, parts, arrays = file_format.unpack(content)
            self._check_origin(header["mxnet"], header["method"])
            then = [Description(*row) for row in header["parameters"]]
            positions = match(then, self._described())
            states = {name: decode(state, arrays, positions) for name, state in parts.items()}
            return states, [was for _, was in sorted(zip(positions, then))]
        if not content.startswith(b"\x80"):
            raise ValueError("it is no file of states, neither of SVRGTrainer nor of gluon.Trainer")
        states, optimizer, generation = pickles.loads(content)
        self._check_origin(generation, self._method)
        found = settings(optimizer, self._parameters)
        return {"optimizer": found, "optimizer_states": {"states": states}}, []

    def _check_origin(self, version: str, method: str) -> None:
        """Raise a ValueError if a file is of another MXNet (1 or 2) or of another method."""
        here = mx.__version__
        if version.split(".")[0] != here.split(".")[0]:
            raise ValueError(f"it needs MXNet {version}, which saved it, and this is MXNet {here}")
        if method != self._method:
            raise ValueError(f"it needs a trainer of {method}, and this one uses {self._method}")

    def _check(self, states: Any, parts: Any, path: Any, then: Any, hint: str = UNCHANGED) -> None:
        """Raise a ValueError if the content of a file does not fit."""
        found = self._problems(states, parts, then)
        if found:
            why = "; ".join(found[:10]) + "; and more" * (len(found) > 10)
            raise ValueError(f"{path} does not fit this trainer: {why}. {hint}")

    def _problems(self, states: Any, parts: Mapping[str, Any], then: Any) -> list[str]:
        """Tell why the content of a file does not fit."""
        found = [*misfits(then, self._described(), "method" in states)]
        for name, state in () if found else states.items():
            try:
                if name in parts:
                    found += getattr(parts[name], "problems", lambda state: ())(state)
                else:
                    found.append(f"it has a state of {name!r}, and this trainer has none")
            except Exception as error:  # of a state that no version has written
                found.append(f"its {name} is malformed ({type(error).__name__}: {error!s:.100})")
        return found
