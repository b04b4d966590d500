"""Solvers of other packages, each run as a script by a Python environment that has it.

``python peers.py SOLVER PROBLEM.npz JOBS.json RESULTS.npz``: then nothing of ours is imported.
Each yields data passes, seconds of CPU time and weights after each data pass or outer iteration;
what the weights are worth is judged by one function for all, `Problem.gap`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Sequence

import numpy as np


def sklearn(problem: Any, job: dict, solver: str) -> Iterator[tuple]:
    """scikit-learn's SAG and SAGA, restarted for each number of epochs, at their own rates."""
    from sklearn.linear_model import LogisticRegression

    warnings.simplefilter("ignore")  # that they do not converge
    n = len(problem["X"])
    done = 0
    while done < job["passes"]:
        done += 1 if done < 12 else 3
        model = LogisticRegression(
            C=1 / (n * float(problem["l2"])),
            fit_intercept=False,
            solver=solver,
            tol=0,
            max_iter=done,
            random_state=job["seed"],
        )
        start = time.process_time()
        model.fit(problem["X"], problem["y"])
        yield done, time.process_time() - start, model.coef_


def copt(problem: Any, job: dict, solver: str) -> Iterator[tuple]:
    """The SVRG and SAGA of copt: minibatches of one, for binary labels.

    They compile in each call, during the first epoch, whose seconds are left out.
    """
    import copt

    X, y, l2 = problem["X"], (problem["y"] > 0).astype(float), float(problem["l2"])
    np.random.seed(job["seed"])
    per_epoch = 3 if solver == "svrg" else 1
    times, weights = [], []

    def after_epoch(variables: dict) -> None:
        times.append(time.process_time())
        weights.append(variables["x"].copy())

    run = copt.minimize_svrg if solver == "svrg" else copt.minimize_saga
    run(
        copt.loss.LogLoss(X, y).partial_deriv,
        X,
        y,
        np.zeros(X.shape[1]),
        job["rate"],
        alpha=l2,
        tol=0,
        max_iter=-(-job["passes"] // per_epoch),
        callback=after_epoch,
    )
    seconds = np.diff(times)
    seconds[0] = np.median(seconds[1:]) if len(seconds) > 1 else 0
    for epoch, (total, found) in enumerate(zip(np.cumsum(seconds), weights[1:]), start=1):
        yield per_epoch * epoch, total, found[None]


_compiled: dict = {}


def nemos(problem: Any, job: dict, solver: str) -> Iterator[tuple]:
    """The ProxSVRG of nemos, with the identity as prox; an outer iteration at a time."""
    import jax

    jax.config.update("jax_enable_x64", True)
    import jax.numpy as jnp
    from nemos.proximal_operator import prox_none
    from nemos.solvers._svrg import ProxSVRG

    X, y, l2 = problem["X"], problem["y"], float(problem["l2"])
    size, n = job["batch_size"], len(X)

    def loss(weight: Any, X: Any, y: Any) -> Any:
        if problem["softmax"]:
            outputs = X @ weight.T
            right = jnp.take_along_axis(outputs, y[:, None], axis=1)[:, 0]
            losses = jax.scipy.special.logsumexp(outputs, axis=1) - right
        else:
            losses = jnp.logaddexp(0, -y * (X @ weight[0]))
        return losses.mean() + 0.5 * l2 * (weight**2).sum()

    classes = int(y.max()) + 1 if problem["softmax"] else 1
    weight = jnp.zeros((classes, X.shape[1]))
    data = jnp.asarray(X), jnp.asarray(y)
    if size not in _compiled:
        _compiled[size] = ProxSVRG(loss, prox_none, batch_size=size)
    svrg = _compiled[size]

    def outer(weight: Any, state: Any) -> tuple:
        """The body of the loop of ``ProxSVRG.run``, which has no callback."""
        full_grad, _ = svrg.loss_gradient(weight, *data)
        state = state._replace(full_grad_at_reference_point=full_grad, reference_point=weight)
        return jax.block_until_ready(svrg._update_per_random_samples(weight, state, None, *data))

    state = svrg.init_state(weight, *data)
    state = state._replace(key=jax.random.key(job["seed"]), stepsize=jnp.asarray(job["rate"]))
    outer(*outer(weight, state))  # compiles
    steps = -(-n // size)
    passes, seconds = 0.0, 0.0
    while passes < job["passes"]:
        start = time.process_time()
        weight, state = outer(weight, state)
        seconds += time.process_time() - start
        passes += 1 + 2 * steps * size / n
        yield passes, seconds, np.asarray(weight)


class Solver(NamedTuple):
    """Who runs it, and what it can do."""

    run: Any
    name: str
    environment: str | None = None  # None: the present one
    has_rate: bool = True
    minibatches: bool = False
    softmax: bool = True


SOLVERS = {
    "sklearn SAG": Solver(sklearn, "sag", has_rate=False),
    "sklearn SAGA": Solver(sklearn, "saga", has_rate=False),
    "copt SVRG": Solver(copt, "svrg", "copt", softmax=False),
    "copt SAGA": Solver(copt, "saga", "copt", softmax=False),
    "nemos ProxSVRG": Solver(nemos, "svrg", "nemos", minibatches=True),
}
#: What pip installs into each environment.
REQUIREMENTS = {"copt": ["copt==0.9.2", "numpy<1.24", "numba"], "nemos": ["nemos==0.2.8"]}


def run(
    solver: str, problem: Any, jobs: Sequence[dict[str, Any]], folder: Path
) -> list[list[tuple[float, float, float]]]:
    """Data passes, seconds and gaps of all jobs, in the environment of a solver."""
    with tempfile.TemporaryDirectory() as place:
        files = [Path(place, name) for name in ("problem.npz", "jobs.json", "results.npz")]
        np.savez(files[0], X=problem.X, y=problem.y, l2=problem.l2, softmax=problem.is_softmax)
        files[1].write_text(json.dumps(list(jobs)))
        _call([_python_of(SOLVERS[solver].environment, folder), __file__, solver, *files])
        with np.load(files[2]) as results:
            return [
                [(*row[:2].tolist(), problem.gap(row[2:])) for row in results[str(number)]]
                for number in range(len(jobs))
            ]


def _python_of(name: str | None, folder: Path) -> str:
    """The interpreter of an environment, which is made if it is not there."""
    if name is None:
        return sys.executable
    python, complete = folder / name / "bin" / "python", folder / name / "complete"
    if not complete.exists():
        _call([sys.executable, "-m", "venv", folder / name])
        _call([python, "-m", "pip", "install", "--quiet", *REQUIREMENTS[name]])
        complete.touch()
    return str(python)


def _call(command: Sequence[Any]) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run(list(map(str, command)), env=environment, check=True)


def main(solver: str, problem_file: str, jobs_file: str, results_file: str) -> None:
    """Do all jobs of one solver on one problem."""
    problem = dict(np.load(problem_file))
    with open(jobs_file) as file:
        jobs = json.load(file)
    run, name, *_ = SOLVERS[solver]
    results = {}
    for number, job in enumerate(jobs):
        points = run(problem, job, name)
        results[str(number)] = np.array([[*done, *weights.ravel()] for *done, weights in points])
    np.savez_compressed(results_file, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
