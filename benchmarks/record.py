"""A record of a run: what was measured, and everything needed to repeat it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Sequence

import numpy as np

import gluon_svrg

Records = list  # of dict, one for each thing that was measured
PACKAGES = ["mxnet", "numpy", "scipy", "scikit-learn", *["skglm"] * bool(find_spec("skglm"))]


def save(
    name: str, records: Records, quick: bool, folder: Path, only: Sequence[str] | None = None
) -> Path:
    """Write a run as JSON, a record on each line; one file for each benchmark and MXNet.

    Of a run of some problems alone, records take the place of those that the file has of them. Each
    of the others then says which commit and versions it is of, where these differ.
    """
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    run = {
        "benchmark": name,
        "quick": quick,
        "commit": commit.stdout.strip() or "unknown",
        "versions": {
            "gluon_svrg": gluon_svrg.__version__,
            "python": platform.python_version(),
            **{package: version(package) for package in PACKAGES},
        },
        "processors": len(os.sched_getaffinity(0)),
    }
    path = folder / f"{name}-mxnet-{version('mxnet')}.json"
    if only and path.exists():
        before = json.loads(path.read_text())
        of = {
            key: before[key] for key in ("quick", "commit", "versions") if before[key] != run[key]
        }
        kept = [{**of, **entry} for entry in before["records"] if entry["problem"] not in only]
        records = [*kept, *records]
    lines = ",\n".join(map(json.dumps, records))
    path.write_text(f'{json.dumps(run)[:-1]}, "records": [\n{lines}\n]}}\n')
    return path


def load(name: str, folder: Path) -> dict[str, Records]:
    """The records of all runs of a benchmark in a folder, by the version of MXNet."""
    runs = {}
    for path in sorted(folder.glob(f"{name}-mxnet-*.json")):
        run = json.loads(path.read_text())
        if run["quick"]:
            raise ValueError(f"{path} is of a run with --quick, whose figures mean nothing")
        runs[run["versions"]["mxnet"]] = run["records"]
    return runs


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = (float(f"{value:.4g}") for value in np.percentile(values, [25, 50, 75]))
    return {"median": median, "quartile_1": low, "quartile_3": high}


def as_text(rows: Sequence[dict[str, Any]]) -> str:
    """Write a table in Markdown; all rows have the keys of the first one."""
    if not rows:
        return ""
    head, *lines = (f"|{'|'.join(map(str, row))}|" for row in [rows[0], *map(dict.values, rows)])
    return "\n".join([head, "|---" * len(rows[0]) + "|", *lines])
