"""Solvers of scikit-learn on a problem: data passes, seconds of the processor, and gaps."""

from __future__ import annotations

import time
import warnings
from typing import Any, Iterable, Iterator, Sequence
from unittest import mock

import numpy as np
import scipy.optimize
from sklearn.linear_model import HuberRegressor, LogisticRegression, SGDRegressor

from .problems import Problem

Points = Iterator[Sequence[float]]


def logistic(
    problem: Problem, solver: str, iterations: Iterable[int], seed: int, dtype: str = "float64"
) -> Points:
    """Logistic or softmax regression, fitted anew for each number of iterations."""
    X = problem.X.astype(dtype)
    for number in iterations:
        model, start = _logistic(problem, solver, number, seed), time.process_time()
        _fit(model, X, problem.y)
        yield number, time.process_time() - start, problem.gap(model.coef_)


def lbfgs(problem: Problem, iterations: int, dtype: str) -> Points:
    """LogisticRegression or HuberRegressor by SciPy's L-BFGS, noted after each iteration.

    HuberRegressor finds a scale as well: with these arguments it has the minimum of the problem.
    """
    model = _logistic(problem, "lbfgs", iterations, 0)
    if problem.is_huber:
        residuals = np.abs(problem.solution[0] @ problem.X.T - problem.y)
        scale = float(np.sqrt(np.mean(np.minimum(residuals, 1) ** 2)))
        own = {"epsilon": 1 / scale, "alpha": problem.n * problem.l2 / scale}
        model = HuberRegressor(fit_intercept=False, tol=0, max_iter=iterations, **own)
    X, noted, evaluations, original = problem.X.astype(dtype), [], 0, scipy.optimize.minimize

    def minimize(function: Any, *arguments: Any, **settings: Any) -> Any:
        def counted(*given: Any) -> Any:
            nonlocal evaluations
            evaluations += 1
            return function(*given)

        def note(weights: np.ndarray) -> None:
            noted.append((evaluations, time.process_time() - start, weights.copy()))

        return original(counted, *arguments, callback=note, **settings)

    with mock.patch("scipy.optimize.minimize", minimize):
        start = time.process_time()
        _fit(model, X, problem.y)
    for done, seconds, weights in noted:  # the last weight of HuberRegressor is the scale
        coefficients = weights[: np.prod(problem.shape)].reshape(problem.shape, order="F")
        yield done, seconds, problem.gap(coefficients)


def sgd(problem: Problem, passes: int, rate: float, seed: int, dtype: str) -> Points:
    """SGDRegressor with Huber's loss, and a rate that falls with the root of the steps."""
    own = {"epsilon": 1.0, "alpha": problem.l2, "eta0": rate, "power_t": 0.5, "random_state": seed}
    model, seconds = SGDRegressor(loss="huber", fit_intercept=False, **own), 0.0
    X = problem.X.astype(dtype)
    for done in range(1, passes + 1):
        start = time.process_time()
        try:
            model.partial_fit(X, problem.y)
        except ValueError:  # it has diverged
            return
        seconds += time.process_time() - start
        yield done, seconds, problem.gap(model.coef_)


def _logistic(problem: Problem, solver: str, iterations: int, seed: int) -> LogisticRegression:
    settings: dict = {"penalty": "l1"} if problem.l1 else {}
    settings["C"] = 1 / (problem.n * (problem.l1 or problem.l2))
    settings.update(solver=solver, max_iter=iterations, random_state=seed, tol=1e-12)
    return LogisticRegression(fit_intercept=False, **settings)


def _fit(model: Any, X: np.ndarray, y: np.ndarray) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it did not converge
        model.fit(X, y)
