"""Parameters that several classes share, described once: `help` shows them in all."""

from __future__ import annotations

import inspect
import re
from typing import Any, Callable, TypeVar

T = TypeVar("T", bound=type)
_SECTION = re.compile(r"^    \w[\w ]*\n    -+\n", re.MULTILINE)
_PARAMETERS = re.compile(r"^    Parameters\n    -+\n((?: {4,}\S.*\n)+)\n", re.MULTILINE)


def parameters_as(other: Any) -> Callable[[T], T]:
    """Add to the docstring of a class those parameters that it leaves to another class.

    The docstring in the file, which an editor shows, describes the parameters that differ. `help`
    shows all of them, in the order of the signature.

    Parameters
    ----------
    other : type
        The class that describes the rest.
    """

    def complete(cls: T) -> T:
        text = cls.__doc__ or ""
        described = {**parameters_in(other.__doc__), **parameters_in(text)}
        entries = "".join(described[name] for name in inspect.signature(cls).parameters)
        before, _, after = _taken_apart(text)
        cls.__doc__ = f"{before}    Parameters\n    ----------\n{entries}\n{after}"
        return cls

    return complete


def parameters_in(text: str) -> dict[str, str]:
    """The parameters that the docstring of a class describes, each with its lines."""
    entries = re.findall(r"^    \S.*\n(?:     .*\n)*", _taken_apart(text)[1], re.MULTILINE)
    return {entry.partition(" : ")[0].strip(): entry for entry in entries}


def _taken_apart(text: str) -> tuple[str, str, str]:
    """What comes before the section of parameters, its lines, and what comes after it."""
    found = _PARAMETERS.search(text)
    if found:
        return text[: found.start()], found[1], text[found.end() :]
    first = _SECTION.search(text)
    start = first.start() if first else len(text)
    return text[:start], "", text[start:]
