"""Strongly convex problems with a known minimum, in NumPy float64 and as a Gluon network.

The mean over n samples of ``loss(W x_i, y_i) + l2 / 2 * |W|^2``; ``l2 = 1/n``; no intercept.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import gluon
from scipy.optimize import minimize
from sklearn.datasets import load_breast_cancer, load_digits

NAMES = ("breast_cancer", "Gaussian", "digits")


@lru_cache(maxsize=None)
def problem(name: str) -> Problem:
    """One of the problems, by its name."""
    if name == "digits":
        X, y = load_digits(return_X_y=True)
        return Problem(name, X / 16, y)
    if name == "breast_cancer":
        X, y = load_breast_cancer(return_X_y=True)
        X, y = (X - X.mean(axis=0)) / X.std(axis=0), 2 * y - 1
    else:
        rng = np.random.RandomState(0)
        X = rng.standard_normal((2000, 50))
        truth = rng.standard_normal(50)
        y = np.where(rng.uniform(size=len(X)) < 1 / (1 + np.exp(-X @ truth)), 1, -1)
    return Problem(name, X / np.linalg.norm(X, axis=1, keepdims=True), y)


class Problem:
    """Logistic regression (labels +-1), softmax regression (labels 0, 1, ...), or Huber's loss.

    The weights have shape (1, features) or (classes, features), and start at zero. `smoothness` is
    the largest Lipschitz constant of the gradient of a single loss: L_max.
    """

    def __init__(self, name: str, X: np.ndarray, y: np.ndarray, is_huber: bool = False) -> None:
        self.name, self.X, self.y, self.is_huber = name, X, y, is_huber
        self.n = len(X)
        self.l2, self.l1 = 1.0 / self.n, 0.0
        self.is_softmax = not is_huber and y.min() == 0
        classes = int(y.max()) + 1 if self.is_softmax else 1
        self.shape = (classes, X.shape[1])
        curvature = 0.5 if self.is_softmax else 1.0 if is_huber else 0.25
        self.smoothness = curvature * float((X**2).sum(axis=1).max()) + self.l2
        self._targets = (np.arange(classes)[:, None] == y).astype(float)  # one-hot, (classes, n)

    def loss(self, weight: np.ndarray) -> float:
        """The mean loss, penalties included."""
        return self.objective(weight, weight @ self.X.T)

    def objective(self, weight: np.ndarray, outputs: np.ndarray) -> float:
        """The same, for outputs that are known."""
        if self.is_softmax:
            losses = np.logaddexp.reduce(outputs, axis=0) - (outputs * self._targets).sum(axis=0)
        elif self.is_huber:  # quadratic where the residual is below 1
            residuals = np.abs(outputs[0] - self.y)
            losses = np.where(residuals < 1, 0.5 * residuals**2, residuals - 0.5)
        else:
            losses = np.logaddexp(0, -self.y * outputs[0])
        penalties = 0.5 * self.l2 * (weight**2).sum() + self.l1 * np.abs(weight).sum()
        return float(losses.mean() + penalties)

    def gradient(self, weights: np.ndarray, index: Any = slice(None)) -> np.ndarray:
        """The sum of the gradients over some samples, all by default.

        The weights have shape (..., classes, features): one matrix, or many at once.
        """
        X = self.X[index]
        outputs = weights @ X.T
        if self.is_softmax:
            exponentials = np.exp(outputs - outputs.max(axis=-2, keepdims=True))
            delta = exponentials / exponentials.sum(axis=-2, keepdims=True)
            delta -= self._targets[:, index]
        elif self.is_huber:
            delta = np.clip(outputs - self.y[index], -1, 1)
        else:
            y = self.y[index]
            delta = -0.5 * y * (1 - np.tanh(0.5 * y * outputs))  # -y / (1 + exp(y z))
        return delta @ X + len(X) * self.l2 * weights

    @cached_property
    def solution(self) -> np.ndarray:
        """Where the loss is lowest."""

        def both(flat: np.ndarray) -> tuple[float, np.ndarray]:
            weight = flat.reshape(self.shape)
            return self.loss(weight), self.gradient(weight).ravel() / self.n

        settings = {"ftol": 0.0, "gtol": 1e-12, "maxcor": 100, "maxiter": 10_000}
        start = np.zeros(self.shape).ravel()
        found = minimize(both, start, jac=True, method="L-BFGS-B", options=settings)
        return found.x.reshape(self.shape)

    @cached_property
    def minimum(self) -> float:
        """The lowest loss, f*."""
        return self.loss(self.solution)

    def gap(self, weight: np.ndarray) -> float:
        """The loss above the minimum; inf for weights that are not finite."""
        if not np.isfinite(weight).all():
            return float("inf")
        return self.loss(weight.astype("float64").reshape(self.shape)) - self.minimum


class PenalizedLoss(gluon.HybridBlock):
    """A linear model with weights of zero, its loss and the penalty, hybridized as one."""

    def __init__(self, problem: Problem, dtype: str = "float64") -> None:
        super().__init__()
        self.l2, self.is_softmax, self.is_huber = problem.l2, problem.is_softmax, problem.is_huber
        self.linear = {"no_bias": True, "num_hidden": problem.shape[0]}
        settings = {"shape": problem.shape, "dtype": dtype}
        if mx.util.is_np_array():
            self.weight = gluon.Parameter("weight", **settings)
        else:
            self.weight = self.params.get("weight", **settings)
        self.initialize(mx.init.Zero())
        self.hybridize()

    if mx.util.is_np_array():  # MXNet 2.0

        def forward(self, X: Any, y: Any) -> Any:
            """The loss of each sample of a minibatch."""
            weight = self.weight.data()
            outputs = mx.npx.fully_connected(X, weight, **self.linear)
            if self.is_softmax:
                losses = -mx.npx.pick(mx.npx.log_softmax(outputs), y)
            elif self.is_huber:
                losses = mx.npx.smooth_l1(outputs.reshape(-1) - y, scalar=1.0)
            else:
                losses = mx.npx.activation(-y * outputs.reshape(-1), act_type="softrelu")
            return losses + 0.5 * self.l2 * mx.np.square(weight).sum()

    else:

        def hybrid_forward(self, F: Any, X: Any, y: Any, weight: Any) -> Any:
            """The loss of each sample of a minibatch."""
            outputs = F.FullyConnected(X, weight, **self.linear)
            if self.is_softmax:
                losses = -F.pick(F.log_softmax(outputs), y)
            elif self.is_huber:
                losses = F.smooth_l1(F.reshape(outputs, (-1,)) - y, scalar=1.0)
            else:
                losses = F.Activation(-y * F.reshape(outputs, (-1,)), act_type="softrelu")
            return F.broadcast_add(losses, 0.5 * self.l2 * F.sum(F.square(weight)))
