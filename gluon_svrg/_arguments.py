"""Arguments: checks of numbers, flags and names, and those that the docstrings of trainers share.

Imports nothing of this package.
"""

from __future__ import annotations

import inspect
import re
from difflib import get_close_matches
from math import inf, isfinite
from numbers import Integral, Real
from typing import Any, Iterable, Mapping


def number(
    value: Any, name: str, low: float = 0, high: float = inf, open_low: bool = False
) -> float:
    """A finite number from low to high, or above low; raise an error if not."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}.")
    found = float(value)
    if not (isfinite(found) and low <= found <= high) or (open_low and found == low):
        least = f", {'above' if open_low else 'at least'} {low:g}" if isfinite(low) else ""
        most = f" and at most {high:g}" if isfinite(high) else ""
        raise ValueError(f"{name} must be finite{least}{most}, got {value}.")
    return found


def whole(value: Any, name: str, low: float = 1) -> int:
    """A whole number from low on; raise a TypeError or a ValueError if it is none."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, got {type(value).__name__}.")
    if value < low:
        raise ValueError(f"{name} must be {low} or more, got {value}.")
    return int(value)


def flag(value: Any, name: str) -> bool:
    """True or False; raise a TypeError if it is neither."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return value


def near(name: str, known: Iterable[str], others: Mapping[str, str] | None = None) -> str:
    """A question about a wrong name, if there is a near one; `others` has names of elsewhere."""
    found = get_close_matches((others or {}).get(name, name), list(known), n=1)
    return f" Did you mean {found[0]!r}?" if found else ""


_HEADING = re.compile(r"^    (\w[\w ]*)\n    -+\n", re.MULTILINE)


def describe(cls: Any) -> None:
    """Complete docstring and signature of a trainer by its base class; `**own` is its method's."""
    base = cls.__mro__[1]
    shared, own = (inspect.signature(f).parameters for f in (base.__init__, cls._method_class))
    names = [*shared.values()][1:-1]
    names += [p.replace(kind=p.KEYWORD_ONLY) for p in own.values()]
    cls.__signature__ = inspect.Signature(names)
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


def _sections(cls: Any) -> tuple[str, dict[str, str]]:
    """The summary of a class's docstring, and its sections by their headings."""
    summary, *rest = _HEADING.split(cls.__doc__)
    return summary, {name: body.rstrip() + "\n\n" for name, body in zip(rest[::2], rest[1::2])}
