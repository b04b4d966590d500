"""A training on a problem by the engine of `compare`, the search for its best setting, its record.

A record has the data passes, the seconds of the processor and the gap, wherever that is lower than
before; of solvers of scikit-learn, iterations stand for passes.
"""

from __future__ import annotations

import time
from itertools import product
from typing import Any, Callable, Iterable, Sequence

import numpy as np
from mxnet import autograd

from gluon_svrg.compare import compare

from . import peers
from .problems import Model, Problem

RATES = [float(f"{10 ** (k / 2):.0e}") for k in range(-12, 7)]  # 1e-6, 3e-6, ..., 300, 1000
#: Methods of `compare`, by the names of records.
METHODS = {
    "Nystrom": "svrg-nystrom",
    "Nystrom, stored": "svrg-stored-nystrom",
    "SVRG, nag": "svrg+nag",
    "SVRG, nag, stored": "svrg-stored+nag",
    "SGD, nag, falling": "nag-decay",
    "Adam, falling": "adam-decay",
}
MEMORIES = {"SciPy L-BFGS, memory 30": 30, "SciPy L-BFGS, memory 10": 10}  # 10 is SciPy's own
METHODS.update(dict.fromkeys(MEMORIES, "lbfgs"))


def trained(
    problem: Problem, method: str, budget: float | Sequence[int], goal: float, **how: Any
) -> dict[str, Any]:
    """The record of a training, which ends a pass after it is at the goal: a part of the first gap.

    The budget is in data passes; for scikit-learn it is a sequence of numbers of iterations. A
    search tells how many passes are enough: `most`.
    """
    how = {"seed": 0, "rate": 0.0, "momentum": 0.0, "minibatch": 1024, **how}
    plain_epochs, most = how.get("plain_epochs", 1), how.get("most", np.inf)
    found = {"problem": problem.name, "rows": problem.n, "weights": int(np.prod(problem.shape))}
    found.update({key: how[key] for key in ("seed", "minibatch", "rate", "momentum")})
    found.update(method=method, budget=np.max(budget).item())
    found["first_gap"] = float(f"{problem.first_gap:.6g}")
    goal *= problem.first_gap
    if isinstance(budget, (int, float)):
        found["storage"] = peers.storage(problem.X)
        passes = min(budget, max(most, plain_epochs + 3))
        points = _by_engine(problem, found, goal, passes=passes, plain_epochs=plain_epochs)
    else:
        found["storage"] = peers.storage(peers.inputs(problem, method))
        points = list(peers.fitted(problem, method, budget, how["seed"], goal))
    *_, (_, seconds, end) = points
    found.update(end=float(f"{end:.3g}"), seconds=float(f"{seconds:.3g}"))
    return {**found, "passes_seconds_gap": lowest(points)}


class _Clock:
    """Seconds of the processor that all trainings have taken so far, without measurements."""

    def __init__(self) -> None:
        self.spent, self._since = 0.0, None  # type: float, float | None

    def stop(self) -> None:
        if self._since is not None:
            self.spent += time.process_time() - self._since
        self._since = None

    def start(self, _: Any = None) -> float:
        self.stop()
        self._since = time.process_time()
        return self.spent


def _by_engine(
    problem: Problem, which: dict[str, Any], goal: float, **how: Any
) -> list[Sequence[float]]:
    method, rate, options = which["method"], which["rate"], {}  # type: str, float, dict
    clock, is_there = _Clock(), False

    def loss_of(net: Any, X: Any, y: Any) -> Any:
        if not autograd.is_recording():  # it is measured
            clock.stop()
        return net(X, y)

    def gap(net: Any) -> float:
        nonlocal is_there
        if is_there:
            raise FloatingPointError("This ends a training, as if it had diverged.")
        found = problem.gap(net.linear.weight.data().asnumpy())
        is_there = found <= goal
        return found

    if method in MEMORIES:
        options = {"lbfgs": {"memory": MEMORIES[method]}}
    elif "nag" in METHODS[method]:
        options = {"nag": {"momentum": which["momentum"]}}
    found = compare(
        lambda: Model(problem),
        loss_of,
        (problem.X, problem.y),
        methods={method: METHODS[method]},
        batch_size=which["minibatch"] or None,
        seeds=[which["seed"]],
        l2=problem.l2,
        prox=problem.penalty,
        learning_rates=[rate or 1],
        optimizer_params=options,
        measure={"gap": gap, "processor": clock.start},
        progress=False,
        **how,
    )
    (training,) = found.trainings
    clock.stop()
    columns = [training.of(name) for name in ("data_passes", "processor", "gap")]
    which["minibatch"] = which["minibatch"] or training.batch_size
    points = [point for point in zip(*columns) if np.isfinite(point[1])]
    if training.diverged and not is_there:
        points.append((training.curve[-1]["data_passes"], clock.spent, np.inf))
    return [(done, seconds - points[0][1], gap) for done, seconds, gap in points]


def best(
    train: Callable[..., dict],
    axes: Sequence[Sequence[float]],
    start: Sequence[float],
    level: float,
) -> dict:
    """Search rates and momenta from a point on, until no neighbour is better, also along both axes.

    Fewer passes to a level are better, then a lower gap at the end, then lower values. No training
    makes many more than the best before it. The record of the best has what the search took, itself
    included.
    """
    done: dict[tuple, dict] = {}

    def merit(place: tuple) -> tuple:
        if place not in done:
            rate, momentum = (axis[k] for axis, k in zip(axes, place))
            most = min((to(entry, level) for entry in done.values()), default=np.inf)
            done[place] = train(rate=rate, momentum=momentum, most=most)
        return to(done[place], level), done[place]["end"], place

    place = tuple(axis.index(value) for axis, value in zip(axes, start))
    while True:
        beside = [range(max(k - 1, 0), min(k + 2, len(axis))) for axis, k in zip(axes, place)]
        better = min(product(*beside), key=merit)
        if better == place:
            curves = [entry["passes_seconds_gap"] for entry in done.values()]
            spent = {"search_seconds": sum(entry["seconds"] for entry in done.values())}
            spent["search_passes"] = sum(curve[-1][0] for curve in curves if curve)
            costs = {name: float(f"{value:.3g}") for name, value in spent.items()}
            return {**done[place], "trainings": len(done), **costs}
        place = better


# --- what records say --------------------------------------------------------------------------


def lowest(points: Iterable[Sequence[float]]) -> list[list[float]]:
    """The points where the gap was lower than ever, and the last; rounded."""
    points, least, kept = [*points], np.inf, []
    for number, (done, seconds, gap) in enumerate(points):
        if np.isfinite(gap) and (gap < least or number == len(points) - 1):
            kept.append([float(f"{done:.4g}"), float(f"{seconds:.3g}"), float(f"{gap:.6g}")])
        least = min(gap, least)
    return kept


def to(entry: dict[str, Any], level: float, what: int = 0) -> float:
    """Data passes (0) or seconds (1) until the gap is at a part of the first one; inf if never."""
    goal = level * entry["first_gap"]
    return float(next((p[what] for p in entry["passes_seconds_gap"] if p[2] <= goal), np.inf))


def median(entries: Sequence[dict], level: float, what: int = 0) -> float:
    """That of several trainings; inf where most never get there, or where there are none."""
    return float(np.median([to(entry, level, what) for entry in entries])) if entries else np.inf


def number(value: float, digits: str = ".0f") -> str:
    """Write a number, or "-" for infinity."""
    return f"{value:{digits}}" if np.isfinite(value) else "-"
