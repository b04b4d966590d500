"""The gap f - f* against data passes and seconds, beside other solvers.

Rates come from one grid for all, ``2^k / (3 L_max)``, tried with seed 0: the rate that needs the
fewest data passes to a gap of 1e-9 counts, or where none gets there the one with the lowest gap.
Where the best of our rates is the largest of the grid, larger ones are tried.
The trainer's are found with the NumPy reference, which takes the same steps.
"""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path
from typing import Any, Iterable, Iterator, Sequence

import mxnet as mx
import numpy as np
from tqdm import tqdm

from . import curves, environments, record
from .methods import Method, Reference, Trained, drive
from .problems import NAMES, Problem, problem

EXPONENTS = range(-5, 10)
LEVELS = (1e-3, 1e-6, 1e-9)
ENOUGH = 1e-10  # below this gap a training ends
SEEDS = 5
PATIENCE = 6  # and one in float32 after so many epochs that did not halve its gap: it has its floor

#: With MXNet.
METHODS = {
    "SVRGTrainer": Method("SVRG"),
    "SVRGTrainer, float32": Method("SVRG", "float32"),
    "SVRGTrainer, stored": Method("stored"),
    "SVRGTrainer, loopless": Method("loopless"),
    "SVRGTrainer, Barzilai-Borwein": Method("BB"),
    "SAGATrainer": Method("SAGA"),
    "SAGTrainer": Method("SAG"),
    "SARAHTrainer": Method("SARAH"),
    "gluon.Trainer, SGD": Method("SGD"),
}
AT_THEORY = "SVRGTrainer, 1/(3 L_max)"
REFERENCE = "SVRG in NumPy"


def run(quick: bool = False, peers: Path | None = None) -> list[dict[str, Any]]:
    """Train everything on everything.

    Parameters
    ----------
    quick : bool
        One problem, two batch sizes, one seed, few passes.
    peers : Path, optional
        Where environments for other packages are, or are to be made. Without it, they are left out.

    Returns
    -------
    list of dict
        A record per training.
    """
    cases = [
        (problem(name), size, 6 if quick else _passes(name))
        for name in (NAMES[:1] if quick else NAMES)
        for size in ((1, 32) if quick else _sizes(problem(name)))
    ]
    seeds = {(case, size): range(1 if quick else _seeds(case, size)) for case, size, _ in cases}
    total = sum(map(len, seeds.values())) * (len(METHODS) + 1)
    bar = tqdm(total=total, desc="convergence", leave=False)
    records = []
    for case, size, passes in cases:
        for seed in seeds[case, size]:  # methods take turns, because timings drift
            for entry in _train_all(case, size, seed, passes):
                records.append(entry)
                bar.update()
    bar.close()
    if peers is not None:
        records += _peers(cases, range(SEEDS), peers)
    return records


def _sizes(problem: Problem) -> tuple[int, ...]:
    return 1, 10, 32, problem.n // 10


def _seeds(problem: Problem, size: int) -> int:
    """How many; fewer at batch size 1, where a training with MXNet takes minutes."""
    return SEEDS if size > 1 else 1 if problem.name == "digits" else 3


def _passes(name: str) -> int:
    """Where a training ends at the latest."""
    return 120 if name == "digits" else 60


# --- ours --------------------------------------------------------------------------------------


def _train_all(problem: Problem, size: int, seed: int, passes: int) -> Iterator[dict[str, Any]]:
    """One seed of each method; the reference and the trainer, with the same sequence."""
    cases = [(name, method, None) for name, method in METHODS.items()]
    if size == 1 and problem.name == NAMES[0]:
        cases.append((AT_THEORY, Method("SVRG"), 1 / (3 * problem.smoothness)))
    for name, method, rate in cases:
        kind = method.kind
        if rate is None:
            kind, rate = _tuned(problem, kind, size, passes)
        solver = Trained(problem, method._replace(kind=kind), rate, size)
        points = list(_follow(solver, kind, seed, passes, method.dtype == "float32"))
        entry = _record(problem, size, name, seed, rate, points)
        if method.kind == "SGD":
            entry["decaying"] = kind != "SGD"
        elif method.dtype == "float64":
            reference = Reference(problem, rate, size, kind)
            expected = list(_follow(reference, kind, seed, passes, False, len(points)))
            difference = np.linalg.norm(solver.weights - reference.weights)
            distance = difference / np.linalg.norm(reference.weights)
            entry["distance_to_reference"] = float(f"{distance:.2g}")
            if name == "SVRGTrainer":
                yield _record(problem, size, REFERENCE, seed, rate, expected)
        yield entry


