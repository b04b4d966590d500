"""Strongly convex problems with a known minimum, in NumPy float64 and as a Gluon network.

The mean over n samples of ``loss(W x_i, y_i) + l2 / 2 * |W|^2``; ``l2 = 1/n``; no intercept.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import gluon
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits

NAMES = ("breast_cancer", "Gaussian", "digits")
RIDGE = "diabetes"  # where learning rates set themselves; the other packages get NAMES


class Problem:
    """Logistic regression (labels +-1), softmax regression (0, 1, ...), or ridge (real numbers).

    Attributes
    ----------
    X : ndarray
        Shape (n, features).
    y : ndarray of int or float
        Shape (n,).
    shape : tuple of int
        Of the weights: (1, features) or (classes, features). They start at zero.
    smoothness : float
        The largest Lipschitz constant of the gradient of a single loss: L_max.
    """

    def __init__(self, name: str, X: np.ndarray, y: np.ndarray) -> None:
        self.name, self.X, self.y = name, X, y
        self.n = len(X)
        self.l2 = 1.0 / self.n
        self.is_ridge = y.dtype.kind == "f"
        self.is_softmax = not self.is_ridge and y.min() == 0
        classes = int(y.max()) + 1 if self.is_softmax else 1
        self.shape = (classes, X.shape[1])
        curvature = 1.0 if self.is_ridge else 0.5 if self.is_softmax else 0.25
        self.smoothness = curvature * float((X**2).sum(axis=1).max()) + self.l2
        self._targets = (np.arange(classes)[:, None] == y).astype(float)  # one-hot, (classes, n)

    def loss(self, weight: np.ndarray) -> float:
        """The mean loss, penalty included."""
        outputs = weight @ self.X.T
        if self.is_softmax:
            losses = np.logaddexp.reduce(outputs, axis=0) - (outputs * self._targets).sum(axis=0)
        elif self.is_ridge:
            losses = 0.5 * (outputs[0] - self.y) ** 2
        else:
            losses = np.logaddexp(0, -self.y * outputs[0])
        return float(losses.mean() + 0.5 * self.l2 * (weight**2).sum())

    def gradient(self, weights: np.ndarray, index: Any = slice(None)) -> np.ndarray:
        """The sum of the gradients over some samples.

        Parameters
        ----------
        weights : ndarray
            Shape (..., classes, features): one weight matrix or many at once.
        index : slice or array of int, optional
            The samples; all by default.

        Returns
        -------
        ndarray
            Of the same shape.
        """
        X = self.X[index]
        outputs = weights @ X.T
        if self.is_softmax:
            exponentials = np.exp(outputs - outputs.max(axis=-2, keepdims=True))
            delta = exponentials / exponentials.sum(axis=-2, keepdims=True)
            delta -= self._targets[:, index]
        elif self.is_ridge:
            delta = outputs - self.y[index]
        else:
            y = self.y[index]
            delta = -0.5 * y * (1 - np.tanh(0.5 * y * outputs))  # -y / (1 + exp(y z))
        return delta @ X + len(X) * self.l2 * weights

    def hessian(self, weight: np.ndarray) -> np.ndarray:
        """Of the mean loss, for the flattened weights."""
        outputs = weight @ self.X.T
        if self.is_softmax:
            p = np.exp(outputs - np.logaddexp.reduce(outputs, axis=0))
        elif self.is_ridge:
            return self.X.T @ self.X / self.n + self.l2 * np.eye(weight.size)
        else:
            p = 0.5 + 0.5 * np.tanh(0.5 * outputs)
        classes, features = self.shape
        blocks = np.empty((classes, features, classes, features))
        for a in range(classes):
            for b in range(classes):
                curvature = p[a] * ((a == b) - p[b]) / self.n
                blocks[a, :, b] = self.X.T @ (curvature[:, None] * self.X)
        return blocks.reshape(2 * [weight.size]) + self.l2 * np.eye(weight.size)

    @property
    def minimum(self) -> float:
        """The lowest loss, f*."""
        return self.loss(self.solution)

    @property
    def solution(self) -> np.ndarray:
        """Where the loss is lowest, by Newton's method with halved steps, from zero."""
        return _solve(self)

    def gap(self, weight: np.ndarray) -> float:
        """The loss above the minimum; inf for weights that are not finite."""
        if not np.isfinite(weight).all():
            return float("inf")
        return self.loss(weight.astype("float64").reshape(self.shape)) - self.minimum

    def network(self, dtype: str = "float64") -> PenalizedLoss:
        """The network that computes the loss of each sample; weights are zero."""
        net = PenalizedLoss(self, dtype)
        net.initialize(mx.init.Zero())
        net.hybridize()
        return net

    def arrays(self, dtype: str = "float64") -> tuple[np.ndarray, np.ndarray]:
        """What the network is called with, as NumPy arrays."""
        labels = self.y if self.is_softmax else self.y[:, None]
        return self.X.astype(dtype), labels.astype(dtype)


