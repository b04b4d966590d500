"""The cost of a step of each method, against a step of `gluon.Trainer`.

All train the same network on the same minibatches, interleaved in one run. Steps that compare
gradients, the first ones after a refresh, are not timed.
"""

from __future__ import annotations

from typing import Any, Callable

import matplotlib.pyplot as plt
import numpy as np
from mxnet import gluon

import gluon_svrg
from gluon_svrg.passes.arrays import Buffers, buffers_like, per_device
from gluon_svrg.passes.multiples import assign_in_turn
from gluon_svrg.passes.sums import steps_keeping

from . import models, record, timing

SETTINGS = {"learning_rate": 1e-6}
BATCHES = 10  # of a table
MODELS = ("MLP 784-512-512-10", "MLP 784-512-10", "linear regression")

#: By what is shown: the trainer, its own arguments, and what it does before and at each step.
METHODS: dict[str, tuple[str, dict[str, Any], str]] = {
    "SVRG": ("SVRGTrainer", {}, "refresh"),
    "SVRG, stored": ("SVRGTrainer", {}, "refresh store index"),
    "SAGA": ("SAGATrainer", {}, "refresh index"),
    "SAG": ("SAGTrainer", {}, "refresh index"),
    "SARAH": ("SARAHTrainer", {}, "refresh"),
    "STORM": ("STORMTrainer", {}, ""),
    "MARS": ("MARSTrainer", {}, ""),
    "MARS, approximate": ("MARSTrainer", {"exact": False}, ""),
}
#: The arithmetic of SAGA in MXNet's operators, without the trainer.
SUMS_ALONE = "gluon.Trainer and SAGA's sums"
#: That of stored gradients: a subtraction.
ROW_ALONE = "gluon.Trainer and a stored row"
SHOWN = [*METHODS, ROW_ALONE, SUMS_ALONE]


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure every method on every model, hybridized with and without static_alloc."""
    records = []
    for name in MODELS[-1:] if quick else MODELS:
        for static_alloc in (False, True):
            records += measure(name, static_alloc, 5 if quick else 30)
    return records


def measure(name: str, static_alloc: bool, rounds: int) -> list[dict[str, Any]]:
    """Measure one model."""
    plain = models.workload(name, static_alloc=static_alloc)
    plain_trainer = gluon.Trainer(plain.net.collect_params(), "sgd", SETTINGS)

    def plain_step() -> None:
        plain.differentiate()
        plain_trainer.step(plain.batch_size)

    functions = {"gluon.Trainer": plain_step}
    for method in METHODS:
        functions[method] = _step_of(method, models.workload(name, static_alloc=static_alloc))
    for floor, function in ((ROW_ALONE, _row_alone), (SUMS_ALONE, _sums_alone)):
        functions[floor] = function(models.workload(name, static_alloc=static_alloc))
    description = f"{name}{', static_alloc' if static_alloc else ''}"
    seconds = timing.rounds(functions, rounds, least=0.03, description=description)
    base = seconds["gluon.Trainer"]
    return [
        {
            "model": name,
            "static_alloc": static_alloc,
            "method": method,
            "seconds": float(np.median(seconds[method])),
            "ratio": timing.summary(seconds[method] / base),
        }
        for method in SHOWN
    ]


def _step_of(method: str, workload: models.Workload) -> Callable[[], None]:
    """A step of a trainer that is past its first ones."""
    cls, own, ways = METHODS[method]
    trainer = getattr(gluon_svrg, cls)(workload.net.collect_params(), "sgd", SETTINGS, **own)
    if "refresh" in ways:
        store = {"store_grads": True} if "store" in ways else {}
        trainer.update_full_grads(workload.closure, [()] * BATCHES, **store)
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        index = {"batch_index": number % BATCHES} if "index" in ways else {}
        trainer.step(workload.batch_size, closure=workload.closure, **index)

    return step


def _row_alone(workload: models.Workload) -> Callable[[], None]:
    """A step of `gluon.Trainer`, with the subtraction of a stored row before the update."""
    trainer = gluon.Trainer(workload.net.collect_params(), "sgd", SETTINGS)
    grads = [parameter.list_grad() for parameter in workload.net.collect_params().values()]
    v = per_device(Buffers(grads))[0]
    rows = [per_device(buffers_like(grads))[0] for _ in range(BATCHES)]
    number = 0

    def step() -> None:
        nonlocal number
        workload.differentiate()
        number += 1
        assign_in_turn([v, rows[number % BATCHES]], ((0, ((1.0, 0), (-1.0, 1))),))
        trainer.step(workload.batch_size)

    return step


def _sums_alone(workload: models.Workload) -> Callable[[], None]:
    """A step of `gluon.Trainer`, with the sums of SAGA between backward and the update."""
    trainer = gluon.Trainer(workload.net.collect_params(), "sgd", SETTINGS)
    grads = [parameter.list_grad() for parameter in workload.net.collect_params().values()]
    v = per_device(Buffers(grads))[0]
    total, new_total, *rows = (
        per_device(buffers_like(grads))[0]
        for _ in range(BATCHES + 3)  # one row is spare
    )
    steps = steps_keeping(1.0, -1.0, 1 / BATCHES, True, v.is_narrow, v.by_products)
    number = 0

    def step() -> None:
        nonlocal number, total, new_total
        workload.differentiate()
        number += 1
        row, new_row = rows[number % len(rows)], rows[(number - 1) % len(rows)]
        assign_in_turn([v, new_row, total, row, new_total], steps)
        total, new_total = new_total, total
        trainer.step(workload.batch_size)

    return step


def table(records: list[dict[str, Any]]) -> list[record.Row]:
    """The table for the README."""
    return [
        {
            "model": entry["model"] + (", static_alloc" if entry["static_alloc"] else ""),
            "method": entry["method"],
            "step (ms)": 1e3 * entry["seconds"],
            "step / step of gluon.Trainer": entry["ratio"]["median"],
        }
        for entry in records
    ]


def plot(records: list[dict[str, Any]]) -> Any:
    """Draw the ratios, with quartiles."""
    models_shown = list(dict.fromkeys((e["model"], e["static_alloc"]) for e in records))
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for number, (model, static_alloc) in enumerate(models_shown):
        shown = [
            entry["ratio"]
            for entry in records
            if (entry["model"], entry["static_alloc"]) == (model, static_alloc)
        ]
        medians = [ratio["median"] for ratio in shown]
        low = [ratio["median"] - ratio["quartile_1"] for ratio in shown]
        high = [ratio["quartile_3"] - ratio["median"] for ratio in shown]
        places = np.arange(len(shown)) + 0.15 * number
        label = model + (", static_alloc" if static_alloc else "")
        axes.errorbar(medians, places, xerr=[low, high], fmt="osD^"[number % 4], label=label)
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_yticks(range(len(SHOWN)), SHOWN)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step / of a step of gluon.Trainer (median, quartiles)")
    axes.set_title("Methods with one gradient per step, and with two")
    axes.legend()
    return figure