def _follow(
    solver: Any, kind: str, seed: int, passes: float, can_stall: bool, count: int | None = None
) -> Iterator[tuple[float, float, float]]:
    """Data passes, seconds and gap after each epoch; the gap is computed off the clock."""
    seconds, mark, since, number = 0.0, np.inf, 0, 0
    epochs = drive(solver, kind, seed)
    while True:
        start = time.perf_counter()
        try:
            done = next(epochs)
        except FloatingPointError:  # a full gradient is not finite
            return
        mx.nd.waitall()
        seconds += time.perf_counter() - start
        gap = solver.problem.gap(solver.weights)
        yield done, seconds, gap
        number += 1
        mark, since = (gap, 0) if gap < 0.5 * mark else (mark, since + 1)
        is_over = gap < ENOUGH or not np.isfinite(gap) or (can_stall and since >= PATIENCE)
        if done >= passes or (number == count if count is not None else is_over):
            return


@lru_cache(maxsize=None)
def _tuned(problem: Problem, kind: str, size: int, passes: int) -> tuple[str, float]:
    """The best rate of the grid, in NumPy; of SGD, with a constant or a decaying one."""
    if kind == "BB":  # it sets its rate itself, after the first epoch
        return kind, 1 / (3 * problem.smoothness)
    exponents = list(EXPONENTS)
    while True:
        rates = _grid(problem, exponents)
        found = []
        for variant in ("SGD", "decaying SGD") if kind == "SGD" else (kind,):
            merits = _tried(problem, variant, rates, size, passes)
            found += [(merit, variant, float(rate)) for merit, rate in zip(merits, rates)]
        _, variant, rate = min(found)
        if rate < rates[-1]:
            return variant, rate
        exponents += [exponents[-1] + 1, exponents[-1] + 2]


def _tried(
    problem: Problem, kind: str, rates: np.ndarray, size: int, passes: int
) -> list[tuple[float, float]]:
    """How good each rate is, in NumPy."""
    solver = Reference(problem, rates, size, kind)
    points: list[list[tuple[float, float]]] = [[] for _ in rates]
    with np.errstate(all="ignore"):  # some diverge
        for done in drive(solver, kind, record.SEED):
            for curve, weight in zip(points, solver.weights):
                curve.append((done, problem.gap(weight)))
            if done >= passes:
                break
    return [_merit(curve) for curve in points]


def _grid(problem: Problem, exponents: Sequence[int] = EXPONENTS) -> np.ndarray:
    return np.array([2.0**k for k in exponents]) / (3 * problem.smoothness)


