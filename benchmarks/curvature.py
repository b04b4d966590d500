"""Nothing set by hand: SVRG with a preconditioner, beside rivals at their best.

SVRG with `Nystrom` finds its own rate and momentum. Beside it are SciPy's L-BFGS on the same
network, and the quickest solvers of scikit-learn and skglm; on data that the constants of `Nystrom`
were not chosen on also SVRG with the best rate and momentum of a grid, whose search is counted.
Gaps are parts of that of zero weights.
"""

from __future__ import annotations

from typing import Any, Iterator, Mapping, Sequence

import numpy as np
from tqdm import tqdm

from .peers import SOLVERS
from .problems import problem
from .record import Records, as_text
from .training import RATES, best, median, number, to, trained

LEVELS = (1e-3, 1e-5, 1e-6)
MOMENTA = [0.9, 0.97, 0.99]
LIMIT, LIMIT_OF_LBFGS = 150, 400  # passes, where a training ends at the latest
PATIENCE = 3  # a search tries no training of more passes than so many times what needs none
NYSTROM, NAG, LBFGS = "Nystrom", "SVRG, nag", "SciPy L-BFGS, memory 30"

#: Problems, minibatches, and perhaps the number of rows: first those that the constants of
#: `Nystrom` were chosen on, then those that it was looked at with in the end, then those that
#: nobody had looked at; at last what users have, without a search: penalties, a few rows far from
#: all others, columns in their own units, and a short last minibatch.
CASES: dict[str, list[tuple]] = {
    "chosen": [
        *((name, 16) for name in ("diabetes", "breast_cancer", "wine", "digits", "digits, 0.01")),
        ("heavy", 64),
        ("made", 256),
        *((name, 1024) for name in ("huber", "poisson", "late")),
        ("late", 4096),
        ("ridge", 1024),
        ("origin", 1024),
        ("origin", 4096),
    ],
    "looked at": [("DoctorContacts", 128), ("OFP", 32), ("diamonds", 256), ("VietNamI", 128)],
    "new": [
        ("BudgetItaly", 32),
        ("mnist", 64),
        ("BudgetFood", 64),
        ("InstEval", 256),
        ("dept", 256),
    ],
    "users": [
        ("L1", 1024),
        ("L1", 4096),
        ("InstEval, L1", 256),
        ("OFP, L1", 32),
        *((f"diabetes, {what}", 16) for what in ("L1", "elastic net", "from 0")),
        ("digits, groups", 16),
        ("student", 128),
        ("OFP, units", 32),
        ("RandHIE", 256),
        ("late", 1562, 100_000),
        ("late", 2000, 30_001),
    ],
}
STARS = {"looked at": "*", "new": "**"}


def _seeds(name: str, rows: int = 0) -> range:
    """Five, but ten where some seeds were lost once."""
    return range(10 if rows or name == "VietNamI" else 5)


def run(quick: bool, only: Sequence[str] = ()) -> Records:
    """Train all methods on all problems, or on some: a record per training."""
    cases = [(group, *case) for group, cases in CASES.items() for case in cases]
    cases = [case for case in cases if not only or case[1] in only]
    bar = tqdm(cases, desc="curvature", leave=False)
    return [entry for case in bar for entry in measured(quick, *case)]


def measured(
    quick: bool, group: str, name: str, minibatch: int, *rows: int
) -> Iterator[dict[str, Any]]:
    """All trainings of a problem."""
    case = problem(name, 300 if quick else next(iter(rows), None))
    goal, seeds = LEVELS[-1], _seeds(name, *rows)[: 1 if quick else None]

    def train(*which: Any, **settings: Any) -> dict[str, Any]:
        found = trained(case, *which, goal=goal, minibatch=minibatch, **settings)
        return {"group": group, **found}

    ours = [train(NYSTROM, 4 if quick else LIMIT, seed=seed) for seed in seeds]
    yield from ours
    if not case.penalty:
        yield train(LBFGS, 4 if quick else LIMIT_OF_LBFGS)
    for solver in SOLVERS.get((case.kind, case.penalty is not None), ()):
        iterations = range(5, 21) if np.prod(case.shape) < 1_000 else (8, 12, 20)  # a fit for each
        if case.penalty:
            iterations = (10, 20, 40, 100, 1000)
        yield train(solver, [4] if quick else iterations)
    if group not in STARS:
        return
    limit = min(LIMIT, PATIENCE * max(entry["passes_seconds_gap"][-1][0] for entry in ours))

    def tuned(rate: float, momentum: float, **more: Any) -> dict[str, Any]:
        return train(NAG, limit, rate=rate, momentum=momentum, **more)

    axes = [[0.1], [0.9]] if quick else [RATES, MOMENTA]
    nag = best(tuned, axes, (0.1, 0.9), 0, goal)
    yield nag
    yield from (tuned(nag["rate"], nag["momentum"], seed=seed) for seed in seeds[1:])


# --- what is shown -----------------------------------------------------------------------------


def tables(runs: Mapping[str, Records]) -> dict[str, str]:
    """A row for each problem of the first run, and how often no search is as good as one."""
    records = next(iter(runs.values()))
    found = {"curvature": as_text(list(_rows(records)))}
    pairs = [(ours, tuned) for ours, tuned, _ in _cases(records) if tuned]
    ratios = [_passes(ours)[-1] / _passes(tuned)[-1] for ours, tuned in pairs]
    for most in (1.0, 1.5):
        within = sum(ratio <= most for ratio in ratios)
        found[f"curvature: up to {most:g}"] = f"{within} of {len(pairs)}"
    return found


def _cases(records: Records) -> Iterator[tuple[Records, Records, Records]]:
    """The records of each problem: of `Nystrom`, of the tuned ones, of others."""
    for which in [(group, *case[:2]) for group, cases in CASES.items() for case in cases]:
        some = [e for e in records if (e["group"], e["problem"], e["minibatch"]) == which]
        ours, tuned = ([e for e in some if e["method"] == name] for name in (NYSTROM, NAG))
        if ours:
            yield ours, tuned, [e for e in some if e["method"] not in (NYSTROM, NAG)]


def _passes(entries: Records) -> list[float]:
    return [median(entries, level) for level in LEVELS]


def _rows(records: Records) -> Iterator[dict[str, str]]:
    for ours, tuned, others in _cases(records):
        first, goal = ours[0], LEVELS[-1]
        lbfgs = [entry for entry in others if entry["method"] == LBFGS]
        rivals = sorted((e for e in others if e not in lbfgs), key=lambda e: to(e, goal, 1))[:1]
        seconds = [median(entries, goal, 1) for entries in (ours, tuned, lbfgs, rivals)]
        seconds.insert(2, tuned[0]["search_seconds"] if tuned else np.inf)
        passes = [
            "/".join(map(number, _passes(each))) if each else "" for each in (ours, tuned, lbfgs)
        ]
        worst = [
            number(max(to(entry, level * first["first_gap"]) for entry in ours)) for level in LEVELS
        ]
        yield {
            "problem": "{problem}, {minibatch}".format(**first) + STARS.get(first["group"], ""),
            "rows x weights": "{rows:,} x {weights:,}".format(**first),
            "no search": f"{passes[0]} ({'/'.join(worst)})",
            "nag": passes[1],
            "its search": "{trainings}: {search_passes:.0f}".format(**tuned[0]) if tuned else "",
            "L-BFGS": passes[2],
            "s": "/".join(number(value, ".2g") for value in seconds),
            "rival": ", ".join(f"{e['method']} ({e.get('storage', 'dense')})" for e in rivals),
        }
