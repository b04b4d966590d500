"""What all trainers share is described once: `help` shows it in each."""

from __future__ import annotations

import inspect
import re
from typing import Any, TypeVar

T = TypeVar("T", bound=type)
_HEADING = re.compile(r"^    (\w[\w ]*)\n    -+\n", re.MULTILINE)
#: Sections that a trainer takes over if it has none of its own, in numpydoc's order.
_SHARED = ("Parameters", "Raises", "See Also")


def trainer(cls: T) -> T:
    """Complete the docstring and the signature of a trainer by those of its base class.

    The docstring in the file, which an editor shows, has what differs. `help` shows all parameters,
    in the order of the signature: those of `gluon.Trainer`, then those of the method.
    """
    base: Any = next(each for each in cls.__mro__[1:] if each.__doc__)
    own = inspect.signature(cls._method_class.__init__)  # type: ignore[attr-defined]
    shared = list(inspect.signature(base.__init__).parameters.values())[1:-1]
    more = [p.replace(kind=p.KEYWORD_ONLY) for p in list(own.parameters.values())[1:]]
    first = [p for p in shared if p.kind is p.POSITIONAL_OR_KEYWORD]
    names = [*first, *more, *shared[len(first) :]]
    cls.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    summary, sections = _sections(cls.__doc__ or "")
    _, inherited = _sections(base.__doc__)
    entries = {**_entries(inherited["Parameters"]), **_entries(sections.get("Parameters", ""))}
    lines = "".join(entries[p.name] for p in names)
    sections = {**{name: inherited[name] for name in _SHARED}, **sections}
    sections["Parameters"] = f"{lines}\n"
    parts = (f"    {name}\n    {'-' * len(name)}\n{text}" for name, text in sections.items())
    cls.__doc__ = (summary + "".join(parts)).rstrip() + "\n    "
    return cls


def _sections(text: str) -> tuple[str, dict[str, str]]:
    """The summary of a docstring, and its sections by their headings."""
    summary, *rest = _HEADING.split(text)
    return summary, {name: body.rstrip() + "\n\n" for name, body in zip(rest[::2], rest[1::2])}


def _entries(text: str) -> dict[str, str]:
    """The entries of a section of parameters, each with its lines."""
    entries = re.findall(r"^    \S.*\n(?:     .*\n)*", text, re.MULTILINE)
    return {entry.partition(" : ")[0].strip(): entry for entry in entries}
