"""One training: by which method, from which seed, with how many gradients, and what it measured."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from itertools import count
from math import cos, inf, nan, pi
from time import perf_counter
from typing import Any, Callable, Iterable, Sequence

import mxnet as mx
import numpy as np

from .. import _mxnet
from ..passes.columns import vector
from ..passes.data import initialize
from .data import Data
from .methods import Method, Options, needs

DIVERGED = 10.0  # so many times the first loss
TRAINED = (
    "new_net() must return a new network each time, with the same weights after the same seeds (of "
    "MXNet, NumPy and random). This one was trained before, or draws from a generator of its own."
)
MEAN_LOSS = (
    "loss_of(net, ...) returned {} numbers for a minibatch of {} samples. It must return the loss "
    "of each sample: not their mean, which would be divided by the batch size again, and not one "
    "for each entry, of which you may take the mean over all axes but the first."
)


@dataclass
class Training:
    """A training that is complete, or has diverged."""

    method: str
    learning_rate: float  # nan for L-BFGS
    options: Options
    seed: int
    diverged: bool = False
    curve: list[dict[str, float]] = field(default_factory=list)  # a row each data pass

    def of(self, name: str) -> np.ndarray:
        """A column of the curve: ``data_passes``, ``seconds``, ``loss`` or a measure."""
        return np.array([row[name] for row in self.curve])


@dataclass
class Problem:
    """What all methods train on: network, loss, data, and how many gradients."""

    new_net: Callable[[], Any]
    loss_of: Callable[..., Any]
    data: Data
    passes: float
    measures: dict[str, Callable[[Any], float]]
    plain_epochs: int
    refresh_every: int

    def __post_init__(self) -> None:
        self.measures = {"loss": self.loss, **self.measures}

    def network(self, seed: int) -> Any:
        """A new network, initialized: equal for all methods of a seed."""
        for seed_all in (mx.random.seed, np.random.seed, random.seed):
            seed_all(seed)
        net = self.new_net()
        parameters = list(net.collect_params().values())
        if not any(_mxnet.has_data(p) or _mxnet.is_deferred(p) for p in parameters):
            net.initialize()
        self.data.put_on(net)
        initialize(parameters, partial(self.loss_of, net), self.data.batches(self.data.seed, 0))
        mx.random.seed(seed)
        return net

    def check(self, seed: int) -> bool:
        """Raise unless networks and losses can be used; tell whether losses are random."""
        net, other = self.network(seed), self.network(seed)
        for one, two in zip(net.collect_params().values(), other.collect_params().values()):
            if one is two or not np.array_equal(one.data().asnumpy(), two.data().asnumpy()):
                raise ValueError(TRAINED)
        batch, losses = next(self.data.batches(seed, 0)), []
        for _ in range(2):
            with mx.autograd.record():
                losses.append(self.loss_of(net, *batch).asnumpy())
        if losses[0].size != len(batch[0]):
            raise ValueError(MEAN_LOSS.format(losses[0].size, len(batch[0])))
        return not np.allclose(losses[0], losses[1], rtol=1e-4, equal_nan=True)

    def loss(self, net: Any) -> float:
        """The mean loss over the data, when the network predicts."""
        with mx.autograd.pause(train_mode=False):
            losses = [self.loss_of(net, *batch).asnumpy() for batch in self.data.chunks()]
        return sum(float(each.sum(dtype="float64")) for each in losses) / self.data.n


class _Run:
    """A training while it runs."""

    def __init__(self, problem: Problem, found: Training, show: Callable[[float], None]) -> None:
        self.problem, self.data, self.found, self.show = problem, problem.data, found, show
        self.n, self.budget = problem.data.n, problem.passes * problem.data.n
        self.net = problem.network(found.seed)
        self.trainer: Any = None
        self.recorded, self.seconds, self.since = 0, 0.0, perf_counter()  # samples; seconds

    def loss_of(self, *batch: Any) -> Any:
        """The loss of each sample, whose gradient counts."""
        self.recorded += len(batch[0]) if mx.autograd.is_recording() else 0
        return self.problem.loss_of(self.net, *batch)

    @property
    def done(self) -> int:
        """The gradients so far, as our trainers count them: not all that they record is one."""
        return getattr(self.trainer, "grad_evaluations", self.recorded)

    def note(self) -> None:
        """Measure, which takes no time of the training; raise if it has diverged."""
        mx.nd.waitall()
        self.seconds += perf_counter() - self.since
        row = {"data_passes": self.done / self.n, "seconds": self.seconds}
        first = self.found.curve[0]["loss"] if self.found.curve else inf
        for name, measure in self.problem.measures.items():  # the loss is the first
            with np.errstate(all="ignore"):
                row[name] = float(measure(self.net))
            if not row["loss"] <= DIVERGED * abs(first):
                raise FloatingPointError("The training has diverged.")
        self.found.curve.append(row)
        self.show(row["data_passes"])
        self.since = perf_counter()

    def by_trainer(self, method: Method) -> None:
        """Train until all gradients are used."""
        seed, rate = self.found.seed, self.found.learning_rate
        self.trainer = trainer = method.trainer(self.net, rate, self.found.options)
        takes_closure = "closure" in signature(trainer.step).parameters
        refreshes, has_table = needs(trainer)
        stores = method.base == "svrg-stored"
        fixed = self.data.fixed(seed, method.name) if has_table or stores else None
        indexed, cost, mark = has_table, self.data.size, 1
        for epoch in count():
            since, before = epoch - self.problem.plain_epochs, self.done
            is_due = since >= 0 and since % self.problem.refresh_every == 0
            if refreshes and is_due and self.done + self.n < self.budget:
                stored = {"store_grads": True} if stores else {}
                trainer.update_full_grads(self.loss_of, fixed or self._whole(epoch), **stored)
                indexed, before = has_table or stores, self.done
            order: Any = enumerate(self.data.batches(seed, epoch))
            if fixed:
                rng, size = np.random.RandomState([seed, epoch, 1]), len(fixed)
                # With replacement for SAG, which otherwise diverges at lower rates.
                again = method.base == "sag" and epoch > 0
                order = ((int(index), fixed[index]) for index in rng.choice(size, size, again))
            for index, batch in order:
                if self.done + cost / 2 > self.budget:
                    return
                used, size = self.done, len(batch[0])
                if method.decays:
                    part = min(1.0, used / self.budget)
                    trainer.set_learning_rate(rate * 0.5 * (1 + cos(pi * part)))
                if takes_closure:
                    row = {"batch_index": index} if indexed else {}
                    trainer.step(size, closure=partial(self.loss_of, *batch), **row)
                else:
                    with mx.autograd.record():
                        loss = self.loss_of(*batch)
                    loss.backward()
                    trainer.step(size)
                cost = self.done - used
                if self.done >= mark * self.n:
                    self.note()
                    mark = self.done // self.n + 1
            if self.done == before:
                raise ValueError(f"data(seed, epoch) gives no minibatch in epoch {epoch}.")

    def _whole(self, epoch: int) -> Iterable[Any]:
        """The data of a full gradient: large chunks, unless losses depend on their minibatch."""
        if any(map(_mxnet.is_auxiliary, self.net.collect_params().values())):
            return self.data.batches(self.found.seed, epoch)
        return self.data.chunks()

    def by_lbfgs(self) -> None:
        """Train by SciPy's L-BFGS-B, whose every evaluation is a data pass."""
        from scipy.optimize import minimize

        parameters = [p for p in self.net.collect_params().values() if _mxnet.is_trainable(p)]
        ends = np.cumsum([p.data().size for p in parameters])[:-1]

        def put(weights: np.ndarray) -> None:
            for p, part in zip(parameters, np.split(weights, ends)):
                p.data()[:] = part.reshape(p.shape).astype(_mxnet.dtype_of(p))

        def evaluate(weights: np.ndarray) -> tuple[float, np.ndarray]:
            if self.done + self.n > self.budget:
                raise StopIteration
            put(weights)
            return mean_gradient(self.loss_of, parameters, self.data)

        accepted = [vector(p.data() for p in parameters)]

        def accept(weights: np.ndarray) -> None:
            accepted.append(weights.copy())
            put(weights)
            self.note()

        # No tolerance: it goes on until it finds no lower loss, or all passes are made.
        options = {"ftol": 0, "gtol": 0, "maxiter": 10**9, "maxfun": 10**9}
        settings: Any = {"jac": True, "method": "L-BFGS-B", "options": options}
        with suppress(StopIteration):
            minimize(evaluate, accepted[0], callback=accept, **settings)
        put(accepted[-1])


def mean_gradient(
    loss_of: Callable[..., Any], parameters: Sequence[Any], data: Data
) -> tuple[float, np.ndarray]:
    """The mean loss over the data, and its gradient as one vector, in float64."""
    loss, gradient = 0.0, np.zeros(1)
    for batch in data.chunks():
        with mx.autograd.record():
            losses = loss_of(*batch)
        losses.backward()
        loss += float(losses.asnumpy().sum(dtype="float64"))
        gradient = gradient + vector(p.grad() for p in parameters)
    return loss / data.n, gradient / data.n


def train(problem: Problem, method: Method, found: Training, show: Callable[[float], None]) -> None:
    """Train a new network by a method; note the beginning, the end and a divergence."""
    run = _Run(problem, found, show)
    try:
        run.note()
        run.by_trainer(method) if method.make else run.by_lbfgs()
        if found.curve[-1]["data_passes"] < run.done / run.n:
            run.note()
    except FloatingPointError:  # of a measurement, or of a full gradient
        found.diverged = True
        end = {"data_passes": run.done / run.n, "seconds": run.seconds, "loss": inf}
        found.curve.append({**dict.fromkeys(problem.measures, nan), **end})
