"""One training of the comparison: a method, a learning rate, a budget of data passes."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any, Callable, Iterator, NamedTuple

import mxnet as mx
import numpy as np

import gluon_svrg

from ..schedule import Linear
from .model import Model
from .settings import FIRST_ALPHA, METHODS, Method


class Run(NamedTuple):
    """One training; its curves have a point per epoch, the start included."""

    method: str
    learning_rate: float
    seed: int
    data_passes: list[float]
    losses: list[float]
    gradient_norm: float
    accuracy: float | None
    seconds: float

    @property
    def diverged(self) -> bool:
        """Whether the loss stopped being finite, or ended above its start."""
        return not self.losses[-1] <= self.losses[0]


def train(
    model: Model,
    name: str,
    learning_rate: float,
    seed: int,
    on_epoch: Callable[[float], None] = lambda data_passes: None,
) -> Run:
    """Train a model from its start, until all data passes are made.

    Parameters
    ----------
    model : Model
        The model, and the settings.
    name : str
        One of `METHODS`.
    learning_rate : float
        The learning rate: constant, or at the start of a method that decays.
    seed : int
        Of the initial weights, and of the order of the samples.
    on_epoch : callable
        Called with the number of data passes after each epoch.

    Returns
    -------
    Run
        The run. It exceeds its data passes by at most one minibatch, and stops early if the loss is
        not finite.
    """
    settings, method, n = model.settings, METHODS[name], len(model.dataset.X)
    plain_epochs = settings.plain_epochs if method.refreshes else 0
    model.reset(seed)
    trainer = _trainer(model, name, learning_rate)
    budget = settings.data_passes * n
    data_passes, losses, seconds = [0.0], [model.loss()], 0.0
    for epoch, batches in enumerate(_epochs(model, method, seed)):
        mx.nd.waitall()
        start = time.perf_counter()
        try:
            since = epoch - plain_epochs
            if method.refreshes and since >= 0 and since % settings.update_freq == 0:
                trainer.update_full_grads(model.loss_of, [batch for batch, _ in batches])
            for (X, y), index in batches:
                if trainer.grad_evaluations >= budget:
                    break
                if method.decays:
                    share = trainer.grad_evaluations / budget
                    trainer.set_learning_rate(learning_rate * 0.5 * (1 + math.cos(math.pi * share)))
                trainer.step(len(X), closure=partial(model.loss_of, X, y), **index)
        except FloatingPointError:  # the full gradient is not finite
            losses[-1] = math.inf
            break
        mx.nd.waitall()
        seconds += time.perf_counter() - start
        data_passes.append(trainer.grad_evaluations / n)
        losses.append(model.loss())
        on_epoch(data_passes[-1])
        if not math.isfinite(losses[-1]):
            losses[-1] = math.inf
            break
        if trainer.grad_evaluations >= budget:
            break
    if not math.isfinite(losses[-1]):
        norm, accuracy = math.inf, None
    else:
        norm, accuracy = model.gradient_norm(), model.accuracy()
    return Run(method.title, learning_rate, seed, data_passes, losses, norm, accuracy, seconds)


def _trainer(model: Model, name: str, learning_rate: float) -> Any:
    """The method's trainer."""
    settings = model.settings
    options: dict[str, Any] = {}
    if name == "svrg":
        options = {"coefficient": settings.coefficient}
    elif name == "alpha-svrg":
        options = {"coefficient": Linear(FIRST_ALPHA, settings.num_snapshots)}
    return getattr(gluon_svrg, METHODS[name].trainer)(
        model.net.collect_params(),
        settings.optimizer,
        {"learning_rate": learning_rate},
        lock_random=False,  # neither model draws random numbers, so no checks are needed
        **options,
    )


def _epochs(model: Model, method: Method, seed: int) -> Iterator[list[tuple[Any, dict[str, int]]]]:
    """The minibatches of each epoch, with their index if there is a table.

    Samples are shuffled again for each epoch. With a table they are shuffled only once; then the
    minibatches are shuffled, or drawn with replacement for SAG, which otherwise diverges at lower
    rates.
    """
    n, rng = len(model.dataset.X), np.random.RandomState(seed)
    if method.has_table:
        fixed = model.batches(rng.permutation(n))
        order = rng.permutation(len(fixed))
        while True:
            yield [(fixed[i], {"batch_index": int(i)}) for i in order]
            count = len(fixed)
            order = rng.randint(0, count, count) if method.draws else rng.permutation(count)
    while True:
        yield [(batch, {}) for batch in model.batches(rng.permutation(n))]
