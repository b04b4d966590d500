"""Memory beside `gluon.Trainer`, in multiples of the parameters, each in its own process."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import mxnet as mx
from mxnet import gluon
from tqdm import tqdm

from gluon_svrg import SVRGTrainer

from . import models, record

SETTINGS = {"learning_rate": 1e-6}
WARM_UP = 20
# What is freed goes back to the system at once, so that what is resident is what is in use.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MXNET_CPU_MEM_POOL_TYPE": "Unpooled"}
# Where oneDNN's operators compute large gradients, these are added in separate arrays.
WITHOUT_ONEDNN = {"MXNET_MKLDNN_ENABLED": "0", "MXNET_ONEDNN_ENABLED": "0"}  # 1.9.1, 2.0


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure what is held, what a refresh needs at its peak, and what grows."""
    records = []
    cases = [
        ("784-2048-2048-10", "held", {}),
        ("784-2048-2048-10, without oneDNN", "held", WITHOUT_ONEDNN),
        ("80 narrow layers", "growth", {}),
    ]
    for model, kind, variables in tqdm(cases, desc="memory", leave=False):
        command = [sys.executable, "-m", "benchmarks.memory", kind, "quick" if quick else "full"]
        done = subprocess.run(
            command,
            cwd=Path(__file__).parents[1],
            env={**os.environ, **ENVIRONMENT, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        for entry in json.loads(done.stdout.splitlines()[-1]):
            records.append({"model": model, **entry})
    return records


def held(quick: bool) -> list[dict[str, Any]]:
    """Compare a process before its first snapshot, between refreshes, and during refreshes."""
    workload = models.of_network("", models.big_mlp(), (128, 784), 10)
    unit = models.parameter_bytes(workload.net)
    plain = gluon.Trainer(workload.net.collect_params(), "sgd", SETTINGS)
    for _ in range(WARM_UP):
        workload.differentiate()
        plain.step(workload.batch_size)
    trainer = SVRGTrainer(workload.net.collect_params(), "sgd", SETTINGS)

    def steps() -> None:
        for _ in range(WARM_UP):
            trainer.step(workload.batch_size, closure=workload.closure)
        mx.nd.waitall()

    def refresh() -> None:
        trainer.update_full_grads(workload.closure, [()] * WARM_UP)
        mx.nd.waitall()

    steps()  # without a snapshot: gluon.Trainer
    base, base_peak = _resident(), _peak_of(steps)
    entries = []
    for which in ("first", "second", "third"):
        peak = _peak_of(refresh)
        entries.append(("peak of the " + which + " refresh", peak - base_peak))
        step_peak = _peak_of(steps)
        entries.append(("peak of the steps after it", step_peak - base_peak))
        entries.append(("held between them", _resident() - base))
    return [
        {"what": what, "MiB": value / 2**20, "times the parameters": value / unit}
        for what, value in entries
    ]


def growth(quick: bool) -> list[dict[str, Any]]:
    """Train for 10,000 steps and 100 refreshes."""
    refreshes, steps = (4, 10) if quick else (100, 100)
    workload = models.workload("80 narrow layers")
    trainer = SVRGTrainer(workload.net.collect_params(), "sgd", SETTINGS)
    resident = []
    for _ in range(refreshes):
        trainer.update_full_grads(workload.closure, [()] * 10)
        for _ in range(steps):
            trainer.step(workload.batch_size, closure=workload.closure)
            mx.nd.waitall()  # what is queued takes memory, sometimes more and sometimes less
        gc.collect()
        resident.append(_resident())
    middle = len(resident) // 2
    halves = {"first": resident[: middle + 1], "second": resident[middle:]}
    return [
        {
            "what": f"growth in the {name} half of {steps * refreshes:,} steps",
            "MiB": (half[-1] - half[0]) / 2**20,
            "resident": half,
        }
        for name, half in halves.items()
    ]


def table(records: list[dict[str, Any]]) -> list[record.Row]:
    """The table for the README."""
    columns = ("model", "what", "MiB", "times the parameters")
    return [{column: entry.get(column, "-") for column in columns} for entry in records]


def plot(records: list[dict[str, Any]]) -> Any:
    """Draw what is held, and what grows."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    shown = [entry for entry in records if "resident" not in entry]
    for shift, model in zip((-0.2, 0.2), dict.fromkeys(e["model"] for e in shown)):
        entries = [entry for entry in shown if entry["model"] == model]
        places = [number + shift for number in range(len(entries))]
        left.barh(places, [e["times the parameters"] for e in entries], 0.4, label=model)
        left.set_yticks(range(len(entries)), [e["what"] for e in entries])
    left.invert_yaxis()
    left.legend()
    left.set_xlabel("memory beside gluon.Trainer / memory of the parameters")
    grown = [value / 2**20 for entry in records for value in entry.get("resident", ())]
    right.plot(grown)
    right.set_xlabel("refreshes")
    right.set_ylabel("resident memory (MiB)")
    right.set_ylim(bottom=0)
    return figure


def _resident() -> int:
    return _status("RssAnon")


def _peak_of(function: Any) -> int:
    """The highest resident memory while a function runs."""
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    function()
    return _status("VmHWM") - _status("RssFile") - _status("RssShmem")  # which hold no arrays


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}: memory is measured on Linux only")


if __name__ == "__main__":
    measure = {"held": held, "growth": growth}[sys.argv[1]]
    print(json.dumps(measure(sys.argv[2] == "quick")))
