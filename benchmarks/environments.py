"""Other packages' solvers, each in a Python environment that suits it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Sequence

import numpy as np

from .problems import Problem

SCRIPT = Path(__file__).with_name("peers.py")
TIMEOUT = 600  # seconds

#: What pip installs into which environment; scikit-learn is in this one.
REQUIREMENTS = {
    "copt": ["copt==0.9.2", "numpy<1.24", "numba"],
    "nemos": ["nemos==0.2.8"],
}


class Abilities(NamedTuple):
    """What a solver can do."""

    environment: str | None = None
    has_rate: bool = True
    minibatches: bool = False
    softmax: bool = True


SOLVERS = {
    "sklearn SAG": Abilities(has_rate=False),
    "sklearn SAGA": Abilities(has_rate=False),
    "copt SVRG": Abilities("copt", softmax=False),
    "copt SAGA": Abilities("copt", softmax=False),
    "nemos ProxSVRG": Abilities("nemos", minibatches=True),
}


class MissingError(RuntimeError):
    """A package that cannot be installed or does not run here."""


@lru_cache(maxsize=None)
def python_of(name: str | None, folder: Path) -> str:
    """The interpreter of an environment, which is made if it is not there.

    Raises
    ------
    MissingError
        If that fails.
    """
    if name is None:
        return sys.executable
    python = folder / name / "bin" / "python"
    complete = folder / name / "complete"
    if complete.exists():
        return str(python)
    install = [str(python), "-m", "pip", "install", "--quiet", *REQUIREMENTS[name]]
    for command in ([sys.executable, "-m", "venv", str(folder / name)], install):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise MissingError(f"not installed: {_last_line(done.stderr)}")
    complete.touch()
    return str(python)


def run(
    solver: str, problem: Problem, jobs: Sequence[dict[str, Any]], folder: Path
) -> list[list[tuple[float, float, float]]]:
    """Data passes, seconds and gaps of all jobs.

    Raises
    ------
    MissingError
        If the solver is not installed, fails, or takes too long.
    """
    python = python_of(SOLVERS[solver].environment, folder)
    with tempfile.TemporaryDirectory() as place:
        files = [Path(place, name) for name in ("problem.npz", "jobs.json", "results.npz")]
        np.savez(files[0], X=problem.X, y=problem.y, l2=problem.l2, softmax=problem.is_softmax)
        files[1].write_text(json.dumps(list(jobs)))
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        try:
            done = subprocess.run(
                [python, str(SCRIPT), solver, *map(str, files)],
                capture_output=True,
                text=True,
                env=environment,
                timeout=TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise MissingError(f"took more than {TIMEOUT} seconds") from None
        if done.returncode:
            raise MissingError(f"failed: {_last_line(done.stderr)}")
        with np.load(files[2]) as results:
            return [
                [
                    (float(passes), float(seconds), problem.gap(weight))
                    for passes, seconds, weight in zip(
                        *(results[f"{number} {what}"] for what in ("passes", "seconds", "weights"))
                    )
                ]
                for number in range(len(jobs))
            ]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1][:100]
