"""Bytes and seconds of steps and refreshes, on servers and with Horovod; a model of 64 workers.

Each job has its own network, and the counter of its interface is read. So all engines are
counted alike, including TCP headers and the engines' own messages.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from tqdm import tqdm

from . import network, record

SERVERS = ["dist_sync", "dist_sync, servers update", "dist_async"]
HOROVOD = "horovod"
DEADLINE = 300  # seconds for a job
MODELLED = 64  # workers
SIZE, LINK = 100e6, 1.25e9  # of the model: bytes of parameters; bytes per second, each way
ROOT = Path(__file__).parents[1]


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Run all jobs, one after the other, in rounds.

    Raises
    ------
    RuntimeError
        If this machine cannot create a separate network, or a job fails.
    """
    if (problem := network.missing()) is not None:
        raise RuntimeError(problem)
    engines = [*(SERVERS[:1] if quick else SERVERS), HOROVOD]
    if find_spec("horovod") is None:
        print("Horovod is not installed and is left out: .ci/horovod builds it", file=sys.stderr)
        engines.remove(HOROVOD)
    jobs = [
        (workers, engine, trainer)
        for workers in ([2] if quick else [1, 2, 3, 4])
        for engine in engines
        for trainer in (_plain(engine), "SVRGTrainer")
    ]
    runs: dict[tuple[int, str, str], list[dict[str, Any]]] = {job: [] for job in jobs}
    for _ in range(1 if quick else 3):
        for job in tqdm(jobs, desc="distributed", leave=False):
            runs[job].append({"load": os.getloadavg()[0], **_run(*job, steps=3 if quick else 20)})
    return [_together(*job, found) for job, found in runs.items()]


def _plain(engine: str) -> str:
    return "hvd.DistributedTrainer" if engine == HOROVOD else "gluon.Trainer"


