"""One training: by which method, from which seed, with how many gradients, and what it measured."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from itertools import count
from math import cos, inf, isfinite, nan, pi
from time import perf_counter
from typing import Any, Callable, Iterable, Mapping, Sequence

import mxnet as mx
import numpy as np

from .. import _mxnet
from ..passes.data import initialize
from ..trainer import VarianceReducedTrainer
from .data import Batch, Data
from .methods import Method, Options

#: A loss of so many times the first one is a divergence.
DIVERGED = 10.0
MEAN_LOSS = (
    "loss_of(net, ...) returned {size} numbers for a minibatch of {n} samples. It must return the "
    "loss of each sample: not their mean, which would be divided by the batch size again, and not "
    "one for each entry, of which you may take the mean over all axes but the first."
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
    measures: Mapping[str, Callable[[Any], float]]
    plain_epochs: int
    refresh_every: int

    def network(self, seed: int) -> Any:
        """A new network, initialized: equal for all methods of a seed."""
        mx.random.seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        net = self.new_net()
        parameters = list(net.collect_params().values())
        if not any(_mxnet.has_data(p) or _mxnet.is_deferred(p) for p in parameters):
            net.initialize()
        self.data.put_on(net)
        first: Iterable[Batch] = self.data.batches(self.data.first_seed, 0)
        next(iter(initialize(parameters, partial(self.loss_of, net), iter(first))))
        mx.random.seed(seed)  # of the training
        return net

    def check(self, seed: int) -> bool:
        """Raise unless networks, losses and data can be used; tell whether losses are random."""
        nets = [self.network(seed) for _ in range(2)]
        params = [list(net.collect_params().values()) for net in nets]
        shared = any(one is other for one, other in zip(*params))
        if shared or not all(_are_equal(one, other) for one, other in zip(*params)):
            raise ValueError(
                "new_net() must return a new network each time, with the same weights after the "
                "same seeds (of MXNet, NumPy and random). This one was trained before, or draws "
                "from a generator of its own."
            )
        batch = next(iter(self.data.batches(seed, 0)))
        losses = []
        for _ in range(2):
            with mx.autograd.record():
                losses.append(self.loss_of(nets[0], *batch).asnumpy())
        if losses[0].size != len(batch[0]):
            raise ValueError(MEAN_LOSS.format(size=losses[0].size, n=len(batch[0])))
        return not np.allclose(losses[0], losses[1], rtol=1e-4, equal_nan=True)

    def loss(self, net: Any) -> float:
        """The mean loss over the data, when the network predicts."""
        total = 0.0
        with mx.autograd.pause(train_mode=False):
            for batch in self.data.chunks():
                total += float(self.loss_of(net, *batch).asnumpy().sum(dtype="float64"))
        return total / self.data.n


def _are_equal(one: Any, other: Any) -> bool:
    return np.array_equal(one.data().asnumpy(), other.data().asnumpy())


class _Run:
    """A training while it runs."""

    def __init__(
        self, problem: Problem, found: Training, show: Callable[[float], None], net: Any
    ) -> None:
        self.problem, self.found, self.show, self.net = problem, found, show, net
        self.n, self.budget = problem.data.n, problem.passes * problem.data.n
        self.loss_of = partial(problem.loss_of, net)
        self.done = 0  # gradients so far
        self.seconds, self.since = 0.0, perf_counter()

    def note(self) -> None:
        """Measure, which takes no time of the training; end the training if it has diverged."""
        mx.nd.waitall()
        self.seconds += perf_counter() - self.since
        curve = self.found.curve
        row = {"data_passes": self.done / self.n, "seconds": self.seconds}
        with np.errstate(all="ignore"):
            loss = self.problem.loss(self.net)
        if not isfinite(loss) or (curve and loss > DIVERGED * abs(curve[0]["loss"])):
            self._end(row, loss)
        values = {name: float(f(self.net)) for name, f in self.problem.measures.items()}
        curve.append({**row, "loss": loss, **values})
        self.show(row["data_passes"])
        self.since = perf_counter()

    def _end(self, row: dict[str, float], loss: float) -> None:
        names = dict.fromkeys(self.problem.measures, nan)
        self.found.curve.append({**row, "loss": loss if isfinite(loss) else inf, **names})
        raise FloatingPointError("The training has diverged.")

    def run(self, train: Callable[[], None]) -> None:
        """Train, and note the beginning, the end and a divergence."""
        try:
            self.note()
            train()
            if self.found.curve[-1]["data_passes"] < self.done / self.n:
                self.note()
        except FloatingPointError:  # of a full gradient, too
            self.found.diverged = True
            last = self.found.curve[-1]
            if isfinite(last["loss"]) and last["data_passes"] < self.done / self.n:
                row = {"data_passes": self.done / self.n, "seconds": self.seconds}
                self.found.curve.append({**last, **row, "loss": inf})

    # --- with a trainer --------------------------------------------------------------------------

    def with_trainer(self, method: Method, rate: float, options: Options, seed: int) -> None:
        """Train until all gradients are used."""
        trainer, data = method.trainer(self.net, rate, options), self.problem.data
        needs = needs_of(trainer, method)
        step = self._step_of(trainer)
        fixed = data.fixed(seed, method.name) if needs.table or method.stores else None
        cost, mark, is_stored = data.batch_size, 1, False
        for epoch in count():
            if needs.refresh and self._is_due(epoch):
                trainer.update_full_grads(
                    self.loss_of, self._whole(fixed, seed, epoch), **needs.storing
                )
                self.done, is_stored = self._counted(trainer, self.n), method.stores
            before = self.done
            for index, batch in self._minibatches(fixed, seed, epoch, method.name):
                if self.done + cost / 2 > self.budget:
                    return
                if method.decays:
                    part = min(1.0, self.done / self.budget)
                    trainer.set_learning_rate(rate * 0.5 * (1 + cos(pi * part)))
                row = {"batch_index": index} if needs.table or is_stored else {}
                used = self.done
                step(batch, row)
                cost = self.done - used
                if self.done >= mark * self.n:
                    self.note()
                    mark = int(self.done // self.n) + 1
            if self.done == before:
                raise ValueError(f"data(seed, epoch) gives no minibatch in epoch {epoch}.")

    def _is_due(self, epoch: int) -> bool:
        since = epoch - self.problem.plain_epochs
        is_time = since >= 0 and since % self.problem.refresh_every == 0
        return is_time and self.done + self.n < self.budget

    def _whole(self, fixed: Sequence[Batch] | None, seed: int, epoch: int) -> Any:
        """The data of a full gradient: large chunks, unless the loss depends on its minibatch."""
        parameters = self.net.collect_params().values()
        if fixed is not None:
            return fixed
        if any(map(_mxnet.is_auxiliary, parameters)) or self.problem.data.batches_of:
            return self.problem.data.batches(seed, epoch)
        return self.problem.data.chunks()

    def _minibatches(
        self, fixed: Sequence[Batch] | None, seed: int, epoch: int, name: str
    ) -> Iterable[tuple[int, Batch]]:
        if fixed is None:
            return enumerate(self.problem.data.batches(seed, epoch))
        rng, size = np.random.RandomState([seed, epoch, 1]), len(fixed)
        # With replacement for SAG, which otherwise diverges at lower rates.
        again = epoch and isinstance(name, str) and name.split("+")[0] == "sag"
        order = rng.randint(0, size, size) if again else rng.permutation(size)
        return ((int(index), fixed[index]) for index in order)

    def _step_of(self, trainer: Any) -> Callable[[Batch, Mapping[str, int]], None]:
        """A step of a trainer, which counts its gradients."""
        if "closure" not in signature(trainer.step).parameters:

            def plain(batch: Batch, _: Mapping[str, int]) -> None:
                with mx.autograd.record():
                    loss = self.loss_of(*batch)
                loss.backward()
                trainer.step(len(batch[0]))
                self.done += len(batch[0])

            return plain
        if hasattr(trainer, "grad_evaluations"):

            def step(batch: Batch, row: Mapping[str, int]) -> None:
                closure = partial(self.loss_of, *batch)
                trainer.step(len(batch[0]), closure=closure, **row)
                self.done = trainer.grad_evaluations

            return step

        def counted(batch: Batch, row: Mapping[str, int]) -> None:
            def closure() -> Any:
                self.done += len(batch[0]) if mx.autograd.is_recording() else 0
                return self.loss_of(*batch)

            trainer.step(len(batch[0]), closure=closure, **row)

        return counted

    def _counted(self, trainer: Any, more: int) -> int:
        return getattr(trainer, "grad_evaluations", self.done + more)

    # --- L-BFGS ----------------------------------------------------------------------------------

    def with_lbfgs(self) -> None:
        """Train by SciPy's L-BFGS-B, whose every evaluation is a data pass."""
        from scipy.optimize import minimize

        parameters = [p for p in self.net.collect_params().values() if _mxnet.is_trainable(p)]
        ends = np.cumsum([p.data().size for p in parameters])[:-1]

        def put(weights: np.ndarray) -> None:
            for p, part in zip(parameters, np.split(weights, ends)):
                value = part.reshape(p.shape).astype(_mxnet.dtype_of(p))
                array = _mxnet.to_ndarray(value, self.problem.data.device)
                p.set_data(_mxnet.like(array, p.data()))

        def flat(arrays: Iterable[Any]) -> np.ndarray:
            return np.concatenate([a.asnumpy().astype("float64").ravel() for a in arrays])

        def evaluate(weights: np.ndarray) -> tuple[float, np.ndarray]:
            if self.done + self.n > self.budget:
                raise StopIteration
            put(weights)
            loss, gradient = 0.0, np.zeros(weights.size)
            for batch in self.problem.data.chunks():
                with mx.autograd.record():
                    losses = self.loss_of(*batch)
                losses.backward()
                loss += float(losses.asnumpy().sum(dtype="float64"))
                gradient += flat(p.grad() for p in parameters)
            self.done += self.n
            return loss / self.n, gradient / self.n

        last = [flat(p.data() for p in parameters)]

        def accept(weights: np.ndarray) -> None:
            last[0] = weights.copy()
            put(weights)
            self.note()

        # No tolerance: it goes on until it finds no lower loss, or all passes are made.
        options = {"ftol": 0, "gtol": 0, "maxiter": 10**9, "maxfun": 10**9}
        with suppress(StopIteration):
            minimize(
                evaluate, last[0], jac=True, method="L-BFGS-B", callback=accept, options=options
            )
        put(last[0])


@dataclass
class Needs:
    """What a trainer needs beside minibatches."""

    refresh: bool
    table: bool
    storing: Mapping[str, bool]


def needs_of(trainer: Any, method: Method) -> Needs:
    """What a trainer needs: one of this package says so; another may have `update_full_grads`."""
    refresh, table = hasattr(trainer, "update_full_grads"), False
    if isinstance(trainer, VarianceReducedTrainer):
        refresh, table = trainer._method.needs_refresh, trainer._method.needs_table
    return Needs(refresh, table, {"store_grads": True} if method.stores else {})


def train(
    problem: Problem,
    method: Method,
    rate: float,
    options: Options,
    seed: int,
    show: Callable[[float], None],
) -> Training:
    """Train a new network by a method."""
    net = problem.network(seed)
    found = Training(method.name, rate, options, seed)
    run = _Run(problem, found, show, net)
    if method.make is None:
        run.run(run.with_lbfgs)
    else:
        run.run(partial(run.with_trainer, method, rate, options, seed))
    return found
