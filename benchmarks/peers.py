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

Point = Sequence[float]  # data passes, seconds, gap


def logistic(
    problem: Problem, solver: str, iterations: Iterable[int], seed: int, dtype: str = "float64"
) -> Iterator[Point]:
    """Logistic or softmax regression, fitted anew for each number of iterations."""
    X, y = problem.X.astype(dtype), problem.y
    for number in iterations:
        model = _logistic(problem, solver, number, seed)
        start = time.process_time()
        _fit(model, X, y)
        yield number, time.process_time() - start, problem.gap(model.coef_)


def _logistic(problem: Problem, solver: str, iterations: int, seed: int = 0) -> Any:
    penalty = problem.l1 or problem.l2
    own: dict = {"penalty": "l1"} if problem.l1 else {}
    return LogisticRegression(
        C=1 / (problem.n * penalty),
        fit_intercept=False,
        solver=solver,
        tol=1e-12,
        max_iter=iterations,
        random_state=seed,
        **own,
    )


def lbfgs(problem: Problem, iterations: int, dtype: str = "float64") -> Iterator[Point]:
    """LogisticRegression or HuberRegressor, with SciPy's L-BFGS, whose every iteration is noted.

    HuberRegressor finds a scale as well: with these arguments it has the minimum of the problem.
    """
    if problem.is_huber:
        residuals = np.abs(problem.solution[0] @ problem.X.T - problem.y)
        scale = float(np.sqrt(np.mean(np.minimum(residuals, 1) ** 2)))
        own = {"epsilon": 1 / scale, "alpha": problem.n * problem.l2 / scale}
        model = HuberRegressor(fit_intercept=False, tol=0, max_iter=iterations, **own)
    else:
        model = _logistic(problem, "lbfgs", iterations)
    original, noted, evaluations = scipy.optimize.minimize, [], 0

    def minimize(function: Any, *arguments: Any, **settings: Any) -> Any:
        def counted(*given: Any) -> Any:
            nonlocal evaluations
            evaluations += 1
            return function(*given)

        def note(weights: np.ndarray) -> None:
            noted.append((evaluations, time.process_time() - start, weights.copy()))

        return original(counted, *arguments, callback=note, **settings)

    X, size = problem.X.astype(dtype), np.prod(problem.shape)
    with mock.patch("scipy.optimize.minimize", minimize):
        start = time.process_time()
        _fit(model, X, problem.y)
    for done, seconds, weights in noted:  # after the weights, HuberRegressor has the scale
        yield done, seconds, problem.gap(weights[:size].reshape(problem.shape, order="F"))


def sgd(problem: Problem, passes: int, rate: float, seed: int, dtype: str) -> Iterator[Point]:
    """SGDRegressor with Huber's loss, and a rate that falls with the root of the steps."""
    model = SGDRegressor(
        loss="huber",
        epsilon=1.0,
        alpha=problem.l2,
        fit_intercept=False,
        eta0=rate,
        power_t=0.5,
        random_state=seed,
    )
    X, seconds = problem.X.astype(dtype), 0.0
    for done in range(1, passes + 1):
        start = time.process_time()
        try:
            model.partial_fit(X, problem.y)
        except ValueError:  # numbers that are not finite
            return
        seconds += time.process_time() - start
        yield done, seconds, problem.gap(model.coef_)


def _fit(model: Any, X: np.ndarray, y: np.ndarray) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it did not converge
        model.fit(X, y)
