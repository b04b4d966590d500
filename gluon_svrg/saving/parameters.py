"""The parameters of a file and those of a trainer: matched by name, in any order, and compared.

MXNet 1.9.1 sorts parameters by name, ``dense10_weight`` before ``dense9_weight``, and counts layers
over a whole process. MXNet 2.0 names them without their layer, ``weight``, and a network's mapping
has keys: ``0.weight``. So names are sorted with numbers as numbers, and compared without them.
"""

from __future__ import annotations

import itertools
import re
from typing import Any, Iterator, NamedTuple, Sequence

import numpy as np

from .. import _mxnet


class Description(NamedTuple):
    """The description of a parameter in a file."""

    name: str
    key: str | None  # in the mapping that was passed to the trainer
    shape: Sequence[int] | None
    dtype: str
    is_trainable: bool


def match(then: Sequence[Description], now: Sequence[Description]) -> list[int]:
    """Find the position here of each parameter in a file; raise a ValueError if they differ."""
    if len(then) != len(now):
        raise ValueError(f"it has {len(then)} parameters, and there are {len(now)}")
    by_key = [[p.name if p.key is None else f"key {p.key}" for p in ps] for ps in (then, now)]
    by_name = [[p.name for p in ps] for ps in (then, now)]
    for old, new in (by_key, by_name):
        ranked = sorted(old, key=_words), sorted(new, key=_words)
        words = [[re.sub(r"\d+", "0", label) for label in labels] for labels in ranked]
        if words[0] == words[1] and len({*old}) == len({*new}) == len(old):
            pairs, places = dict(zip(*ranked)), {label: n for n, label in enumerate(new)}
            return [places[pairs[label]] for label in old]
    if by_name[0] == by_name[1] and any(p.key is None for p in (*then, *now)):
        return list(range(len(now)))  # names that repeat, as in a list of MXNet 2.0
    was, here = (", ".join(sorted(labels)[:3]) for labels in by_key)
    raise ValueError(
        f"it has other parameters: {was}, ... are not {here}, ... Give the trainer a dict with the "
        "keys or names of the file"
    )


def _words(label: str) -> list[Any]:
    """The words and the numbers in a name, to sort by."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", label)]


def misfits(then: list[Description], now: list[Description], is_frozen_kept: bool) -> Iterator[str]:
    """Describe parameters of another shape or dtype, or, if that matters, frozen only once."""
    for position, (was, here) in enumerate(zip(then, now)):
        name = f"parameter {position} ({here.key or here.name}) was"
        sizes = itertools.zip_longest(was.shape or (), here.shape or (), fillvalue=-9)
        same = (a == b or {a, b} & {0, -1} for a, b in sizes)  # or they may become the same
        fits = was.shape is None or here.shape is None or all(same)
        if not fits or was.dtype != here.dtype:
            shapes = [shape and tuple(shape) for shape in (was.shape, here.shape)]
            yield f"{name} {was.dtype} {shapes[0]} and is {here.dtype} {shapes[1]} here"
        if is_frozen_kept and was.is_trainable != here.is_trainable:
            yield f"{name} {'with' if was.is_trainable else 'without'} gradients, here it is not"


def array_problems(
    arrays: Any, what: str, parameters: Any, summed: bool = False, rows: int = 0
) -> Iterator[str]:
    """Describe where values of a file, or stacks of them, are no arrays like these."""
    if not isinstance(arrays, dict) or arrays.keys() != parameters.keys():
        yield f"its {what} belongs to other parameters"
        return
    for number, parameter in parameters.items():
        values = arrays[number] if isinstance(arrays[number], list) else [arrays[number]]
        name = f"its {what} of parameter {number} ({_mxnet.name_of(parameter)})"
        dtype = np.promote_types(parameter.dtype, np.float32 if summed else parameter.dtype)
        for value in values:
            stacked = [rows] if rows else []
            shape = (*stacked, *parameter.shape) if _mxnet.has_data(parameter) else value.shape
            if (value.dtype, value.shape) != (dtype, shape):
                yield f"{name} is {value.dtype} {value.shape}, and must be {dtype} {shape}"
