"""Solvers of other packages, run as a script by a Python that has them; it imports nothing of ours.

``python peers.py SOLVER PROBLEM.npz JOBS.json RESULTS.npz``. Weights are written after each data
pass or outer iteration; what they are worth is judged elsewhere, by one function for all.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Any, Iterator

import numpy as np

#: data passes so far, seconds so far, weights
Point = tuple


def sklearn(problem: Any, job: dict, solver: str) -> Iterator[Point]:
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
        start = time.perf_counter()
        model.fit(problem["X"], problem["y"])
        yield done, time.perf_counter() - start, model.coef_


def copt(problem: Any, job: dict, solver: str) -> Iterator[Point]:
    """The SVRG and SAGA of copt: minibatches of one, for binary labels.

    They compile in each call, during the first epoch, whose seconds are left out.
    """
    import copt

    X, y, l2 = problem["X"], (problem["y"] > 0).astype(float), float(problem["l2"])
    np.random.seed(job["seed"])
    per_epoch = 3 if solver == "svrg" else 1
    times, weights = [], []

    def after_epoch(variables: dict) -> None:
        times.append(time.perf_counter())
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


def nemos(problem: Any, job: dict, solver: str) -> Iterator[Point]:
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
        start = time.perf_counter()
        weight, state = outer(weight, state)
        seconds += time.perf_counter() - start
        passes += 1 + 2 * steps * size / n
        yield passes, seconds, np.asarray(weight)


SOLVERS = {
    "sklearn SAG": (sklearn, "sag"),
    "sklearn SAGA": (sklearn, "saga"),
    "copt SVRG": (copt, "svrg"),
    "copt SAGA": (copt, "saga"),
    "nemos ProxSVRG": (nemos, "svrg"),
}


def main(solver: str, problem_file: str, jobs_file: str, results_file: str) -> None:
    """Do all jobs of one solver on one problem."""
    problem = dict(np.load(problem_file))
    with open(jobs_file) as file:
        jobs = json.load(file)
    run, name = SOLVERS[solver]
    results = {}
    for number, job in enumerate(jobs):
        columns = zip(*run(problem, job, name))
        for what, values in zip(("passes", "seconds", "weights"), columns):
            results[f"{number} {what}"] = np.array(values)
    np.savez_compressed(results_file, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
