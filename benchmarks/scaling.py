"""The cost of a step against the number of parameters, of tensors and of devices."""

from __future__ import annotations

import os
from typing import Any

import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet import gluon

from gluon_svrg import SVRGTrainer

from . import models, record, timing

SETTINGS = {"learning_rate": 1e-6}
BATCH = 32


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Vary one thing at a time."""
    parameters = [10**3, 10**4] if quick else [10**3, 10**4, 10**5, 10**6, 10**7]
    tensors = [2, 10] if quick else [2, 10, 50, 200, 500]
    devices = [1, 2] if quick else [1, 2, 3, 4]
    count = 3 if quick else 30
    records = []
    for number in parameters:
        side = round(number**0.5)
        records.append(_measure("parameters", number, [side], side, 1, count))
    for number in tensors:
        records.append(_measure("tensors", number, [16] * (number // 2), 16, 1, count))
    for number in devices:
        records.append(_measure("devices", number, [256, 256], 256, number, count))
    return records


def _measure(
    what: str, number: int, units: list[int], inputs: int, devices: int, rounds: int
) -> dict[str, Any]:
    """Time a step of both trainers on a network of dense layers."""
    contexts = [mx.cpu(index) for index in range(devices)]
    plain, svrg = (
        models.of_network(what, models.dense(*units), (BATCH, inputs), 0, devices=contexts)
        for _ in range(2)
    )
    plain_trainer = gluon.Trainer(plain.net.collect_params(), "sgd", SETTINGS)
    trainer = SVRGTrainer(svrg.net.collect_params(), "sgd", SETTINGS)
    trainer.update_full_grads(svrg.closure, [()] * 2)

    def plain_step() -> None:
        plain.differentiate()
        plain_trainer.step(BATCH)

    functions = {
        "gluon.Trainer": plain_step,
        "SVRGTrainer": lambda: trainer.step(BATCH, closure=svrg.closure),
    }
    seconds = timing.rounds(functions, rounds, description=f"{number} {what}")
    return {
        "varied": what,
        "number": number,
        "oversubscribed": devices > len(os.sched_getaffinity(0)),
        "seconds": {name: float(np.median(values)) for name, values in seconds.items()},
        "ratio": timing.summary(seconds["SVRGTrainer"] / seconds["gluon.Trainer"]),
    }


def table(records: list[dict[str, Any]]) -> list[record.Row]:
    """The table for the README."""
    return [
        {
            "varied": f"{entry['number']:,} {entry['varied']}"
            + (" (oversubscribed)" if entry["oversubscribed"] else ""),
            "gluon.Trainer (ms)": 1e3 * entry["seconds"]["gluon.Trainer"],
            "SVRGTrainer (ms)": 1e3 * entry["seconds"]["SVRGTrainer"],
            "ratio": entry["ratio"]["median"],
        }
        for entry in records
    ]


def plot(records: list[dict[str, Any]]) -> Any:
    """Draw seconds per step against what was varied."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for ax, what in zip(axes, ("parameters", "tensors", "devices")):
        shown = [entry for entry in records if entry["varied"] == what]
        numbers = [entry["number"] for entry in shown]
        for name in ("gluon.Trainer", "SVRGTrainer"):
            ax.plot(numbers, [1e3 * e["seconds"][name] for e in shown], "o-", label=name)
        for entry in shown:
            if entry["oversubscribed"]:
                ax.annotate("oversubscribed", (entry["number"], 0), rotation=90, color="grey")
        if what != "devices":
            ax.set_xscale("log")
            ax.set_yscale("log")
        else:
            ax.set_xticks(numbers)
            ax.set_ylim(bottom=0)
        ax.set_xlabel(f"number of {what}")
        ax.set_ylabel("milliseconds per step")
        ax.legend()
    return figure
