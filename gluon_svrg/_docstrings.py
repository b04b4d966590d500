"""What all trainers share is described once: `help` shows it in each."""

from __future__ import annotations

import inspect
import re
from typing import Any, TypeVar

T = TypeVar("T", bound=type)
_HEADING = re.compile(r"^    (\w[\w ]*)\n    -+\n", re.MULTILINE)


def trainer(cls: T) -> T:
    """Complete docstring and signature of a trainer by its base class; `**own` is its method's."""
    base: Any = cls.__mro__[1]
    method: Any = cls._method_class  # type: ignore[attr-defined]
    shared, own = (inspect.signature(f).parameters for f in (base.__init__, method))
    names = [*shared.values()][1:-1]
    names += [p.replace(kind=p.KEYWORD_ONLY) for p in own.values()]
    cls.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    summary, sections = _sections(cls)
    _, inherited = _sections(base)
    itself = re.compile(f"    {cls.__name__} : .*\n")
    inherited["See Also"] = itself.sub("", inherited["See Also"])
    for name in ("Parameters", "See Also"):
        entries = inherited[name].partition("    **own")[0].rstrip()
        inherited[name] = f"{entries}\n{sections.pop(name, '')}".rstrip() + "\n\n"
    sections = {**inherited, **sections}
    parts = (f"    {name}\n    {'-' * len(name)}\n{text}" for name, text in sections.items())
    cls.__doc__ = (summary + "".join(parts)).rstrip() + "\n    "
    return cls


def _sections(cls: Any) -> tuple[str, dict[str, str]]:
    """The summary of a class's docstring, and its sections by their headings."""
    summary, *rest = _HEADING.split(cls.__doc__)
    return summary, {name: body.rstrip() + "\n\n" for name, body in zip(rest[::2], rest[1::2])}