if mx.util.is_np_array():  # 2.0

    class PenalizedLoss(gluon.HybridBlock):
        """A linear model, its loss and the penalty, hybridized as one."""

        def __init__(self, problem: Problem, dtype: str) -> None:
            super().__init__()
            self.problem = problem
            self.weight = gluon.Parameter("weight", shape=problem.shape, dtype=dtype)

        def forward(self, X: Any, y: Any) -> Any:
            """The loss of each sample of a minibatch."""
            weight = self.weight.data()
            outputs = mx.npx.fully_connected(
                X, weight, no_bias=True, num_hidden=self.problem.shape[0], flatten=False
            )
            if self.problem.is_softmax:
                losses = -mx.npx.pick(mx.npx.log_softmax(outputs), y)
            elif self.problem.is_ridge:
                losses = 0.5 * mx.np.square(outputs - y)
            else:
                losses = mx.npx.activation(-y * outputs, act_type="softrelu")
            return losses + 0.5 * self.problem.l2 * mx.np.square(weight).sum()

else:

    class PenalizedLoss(gluon.HybridBlock):
        """A linear model, its loss and the penalty, hybridized as one."""

        def __init__(self, problem: Problem, dtype: str) -> None:
            super().__init__()
            self.problem = problem
            self.weight = self.params.get("weight", shape=problem.shape, dtype=dtype)

        def hybrid_forward(self, F: Any, X: Any, y: Any, weight: Any) -> Any:
            """The loss of each sample of a minibatch."""
            outputs = F.FullyConnected(X, weight, no_bias=True, num_hidden=self.problem.shape[0])
            if self.problem.is_softmax:
                losses = -F.pick(F.log_softmax(outputs), y)
            elif self.problem.is_ridge:
                losses = 0.5 * F.square(outputs - y)
            else:
                losses = F.Activation(-y * outputs, act_type="softrelu")
            return F.broadcast_add(losses, 0.5 * self.problem.l2 * F.sum(F.square(weight)))


@lru_cache(maxsize=None)
def problem(name: str) -> Problem:
    """One of the problems, by its name."""
    if name == "digits":
        X, y = load_digits(return_X_y=True)
        return Problem(name, X / 16, y)
    if name == RIDGE:
        X, y = load_diabetes(return_X_y=True)
        X, y = X / X.std(axis=0), (y - y.mean()) / y.std()
    elif name == "breast_cancer":
        X, y = load_breast_cancer(return_X_y=True)
        X, y = (X - X.mean(axis=0)) / X.std(axis=0), 2 * y - 1
    else:
        rng = np.random.RandomState(0)
        X = rng.standard_normal((2000, 50))
        truth = rng.standard_normal(50)
        y = np.where(rng.uniform(size=len(X)) < 1 / (1 + np.exp(-X @ truth)), 1, -1)
    return Problem(name, X / np.linalg.norm(X, axis=1, keepdims=True), y)


@lru_cache(maxsize=None)
def _solve(problem: Problem) -> np.ndarray:
    weight = np.zeros(problem.shape)
    for _ in range(50):
        gradient = problem.gradient(weight) / problem.n
        step = np.linalg.solve(problem.hessian(weight), gradient.ravel()).reshape(weight.shape)
        size = 1.0
        while problem.loss(weight - size * step) > problem.loss(weight) and size > 1e-3:
            size /= 2
        weight = (
            weight - (size if size > 1e-3 else 1.0) * step
        )  # the last ones change rounding only
        if np.linalg.norm(gradient) < 1e-14:
            break
    return weight
