"""327,346 flights: passes and seconds to a minimum where the data are large.

Linear models tell from other facts of a flight whether it arrives more than 15 minutes
late (``late``, and ``L1`` with that penalty; ``kernel`` from random Fourier features of the
numbers), how late (``Huber``), and where a flight started (``origin``). SVRG with a preconditioner
finds its own rate and momentum; no rate or momentum beside that of a rival is better, and its
record has the search. Seconds are of the processor, data are float32, gaps parts of the first one.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from math import inf, isfinite
from typing import Any, Iterator, Mapping, Sequence

from tqdm import tqdm

from .peers import NEWTON, SKGLM
from .problems import problem
from .record import Records, as_text
from .training import MEMORIES, RATES, best, median, number, trained

LEVELS = (1e-3, 1e-5, 1e-6)
SEEDS = (0, 1, 2)  # of SVRG on `late`, and of all with `Nystrom`; the first one for the rest
MOMENTA = [0.5, 0.9, 0.97, 0.99, 0.995, 0.998, 0.999]
SIZES = [f"late, {rows:,}" for rows in (1_000, 3_000, 10_000, 30_000, 100_000)]

NYSTROM, NYSTROM_STORED, SVRG = "Nystrom", "Nystrom, stored", "SVRG, nag"
STORED, SGD, LBFGS = "SVRG, nag, stored", "SGD, nag, falling", next(iter(MEMORIES))
#: Problem, method, data passes (of scikit-learn: after how many iterations it is looked at);
#: rate and momentum where the search begins, and the minibatch, 0 for that of `compare`.
PLANS: list[tuple[str, str, Any, float, float, int]] = [
    *(("late", NYSTROM, 60, 0, 0, size) for size in (1024, 4096, 0)),
    *(("late", NYSTROM_STORED, 60, 0, 0, size) for size in (1024, 4096)),
    ("late", SVRG, 18, 3, 0.99, 1024),
    ("late", SVRG, 33, 10, 0.97, 4096),
    ("late", STORED, 12, 3, 0.99, 1024),
    *(("late", SGD, passes, 3, 0.9, 1024) for passes in (12, 24)),
    ("late", "Adam, falling", 24, 0.3, 0, 1024),
    *(("late", name, 220, 0, 0, 1024) for name in MEMORIES),
    *(("late", name, range(4, 10), 0, 0, 0) for name in (NEWTON, "sklearn newton-cg")),
    ("late", "sklearn lbfgs", (50, 100, 200, 400), 0, 0, 0),
    ("late", "sklearn sag", (4, 10, 20), 0, 0, 0),
    *(("L1", NYSTROM, 40, 0, 0, size) for size in (1024, 4096)),
    ("L1", SVRG, 15, 1, 0.97, 1024),
    ("L1", "sklearn saga", (4, 10, 20), 0, 0, 0),
    ("L1", "sklearn liblinear", (10, 15, 20, 30, 40), 0, 0, 0),
    *[("L1", SKGLM, range(3, 11), 0, 0, 0)] * bool(find_spec(SKGLM)),
    ("Huber", NYSTROM, 60, 0, 0, 1024),
    ("Huber", SVRG, 48, 0.3, 0.998, 1024),
    *(("Huber", name, 350, 0, 0, 1024) for name in MEMORIES),
    ("origin", NYSTROM, 60, 0, 0, 1024),
    ("origin", SVRG, 30, 3, 0.995, 1024),
    *(("origin", name, 200, 0, 0, 1024) for name in MEMORIES),
    ("origin", NEWTON, (8,), 0, 0, 0),
    ("kernel", NYSTROM, 150, 0, 0, 0),
    ("kernel", SGD, 40, 0.1, 0.99, 1024),
    ("kernel", LBFGS, 600, 0, 0, 0),
    *(("kernel", f"{NEWTON}{dtype}", range(4, 10), 0, 0, 0) for dtype in ("", ", float64")),
    *(("kernel, 2000", name, passes, 0, 0, 0) for name, passes in ((NYSTROM, 150), (LBFGS, 300))),
    *((name, method, 400, 0, 0, 0) for name in SIZES for method in (NYSTROM, LBFGS)),
    *((name, NEWTON, range(4, 13), 0, 0, 0) for name in SIZES),
]
PROBLEMS = dict.fromkeys(name for name, *_ in PLANS)


def run(quick: bool, only: Sequence[str] = ()) -> Records:
    """Train everything on everything, or on some problems: a record per result."""
    records: Records = []
    plans = [plan for plan in PLANS if plan[0] in (only or PROBLEMS)]
    for name, method, budget, *start, minibatch in tqdm(plans, desc="flights", leave=False):
        if quick:
            budget = 3 if isinstance(budget, int) else [2]
        case = problem(name, 1_000 if quick else None)
        train = partial(trained, case, method, budget, LEVELS[-1])
        settings: dict = {"minibatch": minibatch, "plain_epochs": int(NYSTROM in method)}
        pairs = zip((RATES, MOMENTA), start)
        axes = [axis if value and not quick else [value] for axis, value in pairs]
        found = best(partial(train, **settings), axes, start, LEVELS[-1])
        records.append(found)
        if (NYSTROM in method or (name == "late" and method in (SVRG, STORED))) and not quick:
            settings.update(rate=found["rate"], momentum=found["momentum"])
            records += [train(seed=seed, **settings) for seed in SEEDS[1:]]
    return records


# --- what is shown -----------------------------------------------------------------------------


def tables(runs: Mapping[str, Records]) -> dict[str, str]:
    """A table of all methods, one by size, and single numbers of the first run."""
    records = next(iter(runs.values()))
    numbers = {}
    compared = {f"no search, {size}": (NYSTROM, {"minibatch": size}) for size in (1024, 4096)}
    compared["tuned"] = (SVRG, {"minibatch": 1024})
    compared["L-BFGS"] = LBFGS, {}
    for who, (method, key) in compared.items():
        some = _some(records, "late", method=method, **key)
        numbers[f"{who}, passes"] = number(median(some, LEVELS[-1]))
        numbers[f"{who}, seconds"] = number(median(some, LEVELS[-1], 1), ".2g")
    texts = {f"flights: {name}": text for name, text in numbers.items() if text != "-"}
    texts["kernel: headline"] = _headline(_some(records, "kernel"))
    shown = {"flights": [*PROBLEMS][: -len(SIZES)], "flights by size": SIZES}
    return {**texts, **{name: as_text([*_rows(runs, some)]) for name, some in shown.items()}}


def _headline(records: Records) -> str:
    """The seconds to a gap of 1e-5, and those of the rival that gets there first."""
    names = {entry["method"] for entry in records}
    seconds = {name: median(_some(records, "kernel", method=name), 1e-5, 1) for name in names}
    ours = seconds.pop(NYSTROM, inf)
    rival = min(seconds, key=seconds.__getitem__, default="")
    if not isfinite(seconds.get(rival, inf)):
        return f"{number(ours, '.2g')} s. No rival gets there within its budget"
    return f"{number(ours, '.2g')} s. The fastest rival, {rival}, needs {seconds[rival]:.2g} s"


def _some(records: Records, name: str, **key: Any) -> Records:
    """Those of a problem."""
    return [entry for entry in records if {"problem": name, **key}.items() <= entry.items()]


def _rows(runs: Mapping[str, Records], names: Sequence[str]) -> Iterator[dict[str, str]]:
    """A row for each problem, method, minibatch and budget: medians over the seeds."""
    first = next(iter(runs.values()))
    for name in names:
        for entry in _some(first, name, seed=SEEDS[0]):
            same = ["method", "minibatch", *["budget"] * ("falling" in entry["method"])]
            key = {key: entry[key] for key in same}
            each = {version: _some(records, name, **key) for version, records in runs.items()}
            method = entry["method"].replace(", nag", "").replace("falling", "{budget} passes")
            method = method.replace(NYSTROM, "SVRG, no search")
            method += ", {minibatch} rows" * (entry["minibatch"] not in (0, 1024))
            search = "{trainings} trainings, {search_seconds:.2g} s"
            yield {
                "problem": name,
                "method": method.format(**entry),
                "storage": entry.get("storage", "").partition(" ")[0],
                "rate, momentum": f"{entry['rate']:g}, {entry['momentum']:g}" * (entry["rate"] > 0),
                "passes": _three(_some(first, name, **key), 0, ".0f"),
                **{f"s, {version}": _three(entries, 1, ".2g") for version, entries in each.items()},
                "search": search.format(**entry) if entry.get("trainings", 1) > 1 else "",
            }


def _three(entries: Records, what: int, digits: str) -> str:
    return "/".join(number(median(entries, level, what), digits) for level in LEVELS)
