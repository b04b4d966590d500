"""Writing the states of a trainer's parts to a file, and reading them. Knows no trainer."""

from __future__ import annotations

import os
from typing import Any, Iterator, Mapping, Protocol, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter

from .. import _mxnet
from .._mxnet import optimizers
from .._version import __version__
from . import container, disk, format1, pickles
from .matching import Description, match
from .optimizer import settings
from .values import ByParameter, by_position, decode, encode, malformed


class Part(Protocol):
    """A part of a trainer whose state is saved."""

    def state(self) -> Any:
        """Return the state as plain data."""

    def problems(self, state: Any) -> Iterator[str]:
        """Describe why a state does not fit; change nothing, whatever the state is."""

    def assign(self, state: Any) -> None:
        """Take over a state without problems."""


class NoPart:
    """A part that a trainer does not have."""

    def state(self) -> None:
        """Nothing."""

    def problems(self, state: Any) -> Iterator[str]:
        """Report any state as a problem."""
        if state is not None:
            yield "it holds what this trainer does not have"

    def assign(self, state: Any) -> None:
        """Do nothing."""


def header(
    method: str,
    parameters: Sequence[Parameter],
    given: Any,
    devices: int,
) -> dict[str, Any]:
    """Describe a trainer, so that a file can be compared with the trainer that loads it.

    Parameters
    ----------
    method : str
        The name of its method.
    parameters : sequence of Parameter
        Its parameters, in its order.
    given : object
        The parameters as passed to the trainer: a mapping has keys for them, a list has not.
    devices : int
        The number of its devices.
    """
    keys: dict[int, str] = {}
    if hasattr(given, "keys"):
        for key in sorted(given.keys(), reverse=True):  # shared parameters get their first key
            keys[id(given[key])] = key
    return {
        "gluon_svrg": __version__,
        "mxnet": mx.__version__,
        "method": method,
        "devices": devices,
        "parameters": [
            [
                parameter.name,
                keys.get(id(parameter)),
                None if parameter.shape is None else list(parameter.shape),
                str(np.dtype(parameter.dtype)),
                _mxnet.is_trainable(parameter),
            ]
            for parameter in parameters
        ],
    }


def write(path: str | os.PathLike[str], header: dict[str, Any], parts: Mapping[str, Part]) -> None:
    """Write the states of parts to a file, completely or not at all.

    Parameters
    ----------
    path : path
        The file.
    header : dict
        The result of `header`.
    parts : dict of str to Part
        The parts by name. A part that waits in a `Saved` is a `Saved.part`.

    Raises
    ------
    TypeError
        If a state holds something that is no plain data.
    OSError
        If the file cannot be written, see `disk.write_bytes`.
    """
    arrays: list[np.ndarray] = []
    states = {name: encode(part.state(), arrays, f"its {name}") for name, part in parts.items()}
    disk.write_bytes(path, *container.pack(header, states, arrays))


def read(
    path: str | os.PathLike[str], header: Mapping[str, Any], most_bytes: int | None = None
) -> Saved:
    """Read a complete file in this format, in format 1 or in that of `gluon.Trainer`.

    Parameters
    ----------
    path : path
        The file.
    header : dict
        The header of the trainer that loads it.
    most_bytes : int, optional
        The most bytes of an array, or of all arrays together in a file of `gluon.Trainer`; see
        `most_bytes`. Tables of stored gradients are not counted. By default, the size of the file.

    Raises
    ------
    ValueError
        If it is damaged, malformed, too large or of another kind.
    OSError
        If it cannot be read.
    """
    rows = {tuple(shape) for _, _, shape, _, _ in header["parameters"] if shape}

    def allow(dtype: np.dtype, shape: tuple[int, ...]) -> bool:
        size = dtype.itemsize * int(np.prod(shape, dtype=object))
        return most_bytes is None or size <= most_bytes or shape[1:] in rows

    try:
        with open(path, "rb") as file:
            start = file.read(len(container.MAGIC))
            file.seek(0)
            if container.is_own(start):
                return Saved(path, *_of_own(file, allow))
            if not start.startswith(b"\x80"):
                what = "it is empty" if not start else "it is no file of states"
                raise ValueError(f"{what}, neither of SVRGTrainer nor of gluon.Trainer")
            size = os.fstat(file.fileno()).st_size
            if most_bytes is not None and size > most_bytes:
                raise ValueError(
                    f"it has {size} bytes, and the optimizer's states for the parameters of this "
                    f"trainer take less than {most_bytes}. Is it of this network?"
                )
            return Saved(path, *_of_gluon(*pickles.loads(file.read(), most_bytes or 10 * size)))
    except ValueError as error:
        raise ValueError(f"{path} cannot be loaded: {error}. Nothing was changed.") from error


