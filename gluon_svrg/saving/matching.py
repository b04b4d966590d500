"""Matching the parameters of a file with those of a trainer by name, in any order.

MXNet 1.9.1 sorts parameters by name, ``dense10_weight`` before ``dense9_weight``, and counts layers
over a whole process: the first layer of a second network may be ``dense7``. MXNet 2.0 calls all of
them ``weight`` and ``bias``, and a network's mapping has keys: ``0.weight``. So names are compared
after each number is replaced by its rank among the numbers in the same place.
"""

from __future__ import annotations

import re
from typing import Any, Iterator, NamedTuple, Sequence


class Description(NamedTuple):
    """The description of a parameter in a file."""

    name: str
    key: str | None  # in the mapping that was passed to the trainer
    shape: tuple[int, ...] | None
    dtype: str
    trainable: bool


class Matching(NamedTuple):
    """The position in the trainer for each parameter in the file, or the problems."""

    positions: list[int]
    problems: list[str]


_ADVICE = (
    "Give the trainer its parameters as a dict with the keys or names of the file "
    "(SVRGTrainer({'dense0_weight': net[0].weight, ...}, ...))"
)


def match(
    then: Sequence[Description], now: Sequence[Description], *, same_generation: bool
) -> Matching:
    """Find the parameters of a file among those of a trainer.

    Parameters
    ----------
    then, now : sequence of Description
        The parameters of the file, and of the trainer.
    same_generation : bool
        Whether both use the same generation of MXNet, and so the same order.
    """
    if len(then) != len(now):
        return Matching([], [f"it has {len(then)} parameters, and there are {len(now)}"])
    positions = _by_labels(then, now)
    without_keys = any(p.key is None for p in (*then, *now))
    in_one_order = same_generation and [p.name for p in then] == [p.name for p in now]
    if positions is None and without_keys and in_one_order:  # names that repeat
        positions = list(range(len(now)))
    if positions is None:
        positions, ambiguous = _by_shapes(_layers(then), _layers(now), then, now)
    if positions is None:
        positions, _ = _by_shapes(_singles(then), _singles(now), then, now)
    if positions is None:
        return Matching([], [ambiguous])
    return Matching(positions, list(_misfits(then, now, positions)))


def canonical(labels: Sequence[str]) -> list[str]:
    """Replace each number at the end of a piece of a name by its rank in that place.

    ``dense10_weight``, ``dense9_weight`` become ``dense1_weight``, ``dense0_weight``.
    """
    pieces = [re.split(r"([._])", label) for label in labels]
    done = [""] * len(labels)
    for place in range(max(map(len, pieces), default=0)):
        numbers: dict[tuple[str, str], set[int]] = {}
        split = []
        for before, row in zip(done, pieces):
            piece = row[place] if place < len(row) else ""
            found = re.fullmatch(r"(.*?)(\d{1,18})", piece)
            word, number = (found[1], int(found[2])) if found else (piece, None)
            split.append((word, number))
            if number is not None:
                numbers.setdefault((before, word), set()).add(number)
        ranks = {place: {n: str(rank) for rank, n in enumerate(sorted(found))}
                 for place, found in numbers.items()}  # fmt: skip
        done = [
            before + word + ("" if number is None else ranks[before, word][number])
            for before, (word, number) in zip(done, split)
        ]
    return done


def _by_labels(then: Sequence[Description], now: Sequence[Description]) -> list[int] | None:
    for old in (_keys(then), _names(then)):
        for new in (_keys(now), _names(now)):
            if old is not None and new is not None and {*old} == {*new}:
                return [new.index(label) for label in old]
    return None


def _keys(parameters: Sequence[Description]) -> list[str] | None:
    keys = [p.key for p in parameters if p.key is not None]
    return _unique(keys) if len(keys) == len(parameters) else None


def _names(parameters: Sequence[Description]) -> list[str] | None:
    return _unique([p.name for p in parameters])


def _unique(labels: list[str]) -> list[str] | None:
    labels = canonical(labels)
    return labels if len({*labels}) == len(labels) else None


def _by_shapes(
    old: dict[Any, dict[str, int]],
    new: dict[Any, dict[str, int]],
    then: Sequence[Description],
    now: Sequence[Description],
) -> tuple[list[int] | None, str]:
    """Match layers by the roles and shapes of their parameters, if no two look alike."""
    positions = [0] * len(then)
    for members in old.values():
        alike = [others for others in new.values() if _look_alike(then, members, now, others)]
        rivals = [others for others in old.values() if _look_alike(then, members, then, others)]
        if len(alike) != 1 or len(rivals) != 1:
            number = next(iter(members.values()))
            count = "is none" if not alike else f"are {max(len(alike), len(rivals))}"
            return None, (
                f"its parameter {number} ({then[number].key or then[number].name}) has another "
                f"name here, and of its kind and shape there {count}. {_ADVICE}"
            )
        for role, number in members.items():
            positions[number] = alike[0][role]
    return positions, ""


def _layers(parameters: Sequence[Description]) -> dict[Any, dict[str, int]]:
    """Parameters by layer and by their role in it."""
    layers: dict[Any, dict[str, int]] = {}
    for number, parameter in enumerate(parameters):
        layer, role = _layer_and_role(parameter)
        if not layer or role in layers.get(layer, ()):  # its layer is unknown
            layer = number
        layers.setdefault(layer, {})[role] = number
    return layers


def _singles(parameters: Sequence[Description]) -> dict[Any, dict[str, int]]:
    """Each parameter as its own layer."""
    return {number: {_layer_and_role(p)[1]: number} for number, p in enumerate(parameters)}


def _layer_and_role(parameter: Description) -> tuple[Any, str]:
    """``dense0_weight`` and ``0.weight`` are the weights of the layers ``dense0`` and ``0``."""
    label = parameter.name if parameter.key is None else parameter.key
    if "." in label:
        layer, _, role = label.rpartition(".")
        return layer, role
    found = re.fullmatch(r"(.*\d)_(\D.*)", label)
    return (found[1], found[2]) if found else ("", label)


def _look_alike(
    these: Sequence[Description],
    members: dict[str, int],
    those: Sequence[Description],
    others: dict[str, int],
) -> bool:
    return members.keys() == others.keys() and all(
        fits(these[number].shape, those[others[role]].shape) for role, number in members.items()
    )


def _misfits(
    then: Sequence[Description], now: Sequence[Description], positions: list[int]
) -> Iterator[str]:
    for was, position in zip(then, positions):
        here = now[position]
        if not fits(was.shape, here.shape) or was.dtype != here.dtype:
            yield (
                f"parameter {position} ({here.key or here.name}) was {was.dtype} "
                f"{shown(was.shape)} and is {here.dtype} {shown(here.shape)} here"
            )


def fits(then: Any, now: Any) -> bool:
    """Whether two shapes can be equal; unknown sizes match any."""
    if then is None or now is None:
        return True
    return len(then) == len(now) and all(
        a == b or a in (0, -1) or b in (0, -1) for a, b in zip(then, now)
    )


def shown(shape: Any) -> str:
    """A shape for a message."""
    return "of unknown shape" if shape is None else str(tuple(shape))