def _run(workers: int, engine: str, trainer: str, steps: int) -> dict[str, Any]:
    """Run one job; what its rank 0 has found."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        arguments = [engine, trainer, str(path), str(steps)]
        worker = [sys.executable, "-m", "benchmarks.exchanges", *arguments]
        status, output = _until_deadline(network.alone([*_launcher(engine, workers), *worker]))
        if status or not path.exists():
            raise RuntimeError(f"{engine}, {workers} workers: status {status}\n{output}")
        return json.loads(path.read_text())


def _launcher(engine: str, workers: int) -> list[str]:
    if engine == HOROVOD:
        program = str(Path(sys.executable).with_name("horovodrun"))
        return [program, "--gloo", "--network-interface", "lo", "-np", str(workers)]
    return [sys.executable, "-m", "gluon_svrg", "launch", "-n", str(workers), "-s", "1", "--"]


def _until_deadline(command: list[str]) -> tuple[int | None, str]:
    beside = str(Path(sys.executable).parent)  # horovodrun calls programs beside it by name
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PATH": os.pathsep.join([beside, os.environ["PATH"]]),
            "OMP_NUM_THREADS": "1",  # the processes share the processors
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=DEADLINE)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # the launcher ends all that it has started
        output, _ = process.communicate(timeout=30)
        return None, f"not done within {DEADLINE} s\n{output}"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _together(
    workers: int, engine: str, trainer: str, runs: list[dict[str, Any]]
) -> dict[str, Any]:
    """One record from the rounds of a job."""
    phases = [name for name, found in runs[0].items() if isinstance(found, dict)]
    return {
        "workers": workers,
        "engine": engine,
        "trainer": trainer,
        "parameters": runs[0]["parameters"],
        "load": [run["load"] for run in runs],
        **{
            phase: {what: [run[phase][what] for run in runs] for what in ("bytes", "seconds")}
            for phase in phases
        },
    }


# --- what it tells -------------------------------------------------------------------------------


def expected(engine: str, phase: str, workers: int) -> tuple[float, float]:
    """What all workers send to servers or each other, and servers send, in parameters."""
    if engine == HOROVOD:
        return 2 * (workers - 1), 0  # a ring: each worker sends 2 (workers - 1) / workers
    if engine == "dist_async" and phase == "refresh":
        return workers, workers * (1 + workers)  # each pulls the weights, and all that was pushed
    return workers, workers  # each pushes all, and pulls all


def counted(entry: dict[str, Any], phase: str) -> float:
    """What all processes have sent, in parameters."""
    return float(np.median(entry[phase]["bytes"])) / entry["parameters"]


def table(records: list[dict[str, Any]]) -> list[record.Row]:
    """Counts, what they should be, and times."""
    rows = []
    for entry in records:
        row: record.Row = {
            "workers": str(entry["workers"]),
            "kvstore": entry["engine"],
            "trainer": entry["trainer"],
        }
        for phase in ("step", "refresh"):
            total = sum(expected(entry["engine"], phase, entry["workers"]))
            row[f"sent per {phase}"] = counted(entry, phase) if phase in entry else "-"
            row[f"expected, per {phase}"] = str(total) if phase in entry else "-"
        for phase in ("gradient", "step", "refresh"):
            row[f"{phase} (ms)"] = (
                1e3 * float(np.median(entry[phase]["seconds"])) if phase in entry else "-"
            )
        rows.append(row)
    return rows


def model(records: list[dict[str, Any]]) -> list[record.Row]:
    """What many workers exchange, from the largest job that was counted of each kind.

    Messages are as much larger than what is in them as was counted in a step. What a refresh sends
    beyond that are sums of numbers: they grow with a power of the workers, and not with the
    parameters. The seconds are a bound from below, the bytes over the busiest link in the busier
    direction; servers have machines of their own.
    """
    rows = []
    for entry in _largest(records):
        engine, workers = entry["engine"], entry["workers"]
        factor = counted(entry, "step") / sum(expected(engine, "step", workers))
        beyond = counted(entry, "refresh") - factor * sum(expected(engine, "refresh", workers))
        numbers = max(beyond, 0.0) * entry["parameters"] / SIZE * _growth(engine, workers)
        for servers in [0] if engine == HOROVOD else [1, MODELLED]:
            row: record.Row = {"kvstore": engine, "servers": str(servers or "-")}
            for phase in ("step", "refresh"):
                sent = np.array(expected(engine, phase, MODELLED))
                more = numbers / sent.sum() if phase == "refresh" else 0.0
                up, down = (factor + more) * sent
                sends, receives = up / MODELLED, (down if servers else up) / MODELLED
                row[f"{phase}: a worker sends + receives"] = f"{sends:.3g} + {receives:.3g}"
                row[f"{phase}: a server sends + receives"] = (
                    f"{down / servers:.4g} + {up / servers:.4g}" if servers else "-"
                )
                row[f"{phase}: seconds"] = max(up, down) / (servers or MODELLED) * SIZE / LINK
            rows.append(row)
    return rows


def by_workers(records: list[dict[str, Any]]) -> list[record.Row]:
    """The table of the README: all numbers of workers in one cell."""
    rows = []
    for engine, trainer in dict.fromkeys((e["engine"], e["trainer"]) for e in records):
        jobs = [e for e in records if (e["engine"], e["trainer"]) == (engine, trainer)]
        row: record.Row = {"kvstore": engine, "trainer": trainer}
        for phase in ("step", "refresh"):
            have_it = [job for job in jobs if phase in job]
            sent = [f"{counted(job, phase):.2f}" for job in have_it]
            milliseconds = [f"{1e3 * np.median(job[phase]['seconds']):.0f}" for job in have_it]
            row[f"sent per {phase}"] = " / ".join(sent) or "-"
            row[f"{phase} (ms)"] = " / ".join(milliseconds) or "-"
        rows.append(row)
    return rows


def _growth(engine: str, workers: int) -> float:
    """By how much sums of numbers grow from some workers to those of the model."""
    if engine == HOROVOD:
        return (MODELLED - 1) / (workers - 1)
    # each worker has its own place in what it sends; with dist_async each reads what each has sent
    return (MODELLED / workers) ** (3 if engine == "dist_async" else 2)


def _largest(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each engine, the largest job that refreshes."""
    jobs = [entry for entry in records if "refresh" in entry and entry["workers"] > 1]
    return list({e["engine"]: e for e in sorted(jobs, key=lambda e: e["workers"])}.values())


def as_text(records: list[dict[str, Any]]) -> str:
    """The table by workers, and the model, with what it assumes."""
    workers = " / ".join(map(str, sorted({entry["workers"] for entry in records})))
    return (
        f"{workers} workers:\n\n{record.as_text(by_workers(records))}\n\n"
        f"{MODELLED} workers, each on its own machine, in multiples of the parameters; "
        f"seconds for {SIZE / 1e6:.0f} MB of parameters over links of {LINK * 8 / 1e9:.0f} Gbit/s, "
        f"at least:\n\n{record.as_text(model(records))}"
    )


def plot(records: list[dict[str, Any]]) -> Any:
    """Draw what a worker sends and is sent, per step and per refresh."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    shown = [entry for entry in records if "refresh" in entry]
    for ax, phase in zip(axes, ("step", "refresh")):
        for engine in dict.fromkeys(entry["engine"] for entry in shown):
            jobs = [entry for entry in shown if entry["engine"] == engine]
            values = [counted(entry, phase) / entry["workers"] for entry in jobs]
            ax.plot([entry["workers"] for entry in jobs], values, "o-", label=engine)
        ax.set_xlabel("workers")
        ax.set_xticks(sorted({entry["workers"] for entry in shown}))
        ax.set_title(f"a {phase}")
    axes[0].set_ylabel("sent per worker / parameters")
    axes[0].legend()
    return figure
