"""The results of a comparison: a table, and files with the figure and all numbers."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from .plot import draw, gap, name_of

FIGURE, RECORD = "curves.png", "results.json"


def table(results: dict[str, Any]) -> str:
    """A table of the best run of each method, with an explanation of its columns."""
    has_accuracy = results["task"] == "classification"
    has_seeds = results["settings"]["seeds"] > 1
    columns = ["method", "best rate", "loss", "gap", *["lowest", "highest"] * has_seeds]
    columns += ["|gradient|", *["accuracy"] * has_accuracy, "data passes", "seconds"]
    rows = [columns]
    for method, number in results["best"].items():
        run = results["runs"][number]
        mark = "*" if method in results["best_rate_at_an_end"] else ""
        row = [
            name_of(method, results),
            f"{run['learning_rate']:g}{mark}",
            f"{run['losses'][-1]:.6g}",
            f"{gap(run['losses'][-1], results):.1e}",
        ]
        if has_seeds:
            ends = [results["runs"][one]["losses"][-1] for one in results["seeds"][method]]
            row += [f"{gap(end, results):.1e}" for end in (ends[0], ends[-1])]
        row.append(f"{run['gradient_norm']:.1e}")
        if has_accuracy:
            row.append("-" if run["accuracy"] is None else f"{run['accuracy']:.4f}")
        rows.append([*row, f"{run['data_passes'][-1]:.0f}", f"{run['seconds']:.1f}"])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*lines, "", *_notes(results)])


def _notes(results: dict[str, Any]) -> list[str]:
    weight_decay, runs = results["settings"]["weight_decay"], results["runs"]
    penalty = f", and {weight_decay / 2:g} |w|^2 over all weights and biases" * bool(weight_decay)
    notes = [
        f"loss: the mean over all samples{penalty or ', no L2 penalty'} "
        f"(--weight-decay {weight_decay:g})",
        "gap: the distance to the lowest loss of all runs; no minimum is known"
        if results["minimum"] is None
        else "gap: the distance to the minimum",
    ]
    seeds = results["settings"]["seeds"]
    if seeds > 1:
        notes.append(
            f"lowest, highest: the gaps of {seeds} seeds at this rate; all else is of the run "
            + ("in the middle" if seeds % 2 else "in the middle, the higher of two")
        )
    if results["best_rate_at_an_end"]:
        notes.append("*: the lowest or highest rate that was tried; others may be better")
    with_every_rate, with_some_seeds = [], []
    for method, numbers in results["seeds"].items():
        count, name = sum(runs[number]["diverged"] for number in numbers), name_of(method, results)
        if count == len(numbers):
            with_every_rate.append(name)
        elif count:
            with_some_seeds.append(f"{name} ({count} of {len(numbers)})")
    diverged = "diverged (ended above the start) with"
    if with_every_rate:
        notes.append(f"{diverged} every rate: {', '.join(with_every_rate)}")
    if with_some_seeds:
        notes.append(f"{diverged} some seeds: {', '.join(with_some_seeds)}")
    return notes


def write(results: dict[str, Any], folder: Path) -> None:
    """Write the figure and the record into a folder; each appears complete or not at all."""
    with tempfile.TemporaryDirectory(dir=folder) as workshop:
        record, figure = Path(workshop, RECORD), Path(workshop, FIGURE)
        record.write_text(json.dumps(_plain(results), indent=1) + "\n", encoding="utf-8")
        draw(results, figure)
        os.replace(figure, folder / FIGURE)
        os.replace(record, folder / RECORD)


def _plain(value: Any) -> Any:
    """Replace infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
