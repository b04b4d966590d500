"""One training of one method from one seed, with its gradients counted and its loss measured."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from itertools import count
from math import cos, inf, nan, pi
from time import perf_counter
from typing import Any, Iterable

import mxnet as mx
import numpy as np
from scipy.optimize import minimize

from .. import _mxnet
from ..passes.columns import vector
from .methods import NYSTROM, Contender, Options, needs
from .task import Task, number, recorded, trainable_of

DIVERGED = 10.0  # times the first loss
OVER = "The seconds were over before any training. Allow more, fewer passes, larger mini-batches."
FINER = 1.02  # L-BFGS makes many passes, so it is measured after each 2% more of them


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
    # A row for each data pass; in long ones of L-BFGS, fewer
    curve: list[dict[str, float]] = field(default_factory=list)

    def of(self, name: str) -> np.ndarray:
        """A column of the curve: ``data_passes``, ``seconds``, ``loss`` or a measure."""
        return np.array([row[name] for row in self.curve])

    @property
    def end(self) -> dict[str, float]:
        """What was measured last in the passes that all methods have."""
        return self.curve[self.place]

    @property
    def place(self) -> int:
        """The position of `end` in the curve."""
        return sum(row["data_passes"] <= self.passes for row in self.curve) - 1


class _Run:
    """A training while it runs."""

    def __init__(self, problem: Task, method: Contender, training: Training, until: float) -> None:
        self.problem, self.data, self.training = problem, problem.data, training
        self.n, self.budget, self.until = problem.data.n, problem.passes * problem.data.n, until
        self.method, self.net = method, problem.network(training.seed)
        self.adds_penalty = problem.l2 and not method.penalty
        self.trainer: Any = None
        self.highest = inf  # a training with a higher loss has diverged
        self.recorded, self.seconds, self.since = 0, 0.0, perf_counter()  # samples; seconds

    def loss_of(self, *batch: Any) -> Any:
        """The loss of each sample, whose gradient counts."""
        if perf_counter() > self.until and self.done < self.budget:
            raise OutOfTimeError(OVER)
        self.recorded += len(batch[0]) if mx.autograd.is_recording() else 0
        losses = self.problem.loss_of(self.net, *batch)
        return losses + self.problem.penalty(self.net) if self.adds_penalty else losses

    @property
    def done(self) -> int:
        """The gradients so far. Our trainers count them, as they also record losses for checks."""
        return getattr(self.trainer, "grad_evaluations", self.recorded)

    def note(self) -> None:
        """Measure, outside of the seconds of the training; raise if it has diverged."""
        mx.nd.waitall()
        self.seconds += perf_counter() - self.since if self.training.curve else 0.0
        row = {"data_passes": self.done / self.n, "seconds": self.seconds}
        for name, measure in self.problem.measures.items():  # the loss is the first
            with np.errstate(all="ignore"):
                row[name] = number(measure(self.net))
            if not row["loss"] <= self.highest:
                raise FloatingPointError("The training has diverged.")
        self.training.curve.append(row)
        self.since = perf_counter()

    def by_trainer(self) -> None:
        """Train until all gradients are used."""
        method, seed, rate = self.method, self.training.seed, self.training.learning_rate
        self.trainer = trainer = method.trainer(self.problem, self.net, rate, self.training.options)
        takes_closure = "closure" in signature(trainer.step).parameters
        refreshes, has_table = needs(method, trainer)
        stores, size = method.stores, self.training.batch_size
        fixed = self.data.fixed(seed, method.name, size) if has_table or stores else None
        cost, mark = size, 1
        for epoch in count():
            since = epoch - self.problem.plain_epochs
            is_due = since >= 0 and since % self.problem.refresh_every == 0
            if refreshes and is_due and self.done + self.n < self.budget:
                stored = {"store_grads": True} if stores else {}
                trainer.update_full_grads(self.loss_of, fixed or self._whole(epoch), **stored)
            before = self.done
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
                    is_stored = has_table or (stores and trainer.has_snapshot)
                    row = {"batch_index": index} if is_stored else {}
                    trainer.step(size, closure=partial(self.loss_of, *batch), **row)
                else:
                    recorded(self.loss_of, *batch).backward()
                    trainer.step(size)
                cost = self.done - used
                if self.done >= mark * self.n:
                    self.note()
                    mark = self.done // self.n + 1
            if self.done == before:
                raise ValueError(f"{method.name!r} computes no gradient in epoch {epoch}.")

    def _whole(self, epoch: int) -> Iterable[Any]:
        """The data of a full gradient: large chunks, unless losses depend on their mini-batch."""
        if any(map(_mxnet.is_auxiliary, self.net.collect_params().values())):
            return self.data.batches(self.training.seed, epoch, self.training.batch_size)
        return self.data.chunks()

    def by_lbfgs(self, seconds: float) -> None:
        """Train by SciPy's L-BFGS-B, with a data pass each evaluation, for a time."""
        parameters = trainable_of(self.net)
        ends = np.cumsum([p.data().size for p in parameters])[:-1]

        def put(weights: np.ndarray) -> None:
            for p, part in zip(parameters, np.split(weights, ends)):
                p.data()[:] = part.reshape(p.shape).astype(_mxnet.dtype_of(p))

        def evaluate(weights: np.ndarray) -> tuple[float, np.ndarray]:
            now = perf_counter()
            is_over = now > self.until or self.seconds + now - self.since > seconds
            if self.done + self.n > self.budget and is_over:
                raise StopIteration
            put(weights)
            loss, gradient = 0.0, np.zeros_like(weights)
            for batch in self.data.chunks():
                losses = recorded(self.loss_of, *batch)
                losses.backward()
                loss += float(losses.asnumpy().sum(dtype="float64"))
                gradient += vector(p.grad() for p in parameters)
            return loss / self.n, gradient / self.n

        accepted, mark = vector(p.data() for p in parameters), 0.0

        def accept(weights: np.ndarray) -> None:
            nonlocal accepted, mark
            accepted = weights.copy()
            if self.done >= mark:
                put(weights)
                self.note()
                mark = FINER * self.done

        # Without tolerances it goes on until it finds no lower loss, or its time is over.
        options = {"ftol": 0, "gtol": 0, "maxiter": 10**9, "maxfun": 10**9}
        options["maxcor"] = self.training.options["memory"]
        settings: Any = {"jac": True, "method": "L-BFGS-B", "options": options}
        with suppress(StopIteration):
            minimize(evaluate, accepted, callback=accept, **settings)
        put(accepted)


def train(task: Task, method: Contender, training: Training, until: float, slowest: float) -> None:
    """Train a new network by a method, and record its curve.

    L-BFGS may take as many seconds as the slowest of the others, and goes on with more passes.
    """
    run = _Run(task, method, training, until)
    try:
        run.note()
        if method.base not in NYSTROM:  # which rolls back by itself
            run.highest = DIVERGED * abs(run.training.curve[0]["loss"])
        run.by_trainer() if method.steps else run.by_lbfgs(slowest)
        if training.curve[-1]["data_passes"] < run.done / run.n:
            run.note()
    except FloatingPointError:  # of `note`, a full gradient or a preconditioner
        training.diverged = True
        end = {"data_passes": run.done / run.n, "seconds": run.seconds, "loss": inf}
        training.curve.append({**dict.fromkeys(task.measures, nan), **end})
