"""What a comparison found: a table to read, a figure to look at, a file to keep."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

FIGURE, RECORD = "curves.png", "results.json"


def table(results: dict[str, Any]) -> str:
    """The best run of each method, as text."""
    columns = ["method", "best rate", "loss", "gap", "|gradient|"]
    has_accuracy = results["task"] == "classification"
    columns += (["accuracy"] if has_accuracy else []) + ["data passes", "seconds"]
    rows = [columns]
    for method in results["best"]:
        run = results["runs"][results["best"][method]]
        name = (
            results["settings"]["optimizer"]
            if method == "plain"
            else f"{method} + " + results["settings"]["optimizer"]
        )
        row = [
            name,
            f"{run['learning_rate']:g}",
            f"{run['losses'][-1]:.6g}",
            f"{_gap(run['losses'][-1], results):.1e}",
            f"{run['gradient_norm']:.1e}",
        ]
        if has_accuracy:
            row.append("-" if run["accuracy"] is None else f"{run['accuracy']:.4f}")
        rows.append([*row, f"{run['data_passes'][-1]:.0f}", f"{run['seconds']:.1f}"])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def write(results: dict[str, Any], folder: Path) -> None:
    """Write the figure and the record into a folder; each appears whole or not at all."""
    with tempfile.TemporaryDirectory(dir=folder) as workshop:
        record, figure = Path(workshop, RECORD), Path(workshop, FIGURE)
        record.write_text(json.dumps(_plain(results), indent=1) + "\n", encoding="utf-8")
        _draw(results, figure)
        os.replace(figure, folder / FIGURE)
        os.replace(record, folder / RECORD)


def _gap(loss: float, results: dict[str, Any]) -> float:
    return max(loss - results["best_known_loss"], 0.0)


def _plain(value: Any) -> Any:
    """JSON knows no infinity."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    settings = results["settings"]
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    colours = {"plain": "tab:orange", "SVRG": "tab:blue"}
    lowest = 1e-16 if results["dtype"] == "float64" else 1e-9
    for number, run in enumerate(results["runs"]):
        is_best = results["best"][run["method"]] == number
        if run["diverged"] and not is_best:
            continue
        gaps = [max(_gap(loss, results), lowest) for loss in run["losses"]]
        optimizer = settings["optimizer"]
        name = optimizer if run["method"] == "plain" else f"SVRG + {optimizer}"
        axes.semilogy(
            run["data_passes"],
            gaps,
            color=colours[run["method"]],
            linewidth=2.2 if is_best else 0.8,
            alpha=1 if is_best else 0.35,
            label=f"{name}, best rate {run['learning_rate']:g}" if is_best else None,
            zorder=3 if is_best else 2,
        )
    axes.set_xlabel("data passes (gradients evaluated / samples)")
    axes.set_ylabel("loss - best known loss")
    axes.set_title(
        f"{results['data']}, {settings['model']} model, batch size {settings['batch_size']}\n"
        "thin lines: the other learning rates"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