def most_bytes(states: int | None, parameters: Sequence[Parameter]) -> int | None:
    """The most bytes in a file of a trainer apart from tables, with room for any optimizer.

    Parameters
    ----------
    states : int or None
        The size of the optimizer's states, see `OptimizerStates.expected_bytes`.
    parameters : sequence of Parameter
        The parameters of the trainer.
    """
    if states is None:
        return None
    weights = sum(int(np.prod(parameter.shape)) * 8 for parameter in parameters)
    return 4 * (states + weights) + 2**24


def _of_own(file: Any, allow: Any) -> tuple[dict[str, Any], dict[str, Any], bool]:
    format_, checksum = container.first_lines(file)
    if format_ == "1":
        return (*format1.read(file, checksum, allow), True)
    found = container.unpack(file, checksum, allow)
    return found.header, decode_parts(found.parts, found.arrays), True


def decode_parts(parts: dict[str, Any], arrays: Sequence[np.ndarray]) -> dict[str, Any]:
    """Read the states of all parts, which use each array once."""
    unused = {*range(len(arrays))}
    states = {name: decode(state, arrays, unused) for name, state in parts.items()}
    if unused:
        raise malformed(f"{len(unused)} arrays are not used")
    return states


def _of_gluon(unpickled: Any, generation: str) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """The states and the optimizer that `gluon.Trainer` saves."""
    if not (
        isinstance(unpickled, tuple)
        and len(unpickled) == 2
        and isinstance(unpickled[0], dict)
        and hasattr(unpickled[1], "class_name")
        and "begin_num_update" in unpickled[1].attributes
    ):
        raise ValueError("it is a pickle, but not of the states of a gluon.Trainer")
    states, optimizer = unpickled
    parts = {
        "optimizer": settings(optimizer, generation),
        "optimizer_states": {
            "mxnet": generation,
            "optimizer": optimizer.class_name,
            "states": states,
        },
    }
    return {"mxnet": generation, "parameters": None, "method": None}, parts, False


