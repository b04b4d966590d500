"""Writes `reference.md` beside this file from the docstrings: `python .github/docs/reference.py`.

A test compares the page with them.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any, Iterator

import gluon_svrg

PAGE = Path(__file__).with_suffix(".md")
MODULES = ("gluon_svrg", *(f"gluon_svrg.{name}" for name in gluon_svrg._SUPPORTING))


def text() -> str:
    """The page: each public name with its signature, and the first line of its docstring."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Reference"
    yield "\nEvery public name, with its signature. `help(name)` shows the whole docstring."
    yield "Trainers also have the methods of `gluon.Trainer`. All share those of `SVRGTrainer`,"
    yield "except `coefficient`."
    for module in map(import_module, MODULES):
        yield f"\n## {module.__name__}\n\n{_first_line(module)}\n\n| name | |\n|---|---|"
        for name in module.__all__:
            value = getattr(module, name)
            if name == "__version__":
                yield "| `__version__` | The version of the package. |"
                continue
            yield _row(name, value)
            if inspect.isclass(value) and module.__name__ != "gluon_svrg.estimator":
                for owner in _owners(name, value):
                    for member, each in sorted(vars(owner).items()):
                        is_shown = callable(each) or isinstance(each, property)
                        if is_shown and not member.startswith("_") and each.__doc__:
                            yield _row(f"{name}.{member}", each)


def _owners(name: str, value: Any) -> list[Any]:
    """The classes whose members are shown: of all trainers only once."""
    shared = "VarianceReducedTrainer" if name == "SVRGTrainer" else "_Refresh"
    return [cls for cls in value.__mro__ if cls.__name__ in (name, shared)]


def _row(name: str, value: Any) -> str:
    signature = ""
    if callable(value):
        found = inspect.signature(value)
        parameters = [p.replace(annotation=p.empty) for p in found.parameters.values()]
        parameters = [p for p in parameters if p.name != "self"]
        signature = str(found.replace(parameters=parameters, return_annotation=found.empty))
    cell = re.sub(r"\|", r"\\|", _first_line(value))
    return f"| `{name}{signature}` | {cell} |"


def _first_line(value: Any) -> str:
    """The summary, without the marks of reStructuredText."""
    summary = (inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " ")
    return re.sub(r" \[\d+\]_", "", summary.replace("``", "`"))


if __name__ == "__main__":
    PAGE.write_text(text())
