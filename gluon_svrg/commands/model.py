"""The models of the comparison: a network, its loss on a data set, and its measures."""

from __future__ import annotations

import math
import warnings
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from .datasets import Dataset
from .settings import Settings

HIDDEN_UNITS = 32
#: Differences of losses below these are rounding errors.
RESOLUTION = {"float64": 1e-14, "float32": 1e-9}


class Model:
    """A network, its loss on a data set with the L2 penalty, and its measures."""

    def __init__(self, dataset: Dataset, settings: Settings) -> None:
        self.dataset = dataset
        self.dtype = precision_of(settings.optimizer)
        self.settings = settings
        outputs = dataset.classes if dataset.classes > 2 else 1
        self.net = gluon.nn.HybridSequential()
        if settings.model == "mlp":
            self.net.add(gluon.nn.Dense(HIDDEN_UNITS, activation="tanh", dtype=self.dtype))
        self.net.add(gluon.nn.Dense(outputs, dtype=self.dtype))
        self.X, self.y = self._array(dataset.X), self._array(dataset.y)
        if dataset.task == "regression":
            self.loss_function = gluon.loss.L2Loss()
        elif outputs == 1:
            self.loss_function = gluon.loss.SigmoidBinaryCrossEntropyLoss()
        else:
            self.loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
        self.reset(settings.seed)

    def reset(self, seed: int) -> None:
        """Return to the initial weights: zero for the linear model, seeded for the other."""
        mx.random.seed(seed)
        start = mx.init.Zero() if self.settings.model == "linear" else mx.init.Xavier()
        self.net.initialize(start, force_reinit=True)
        self.net.hybridize()
        self.net(self.X[:1])

    def loss_of(self, X: Any, y: Any) -> Any:
        """The penalized loss of each sample."""
        parameters = self.net.collect_params().values()
        penalty = sum((parameter.data() ** 2).sum() for parameter in parameters)
        return self.loss_function(self.net(X), y) + 0.5 * self.settings.weight_decay * penalty

    def batches(self, order: np.ndarray) -> list[tuple[Any, Any]]:
        """The minibatches of one epoch, with the samples in this order."""
        size, n = self.settings.batch_size, len(self.dataset.X)
        X, y = self._array(self.dataset.X[order]), self._array(self.dataset.y[order])
        return [(X[i : i + size], y[i : i + size]) for i in range(0, n, size)]

    @np.errstate(over="ignore", invalid="ignore")  # of trainings that diverge
    def loss(self) -> float:
        """The mean penalized loss over all data, in float64: MXNet 2.0 rounds losses to float32."""
        output, y = self.net(self.X).asnumpy().astype("float64"), self.dataset.y
        if self.dataset.task == "regression":
            losses = 0.5 * (output[:, 0] - y) ** 2
        elif output.shape[1] == 1:
            losses = np.logaddexp(0, output[:, 0]) - y * output[:, 0]
        else:
            rows = np.arange(len(y))
            losses = np.logaddexp.reduce(output, axis=1) - output[rows, y.astype(int)]
        parameters = [p.data().asnumpy() for p in self.net.collect_params().values()]
        penalty = sum((values**2).sum() for values in parameters)
        return float(losses.mean() + 0.5 * self.settings.weight_decay * penalty)

    @np.errstate(over="ignore")
    def gradient_norm(self) -> float:
        """The norm of the gradient of the mean loss."""
        with autograd.record():
            loss = self.loss_of(self.X, self.y)
        loss.backward()
        grads = [p.grad().asnumpy() for p in self.net.collect_params().values()]
        return math.sqrt(sum(float((grad**2).sum()) for grad in grads)) / len(self.dataset.X)

    def accuracy(self) -> float | None:
        """The share of correctly classified samples; None for a regression."""
        if self.dataset.task == "regression":
            return None
        output = self.net(self.X).asnumpy()
        right = output.argmax(axis=1) if output.shape[1] > 1 else (output[:, 0] > 0)
        return float((right == self.dataset.y).mean())

    def set_linear(self, weight_and_bias: np.ndarray) -> None:
        """Assign a solution of the linear model; the last column is the bias."""
        self.net[0].weight.set_data(self._array(weight_and_bias[:, :-1]))
        self.net[0].bias.set_data(self._array(weight_and_bias[:, -1]))

    def _array(self, values: np.ndarray) -> Any:
        make = mx.np.array if mx.util.is_np_array() else mx.nd.array
        return make(np.asarray(values), dtype=self.dtype)


def minimum_of(model: Model) -> float | None:
    """The lowest loss of a linear model, from NumPy or scikit-learn.

    Returns
    -------
    float or None
        None if no minimum is known: for a network with a hidden layer, for a classification
        without weight decay, which may have none, and if the solver stopped far from it.
    """
    settings, dataset = model.settings, model.dataset
    is_regression = dataset.task == "regression"
    if settings.model != "linear" or not (settings.weight_decay or is_regression):
        return None
    X = np.hstack([dataset.X, np.ones((len(dataset.X), 1))])  # the bias is penalized like a weight
    if settings.weight_decay == 0:
        model.set_linear(np.linalg.lstsq(X, dataset.y, rcond=None)[0][None])
        return model.loss()
    model.set_linear(_solution(X, dataset.y, settings.weight_decay * len(X), is_regression))
    # The loss is strongly convex: this bounds its distance to the minimum.
    distance = model.gradient_norm() ** 2 / (2 * settings.weight_decay)
    return model.loss() if distance <= RESOLUTION[model.dtype] else None


def _solution(X: np.ndarray, y: np.ndarray, penalty: float, is_regression: bool) -> np.ndarray:
    """Weights and bias, a row for each output."""
    from sklearn.linear_model import LogisticRegression, Ridge

    if is_regression:
        solver = Ridge(penalty, fit_intercept=False, solver="cholesky")
    else:
        solver = LogisticRegression(
            C=1 / penalty, fit_intercept=False, solver="newton-cg", tol=1e-12, max_iter=1000
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the gradient shows whether it has converged
        return np.atleast_2d(solver.fit(X, y).coef_)


def precision_of(optimizer: str) -> str:
    """float64, or float32 if MXNet's optimizer supports nothing else.

    Raises
    ------
    ValueError
        If the optimizer cannot update a weight matrix and a bias at all.
    """
    for dtype in ("float64", "float32"):
        updater = mx.optimizer.get_updater(mx.optimizer.create(optimizer))
        weights = [mx.nd.ones(shape, dtype=dtype) for shape in ((2, 2), (2,))]
        try:
            updater([0, 1], [weight.copy() for weight in weights], weights)
            mx.nd.waitall()
        except mx.base.MXNetError:
            continue
        except Exception as error:
            raise ValueError(
                f"{optimizer} cannot update a weight matrix and a bias with its defaults: "
                f"{str(error) or type(error).__name__}"
            ) from error
        return dtype
    raise ValueError(f"{optimizer} can neither update float64 nor float32 parameters")
