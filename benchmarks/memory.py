"""Memory beside `gluon.Trainer`, in multiples of the parameters, each method in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Mapping

import mxnet as mx
import numpy as np
from tqdm import tqdm

import gluon_svrg

from .networks import METHODS, ROWS, Workload
from .record import Records, as_text

NETWORK = "MLP 784-2048-2048-10"  # 5.8 million parameters
SMALL = "64 units"  # comes first: then all code is loaded
STEPS = 20
# What is freed goes back to the system at once, so that what is resident is what is in use.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MXNET_CPU_MEM_POOL_TYPE": "Unpooled"}


def run(quick: bool) -> Records:
    """Measure what each method keeps, and what it needs at its peak."""
    records = []
    for method in tqdm(list(METHODS)[: 1 if quick else None], desc="memory", leave=False):
        output = subprocess.check_output(
            [sys.executable, "-m", "benchmarks.memory", method],
            cwd=Path(__file__).parents[1],
            env={**os.environ, **ENVIRONMENT},
        )
        records.append({"method": method, **json.loads(output.splitlines()[-1])})
    return records


def measure(method: str, network: str) -> dict[str, float]:
    """Compare this process with itself while it was `gluon.Trainer`."""
    workload = Workload(network)
    unit = sum(4 * int(np.prod(p.shape)) for p in workload.net.collect_params().values())
    plain = workload.plain()

    def repeated(step: Callable[[], None]) -> None:
        for _ in range(STEPS):
            step()
        mx.nd.waitall()

    repeated(plain)
    before, peak_before = _status("RssAnon"), _peak_of(lambda: repeated(plain))
    step, refresh = workload.calls(gluon_svrg, method)

    def period() -> None:
        refresh(ROWS)
        repeated(step)

    period()
    peak = (_peak_of(period) - peak_before) / unit  # of the second refresh, and of steps
    kept = (_status("RssAnon") - before) / unit
    return {"parameters": unit // 4, "kept": round(kept, 3), "peak": round(peak, 3)}


def _peak_of(function: Callable[[], Any]) -> int:
    """The highest resident memory while a function runs."""
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    function()
    return _status("VmHWM") - _status("RssFile") - _status("RssShmem")  # which hold no arrays


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def tables(runs: Mapping[str, Records]) -> dict[str, str]:
    """What is kept / the peak."""
    rows = []
    for method in dict.fromkeys(entry["method"] for run in runs.values() for entry in run):
        rows_kept = f" ({ROWS} rows)" if "index" in METHODS[method][2] else ""
        row = {"times the parameters": method + rows_kept}
        for version, records in runs.items():
            for entry in records:
                if entry["method"] == method:
                    row[version] = f"{entry['kept']:.2f}/{entry['peak']:.2f}"
        rows.append(row)
    return {"memory": as_text(rows)}


if __name__ == "__main__":
    measure(sys.argv[1], SMALL)
    print(json.dumps(measure(sys.argv[1], NETWORK)))
