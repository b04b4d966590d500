"""Nothing set by hand: SVRG with a preconditioner, beside rivals at their best.

SVRG with `Nystrom` finds its own rate and momentum. Beside it are SciPy's L-BFGS on the same
network, and the quickest solvers of scikit-learn and skglm; on data with a star also SVRG with the
best rate and momentum of a grid, whose search is counted.
Gaps are parts of that of zero weights.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Iterator, Mapping, Sequence

import numpy as np
from tqdm import tqdm

from .peers import SOLVERS
from .problems import problem
from .record import Records, as_text
from .training import RATES, best, median, number, to, trained

LEVELS = (1e-3, 1e-5, 1e-6)
MOMENTA, PENALTIES = [0.9, 0.97, 0.99], ("L1", "elastic net", "from 0")
LIMIT, LIMIT_OF_LBFGS = 150, 400  # passes, where a training ends at the latest
PATIENCE = 3  # a search tries no training of more passes than so many times what needs none
NYSTROM, NAG, LBFGS = "Nystrom", "SVRG, nag", "SciPy L-BFGS, memory 30"

#: By minibatch: what the constants of `Nystrom` were chosen on, what was looked at, what is held
#: out; at last what users have: penalties, rows far from others, units, a short last minibatch.
CASES: dict[str, dict[int, list[str]]] = {
    "chosen": {
        16: ["diabetes", "breast_cancer", "wine", "digits", "digits, 0.01"],
        64: ["heavy"],
        256: ["made"],
        1024: ["huber", "poisson", "late", "ridge", "origin"],
        4096: ["late", "origin"],
    },
    "looked at": {32: ["OFP"], 64: ["BudgetFood"], 128: ["DoctorContacts", "VietNamI"],
                  256: ["diamonds"]},
    "new": {32: ["BudgetItaly"], 64: ["mnist"], 256: ["InstEval", "dept"]},
    "users": {
        16: [*(f"diabetes, {what}" for what in PENALTIES), "digits, groups", "Griliches"],
        32: ["OFP, L1", "OFP, units"],
        128: ["student"],
        256: ["RandHIE", "InstEval, L1"],
        1024: ["L1"],
        1562: ["late, 100,000"],
        2000: ["late, 30,001"],
        4096: ["L1"],
    },
}  # fmt: skip
STARS = {"looked at": "*", "new": "**"}
SEEDS = dict.fromkeys(("VietNamI", "late, 100,000", "late, 30,001"), 10)  # others have five


def _cases() -> Iterator[tuple[str, str, int]]:
    """Group, problem and minibatch of each."""
    for group, sizes in CASES.items():
        yield from ((group, name, size) for size, names in sizes.items() for name in names)


def run(quick: bool, only: Sequence[str] = ()) -> Records:
    """Train all methods on all problems, or on some: a record per result."""
    cases = [case for case in _cases() if case[1] in (only or case)]
    return [entry for case in tqdm(cases, desc="curvature") for entry in measured(*case, quick)]


def measured(group: str, name: str, minibatch: int, quick: bool) -> Iterator[dict[str, Any]]:
    """All trainings of a problem."""
    case = problem(name, 300 if quick else None)
    goal, seeds = LEVELS[-1], range(1 if quick else SEEDS.get(name, 5))

    def train(*which: Any, **settings: Any) -> dict[str, Any]:
        found = trained(case, *which, goal=goal, minibatch=minibatch, **settings)
        return {"group": group, **found}

    ours = [train(NYSTROM, 4 if quick else LIMIT, seed=seed) for seed in seeds]
    yield from ours
    if not case.penalty:
        yield train(LBFGS, 4 if quick else LIMIT_OF_LBFGS)
    few = range(5, 21) if np.prod(case.shape) < 1_000 else (8, 12, 20)  # a fit for each
    iterations = [4] if quick else (10, 20, 40, 100, 1000) if case.penalty else few
    for solver in SOLVERS.get((case.kind, case.penalty is not None), ()):
        yield train(solver, iterations)
    if group in STARS:
        limit = min(LIMIT, PATIENCE * max(entry["passes_seconds_gap"][-1][0] for entry in ours))
        axes = [[0.1], [0.9]] if quick else [RATES, MOMENTA]
        nag = best(partial(train, NAG, limit), axes, (0.1, 0.9), goal)
        found = {key: nag[key] for key in ("rate", "momentum")}
        yield nag
        yield from (train(NAG, limit, seed=seed, **found) for seed in seeds[1:])


# --- what is shown -----------------------------------------------------------------------------


def tables(runs: Mapping[str, Records]) -> dict[str, str]:
    """A row for each problem of the first run, and how often no search is as good as one."""
    records = next(iter(runs.values()))
    found = {"curvature": as_text(list(_rows(records)))}
    pairs = [map(_passes, (ours, tuned)) for ours, tuned, _ in _compared(records) if tuned]
    ratios = [ours[-1] / tuned[-1] for ours, tuned in pairs]
    for most in ("1", "1.5"):
        within = sum(ratio <= float(most) for ratio in ratios)
        found[f"curvature: up to {most}"] = f"{within} of {len(ratios)}"
    return found


def _compared(records: Records) -> Iterator[tuple[Records, Records, Records]]:
    """The records of each problem: of `Nystrom`, of the tuned ones, of others."""
    for case in _cases():
        some = [e for e in records if (e["group"], e["problem"], e["minibatch"]) == case]
        ours, tuned = ([e for e in some if e["method"] == name] for name in (NYSTROM, NAG))
        if ours:
            yield ours, tuned, [e for e in some if e["method"] not in (NYSTROM, NAG)]


def _passes(entries: Records, of: Any = np.median) -> list[float]:
    """To each level, of several seeds."""
    return [float(of([to(entry, level) for entry in entries])) for level in LEVELS]


def _rows(records: Records) -> Iterator[dict[str, str]]:
    for ours, tuned, others in _compared(records):
        first, goal = ours[0], LEVELS[-1]
        lbfgs = [entry for entry in others if entry["method"] == LBFGS]
        rivals = sorted((e for e in others if e not in lbfgs), key=lambda e: to(e, goal, 1))[:1]
        names = [f"{e['method'].split()[-1]} ({e['storage'].split()[0]})" for e in rivals]
        seconds = [median(entries, goal, 1) for entries in (ours, tuned, lbfgs, rivals)]
        seconds.insert(2, tuned[0]["search_seconds"] if tuned else np.inf)
        found = [_passes(each) if each else [] for each in (ours, tuned, lbfgs)]
        passes = ["/".join(map(number, each)) for each in (*found, _passes(ours, max))]
        yield {
            "problem": "{problem}, {minibatch}".format(**first) + STARS.get(first["group"], ""),
            "rows x weights": "{rows:,} x {weights:,}".format(**first),
            "no search": f"{passes[0]} ({passes[3]})",
            "nag": passes[1],
            "its search": "{trainings}: {search_passes:.0f}".format(**tuned[0]) if tuned else "",
            "L-BFGS": passes[2],
            "s": "/".join(number(value, ".2g") for value in seconds),
            "rival": "".join(names),
        }
