"""Solvers of scikit-learn and skglm: iterations, seconds of the processor, and gaps.

They get the storage that suits them: sparse where nine of ten inputs are zeros. `cholesky` then
needs float64, as SciPy's sums of float32 lose digits that BLAS keeps.
"""

from __future__ import annotations

import re
import time
import warnings
from importlib.util import find_spec
from typing import Any, Iterable, Iterator, Sequence

from scipy.sparse import issparse
from sklearn.linear_model import ElasticNet, LogisticRegression, PoissonRegressor, Ridge

from .problems import Problem

NEWTON, SKGLM = "sklearn newton-cholesky", "skglm"
#: The quickest for each kind of problem without and with a penalty, where theirs is the same one.
SOLVERS: dict[tuple[str, bool], tuple[str, ...]] = {
    **{(kind, False): (NEWTON,) for kind in ("logistic", "softmax", "poisson")},
    ("ridge", False): ("sklearn cholesky",),
    ("logistic", True): ("sklearn liblinear", *[SKGLM] * bool(find_spec(SKGLM))),
    ("ridge", True): ("sklearn cd",),
}


def inputs(problem: Problem, method: str) -> Any:
    """The inputs that suit a method, such as ``sklearn newton-cholesky, float64``."""
    X = problem.suited
    if issparse(X) and method == SKGLM:
        X = X.tocsc()
    is_double = "float64" in method or (issparse(X) and method == "sklearn cholesky")
    return X.astype("float64") if is_double else X


def storage(X: Any) -> str:
    """How inputs are stored, as in ``CSR float32``."""
    return f"{X.format.upper() if issparse(X) else 'dense'} {X.dtype}"


def fitted(
    problem: Problem, method: str, iterations: Iterable[int], seed: int, goal: float
) -> Iterator[Sequence[float]]:
    """Fit anew for each number of iterations, until the gap is at the goal."""
    X, y, solver = inputs(problem, method), problem.y, re.sub("sklearn |,.*", "", method)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it did not converge
        if method == SKGLM:  # which compiles
            _model(problem, solver, 1, seed).fit(X[:200], y[:200])
        for number in iterations:
            model, start = _model(problem, solver, number, seed), time.process_time()
            model.fit(X, y)
            yield number, time.process_time() - start, problem.gap(model.coef_)
            if problem.gap(model.coef_) <= goal:
                return


def _model(problem: Problem, solver: str, iterations: int, seed: int) -> Any:
    settings: Any = {"fit_intercept": False, "max_iter": iterations}
    if solver == "cholesky":
        return Ridge(alpha=problem.n * problem.l2, solver=solver, **settings)
    settings["tol"] = 1e-12
    if solver == "cd":
        strength = problem.l1 + problem.whole_l2
        settings.update(positive=not problem.l1, l1_ratio=problem.l1 / strength)
        return ElasticNet(strength, **settings)
    if solver == SKGLM:
        from skglm import SparseLogisticRegression

        return SparseLogisticRegression(problem.l1, **settings)
    settings["solver"] = solver
    if problem.kind == "poisson":
        return PoissonRegressor(alpha=problem.l2, **settings)
    settings.update(C=1 / (problem.n * (problem.l1 or problem.l2)), random_state=seed)
    return LogisticRegression(penalty="l1" if problem.l1 else "l2", **settings)
