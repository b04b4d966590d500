"""One training: by which method, from which seed, with how many gradients, and what it measured."""

from __future__ import annotations

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
from scipy.optimize import minimize

from .. import _mxnet
from ..passes.columns import vector
from .data import Data
from .methods import STORED, Contender, Options, needs
from .problem import Problem, trainable_of

DIVERGED = 10.0  # so many times the first loss
OVER = "The seconds were over before any training. Allow more, fewer passes, larger mini-batches."
FINER = 1.02  # L-BFGS makes many passes: it is measured again after so many times as many


class OutOfTimeError(TimeoutError):
    """The seconds of a comparison are over."""


@dataclass
class Training:
    """A training that is complete, or has diverged."""

    method: str
    learning_rate: float  # nan for a method that sets its own
    options: Options
    seed: int
    batch_size: int  # 0 for L-BFGS
    passes: float  # that all methods have; L-BFGS may have made more
    diverged: bool = False
    curve: list[dict[str, float]] = field(default_factory=list)  # a row each data pass

    def of(self, name: str) -> np.ndarray:
        """A column of the curve: ``data_passes``, ``seconds``, ``loss`` or a measure."""
        return np.array([row[name] for row in self.curve])

    @property
    def end(self) -> dict[str, float]:
        """What was measured last in the passes that all methods have."""
        return self.curve[self.place]

    @property
    def place(self) -> int:
        """The number of that row."""
        return sum(row["data_passes"] <= self.passes for row in self.curve) - 1


class _Run:
    """A training while it runs."""

    def __init__(self, problem: Problem, training: Training, until: float) -> None:
        self.problem, self.data, self.training = problem, problem.data, training
        self.n, self.budget, self.until = problem.data.n, problem.passes * problem.data.n, until
        self.net, self.has_penalty = problem.network(training.seed), not problem.l2
        self.trainer: Any = None
        self.goes_back = False  # whether the trainer itself sees to it that no training diverges
        self.recorded, self.seconds, self.since = 0, 0.0, perf_counter()  # samples; seconds

    def loss_of(self, *batch: Any) -> Any:
        """The loss of each sample, whose gradient counts."""
        if perf_counter() > self.until and self.done < self.budget:
            raise OutOfTimeError(OVER)
        self.recorded += len(batch[0]) if mx.autograd.is_recording() else 0
        losses = self.problem.loss_of(self.net, *batch)
        return losses if self.has_penalty else losses + self.problem.penalty(self.net)

    @property
    def done(self) -> int:
        """The gradients so far, as our trainers count them: not all that they record is one."""
        return getattr(self.trainer, "grad_evaluations", self.recorded)

    def note(self) -> None:
        """Measure, which takes no time of the training; raise if it has diverged."""
        mx.nd.waitall()
        self.seconds += perf_counter() - self.since if self.training.curve else 0.0
        row = {"data_passes": self.done / self.n, "seconds": self.seconds}
        first = self.training.curve[0]["loss"] if self.training.curve else inf
        for name in self.problem.measures:  # the loss is the first
            with np.errstate(all="ignore"):
                row[name] = self.problem.measured(name, self.net)
            if not row["loss"] <= (inf if self.goes_back else DIVERGED * abs(first)):
                raise FloatingPointError("The training has diverged.")
        self.training.curve.append(row)
        self.since = perf_counter()

    def by_trainer(self, method: Contender) -> None:
        """Train until all gradients are used."""
        seed, rate = self.training.seed, self.training.learning_rate
        self.has_penalty = self.has_penalty or bool(method.penalty)
        self.trainer = trainer = method.trainer(self.problem, self.net, rate, self.training.options)
        self.goes_back = method.sets_rate
        takes_closure = "closure" in signature(trainer.step).parameters
        refreshes, has_table = needs(method, trainer)
        stores = method.base == STORED
        fixed = self.data.fixed(seed, method.name) if has_table or stores else None
        indexed, cost, mark = has_table, self.training.batch_size, 1
        for epoch in count():
            since, before = epoch - self.problem.plain_epochs, self.done
            is_due = since >= 0 and since % self.problem.refresh_every == 0
            if refreshes and is_due and self.done + self.n < self.budget:
                stored = {"store_grads": True} if stores else {}
                trainer.update_full_grads(self.loss_of, fixed or self._whole(epoch), **stored)
                indexed, before = has_table or stores, self.done
            order: Any = enumerate(self.data.batches(seed, epoch, self.training.batch_size))
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
                raise ValueError(f"data(seed, epoch) gives no mini-batch in epoch {epoch}.")

    def _whole(self, epoch: int) -> Iterable[Any]:
        """The data of a full gradient: large chunks, unless losses depend on their mini-batch."""
        if any(map(_mxnet.is_auxiliary, self.net.collect_params().values())):
            return self.data.batches(self.training.seed, epoch, self.training.batch_size)
        return self.data.chunks()

    def by_lbfgs(self, seconds: float) -> None:
        """Train by SciPy's L-BFGS-B, a data pass an evaluation, for as long as others took."""
        parameters, l2 = trainable_of(self.net), self.problem.l2
        ends = np.cumsum([p.data().size for p in parameters])[:-1]
        decays = np.concatenate([np.full(p.data().size, l2 * p.wd_mult) for p in parameters])
        self.has_penalty = True  # added here

        def put(weights: np.ndarray) -> None:
            for p, part in zip(parameters, np.split(weights, ends)):
                p.data()[:] = part.reshape(p.shape).astype(_mxnet.dtype_of(p))

        def evaluate(weights: np.ndarray) -> tuple[float, np.ndarray]:
            now = perf_counter()
            is_over = now > self.until or self.seconds + now - self.since > seconds
            if self.done + self.n > self.budget and is_over:
                raise StopIteration
            put(weights)
            loss, gradient = mean_gradient(self.loss_of, parameters, self.data)
            return loss + decays @ weights**2 / 2, gradient + decays * weights

        accepted, mark = vector(p.data() for p in parameters), 0.0

        def accept(weights: np.ndarray) -> None:
            nonlocal accepted, mark
            accepted = weights.copy()
            if self.done >= mark:
                put(weights)
                self.note()
                mark = FINER * self.done

        # No tolerance: it goes on until it finds no lower loss, or its time is over.
        options = {"ftol": 0, "gtol": 0, "maxiter": 10**9, "maxfun": 10**9}
        options["maxcor"] = self.training.options["memory"]
        settings: Any = {"jac": True, "method": "L-BFGS-B", "options": options}
        with suppress(StopIteration):
            minimize(evaluate, accepted, callback=accept, **settings)
        put(accepted)


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


def train(
    problem: Problem, method: Contender, training: Training, until: float, slowest: float
) -> None:
    """Train a new network by a method; note the beginning, the end and a divergence.

    L-BFGS may take as many seconds as the slowest of the others, and goes on with more passes.
    """
    run = _Run(problem, training, until)
    try:
        run.note()
        run.by_trainer(method) if method.steps else run.by_lbfgs(slowest)
        if training.curve[-1]["data_passes"] < run.done / run.n:
            run.note()
    except FloatingPointError:  # of a measurement, or of a full gradient
        training.diverged = True
        end = {"data_passes": run.done / run.n, "seconds": run.seconds, "loss": inf}
        training.curve.append({**dict.fromkeys(problem.measures, nan), **end})
