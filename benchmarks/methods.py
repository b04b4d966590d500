"""The methods for strongly convex problems, each driven once: by a trainer, and in NumPy beside it.

`drive` makes the decisions (which samples, when to refresh) and knows neither; so both see the same
sequence of minibatches.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Iterable, Iterator, Sequence

import numpy as np
from mxnet import autograd, gluon

from gluon_svrg import SAGATrainer, SAGTrainer, SARAHTrainer, SVRGTrainer

from .networks import array
from .problems import PenalizedLoss, Problem

TABLES = {"SAGA": SAGATrainer, "SAG": SAGTrainer}
TRAINERS = {**TABLES, "SARAH": SARAHTrainer}


class Trained:
    """With MXNet: a trainer of gluon_svrg, or `gluon.Trainer` for SGD."""

    def __init__(
        self, problem: Problem, rate: float, batch_size: int, kind: str, dtype: str = "float64"
    ) -> None:
        self.problem, self.rate, self.batch_size, self.dtype = problem, rate, batch_size, dtype
        self.net = PenalizedLoss(problem, dtype)
        self.plain = kind.endswith("SGD")
        trainer = gluon.Trainer if self.plain else TRAINERS.get(kind, SVRGTrainer)
        settings = {"learning_rate": rate}
        self.trainer = trainer(self.net.collect_params(), "sgd", settings, kvstore=None)
        self._steps = 0

    @property
    def grad_evaluations(self) -> int:
        """Gradients of single losses so far, as the trainer counts them."""
        return self._steps * self.batch_size if self.plain else self.trainer.grad_evaluations

    @property
    def weights(self) -> np.ndarray:
        """The current ones, when all steps are done."""
        return self.net.weight.data().asnumpy()

    def scale_rate(self, factor: float) -> None:
        """Multiply the first learning rate."""
        self.trainer.set_learning_rate(self.rate * factor)

    def load(self, batches: Sequence[np.ndarray]) -> list[tuple[Any, Any]]:
        """Minibatches as arrays of MXNet, cut out of one."""
        order, ends = np.concatenate(batches), np.cumsum([len(index) for index in batches])
        X, y = (array(values[order], self.dtype) for values in (self.problem.X, self.problem.y))
        return [(X[end - len(i) : end], y[end - len(i) : end]) for i, end in zip(batches, ends)]

    def refresh(self, batches: Sequence[tuple[Any, Any]], store: bool = False) -> None:
        """Take a snapshot and the full gradient."""
        self.trainer.update_full_grads(self.net, batches, store_grads=store)

    def step(self, batch: tuple[Any, Any], position: int | None = None) -> None:
        """Make one step."""
        if self.plain:
            with autograd.record():
                loss = self.net(*batch)
            loss.backward()
            self.trainer.step(self.batch_size)
            self._steps += 1
        else:
            closure = partial(self.net, *batch)
            self.trainer.step(self.batch_size, closure=closure, batch_index=position)


class Reference:
    """The same in NumPy, float64, straight from the formula; for many rates at once, if asked.

    MXNet's optimizers take the rate and ``1 / batch_size`` in float32, so it does, too.
    """

    def __init__(
        self, problem: Problem, rate: float | np.ndarray, batch_size: int, kind: str
    ) -> None:
        self.problem, self.rate, self.batch_size, self.kind = problem, rate, batch_size, kind
        self.weights = np.zeros(np.shape(rate) + problem.shape)
        self.snapshot: np.ndarray | None = None
        self.rows: dict[int, np.ndarray] = {}  # of stored gradients, or of a table
        self.mean: Any = 0.0  # full gradient, last estimate, or mean of the table, per loss entry
        self.entries = self.grad_evaluations = 0
        self.rescale = np.float64(np.float32(1.0 / batch_size))
        self.scale_rate(1.0)

    def scale_rate(self, factor: float) -> None:
        """Multiply the first learning rate."""
        rounded = np.asarray(self.rate * factor, dtype="float32").astype("float64")
        self._rate = rounded[..., None, None]

    def load(self, batches: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Minibatches are arrays of indices."""
        return batches

    def _gradient(self, weights: np.ndarray, index: np.ndarray) -> np.ndarray:
        self.grad_evaluations += len(index)
        return self.problem.gradient(weights, index)

    def refresh(self, batches: Iterable[np.ndarray], store: bool = False) -> None:
        """Take a snapshot and the full gradient."""
        gradients = [self._gradient(self.weights, index) for index in batches]
        self.snapshot, self.mean = self.weights.copy(), sum(gradients) / self.problem.n
        self.rows = dict(enumerate(gradients)) if store else {}

    def _from_table(self, gradient: np.ndarray, count: int, position: int) -> np.ndarray:
        """The estimate of SAGA, or of SAG, which moves the row and the mean of the table."""
        estimate = gradient + count * self.mean - self.rows.get(position, 0.0)
        before = self.entries
        self.entries += 0 if position in self.rows else count
        self.mean = ((before - count) * self.mean + estimate) / self.entries
        self.rows[position] = gradient
        return estimate if self.kind == "SAGA" else count * self.mean

    def step(self, index: np.ndarray, position: int | None = None) -> None:
        """Make one step."""
        gradient, count = self._gradient(self.weights, index), len(index)
        if self.kind in TABLES and position is not None:
            gradient = self._from_table(gradient, count, position)
        elif self.snapshot is not None:
            stored = position is not None
            reference = self.rows[position] if stored else self._gradient(self.snapshot, index)
            gradient = gradient - (reference - count * self.mean)
            if self.kind == "SARAH":
                self.snapshot, self.mean = self.weights, gradient / count
        self.weights = self.weights - self._rate * (self.rescale * gradient)


def drive(solver: Trained | Reference, kind: str, seed: int) -> Iterator[float]:
    """Train without end.

    Samples are drawn with replacement; with stored gradients, fixed minibatches are. SAGA visits
    all minibatches once an epoch, in a new order each time. SAG does so in its first epoch alone:
    it diverges at much lower rates where each minibatch comes once an epoch.

    The seed is of the samples and of the coins of the loopless variant. After each epoch of steps,
    the data passes so far are yielded.
    """
    problem, size = solver.problem, solver.batch_size
    n, rng, coins = problem.n, np.random.RandomState(seed), np.random.RandomState(seed)
    everything = np.arange(n)
    pieces = [everything[start : start + size] for start in range(0, n, size)]
    whole = solver.load(pieces if kind in ("stored", *TABLES) else [everything])
    epoch = 0
    while True:
        if kind == "decaying SGD":
            solver.scale_rate(1 / (1 + epoch))
        if kind in ("SVRG", "stored", "SARAH") or (kind == "loopless" and not epoch):
            solver.refresh(whole, store=kind == "stored")
        if kind == "stored" or kind in TABLES:
            is_shuffled = kind == "SAGA" or (kind == "SAG" and not epoch)
            draw = rng.permutation if is_shuffled else partial(rng.randint, 0, len(pieces))
            for position in draw(len(pieces)):
                solver.step(whole[position], int(position))
        else:
            for batch in solver.load(list(rng.randint(0, n, (n // size, size)))):
                solver.step(batch)
                if kind == "loopless" and coins.uniform() < size / n:
                    solver.refresh(whole)
        epoch += 1
        yield solver.grad_evaluations / n
