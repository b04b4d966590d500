"""The figure of a comparison: each method's best run, and the final loss of every rate."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .model import RESOLUTION
from .palette import STYLES


def name_of(method: str, results: dict[str, Any]) -> str:
    """The name of a method; the plain ones have the name of their optimizer."""
    optimizer = str(results["settings"]["optimizer"])
    if method.startswith("plain"):
        return method.replace("plain", optimizer)
    return f"{method} + {optimizer}"


def gap(loss: float, results: dict[str, Any]) -> float:
    """How far a loss is above the best known one."""
    return max(loss - results["best_known_loss"], 0.0)


def finding(results: dict[str, Any]) -> str:
    """The result in a sentence: the best method, compared with the plain ones or the next."""
    ended = {method: results["runs"][number] for method, number in results["best"].items()}
    losses = {method: run["losses"][-1] for method, run in ended.items() if not run["diverged"]}
    if not losses:
        return "All runs diverged"
    names = {method: name_of(method, results) for method in losses}
    first, *others = sorted(losses, key=lambda method: losses[method])
    if results["minimum"] is None:
        values = {method: f"{loss:.4g}" for method, loss in losses.items()}
        found = f"{names[first]} has the lowest loss: {values[first]}"
    else:
        values = {method: f"{gap(loss, results):.0e}" for method, loss in losses.items()}
        resolution = RESOLUTION[results["dtype"]]
        there = [method for method in losses if gap(losses[method], results) <= resolution]
        others = [method for method in others if method not in there]
        found = f"{names[first]} comes closest to the minimum: {values[first]}"
        if there:
            reach = "reaches" if len(there) == 1 else "reach"
            found = f"{' and '.join(names[method] for method in there)} {reach} the minimum"
    if not others:
        return found
    rivals = [method for method in ("plain", "plain-decay") if method in others] or others[:1]
    return f"{found} ({', '.join(f'{names[rival]}: {values[rival]}' for rival in rivals)})"


def draw(results: dict[str, Any], path: Any) -> None:
    """Draw the figure into a file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    settings = results["settings"]
    figure, (curves, rates) = plt.subplots(
        ncols=2, figsize=(10, 5), width_ratios=(3, 2), sharey=True, layout="constrained"
    )
    for number, method in enumerate(results["best"]):
        shift = 10 ** (0.05 * (number - (len(results["best"]) - 1) / 2))
        _draw_method(curves, rates, method, shift, results)
    if results["minimum"] is None:
        curves.set_ylabel("loss (no minimum is known)")
    else:
        curves.set_ylabel("loss - minimum")
        _draw_rounding(curves, RESOLUTION[results["dtype"]])
    curves.set_xlabel("data passes (gradients evaluated / samples)")
    curves.set_title("the best learning rate of each method", fontsize="medium")
    rates.set_xlabel("learning rate")
    rates.set_title("all learning rates, at the end; x: diverged", fontsize="medium")
    for axes in (curves, rates):
        axes.set_yscale("log")
        axes.margins(y=0.1)
        axes.grid(color="#dddddd")
    rates.set_xscale("log")
    penalty = f"L2 {settings['weight_decay']:g}"
    seeds = f"{settings['seeds']} seeds" if settings["seeds"] > 1 else "one seed"
    figure.suptitle(
        f"{finding(results)}\n{results['data']}, {settings['model']} model, "
        f"batch size {settings['batch_size']}, {penalty}, {seeds}"
    )
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_method(
    curves: Any, rates: Any, method: str, shift: float, results: dict[str, Any]
) -> None:
    """Draw the best run over its data passes, and the end of all runs over their learning rates.

    Thin lines are the other seeds. All diverged runs are at one height, so their marks are shifted
    by a factor.
    """
    best = results["runs"][results["best"][method]]
    first_seed = results["settings"]["seed"]
    of_method = [run for run in results["runs"] if run["method"] == method]
    runs = [run for run in of_method if run["seed"] == first_seed]
    runs.sort(key=lambda run: run["learning_rate"])
    color, marker, line = STYLES[method]
    for run in (results["runs"][number] for number in results["seeds"][method]):
        heights = [_height(loss, results) for loss in run["losses"]]
        curves.plot(run["data_passes"], heights, color=color, linewidth=0.7, alpha=0.5)
    style = {"color": color, "marker": marker, "linestyle": line, "markersize": 6}
    heights = [_height(loss, results) for loss in best["losses"]]
    curves.plot(
        best["data_passes"],
        heights,
        **style,
        linewidth=1.8,
        markevery=max(1, len(heights) // 8),
        label=f"{name_of(method, results)}, rate {best['learning_rate']:g}",
    )
    ended = [math.nan if run["diverged"] else _height(run["losses"][-1], results) for run in runs]
    rates.plot([run["learning_rate"] for run in runs], ended, **style, linewidth=1.0)
    diverged = [run["learning_rate"] * shift for run in runs if run["diverged"]]
    top = rates.get_xaxis_transform()
    rates.plot(diverged, [0.97] * len(diverged), "x", color=color, transform=top)
    if best["diverged"]:
        place = max(i for i, height in enumerate(heights) if math.isfinite(height))
        curves.plot(best["data_passes"][place], heights[place], "x", color=color, markersize=11)


def _draw_rounding(axes: Any, resolution: float) -> None:
    """Mark where rounding errors begin."""
    if min(np.nanmin(line.get_ydata()) for line in axes.lines) <= resolution:
        axes.text(0, resolution, "rounding errors", verticalalignment="center")


def _height(loss: float, results: dict[str, Any]) -> float:
    """The height of a loss in the figure: not far above the start, nor below rounding errors."""
    start = results["runs"][0]["losses"][0]
    if not loss <= 1000 * start:
        return math.nan
    if results["minimum"] is None:
        return loss
    return max(gap(loss, results), RESOLUTION[results["dtype"]])
