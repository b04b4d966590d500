"""The comparison: one model, trained with a plain optimizer and with SVRG.

Both get the same learning rates, the same start, the same order of samples and the same number of
data passes, full gradients included.
"""

from __future__ import annotations

import math
import platform
import time
from functools import partial
from typing import Any, Callable, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from .. import __version__
from ..svrg import SVRGTrainer
from .datasets import Dataset

METHODS = ("plain", "SVRG")
LEARNING_RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
L2 = 1e-2  # the weight of half the squared norm of all parameters
HIDDEN_UNITS = 32


class Settings(NamedTuple):
    """What is compared."""

    model: str = "linear"
    optimizer: str = "sgd"
    epochs: int = 20  # of SVRG; the plain optimizer makes more of them, for the same data passes
    batch_size: int = 16
    update_freq: int = 2
    coefficient: float = 1.0
    seed: int = 0


class Run(NamedTuple):
    """One training; its curves have a point per epoch, the start included."""

    method: str
    learning_rate: float
    data_passes: list[float]
    losses: list[float]
    gradient_norm: float
    accuracy: float | None
    seconds: float

    @property
    def diverged(self) -> bool:
        """Whether the loss stopped being finite, or ended above its start."""
        return not self.losses[-1] <= self.losses[0]


class Model:
    """A network, its loss on a data set with the L2 penalty, and what there is to measure."""

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
        self.reset()

    def reset(self) -> None:
        """Go back to the start: zero for the linear model, seeded for the other."""
        mx.random.seed(self.settings.seed)
        start = mx.init.Zero() if self.settings.model == "linear" else mx.init.Xavier()
        self.net.initialize(start, force_reinit=True)
        self.net.hybridize()
        self.net(self.X[:1])

    def loss_of(self, X: Any, y: Any) -> Any:
        """The penalized loss of each sample."""
        parameters = self.net.collect_params().values()
        penalty = sum((parameter.data() ** 2).sum() for parameter in parameters)
        return self.loss_function(self.net(X), y) + 0.5 * L2 * penalty

    def batches(self, order: np.ndarray | None = None) -> list[tuple[Any, Any]]:
        """The minibatches of one epoch."""
        size, n = self.settings.batch_size, len(self.dataset.X)
        if order is None:
            return [(self.X[i : i + size], self.y[i : i + size]) for i in range(0, n, size)]
        X, y = self._array(self.dataset.X[order]), self._array(self.dataset.y[order])
        return [(X[i : i + size], y[i : i + size]) for i in range(0, n, size)]

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
        return float(losses.mean() + 0.5 * L2 * sum((values**2).sum() for values in parameters))

    def gradient_norm(self) -> float:
        """The norm of the gradient of the mean loss."""
        with autograd.record():
            loss = self.loss_of(self.X, self.y)
        loss.backward()
        grads = [p.grad().asnumpy() for p in self.net.collect_params().values()]
        return math.sqrt(sum(float((grad**2).sum()) for grad in grads)) / len(self.dataset.X)

    def accuracy(self) -> float | None:
        """The share of samples that are classified rightly; None for a regression."""
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


def compare(
    dataset: Dataset,
    settings: Settings,
    learning_rates: Sequence[float] = LEARNING_RATES,
    on_epoch: Callable[[str, float], None] = lambda method, learning_rate: None,
) -> dict[str, Any]:
    """Train with every learning rate by both methods.

    Parameters
    ----------
    dataset : Dataset
        The data.
    settings : Settings
        What is compared.
    learning_rates : sequence of float
        The grid, the same for both methods.
    on_epoch : callable
        Called with the method and the learning rate after each epoch.

    Returns
    -------
    dict
        Plain data: settings, versions, all runs, the best of each method, the best known loss.
    """
    model = Model(dataset, settings)
    runs = [_train(model, method, rate, on_epoch) for method in METHODS for rate in learning_rates]
    known = [min(run.losses) for run in runs if not run.diverged]
    if settings.model == "linear":
        known.append(_solution(model))
    best = {method: _best([run for run in runs if run.method == method]) for method in METHODS}
    return {
        "data": dataset.name,
        "task": dataset.task,
        "samples": len(dataset.X),
        "features": dataset.X.shape[1],
        "settings": settings._asdict(),
        "l2": L2,
        "dtype": model.dtype,
        "versions": {
            "gluon_svrg": __version__,
            "mxnet": mx.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "best_known_loss": min(known, default=math.nan),
        "best": {method: runs.index(run) for method, run in best.items()},
        "runs": [{**run._asdict(), "diverged": run.diverged} for run in runs],
    }


def number_of_epochs(settings: Settings, method: str) -> int:
    """How many epochs a method makes: as many data passes as SVRG, full gradients included."""
    if method == "SVRG":
        return settings.epochs
    passes_per_epoch = 2 if settings.coefficient else 1
    return passes_per_epoch * settings.epochs + math.ceil(settings.epochs / settings.update_freq)


def _train(
    model: Model, method: str, learning_rate: float, on_epoch: Callable[[str, float], None]
) -> Run:
    settings = model.settings
    model.reset()
    trainer = SVRGTrainer(
        model.net.collect_params(),
        settings.optimizer,
        {"learning_rate": learning_rate},
        coefficient=settings.coefficient,
        lock_random=False,  # neither model draws random numbers: nothing is looked for
    )
    n, rng = len(model.dataset.X), np.random.RandomState(settings.seed)
    data_passes, losses, seconds = [0.0], [model.loss()], 0.0
    for epoch in range(number_of_epochs(settings, method)):
        batches = model.batches(rng.permutation(n))
        mx.nd.waitall()
        start = time.perf_counter()
        try:
            if method == "SVRG" and epoch % settings.update_freq == 0:
                trainer.update_full_grads(model.loss_of, batches)
            for X, y in batches:
                trainer.step(len(X), closure=partial(model.loss_of, X, y))
        except FloatingPointError:  # the full gradient is not finite
            losses[-1] = math.inf
            break
        mx.nd.waitall()
        seconds += time.perf_counter() - start
        data_passes.append(trainer.grad_evaluations / n)
        losses.append(model.loss())
        on_epoch(method, learning_rate)
        if not math.isfinite(losses[-1]):
            losses[-1] = math.inf
            break
    if not math.isfinite(losses[-1]):
        return Run(method, learning_rate, data_passes, losses, math.inf, None, seconds)
    accuracy = model.accuracy()
    norm = model.gradient_norm()
    return Run(method, learning_rate, data_passes, losses, norm, accuracy, seconds)


def _best(runs: Sequence[Run]) -> Run:
    return min(runs, key=lambda run: run.losses[-1])


def _solution(model: Model) -> float:
    """The loss of the linear model's solution as scikit-learn finds it."""
    from sklearn.linear_model import LogisticRegression, Ridge

    X, y = model.dataset.X, model.dataset.y
    X = np.hstack([X, np.ones((len(X), 1))])  # the bias is penalized like a weight
    if model.dataset.task == "regression":
        solver = Ridge(L2 * len(X), fit_intercept=False, solver="cholesky")
    else:
        solver = LogisticRegression(
            C=1 / (L2 * len(X)),
            fit_intercept=False,
            solver="newton-cg",
            tol=1e-12,
            max_iter=1000,
        )
    model.set_linear(np.atleast_2d(solver.fit(X, y).coef_))
    return model.loss()


def precision_of(optimizer: str) -> str:
    """float64, or float32 where MXNet's optimizer knows nothing else.

    Raises
    ------
    ValueError
        If it cannot update a weight matrix and a bias at all.
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