class Saved:
    """The content of a file, until it is assigned.

    Parameters
    ----------
    path : path
        The file.
    header : dict
        The header of the saved trainer.
    states : dict
        The states, by the names of their parts.
    complete : bool
        Whether a trainer of this package wrote it: the header describes parameters, and there are
        all parts. A file of `gluon.Trainer` has only the optimizer.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        header: dict[str, Any],
        states: dict[str, Any],
        complete: bool,
    ) -> None:
        self.path, self.header, self._complete = path, header, complete
        self._states = states
        self._placed: dict[str, Any] | None = None  # with the positions of this trainer
        if complete:
            self._parameters = list(_descriptions(header))
            by_position(states, self._position)  # of parameters that are in the header

    @property
    def names(self) -> list[str]:
        """The names of the parts in the file."""
        return list(self._states)

    def is_empty(self, name: str) -> bool:
        """Whether the file has no state of a part."""
        return self._states.get(name) is None

    def drop(self, name: str) -> None:
        """Forget the state of a part, as if the file had none."""
        for states in (self._states, self._placed):
            if states is not None and name in states:
                states[name] = None

    def problems(self, parts: Mapping[str, Part], header: Mapping[str, Any]) -> list[str]:
        """Describe what does not fit; change nothing.

        Parameters
        ----------
        parts : dict of str to Part
            All parts of the trainer.
        header : dict
            The current header of the trainer.
        """
        found = self._place(header)
        if found:
            return found
        assert self._placed is not None
        for name, state in self._placed.items():
            if name in parts:
                found += _problems_of(name, parts[name], state)
            elif state is not None:
                found.append(f"it has a state of {name[:40]!r}, and this trainer has no such part")
        if self._complete:
            found += [f"it lacks the state of {name!r}" for name in parts if name not in self.names]
        return found

    def check(self, parts: Mapping[str, Part], header: Mapping[str, Any]) -> None:
        """Raise a ValueError if there are problems."""
        found = self.problems(parts, header)
        if found:
            more = f"; and {len(found) - 10} more" if len(found) > 10 else ""
            raise ValueError(
                f"{self.path} does not fit this trainer: {'; '.join(found[:10])}{more}. Nothing "
                "was changed."
            )

    def assign(self, parts: Mapping[str, Part]) -> None:
        """Assign the states to parts, after `problems` has found nothing.

        Parts that the file does not have do not change.
        """
        if self._placed is None:
            raise RuntimeError("Saved.assign needs Saved.problems before: states have no place.")
        for name, part in parts.items():
            if name in self._placed:
                part.assign(self._placed[name])

    def part(self, name: str) -> _Waiting:
        """Return a part with the state in this file, to save it again."""
        if self._placed is None:
            raise RuntimeError("Saved.part needs Saved.problems before: states have no place.")
        return _Waiting(self._placed[name])

    # --- places ----------------------------------------------------------------------------

    def _position(self, position: int) -> int:
        if not 0 <= position < len(self._parameters):
            raise malformed(f"there is no parameter {position}")
        return position

    def _place(self, header: Mapping[str, Any]) -> list[str]:
        """Find the parameters of the file among those of the trainer."""
        if not self._complete:
            self._placed = dict(self._states)
            return []
        now = list(_descriptions(header))
        was, here = (optimizers.generation(head["mxnet"]) for head in (self.header, header))
        found = match(self._parameters, now, same_generation=was == here)
        problems = list(found.problems)
        if self.header["method"] != header["method"]:
            problems.append(
                f"it was saved with {str(self.header['method'])[:40]}, and this trainer uses "
                f"{header['method']}: load it into a trainer of that method"
            )
        if not problems and not self.is_empty("method"):
            problems += self._frozen(now, found.positions)
        if problems:
            return problems
        moved = found.positions != list(range(len(now)))
        if moved and self._knows_keys_alone():
            return [
                "it refers to parameters by the keys of a kvstore, and they have another order "
                "here: load it with the MXNet that wrote it, and save it again"
            ]
        self._placed = by_position(self._states, found.positions.__getitem__)
        return []

    def _knows_keys_alone(self) -> bool:
        """Whether the file has only keys with gaps, which do not identify parameters."""
        state = self._states.get("optimizer_states")
        return isinstance(state, dict) and not isinstance(state.get("states"), ByParameter)

    def _frozen(self, now: Sequence[Description], positions: Sequence[int]) -> Iterator[str]:
        words = ["without gradients", "with gradients"]
        for was, position in zip(self._parameters, positions):
            if was.trainable != now[position].trainable:
                yield (
                    f"parameter {position} ({now[position].name}) was {words[was.trainable]}, "
                    "here it is not"
                )


class _Waiting:
    """A part that waits for its trainer."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state(self) -> Any:
        return self._state

    def problems(self, state: Any) -> Iterator[str]:
        yield from ()

    def assign(self, state: Any) -> None:
        raise RuntimeError("A part of a file has no state of its own.")


def _problems_of(name: str, part: Part, state: Any) -> list[str]:
    """Ask a part for problems; it may not expect everything that a file can hold."""
    try:
        return list(part.problems(state))
    except Exception as error:
        return [f"its state of {name!r} is malformed ({type(error).__name__}: {str(error)[:100]})"]


def _descriptions(header: Mapping[str, Any]) -> Iterator[Description]:
    """Read a header in which anything may be wrong."""
    rows = header.get("parameters")
    texts = [header.get(name) for name in ("gluon_svrg", "mxnet", "method")]
    if not all(isinstance(text, str) for text in texts) or not isinstance(rows, list):
        raise malformed("its header")
    for row in rows:
        if not (isinstance(row, list) and len(row) == 5):
            raise malformed("its parameters")
        name, key, shape, dtype, trainable = row
        if not (
            isinstance(name, str)
            and isinstance(key, (str, type(None)))
            and (shape is None or (isinstance(shape, list) and all(type(n) is int for n in shape)))
            and isinstance(dtype, str)
            and isinstance(trainable, bool)
        ):
            raise malformed(f"its parameter {str(name)[:40]!r}")
        yield Description(name, key, None if shape is None else tuple(shape), dtype, trainable)
