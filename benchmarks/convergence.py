"""The gap f - f* against data passes and seconds of CPU time, beside other solvers.

Rates come from one grid for all, ``2^k / (3 L_max)``, tried with a seed of their own: the rate that
needs the fewest data passes to a gap of 1e-9 counts, or where none gets there the one with the
lowest gap. The trainers' are found with the NumPy reference, which takes the same steps.
"""

from __future__ import annotations

import time
from itertools import islice, product
from typing import Any, Iterable, Iterator, Mapping, Sequence

import mxnet as mx
import numpy as np
from tqdm import tqdm

from . import peers
from .methods import Reference, Trained, drive
from .problems import NAMES, Problem, problem
from .record import Records, as_text

EXPONENTS = range(-8, 13)
TUNING_SEED = 0
SEEDS = (1, 2, 3)
SIZES = (1, 32)
LEFT_OUT = {("digits", 1)}  # 200,000 steps in each training of MXNet
PASSES = {"digits": 120}  # where a training ends at the latest; 60 where nothing is said
LEVELS = (1e-3, 1e-6, 1e-9)
ENOUGH = 1e-10  # below this gap a training ends

#: With MXNet: what `drive` does.
METHODS = {
    "SVRGTrainer": "SVRG",
    "SVRGTrainer, stored": "stored",
    "SVRGTrainer, loopless": "loopless",
    "SAGATrainer": "SAGA",
    "SAGTrainer": "SAG",
    "SARAHTrainer": "SARAH",
    "gluon.Trainer, SGD": "SGD",
}
REFERENCE = "SVRG in NumPy"
SKLEARN = {"sklearn SAG": "sag", "sklearn SAGA": "saga"}  # at batch size 1


def run(quick: bool) -> Records:
    """Train everything on everything: a record per training."""
    seeds = SEEDS[:1] if quick else SEEDS
    cases = [
        (problem(name), size, 6 if quick else PASSES.get(name, 60))
        for name in NAMES[: 1 if quick else None]
        for size in SIZES
        if (name, size) not in LEFT_OUT
    ]
    records = []
    for (case, size, passes), (name, solver), seed in product(cases, SKLEARN.items(), seeds):
        if size == 1:
            epochs = [done for done in range(1, passes + 3) if done <= 12 or done % 3 == 0]
            points = list(peers.logistic(case, solver, epochs, seed))
            records.append(_record(case, size, name, seed, None, points))
    for case in tqdm(cases, desc="convergence", leave=False):
        records += _ours(*case, seeds)
    return records


# --- ours --------------------------------------------------------------------------------------


def _ours(problem: Problem, size: int, passes: int, seeds: Sequence[int]) -> Iterator[dict]:
    """The trainers and the reference, with the same sequence of samples."""
    kinds = METHODS.items()
    trainings = [(name, *_tuned(problem, kind, size, passes)) for name, kind in kinds]
    for seed in seeds:  # methods take turns, because timings drift
        for name, kind, rate in trainings:
            solver = Trained(problem, rate, size, kind)
            points = list(_followed(solver, kind, seed, passes))
            entry = _record(problem, size, name, seed, rate, points)
            if kind == "decaying SGD":
                entry["rate"] += " / epoch"
            reference = Reference(problem, rate, size, kind)
            expected = list(islice(_followed(reference, kind, seed, passes), len(points)))
            distance = np.linalg.norm(solver.weights - reference.weights)
            distance /= np.linalg.norm(reference.weights)
            entry["distance_to_reference"] = float(f"{distance:.2g}")
            if name == "SVRGTrainer":
                yield _record(problem, size, REFERENCE, seed, rate, expected)
            yield entry


def _followed(
    solver: Trained | Reference, kind: str, seed: int, passes: float
) -> Iterator[tuple[float, float, float]]:
    """Data passes, seconds and gap after each epoch; the gap is computed off the clock."""
    seconds, done, gap = 0.0, 0.0, np.inf
    epochs = drive(solver, kind, seed)
    while done < passes and (gap >= ENOUGH or not done):
        start = time.process_time()
        try:
            done = next(epochs)
        except FloatingPointError:  # a full gradient is not finite
            return
        mx.nd.waitall()
        seconds += time.process_time() - start
        gap = solver.problem.gap(solver.weights)
        yield done, seconds, gap