def _merit(curve: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Data passes to the last level, then the gap; lower is better."""
    last = np.inf
    for done, gap in curve:
        last = gap if np.isfinite(gap) else np.inf
        if gap <= LEVELS[-1]:
            return done, gap
    return np.inf, last


def _record(
    problem: Problem, size: int, method: str, seed: int, rate: float | None, points: Sequence[Any]
) -> dict[str, Any]:
    """Describe a training by the checkpoints where the gap was lower than ever, and the last."""
    lowest, kept = np.inf, []
    for number, point in enumerate(points):
        if point[2] < lowest or number == len(points) - 1:
            kept.append(point)
        lowest = min(point[2], lowest)
        if lowest < ENOUGH:  # other solvers continue
            break
    done, seconds, gaps = zip(*kept) if kept else ((), (), ())
    return {
        "problem": problem.name,
        "batch_size": size,
        "method": method,
        "seed": seed,
        "rate_times_3_smoothness": (
            None if rate is None else float(f"{rate * 3 * problem.smoothness:.6g}")
        ),
        "data_passes": [float(f"{value:.4g}") for value in done],
        "seconds": [float(f"{value:.3g}") for value in seconds],
        "gaps": [float(f"{value:.3g}") if np.isfinite(value) else None for value in gaps],
    }


# --- others ------------------------------------------------------------------------------------


def _peers(
    cases: Sequence[tuple[Problem, int, int]], seeds: Iterable[int], folder: Path
) -> list[dict[str, Any]]:
    """Other packages' solvers, with the best rate of the same grid where they have one."""
    records = []
    bar = tqdm(environments.SOLVERS.items(), desc="peers", leave=False)
    for solver, abilities in bar:
        bar.set_postfix_str(solver)
        for name in dict.fromkeys(case.name for case, _, _ in cases):
            subject = problem(name)
            sizes = [(size, _passes(name)) for case, size, _ in cases if case is subject]
            if not abilities.minibatches:
                sizes = sizes[:1]
            if subject.is_softmax and not abilities.softmax:
                continue
            try:
                records += _peer(subject, solver, abilities.has_rate, sizes, list(seeds), folder)
            except environments.MissingError as error:
                records.append(
                    {"problem": name, "batch_size": 1, "method": solver, "missing": str(error)}
                )
    return records


def _peer(
    problem: Problem,
    solver: str,
    has_rate: bool,
    sizes: Sequence[tuple[int, int]],
    seeds: Sequence[int],
    folder: Path,
) -> list[dict[str, Any]]:
    best: dict[int, float | None] = {size: None for size, _ in sizes}
    if has_rate:
        jobs = [
            {"batch_size": size, "rate": float(rate), "seed": record.SEED, "passes": passes}
            for size, passes in sizes
            for rate in _grid(problem)
        ]
        merits: dict[int, list[Any]] = {size: [] for size in best}
        for job, points in zip(jobs, environments.run(solver, problem, jobs, folder)):
            merits[job["batch_size"]].append((_merit([(p, g) for p, _, g in points]), job["rate"]))
        best = {size: min(found)[1] for size, found in merits.items()}
    jobs = [
        {"batch_size": size, "rate": best[size], "seed": seed, "passes": passes}
        for size, passes in sizes
        for seed in seeds
    ]
    return [
        _record(problem, job["batch_size"], solver, job["seed"], job["rate"], points)
        for job, points in zip(jobs, environments.run(solver, problem, jobs, folder))
    ]


# --- what is shown -----------------------------------------------------------------------------


def table(records: list[dict[str, Any]]) -> list[record.Row]:
    """Medians over the seeds, for each problem, batch size and method."""
    rows = []
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for entry in records:
        groups.setdefault(
            (NAMES.index(entry["problem"]), entry["batch_size"], entry["method"]), []
        ).append(entry)
    for (number, size, method), entries in sorted(groups.items(), key=lambda item: item[0][:2]):
        row: record.Row = {"problem": NAMES[number], "batch": str(size), "method": method}
        if "missing" in entries[0]:
            row.update(dict.fromkeys(_COLUMNS, "-"))
            row["rate"] = entries[0]["missing"]
        else:
            rate = entries[0]["rate_times_3_smoothness"]
            row["rate"] = "its own" if rate is None else f"{rate:g}"
            row["rate"] += " / epoch" if entries[0].get("decaying") else ""
            for level in LEVELS:
                row[f"passes to {level:.0e}"] = curves.median_to(entries, level, "data_passes")
            for level in LEVELS[1:]:
                row[f"seconds to {level:.0e}"] = curves.median_to(entries, level, "seconds")
            row["lowest gap"] = f"{np.median([curves.lowest(entry) for entry in entries]):.0e}"
            furthest = max(entry.get("distance_to_reference", 0) for entry in entries)
            row["from reference"] = f"{furthest:.0e}" if furthest else "-"
        rows.append(row)
    return rows


_COLUMNS = (
    "rate",
    *(f"passes to {level:.0e}" for level in LEVELS),
    *(f"seconds to {level:.0e}" for level in LEVELS[1:]),
    "lowest gap",
    "from reference",
)


def plot(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Draw gaps against data passes, and against seconds."""
    return {
        "passes": curves.draw(records, "data_passes", "data passes"),
        "seconds": curves.draw(records, "seconds", "seconds"),
    }
