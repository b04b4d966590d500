"""Whether SVRG should start with epochs of the plain optimizer, before its first snapshot.

Weights start at zero, samples are shuffled for each epoch, SVRG takes a snapshot every other epoch.
The learning rate is the one of the grid of `benchmarks convergence` that needs the fewest data
passes to the last of `LEVELS` *without* such a start, the median over three other seeds. All starts
have that rate. It is found with the NumPy reference, which takes the same steps as the trainer: the
trainer makes the trainings of the first seed, the reference makes these again and all others.
"""

from __future__ import annotations

from typing import Any, Iterator, Sequence

import matplotlib.pyplot as plt
import numpy as np
from tqdm import tqdm

from . import convergence, curves, record
from .curves import BLUE, GREEN, VERMILION
from .methods import Method, Reference, Trained
from .problems import NAMES, RIDGE, Problem, problem

LEVELS = (1e-2, 1e-3, 1e-4, 1e-6, 1e-8)
SIZES = (10, 32)
STARTS = (0, 1, 2)  # plain epochs
SEEDS, TUNING_SEEDS = range(10), range(100, 103)
UPDATE_FREQ = 2  # epochs
CHECKS = 10  # of the gap, in an epoch


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Train from each start.

    Returns
    -------
    list of dict
        A record per training.
    """
    names, sizes = ((*NAMES, RIDGE), SIZES) if not quick else (NAMES[:1], SIZES[-1:])
    cases = [(problem(name), size, _passes(name)) for name in names for size in sizes]
    seeds = SEEDS[:1] if quick else SEEDS
    records = []
    with tqdm(total=len(cases) * len(seeds) * len(STARTS), desc="start", leave=False) as bar:
        for case, size, passes in cases:
            rate = tuned(case, size, passes, TUNING_SEEDS[:1] if quick else TUNING_SEEDS)
            for seed in seeds:
                for start in STARTS:
                    reference = Reference(case, rate, size)
                    points = list(train(reference, seed, start, passes))
                    records.append(_record(case, size, rate, seed, start, points))
                    if seed == seeds[0]:
                        trained = Trained(case, Method("SVRG"), rate, size)
                        list(train(trained, seed, start, passes))
                        difference = np.linalg.norm(trained.weights - reference.weights)
                        distance = difference / np.linalg.norm(reference.weights)
                        records[-1]["distance_of_trainer"] = float(f"{distance:.2g}")
                    bar.update()
    return records


def _passes(name: str) -> int:
    """Where a training ends at the latest."""
    return 150 if name in ("digits", RIDGE) else 60


def train(
    solver: Trained | Reference, seed: int, plain_epochs: int, passes: float
) -> Iterator[tuple[float, Any]]:
    """Train until the gap is below all `LEVELS`, or all passes are made.

    Yields
    ------
    tuple
        Data passes so far, and the gap; of a reference with many rates, that of each.
    """
    n, size, rng = solver.problem.n, solver.batch_size, np.random.RandomState(seed)
    (whole,) = solver.load([np.arange(n)])
    epoch = 0
    while True:
        if epoch >= plain_epochs and (epoch - plain_epochs) % UPDATE_FREQ == 0:
            solver.refresh([whole])
        order = rng.permutation(n)
        batches = solver.load([order[start : start + size] for start in range(0, n, size)])
        every = -(-len(batches) // CHECKS)
        for number, batch in enumerate(batches, start=1):
            solver.step(batch)
            if number % every and number < len(batches):
                continue
            gap = _gap(solver)
            yield solver.grad_evaluations / n, gap
            if np.all(gap <= LEVELS[-1]) or solver.grad_evaluations >= passes * n:
                return
        epoch += 1


def _gap(solver: Trained | Reference) -> Any:
    weights, shape = solver.weights, solver.problem.shape
    if weights.shape == shape:
        return solver.problem.gap(weights)
    return np.array([solver.problem.gap(weight) for weight in weights])


def tuned(problem: Problem, size: int, passes: float, seeds: Sequence[int]) -> float:
    """The rate of the grid that needs the fewest passes without a plain start, in NumPy."""
    rates = convergence._grid(problem)
    merits = []
    with np.errstate(all="ignore"):  # some diverge
        for seed in seeds:
            done, gaps = zip(*train(Reference(problem, rates, size), seed, 0, passes))
            there = np.array(gaps) <= LEVELS[-1]
            merits.append(np.where(there.any(axis=0), np.array(done)[there.argmax(axis=0)], np.inf))
    medians = np.median(merits, axis=0)
    best = int(np.argmin(medians))
    if not np.isfinite(medians[best]):
        raise RuntimeError(f"{problem.name}, batch size {size}: no rate reaches {LEVELS[-1]:g}")
    if best == len(rates) - 1:
        raise RuntimeError(f"{problem.name}, batch size {size}: the best rate ends the grid")
    return float(rates[best])


def _record(
    problem: Problem, size: int, rate: float, seed: int, start: int, points: Sequence[Any]
) -> dict[str, Any]:
    done, gaps = zip(*points)
    return {
        "problem": problem.name,
        "batch_size": size,
        "plain_epochs": start,
        "seed": seed,
        "rate_times_3_smoothness": float(f"{rate * 3 * problem.smoothness:.6g}"),
        "data_passes": [float(f"{value:.4g}") for value in done],
        "gaps": [float(f"{value:.3g}") if np.isfinite(value) else None for value in gaps],
    }


def table(records: list[dict[str, Any]]) -> list[record.Row]:
    """Medians of the passes to each level, from each start."""
    rows = []
    for name, size in dict.fromkeys((e["problem"], e["batch_size"]) for e in records):
        row = {"problem": name, "batch size": str(size)}
        for level in LEVELS:
            medians = [_median(_entries(records, name, size, start), level) for start in STARTS]
            cells = ["-" if np.isinf(median) else f"{median:.1f}" for median in medians]
            row[f"to {level:.0e}"] = " / ".join(cells)
        rows.append(row)
    return rows


def _entries(
    records: list[dict[str, Any]], name: str, size: int, start: int
) -> list[dict[str, Any]]:
    wanted = (name, size, start)
    return [e for e in records if (e["problem"], e["batch_size"], e["plain_epochs"]) == wanted]


def _median(entries: Sequence[dict[str, Any]], level: float) -> float:
    return float(np.median([curves.to(entry, level, "data_passes") for entry in entries]))


def plot(records: list[dict[str, Any]]) -> Any:
    """A panel for each problem and batch size: the median of all seeds from each start."""
    cases = list(dict.fromkeys((e["problem"], e["batch_size"]) for e in records))
    columns = len({size for _, size in cases})
    figure, axes = plt.subplots(
        len(cases) // columns,
        columns,
        figsize=(5 * columns, 0.8 + 2.8 * len(cases) // columns),
        layout="constrained",
        squeeze=False,
        sharey=True,
    )
    for ax, (name, size) in zip(axes.ravel(), cases):
        for start, color in zip(STARTS, (BLUE, VERMILION, GREEN)):
            curve = curves.median_curve(_entries(records, name, size, start), "data_passes")
            ax.plot(*curve, color=color, label=f"{start} plain epoch{'s' * (start != 1)}")
        ax.set_yscale("log")
        ax.set_ylim(LEVELS[-1], 1)
        ax.set_xlim(left=0)
        ax.grid(color="#e5e5e5")
        ax.set_title(f"{name}, batch size {size}")
        ax.set_xlabel("data passes")
    for row in axes:
        row[0].set_ylabel("f - f*")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    return figure
