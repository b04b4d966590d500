"""327,346 flights: passes and seconds to a minimum where the data are large.

Linear models tell from what is known at a departure whether a flight arrives more than 15 minutes
late (``late``, and ``L1`` with that penalty), how late (``Huber``), and where a flight started
(``origin``). SVRG with a preconditioner finds its own rate and momentum. Each rival has its best
setting: no rate, momentum or size of the minibatches beside it is better, and the record has what
the search took. L-BFGS has two memories. Seconds are of the processor, data are float32.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any, Iterator, Mapping

from tqdm import tqdm

from .problems import problem
from .record import Records, as_text
from .training import MEMORIES, RATES, best, median, number, trained

ROWS = 327_346
LEVELS = (1e-3, 1e-5, 1e-6)
SEEDS = (0, 1, 2)  # of SVRG on `late`, and of all without a search; the first one for the rest
MOMENTA = [0.5, 0.9, 0.97, 0.99, 0.995, 0.998, 0.999]
#: Parts of the rows, and the minibatches that `compare` has for so many.
DEFAULTS = {1_000: 32, 3_000: 32, 10_000: 64, 30_000: 128, 100_000: 512}

NYSTROM, SVRG, STORED = "Nystrom", "SVRG, nag", "SVRG, nag, stored"
NEWTON = "sklearn newton-cholesky"
#: Problem, rows, method, data passes (of scikit-learn: after how many iterations it is looked at);
#: rate and momentum where the search begins, and the minibatch.
PLANS: list[tuple[str, int, str, Any, float, float, int]] = [
    *(("late", ROWS, NYSTROM, 40, 0, 0, size) for size in (1024, 4096)),
    ("late", ROWS, SVRG, 18, 3, 0.99, 1024),
    ("late", ROWS, SVRG, 33, 10, 0.97, 4096),
    ("late", ROWS, STORED, 12, 3, 0.99, 1024),
    ("late", ROWS, "SGD, nag, falling", 12, 3, 0.9, 1024),
    ("late", ROWS, "SGD, nag, falling", 24, 3, 0.9, 1024),
    ("late", ROWS, "Adam, falling", 24, 0.3, 0, 1024),
    *(("late", ROWS, name, 220, 0, 0, 1024) for name in MEMORIES),
    ("late", ROWS, NEWTON, range(4, 9), 0, 0, 0),
    ("late", ROWS, "sklearn sag", (4, 10), 0, 0, 0),
    ("L1", ROWS, SVRG, 15, 1, 0.97, 1024),
    ("L1", ROWS, "sklearn saga", (4, 10), 0, 0, 0),
    ("L1", ROWS, "sklearn liblinear", (5, 10, 20, 40), 0, 0, 0),
    ("Huber", ROWS, NYSTROM, 60, 0, 0, 1024),
    ("Huber", ROWS, SVRG, 48, 0.3, 0.998, 1024),
    *(("Huber", ROWS, name, 350, 0, 0, 1024) for name in MEMORIES),
    ("origin", ROWS, NYSTROM, 60, 0, 0, 1024),
    ("origin", ROWS, SVRG, 30, 3, 0.995, 1024),
    *(("origin", ROWS, name, 200, 0, 0, 1024) for name in MEMORIES),
    ("origin", ROWS, NEWTON, (8,), 0, 0, 0),
    *(("late", rows, name, 400, 0, 0, 1024) for rows, name in product(DEFAULTS, MEMORIES)),
    *(("late", rows, NEWTON, range(4, 13), 0, 0, 0) for rows in DEFAULTS),
    *(("late", rows, NYSTROM, 100, 0, 0, size) for rows, size in DEFAULTS.items()),
]
PROBLEMS = dict.fromkeys(name for name, *_ in PLANS)


def run(quick: bool) -> Records:
    """Train everything on everything: a record per training."""
    records: Records = []
    plans = [plan for plan in PLANS if plan[1] == ROWS] if quick else PLANS
    for name, rows, method, budget, *start, minibatch in tqdm(plans, desc="flights", leave=False):
        if quick:
            rows, budget = 1_000, 3 if isinstance(budget, int) else [2]
        train = partial(_train, name, rows, method, budget, minibatch)
        axes = [RATES, MOMENTA]
        axes = [axis if value and not quick else [value] for axis, value in zip(axes, start)]
        found = best(train, axes, start, 0, LEVELS[2])
        records.append(found)
        if (method == NYSTROM or (name == "late" and method in (SVRG, STORED))) and not quick:
            place = [found[key] for key in ("rate", "momentum")]
            records += [train(*place, seed=seed) for seed in SEEDS[1:]]
    return records


def _train(
    name: str,
    rows: int,
    method: str,
    budget: Any,
    minibatch: int,
    rate: float,
    momentum: float,
    **more: Any,
) -> dict[str, Any]:
    settings = {"rate": rate, "momentum": momentum, "minibatch": minibatch, **more}
    settings["plain_epochs"] = int(method == NYSTROM)  # before the first refresh
    return trained(problem(name, rows), method, budget, LEVELS[-1], **settings)


# --- what is shown -----------------------------------------------------------------------------


def tables(runs: Mapping[str, Records]) -> dict[str, str]:
    """A table of all methods, one by size, and single numbers of the first run."""
    records = next(iter(runs.values()))
    found = {
        "flights": as_text(list(_rows(runs))),
        "flights by size": as_text(list(_by_size(runs))),
    }
    ours = _some(records, "late", method=SVRG, minibatch=1024)
    found["flights: search"] = _search(ours[0])
    compared = {
        f"no search, {size}": {"method": NYSTROM, "minibatch": size} for size in (1024, 4096)
    }
    compared.update({"tuned": {"method": SVRG, "minibatch": 1024}, "newton": {"method": NEWTON}})
    compared["L-BFGS"] = {"method": next(iter(MEMORIES))}
    for what, (unit, digits) in enumerate((("passes", ".0f"), ("seconds", ".2g"))):
        each = {
            who: median(_some(records, "late", **key), LEVELS[-1], what)
            for who, key in compared.items()
        }
        for who, value in each.items():
            found[f"flights: {who}, {unit}"] = number(value, digits)
            for rival in ("L-BFGS", "newton"):
                found[f"flights: {rival} over {who}, {unit}"] = number(each[rival] / value, ".2g")
    found["flights: headline"] = (
        "{no search, 4096, passes} passes and {no search, 4096, seconds} s. `newton-cholesky` of "
        "scikit-learn needs {newton, seconds} s, L-BFGS {L-BFGS, passes} passes and "
        "{L-BFGS, seconds} s"
    ).format(**{name.partition(": ")[2]: text for name, text in found.items()})
    return found


def _search(entry: Mapping[str, Any]) -> str:
    """What the search of the best setting took."""
    if entry.get("trainings", 1) == 1:
        return ""
    return f"{entry['trainings']} trainings, {entry['search_seconds']:.2g} s"


def _rival(records: Records, level: float, rows: int) -> Records:
    """L-BFGS with the memory that is quicker to a level."""
    each = [_some(records, "late", rows=rows, method=name) for name in MEMORIES]
    return min(each, key=lambda entries: median(entries, level, 1))


def _some(records: Records, name: str, **key: Any) -> Records:
    """Those of a problem, with all rows if nothing else is said."""
    key = {"problem": name, "rows": max(entry["rows"] for entry in records), **key}
    return [entry for entry in records if key.items() <= entry.items()]


def _rows(runs: Mapping[str, Records]) -> Iterator[dict[str, str]]:
    """A row for each problem, method, minibatch and budget: medians over the seeds."""
    first = next(iter(runs.values()))
    for name in PROBLEMS:
        for entry in _some(first, name, seed=SEEDS[0]):
            names = ["method", "minibatch", *["budget"] * ("falling" in entry["method"])]
            key = {name: entry[name] for name in names}
            each = {version: _some(records, name, **key) for version, records in runs.items()}
            method = entry["method"].replace(", nag", "").replace("falling", "{budget} passes")
            method = method.replace(NYSTROM, "SVRG, no search")
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
    return "/".join(number(median(entries, level, what), digits) for level in LEVELS)


def _by_size(runs: Mapping[str, Records]) -> Iterator[dict[str, str]]:
    """Passes and seconds to the middle level."""
    first, level = next(iter(runs.values())), LEVELS[1]
    for rows in sorted({entry["rows"] for entry in first}):
        row: dict[str, str] = {}
        for version, records in runs.items():
            size = {"minibatch": DEFAULTS.get(rows, 1024)}
            compared = [
                _some(records, "late", rows=rows, method=NYSTROM, **size),
                _rival(records, level, rows),
                _some(records, "late", rows=rows, method=NEWTON),
            ]
            passes, seconds = (
                "/".join(number(median(entries, level, what), digits) for entries in compared)
                for what, digits in enumerate((".0f", ".2g"))
            )
            row = row or {"flights": f"{rows:,}", **size, "passes": passes}
            row[f"s, {version}"] = seconds
        yield row
