"""What a step and a refresh cost, against what they cannot do without.

The floor of a step of SVRG is two gradients and the optimizer's update. Stored gradients and SAGA
take one gradient, and are compared with a step of `gluon.Trainer`; a refresh is compared with a
loop of forward and backward. Everything is timed many times in a row with one wait for the device,
as in a training loop, where Python prepares the next step meanwhile. All take turns in each round,
and the ratios are formed within the rounds. Another version of the package can take turns, too.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Mapping

import mxnet as mx
import numpy as np
from tqdm import tqdm

import gluon_svrg

from .networks import NETWORKS, ROWS, WITH_MOMENTUM, Workload
from .record import Records, as_text, summary

ROUNDS = 15
SECONDS = 0.1  # about as long each is repeated in a round
WITH_P = list(NETWORKS)[:2]  # where a preconditioner of rank 50 is measured as well
FIRST_STEPS = 10  # before rounds begin; in the first ones a preconditioner measures

#: What is compared with what.
RATIOS = {
    "SVRG / floor": ("SVRG", "floor"),
    "stored / plain step": ("stored", "plain step"),
    "SAGA / plain step": ("SAGA", "plain step"),
    "refresh / plain pass": ("refresh", "plain pass"),
    "with P / without": ("SVRG, P", "SVRG, nag"),
}


def run(quick: bool, baseline: Path | None = None) -> Records:
    """Measure all networks but the last one, hybridized without and with static_alloc."""
    packages = {"": gluon_svrg}
    if baseline is not None:
        packages["baseline"] = _imported(baseline)
    names = ["regression, 141 features", "64 units"] if quick else list(NETWORKS)[:6]
    cases = [(name, static_alloc) for name in names for static_alloc in (False, True)]
    bar = tqdm(cases, desc="costs", leave=False)
    return [_measure(name, static_alloc, packages, quick) for name, static_alloc in bar]


def _imported(folder: Path) -> ModuleType:
    """The package `gluon_svrg` of a folder, beside the installed one and under another name."""
    name, place = "gluon_svrg_baseline", folder / "gluon_svrg"
    spec = importlib.util.spec_from_file_location(
        name, place / "__init__.py", submodule_search_locations=[str(place)]
    )
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _measure(
    name: str, static_alloc: bool, packages: Mapping[str, ModuleType], quick: bool
) -> dict[str, Any]:
    """Time everything on one network."""
    plain = Workload(name, static_alloc)
    length = 5 if quick else 10 if name == "ResNet-18" else 100  # minibatches of a pass
    functions: dict[str, list[Callable[[], Any]]] = {
        "gradient": [plain.differentiate],
        "plain step": [plain.plain()],
        "plain pass": [lambda: [plain.differentiate() for _ in range(length)]],
    }
    # With a baseline, two of each: what is made earlier takes a few percent longer
    for prefix in ["", "baseline", "baseline", ""] if "baseline" in packages else [""]:
        own = WITH_MOMENTUM if name in WITH_P and not prefix else ()
        for method in ("SVRG", "stored", "SAGA", *own):
            step, refresh = Workload(name, static_alloc).calls(packages[prefix], method)
            refresh(ROWS)
            for _ in range(FIRST_STEPS):
                step()
            functions.setdefault(prefix + method, []).append(step)
            if method == "SVRG":
                functions.setdefault(prefix + "refresh", []).append(partial(refresh, length))
    seconds = _rounds(functions, 3 if quick else ROUNDS)
    seconds["floor"] = seconds["gradient"] + seconds["plain step"]

    compared = {title: both for title, both in RATIOS.items() if both[0] in seconds}
    twice = [name for name in functions if "baseline" + name in functions]
    compared.update({f"{name} / baseline": (name, "baseline" + name) for name in twice})
    medians = {key: float(f"{1e6 * np.median(values):.4g}") for key, values in seconds.items()}
    return {
        "network": name,
        "static_alloc": static_alloc,
        "versions": {prefix or "own": package.__version__ for prefix, package in packages.items()},
        "microseconds": medians,
        "ratios": {title: summary(seconds[a] / seconds[b]) for title, (a, b) in compared.items()},
    }


def _rounds(functions: Mapping[str, list[Callable[[], Any]]], count: int) -> dict[str, np.ndarray]:
    """Mean seconds per call of the functions of each name in each round."""

    def timed(function: Callable[[], Any], times: int) -> float:
        if times > 1:
            function()  # what ran before it has left other arrays in the caches
        mx.nd.waitall()
        start = time.perf_counter()
        for _ in range(times):
            function()
        mx.nd.waitall()
        return (time.perf_counter() - start) / times

    times = {n: int(np.clip(SECONDS / timed(f[0], 3), 1, 200)) for n, f in functions.items()}
    found: dict[str, list[float]] = {name: [] for name in functions}
    rng = np.random.RandomState(0)
    for _ in range(count):
        for name in rng.permutation(list(functions)):  # nothing always comes after the same thing
            found[name].append(np.mean([timed(f, times[name]) for f in functions[name]]))
    return {name: np.array(values) for name, values in found.items()}


def tables(runs: Mapping[str, Records]) -> dict[str, str]:
    """Medians, without static_alloc / with it; a pair for each MXNet."""
    rows, first = [], next(iter(runs.values()))
    for network in dict.fromkeys(entry["network"] for entry in first):
        each = [[e for e in records if e["network"] == network] for records in runs.values()]

        def pairs(value: Callable[[dict], float], digits: str, each: Any = each) -> str:
            return ", ".join("/".join(f"{value(e):{digits}}" for e in both) for both in each)

        row = {"network": network}
        for title in first[0]["ratios"]:
            row[title] = ""
            if title in each[0][0]["ratios"]:
                row[title] = pairs(lambda e, t=title: e["ratios"][t]["median"], ".2f")
        row["SVRG (µs)"] = pairs(lambda e: e["microseconds"]["SVRG"], ".0f")
        rows.append(row)
    return {"costs": as_text(rows)}
