"""The record of a run: its figures, and everything needed to repeat it."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

SEED = 0

#: One line of a table: what was measured (str) and how much it was (float).
Row = dict


def of(name: str, records: list[dict[str, Any]], quick: bool) -> dict[str, Any]:
    """Describe a run."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    packages = {package: version(package) for package in ("mxnet", "numpy")}
    return {
        "benchmark": name,
        "quick": quick,
        "seed": SEED,
        "commit": commit.stdout.strip() or "unknown",
        "versions": {"python": platform.python_version(), **packages},
        "processors": len(os.sched_getaffinity(0)),
        "records": records,
    }


def save(run: dict[str, Any], folder: Path) -> Path:
    """Write a run as JSON, lists of numbers on one line; one file per benchmark and MXNet."""
    path = folder / f"{run['benchmark']}-mxnet-{run['versions']['mxnet']}.json"
    text = json.dumps(run, indent=1)
    text = re.sub(
        r"\[[^][{}\"]*\]", lambda numbers: f"[{' '.join(numbers[0][1:-1].split())}]", text
    )
    path.write_text(text + "\n")
    return path


def load(path: Path, name: str) -> dict[str, Any]:
    """Read a run of a benchmark."""
    run = json.loads(path.read_text())
    if not isinstance(run, dict) or run.get("benchmark") != name:
        raise ValueError(f"{path} is not a saved run of the benchmark {name!r}")
    return run


def as_text(rows: list[Row]) -> str:
    """Write a table in Markdown."""
    if not rows:
        return "(no row)"
    cells = [list(rows[0])] + [[_cell(value) for value in row.values()] for row in rows]
    cells.insert(1, ["---"] * len(rows[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def divide(rows: list[Row], saved: list[Row]) -> list[Row]:
    """Divide the figures of a table by those of another, for the rows that both have."""
    others = {_key(row): row for row in saved}
    return [
        {
            name: value / other if isinstance(value, float) and other else value
            for name, value in row.items()
            for other in [others[_key(row)].get(name)]
        }
        for row in rows
        if _key(row) in others
    ]


def _key(row: Row) -> tuple[str, ...]:
    return tuple(value for value in row.values() if isinstance(value, str))


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
