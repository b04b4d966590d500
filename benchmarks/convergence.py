"""Trainers on small data, each at the best learning rate that `compare` finds.

It searches rates in factors of about 3, until the best is no end of them, for each of three
momenta where the optimizer is NAG. scikit-learn's SAG and SAGA, which take one row a step, stand
beside it, with seconds of the processor; all others are on the wall.
"""

from __future__ import annotations

from typing import Any, Iterator, Mapping

import numpy as np
from tqdm import tqdm

from gluon_svrg.compare import compare

from . import peers
from .curvature import MOMENTA
from .problems import Model, problem
from .record import Records, as_text
from .training import to

PROBLEMS = {"breast_cancer": 120, "wine": 90, "digits": 90}  # data passes of each training
MINIBATCH = 32
METHODS = ["svrg-nystrom", "svrg+nag", "svrg", "svrg-stored", "saga", "sag", "sarah"]
METHODS += ["nag-decay", "sgd-decay", "lbfgs"]
SKLEARN = {"sklearn SAG": "sag", "sklearn SAGA": "saga"}
LEVELS = (1e-3, 1e-6, 1e-9)  # parts of the first gap


def run(quick: bool) -> Records:
    """Train everything on everything: a record per problem and method."""
    names = list(PROBLEMS)[: 1 if quick else None]
    return [entry for name in tqdm(names, desc="convergence") for entry in _measured(name, quick)]


def _measured(name: str, quick: bool) -> Iterator[dict[str, Any]]:
    case = problem(name)
    found = compare(
        lambda: Model(case),
        lambda net, X, y: net(X, y),
        (case.X, case.y),
        methods=METHODS,
        passes=6 if quick else PROBLEMS[name],
        batch_size=MINIBATCH,
        seeds=1 if quick else 3,
        l2=case.l2,
        minimum=case.minimum,
        gaps=LEVELS,
        learning_rates=[0.1] if quick else None,
        optimizer_params={"nag": [{"momentum": momentum} for momentum in MOMENTA]},
        progress=False,
    )
    for method, row in found.table().iterrows():
        entry = {"problem": name, "method": method, "options": row["options"]}
        entry.update(rate=_told(row["learning rate"]), trainings=int(row["search trainings"]))
        entry["seconds_of_search"] = _told(row["search seconds"])
        for what in ("passes", "seconds"):
            entry[what] = [_told(row.get(f"{what} to {level:g}", np.nan)) for level in LEVELS]
        yield entry
    goal = LEVELS[-1] * case.first_gap
    for method, solver in SKLEARN.items():
        points = list(peers.fitted(case, solver, [4] if quick else range(1, 100), 0, goal))
        entry = {"passes_seconds_gap": points, "first_gap": case.first_gap}
        passes, seconds = ([_told(to(entry, e, what)) for e in LEVELS] for what in (0, 1))
        yield {"problem": name, "method": method, "passes": passes, "seconds": seconds}


def _told(value: float) -> float | None:
    """A number for a record; None for what was never reached."""
    return float(f"{value:.4g}") if np.isfinite(value) else None


# --- what is shown -----------------------------------------------------------------------------


def tables(runs: Mapping[str, Records]) -> dict[str, str]:
    """Those of the first run: passes to all levels, and seconds to the middle one."""
    records = next(iter(runs.values()))
    rows = []
    for method in dict.fromkeys(entry["method"] for entry in records):
        some = {entry["problem"]: entry for entry in records if entry["method"] == method}
        searches = [entry.get("trainings", 0) for entry in some.values()]
        row = {"method": method.replace("svrg-nystrom", "svrg, no search")}
        row.update({name: _cell(some.get(name)) for name in PROBLEMS})
        row["search"] = f"{min(searches)} to {max(searches)}" if any(searches) else ""
        rows.append(row)
    return {"convergence": as_text(rows)}


def _cell(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return ""
    passes = "/".join("-" if value is None else f"{value:.0f}" for value in entry["passes"])
    seconds = entry["seconds"][1]
    return passes + (f" ({seconds:.2g})" if seconds is not None else "")
