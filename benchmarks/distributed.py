"""Bytes pushed and pulled by a worker, per step and per refresh, on a real cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import mxnet as mx
from mxnet import gluon
from tqdm import tqdm

from gluon_svrg import SVRGTrainer

from . import models, record

SETTINGS = {"learning_rate": 1e-6}
WORKERS = 2
CASES = [
    ("dist_sync", False),
    ("dist_sync", True),
    ("dist_async", True),
]


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Count for each store, with both trainers."""
    records = []
    for store, on_servers in tqdm(CASES, desc="distributed", leave=False):
        for trainer in ("gluon.Trainer", "SVRGTrainer"):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "counts.json")
                launcher = ["-m", "gluon_svrg", "launch", "-n", str(WORKERS), "-s", "2", "--"]
                arguments = [store, str(on_servers), trainer, str(path), "3" if quick else "20"]
                command = [sys.executable, "-m", "benchmarks.distributed", *arguments]
                done = subprocess.run(
                    [sys.executable, *launcher, *command],
                    cwd=Path(__file__).parents[1],
                    env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
                    capture_output=True,
                    text=True,
                    timeout=300,
                    check=False,
                )
                if done.returncode:
                    raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}")
                records.append(
                    {
                        "store": store,
                        "update": "servers" if on_servers else "workers",
                        "trainer": trainer,
                        **json.loads(path.read_text()),
                    }
                )
    return records


def work(store_name: str, on_servers: bool, kind: str, path: Path, steps: int) -> None:
    """Run in each worker: count what goes through the store."""
    workload = models.workload("MLP 784-512-512-10")
    store = mx.kv.create(store_name)
    counts = {"pushed": 0, "pulled": 0}
    for name in ("push", "pull", "pushpull", "init", "broadcast"):
        _count(store, name, counts)
    cls = SVRGTrainer if kind == "SVRGTrainer" else gluon.Trainer
    trainer = cls(
        workload.net.collect_params(),
        "sgd",
        SETTINGS,
        kvstore=store,
        update_on_kvstore=on_servers,
    )
    found: dict[str, Any] = {"parameters": models.parameter_bytes(workload.net)}

    def step() -> None:
        if kind == "SVRGTrainer":
            trainer.step(workload.batch_size, closure=workload.closure)
        else:
            workload.differentiate()
            trainer.step(workload.batch_size)

    step()
    if kind == "SVRGTrainer":
        for _ in range(2):  # the first makes the keys
            counts.update(pushed=0, pulled=0)
            trainer.update_full_grads(workload.closure, [()] * 2)
        found["refresh"] = dict(counts)
        step()
    counts.update(pushed=0, pulled=0)
    for _ in range(steps):
        step()
    mx.nd.waitall()
    found["step"] = {name: count / steps for name, count in counts.items()}
    if store.rank == 0:
        path.write_text(json.dumps(found))
    store._barrier()


def _count(store: Any, name: str, counts: dict[str, int]) -> None:
    method = getattr(store, name)

    def counted(key: Any, value: Any = None, out: Any = None, **kwargs: Any) -> None:
        if name != "pull":
            counts["pushed"] += _bytes(value)
        if name != "push":
            counts["pulled"] += _bytes(value if out is None else out)
        if name == "pull":
            method(key, out=out, **kwargs)
        elif name in ("pushpull", "broadcast"):
            method(key, value, out=out, **kwargs)
        else:
            method(key, value, **kwargs)

    setattr(store, name, counted)


def _bytes(arrays: Any) -> int:
    first = arrays[0] if isinstance(arrays, (list, tuple)) else arrays  # devices are reduced first
    return int(first.size * first.asnumpy().itemsize)


def table(records: list[dict[str, Any]]) -> list[record.Row]:
    """What is in the README."""
    return [
        {
            "store": entry["store"],
            "update on the": entry["update"],
            "trainer": entry["trainer"],
            "pushed per step / parameters": entry["step"]["pushed"] / entry["parameters"],
            "pulled per step / parameters": entry["step"]["pulled"] / entry["parameters"],
            "pushed per refresh / parameters": (
                entry["refresh"]["pushed"] / entry["parameters"] if "refresh" in entry else "-"
            ),
        }
        for entry in records
    ]


def plot(records: list[dict[str, Any]]) -> Any:
    """Draw bytes per step."""
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    names = [f"{e['store']}, {e['update']}\n{e['trainer']}" for e in records]
    for shift, what in ((-0.2, "pushed"), (0.2, "pulled")):
        values = [e["step"][what] / 2**20 for e in records]
        axes.barh([i + shift for i in range(len(names))], values, height=0.4, label=what)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("MiB per step of a worker")
    axes.legend()
    return figure


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2] == "True", sys.argv[3], Path(sys.argv[4]), steps=int(sys.argv[5]))
