"""The cost of a step with stored gradients, against a step of `gluon.Trainer`.

Both evaluate the closure and one gradient; the trainer adds the combination with what it stored.
"""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from mxnet import gluon

from gluon_svrg import SVRGTrainer

from . import models, record, timing

MODEL = "MLP 784-512-10"
BATCH = 128
BATCHES = 10  # whose gradients are stored
SETTINGS = {"learning_rate": 1e-6}


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure it, hybridized with and without static_alloc."""
    return [measure(static_alloc, 5 if quick else 30) for static_alloc in (False, True)]


def measure(static_alloc: bool, rounds: int) -> dict[str, Any]:
    """Compare in pairs."""
    plain, svrg = (
        models.of_network(MODEL, models.dense(512, 10), (BATCH, 784), 10, static_alloc=static_alloc)
        for _ in range(2)
    )
    plain_trainer = gluon.Trainer(plain.net.collect_params(), "sgd", SETTINGS)
    trainer = SVRGTrainer(svrg.net.collect_params(), "sgd", SETTINGS)
    trainer.update_full_grads(svrg.closure, [()] * BATCHES, store=True)
    number = 0

    def plain_step() -> None:
        plain.differentiate()
        plain_trainer.step(BATCH)

    def step() -> None:
        nonlocal number
        number += 1
        trainer.step(BATCH, closure=svrg.closure, batch_index=number % BATCHES)

    functions = {"gluon.Trainer": plain_step, "SVRGTrainer": step}
    description = "static_alloc" if static_alloc else "hybridized"
    seconds = timing.rounds(functions, rounds, least=0.05, description=description)
    return {
        "model": MODEL,
        "batch_size": BATCH,
        "static_alloc": static_alloc,
        "seconds": {name: float(np.median(values)) for name, values in seconds.items()},
        "ratio": timing.summary(seconds["SVRGTrainer"] / seconds["gluon.Trainer"]),
    }


def table(records: list[dict[str, Any]]) -> list[record.Row]:
    """What is in the README."""
    return [
        {
            "model": f"{entry['model']}, batch {entry['batch_size']}",
            "hybridized with": "static_alloc" if entry["static_alloc"] else "-",
            "gluon.Trainer (ms)": 1e3 * entry["seconds"]["gluon.Trainer"],
            "SVRGTrainer, stored (ms)": 1e3 * entry["seconds"]["SVRGTrainer"],
            "ratio": entry["ratio"]["median"],
            "quartiles": f"{entry['ratio']['quartile_1']:.3g}-{entry['ratio']['quartile_3']:.3g}",
        }
        for entry in records
    ]


def plot(records: list[dict[str, Any]]) -> Any:
    """Draw the ratios, with quartiles."""
    figure, axes = plt.subplots(figsize=(7, 2), layout="constrained")
    ratios = [entry["ratio"] for entry in records]
    medians = [ratio["median"] for ratio in ratios]
    low = [ratio["median"] - ratio["quartile_1"] for ratio in ratios]
    high = [ratio["quartile_3"] - ratio["median"] for ratio in ratios]
    axes.errorbar(medians, range(len(ratios)), xerr=[low, high], fmt="o", capsize=3)
    names = ["static_alloc" if entry["static_alloc"] else "hybridized" for entry in records]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.5, len(names) - 0.5)
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_xlabel("seconds of a stored step / of a step of gluon.Trainer (median, quartiles)")
    return figure
