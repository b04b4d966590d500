"""The tables of the README from saved runs: ``python -m benchmarks.summary JSON [JSON ...]``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Sequence

from . import curves, record
from .problems import NAMES

LEVELS = (1e-3, 1e-6, 1e-9)
#: The models of the family's table.
SHORT = {
    "MLP 784-512-512-10": "larger MLP",
    "MLP 784-512-10": "MLP",
    "linear regression": "linear",
}


def smallest_batches(records: Sequence[dict[str, Any]]) -> list[record.Row]:
    """Everything at batch size 1: passes to all levels, and seconds to the middle one."""
    rows = []
    for method in _methods(records, {1}):
        row = {"batch size 1": method}
        for name in NAMES:
            entries = _entries(records, name, 1, method)
            row[f"{name}: passes"] = _passes(entries, LEVELS)
            row[f"{name}: s"] = _seconds(entries, LEVELS[1])
        rows.append(row)
    return rows


def larger_batches(records: Sequence[dict[str, Any]]) -> list[record.Row]:
    """Passes to 1e-6 and 1e-9 and seconds to 1e-6, for the larger batches."""
    rows = []
    for position in (1, 2, 3):
        sizes = {name: _sizes(records, name)[position] for name in NAMES}
        label = "n/10" if position == 3 else str(sizes[NAMES[0]])
        for method in _methods(records, set(sizes.values())):
            row = {"batch": label, "method": method}
            for name in NAMES:
                entries = _entries(records, name, sizes[name], method)
                row[f"{name}: passes"] = _passes(entries, LEVELS[1:])
                row[f"{name}: s"] = _seconds(entries, LEVELS[1])
            rows.append(row)
    return rows


def _methods(records: Sequence[dict[str, Any]], sizes: set[int]) -> list[str]:
    known = {entry["method"] for entry in records if entry["batch_size"] in sizes}
    return [method for method in curves.STYLES if method in known]


def _sizes(records: Sequence[dict[str, Any]], name: str) -> list[int]:
    return sorted({entry["batch_size"] for entry in records if entry["problem"] == name})


def _entries(
    records: Sequence[dict[str, Any]], name: str, size: int, method: str
) -> list[dict[str, Any]]:
    wanted = (name, size, method)
    return [e for e in records if (e["problem"], e["batch_size"], e["method"]) == wanted]


def _passes(entries: Sequence[dict[str, Any]], levels: Sequence[float]) -> str:
    if not entries or "missing" in entries[0]:
        return ""
    found = [curves.median_to(entries, level, "data_passes") for level in levels]
    if all(value == "-" for value in found):
        lowest = sorted(curves.lowest(entry) for entry in entries)[len(entries) // 2]
        return f"({lowest:.0e})"
    return " / ".join(value if isinstance(value, str) else f"{value:.0f}" for value in found)


def _seconds(entries: Sequence[dict[str, Any]], level: float) -> str:
    if not entries or "missing" in entries[0]:
        return ""
    value = curves.median_to(entries, level, "seconds")
    return value if isinstance(value, str) else f"{value:.2g}"


def steps(runs: Sequence[dict[str, Any]]) -> list[record.Row]:
    """Steps over their floor, one by one and in a row, of this version and of 0.2.0."""
    keys = {
        "0.3.0": "step_to_floor",
        "0.2.0": "baseline_to_floor",
        "0.3.0 in a row": "steps_to_floor",
        "0.2.0 in a row": "baseline_steps_to_floor",
    }
    rows = []
    for entries in zip(*(run["records"] for run in runs)):
        row = {"step, hybridized": _model(entries[0])}
        for run, entry in zip(runs, entries):
            for version, key in keys.items():
                row[f"{version}, {run['versions']['mxnet']}"] = f"{entry[key]['median']:.2f}"
        rows.append(row)
    return rows


def passes(runs: Sequence[dict[str, Any]]) -> list[record.Row]:
    """Full passes over plain ones, of this version, of 0.2.0, and of a bare loop that adds."""
    keys = {"0.3.0": "full_pass", "0.2.0": "baseline", "bare sum": "bare_sum"}
    rows = []
    for entries in zip(*(run["records"] for run in runs)):
        for number, first in enumerate(entries[0]["passes"]):
            row = {"full pass, hybridized": _model(entries[0]), "minibatches": first["batches"]}
            for run, entry in zip(runs, entries):
                for version, key in keys.items():
                    ratio = entry["passes"][number][key]
                    row[f"{version}, {run['versions']['mxnet']}"] = f"{ratio['median']:.2f}"
            rows.append(row)
    return rows


def _model(entry: dict[str, Any]) -> str:
    return entry["model"] + (", `static_alloc`" if entry["static_alloc"] else "")


def methods(runs: Sequence[dict[str, Any]]) -> list[record.Row]:
    """Steps of each method over one of `gluon.Trainer`, without and with static_alloc."""
    rows: dict[str, record.Row] = {}
    for run in runs:
        for entry in run["records"]:
            name = entry["method"]
            row = rows.setdefault(name, {"step / step of `gluon.Trainer`": name})
            column = f"{SHORT[entry['model']]}, {run['versions']['mxnet']}"
            median = f"{entry['ratio']['median']:.2f}"
            row[column] = f"{row[column]} / {median}" if column in row else median
    return list(rows.values())


def forms(runs: Sequence[dict[str, Any]]) -> list[record.Row]:
    """Microseconds of the sums of a step with one gradient."""
    rows: dict[str, record.Row] = {}
    for run in runs:
        for entry in run["records"]:
            form = entry["form"]
            row = rows.setdefault(form, {"microseconds": form})
            column = f"{SHORT[entry['model']]}, {run['versions']['mxnet']}"
            row[column] = f"{entry['microseconds']:.0f}"
    return sorted(rows.values(), key=lambda row: row["microseconds"].startswith("SAGA"))


def tables(*runs: dict[str, Any]) -> list[str]:
    """Those of the README, as Markdown, from one run or from one per MXNet."""
    if runs[0]["benchmark"] == "overhead":
        return [record.as_text(rows(runs)) for rows in (steps, passes)]
    if runs[0]["benchmark"] == "family":
        return [record.as_text(methods(runs))]
    if runs[0]["benchmark"] == "forms":
        return [record.as_text(forms(runs))]
    (run,) = runs
    return [record.as_text(rows(run["records"])) for rows in (smallest_batches, larger_batches)]


if __name__ == "__main__":
    print("\n\n".join(tables(*(json.loads(Path(name).read_text()) for name in sys.argv[1:]))))