def _tuned(problem: Problem, kind: str, size: int, passes: int) -> tuple[str, float]:
    """The best rate of the grid, in NumPy; of SGD, with a constant or a decaying one."""
    found, rates = {}, np.array([2.0**k for k in EXPONENTS]) / (3 * problem.smoothness)
    for variant in ("SGD", "decaying SGD") if kind == "SGD" else (kind,):
        solver, done = Reference(problem, rates, size, variant), 0.0
        epochs, curves = drive(solver, variant, TUNING_SEED), [[] for _ in rates]  # type: Any, list
        with np.errstate(all="ignore"):  # some diverge
            while done < passes:
                done = next(epochs)
                for curve, weight in zip(curves, solver.weights):
                    curve.append((done, problem.gap(weight)))
        merits = [_merit(curve) for curve in curves]
        place = merits.index(min(merits))
        assert 0 < place < len(rates) - 1, "the best rate is at an edge"
        found[variant] = merits[place], float(rates[place])
    best = min(found, key=found.__getitem__)
    return best, found[best][1]


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
    """Describe a training."""
    return {
        "problem": problem.name,
        "batch_size": size,
        "method": method,
        "seed": seed,
        "rate": "its own" if rate is None else f"{rate * 3 * problem.smoothness:.6g} / (3 L_max)",
        "passes_seconds_gap": lowest(points),
    }


def lowest(points: Sequence[Sequence[float]]) -> list[list[float]]:
    """The checkpoints where the gap was lower than ever, and the last; rounded."""
    least, kept = np.inf, []
    for number, (done, seconds, gap) in enumerate(points):
        if np.isfinite(gap) and (gap < least or number == len(points) - 1):
            kept.append([float(f"{done:.4g}"), float(f"{seconds:.3g}"), float(f"{gap:.3g}")])
        least = min(gap, least)
        if least < ENOUGH:  # other solvers continue
            break
    return kept


# --- what is shown -----------------------------------------------------------------------------


def tables(runs: Mapping[str, Records]) -> dict[str, str]:
    """Those of the first run, and how many trainings of the others need the same passes."""
    records, *rest = runs.values()
    found = {"convergence": _by_method(records)}
    distances = [entry.get("distance_to_reference", 0) for entry in records]
    found["convergence distance"] = f"{max(distances):.0e}"
    first = {_key(entry): entry for entry in records}
    both = [(first[_key(entry)], entry) for run in rest for entry in run if _key(entry) in first]
    same = sum(all(to(a, level) == to(b, level) for level in LEVELS) for a, b in both)
    if both:
        found["convergence agreement"] = f"{same} of {len(both)}"
    return found


def _key(entry: dict[str, Any]) -> tuple:
    return tuple(entry[name] for name in ("problem", "batch_size", "method", "seed"))


def _entries(records: Records, name: str, size: int, method: str) -> Records:
    return [entry for entry in records if _key(entry)[:3] == (name, size, method)]


def to(entry: dict[str, Any], level: float, what: int = 0) -> float:
    """Data passes (0) or seconds (1) until the gap is no larger than a level; inf if never."""
    reached = (point[what] for point in entry["passes_seconds_gap"] if point[2] <= level)
    return float(next(reached, np.inf))


def _median(entries: Records, level: float, what: int = 0) -> float:
    return float(np.median([to(entry, level, what) for entry in entries]))


def number(value: float, digits: str = ".0f") -> str:
    """Write a number, or "-" for infinity."""
    return f"{value:{digits}}" if np.isfinite(value) else "-"


def _by_method(records: Records) -> str:
    """Medians over the seeds: passes to all levels, and seconds to the middle one."""
    rows = []
    for method in (*METHODS, REFERENCE, *SKLEARN):
        row = {"method": method}
        for name, size in dict.fromkeys(_key(entry)[:2] for entry in records):
            entries = _entries(records, name, size, method)
            passes = [_median(entries, level) for level in LEVELS] if entries else []
            seconds = number(_median(entries, LEVELS[1], 1), ".2g") if entries else ""
            row[f"{name}, {size}"] = f"{'/'.join(map(number, passes))} ({seconds})" * bool(entries)
        rows.append(row)
    return as_text(rows)
