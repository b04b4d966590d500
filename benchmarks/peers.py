"""Solvers of scikit-learn on a problem: iterations, seconds of the processor, and gaps."""

from __future__ import annotations

import time
import warnings
from typing import Any, Iterable, Iterator, Sequence

from sklearn.linear_model import LogisticRegression, PoissonRegressor, Ridge

from .problems import Problem

#: The solver that needs the fewest iterations, for each kind of problem that has one.
SECOND_ORDER = dict.fromkeys(("logistic", "softmax", "poisson"), "newton-cholesky")
SECOND_ORDER["ridge"] = "cholesky"


def fitted(
    problem: Problem, solver: str, iterations: Iterable[int], seed: int, goal: float
) -> Iterator[Sequence[float]]:
    """Fit anew for each number of iterations, until the gap is at the goal."""
    for number in iterations:
        model, start = _model(problem, solver, number, seed), time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it did not converge
            model.fit(problem.X, problem.y)
        yield number, time.process_time() - start, problem.gap(model.coef_)
        if problem.gap(model.coef_) <= goal:
            return


def _model(problem: Problem, solver: str, iterations: int, seed: int) -> Any:
    settings: Any = {"fit_intercept": False, "solver": solver, "max_iter": iterations}
    if problem.kind == "ridge":
        return Ridge(alpha=problem.n * problem.l2, **settings)
    settings["tol"] = 1e-12
    if problem.kind == "poisson":
        return PoissonRegressor(alpha=problem.l2, **settings)
    settings.update(C=1 / (problem.n * (problem.l1 or problem.l2)), random_state=seed)
    return LogisticRegression(penalty="l1" if problem.l1 else "l2", **settings)
