"""Reading and drawing curves of gaps."""

from __future__ import annotations

from typing import Any, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import to_hex, to_rgb

from .problems import NAMES

# Okabe's and Ito's colors, which color-blind readers can tell apart, without the faint yellow.
GREY, BLUE, SKY, GREEN = "#777777", "#0072B2", "#56B4E9", "#009E73"
ORANGE, PURPLE, VERMILION, BLACK = "#E69F00", "#CC79A7", "#D55E00", "#000000"

FLOOR = 1e-10  # of the axis: there trainings end


def _mixed(color: str, other: str, share: float = 0.5) -> str:
    """A color with a share of another one."""
    parts = zip(to_rgb(color), to_rgb(other))
    return to_hex([(1 - share) * one + share * two for one, two in parts])


#: Color and line of each solver: those of its method, and shades of these for other packages, whose
#: lines are dashed.
STYLES = {
    "SVRGTrainer": (BLUE, "-"),
    "SVRGTrainer, 1/(3 L_max)": (BLUE, ":"),
    "SVRGTrainer, float32": (_mixed(BLUE, "white", 0.6), "-"),
    "SVRGTrainer, stored": (BLUE, "--"),
    "SVRGTrainer, loopless": (_mixed(BLUE, "black"), "-"),
    "SVRGTrainer, Barzilai-Borwein": (_mixed(BLUE, "black"), "-."),
    "SAGATrainer": (GREEN, "-"),
    "SAGTrainer": (ORANGE, "-"),
    "SARAHTrainer": (PURPLE, "-"),
    "gluon.Trainer, SGD": (GREY, "-"),
    "SVRG in NumPy": (BLACK, ":"),
    "sklearn SAG": (_mixed(ORANGE, "black"), "--"),
    "sklearn SAGA": (_mixed(GREEN, "black"), "--"),
    "copt SVRG": (_mixed(BLUE, "white", 0.6), "--"),
    "copt SAGA": (_mixed(GREEN, "white", 0.4), "--"),
    "nemos ProxSVRG": (SKY, "--"),
}


def lowest(entry: dict[str, Any]) -> float:
    """The lowest gap of a training."""
    return min([np.inf, *(gap for gap in entry["gaps"] if gap is not None)])


def to(entry: dict[str, Any], level: float, what: str) -> float:
    """Where the gap is for the first time no larger than a level; inf if never."""
    for value, gap in zip(entry[what], entry["gaps"]):
        if gap is not None and gap <= level:
            return float(value)
    return float("inf")


def median_to(entries: Sequence[dict[str, Any]], level: float, what: str) -> float | str:
    """The median over seeds, "-" where most do not get there."""
    median = float(np.median([to(entry, level, what) for entry in entries]))
    return median if np.isfinite(median) else "-"


def draw(records: list[dict[str, Any]], what: str, label: str) -> Any:
    """A row of panels for each problem, a column for each batch size."""
    shown = [entry for entry in records if "missing" not in entry]
    names = [name for name in NAMES if any(entry["problem"] == name for entry in shown)]
    sizes = {n: sorted({e["batch_size"] for e in shown if e["problem"] == n}) for n in names}
    columns = max(map(len, sizes.values()))
    figure, axes = plt.subplots(
        len(names),
        columns,
        figsize=(4 * columns, 1 + 3.1 * len(names)),
        layout="constrained",
        squeeze=False,
        sharey=True,
    )
    handles: dict[str, Any] = {}
    for row, name in zip(axes, names):
        for number, (ax, size) in enumerate(zip(row, sizes[name])):
            for method, (color, style) in STYLES.items():
                entries = [
                    e
                    for e in shown
                    if (e["problem"], e["batch_size"], e["method"]) == (name, size, method)
                ]
                if entries:
                    (line,) = ax.plot(
                        *median_curve(entries, what), style, color=color, linewidth=1.6
                    )
                    handles.setdefault(method, line)
            ax.set_yscale("log")
            ax.set_ylim(FLOOR, 1)
            if what == "seconds":
                ax.set_xscale("log")
            else:
                ax.set_xlim(left=0)
            ax.grid(True, color="#e5e5e5")
            for level in (1e-3, 1e-6, 1e-9):
                ax.axhline(level, color="#bbbbbb", linewidth=0.8)
            ax.set_title(f"{name}, batch {size}" + (" = n/10" if number == 3 else ""))
            ax.set_xlabel(label)
        row[0].set_ylabel("f - f*")
    order = [method for method in STYLES if method in handles]
    figure.legend(
        [handles[method] for method in order],
        order,
        loc="outside upper center",
        ncols=4,
        frameon=False,
    )
    return figure


def median_curve(entries: Sequence[dict[str, Any]], what: str) -> tuple[np.ndarray, np.ndarray]:
    """Where a training arrives at a gap, between checkpoints too; the median, as in the table."""
    levels = np.geomspace(1, FLOOR, 89)
    arrivals = []
    for entry in entries:
        points = [(x, gap) for x, gap in zip(entry[what], entry["gaps"]) if gap is not None]
        places, gaps = (np.array(values) for values in zip(*points))
        lowest_so_far = np.log(np.maximum(np.minimum.accumulate(gaps), FLOOR / 10))
        arrivals.append(
            np.interp(-np.log(levels), -lowest_so_far, places, left=np.nan, right=np.inf)
        )
    medians = np.median(arrivals, axis=0)
    shown = np.isfinite(medians)
    return medians[shown], levels[shown]
