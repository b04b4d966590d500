"""The methods for strongly convex problems, each driven once: by a trainer, and in NumPy beside it.

`drive` makes the decisions (which samples, when to refresh) and knows neither; so both see the same
sequence of minibatches.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Iterable, Iterator, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from gluon_svrg import SAGATrainer, SAGTrainer, SARAHTrainer, SVRGTrainer
from gluon_svrg.schedule import Loopless

from .problems import Problem


class Method(NamedTuple):
    """What `drive` does, and in which precision."""

    kind: str  # SGD, decaying SGD, SVRG, stored, loopless, BB (Barzilai-Borwein), SAGA, SAG, SARAH
    dtype: str = "float64"


TABLES = {"SAGA": SAGATrainer, "SAG": SAGTrainer}
TRAINERS = {**TABLES, "SARAH": SARAHTrainer}


class Trained:
    """With MXNet: a trainer of gluon_svrg, or `gluon.Trainer` for SGD."""

    def __init__(self, problem: Problem, method: Method, rate: float, batch_size: int) -> None:
        self.problem, self.rate, self.batch_size = problem, rate, batch_size
        self.net = problem.network(method.dtype)
        self.data = problem.arrays(method.dtype)
        self.plain = method.kind.endswith("SGD")
        trainer = gluon.Trainer if self.plain else TRAINERS.get(method.kind, SVRGTrainer)
        own = {"barzilai_borwein": True} if method.kind == "BB" else {}
        settings = {"learning_rate": rate}
        self.trainer = trainer(self.net.collect_params(), "sgd", settings, kvstore=None, **own)
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
        make = mx.np.array if mx.util.is_np_array() else mx.nd.array
        X, y = (make(values[order], dtype=values.dtype) for values in self.data)
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
            where = {} if position is None else {"batch_index": position}
            self.trainer.step(self.batch_size, closure=partial(self.net, *batch), **where)


class Reference:
    """The same in NumPy, float64, straight from the formula; for many rates at once, if asked.

    MXNet's optimizers take the rate and ``1 / batch_size`` in float32, so it does, too.
    """

    def __init__(
        self, problem: Problem, rate: float | np.ndarray, batch_size: int, kind: str = "SVRG"
    ) -> None:
        self.problem, self.rate, self.batch_size, self.kind = problem, rate, batch_size, kind
        many = np.shape(rate)
        self.weights = np.zeros(many + problem.shape)
        self.snapshot: np.ndarray | None = None
        self.stored: list[np.ndarray] = []
        self.table: dict[int, np.ndarray] = {}
        self.mean: Any = np.zeros(1)
        self.entries = self.inner_steps = 0
        self.grad_evaluations = self.num_snapshots = 0
        self.rescale = np.float64(np.float32(1.0 / batch_size))
        self.scale_rate(1.0)

    @property
    def wants_snapshot(self) -> bool:
        """Whether there is no snapshot."""
        return self.snapshot is None

    def register(self, schedule: Any) -> None:
        """Nothing is saved here."""

    @property
    def trainer(self) -> Reference:
        """What a schedule asks."""
        return self

    def _remember(self, schedule: Any) -> None:
        """A trainer would save the state of the schedule."""

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
        full_grad = sum(gradients) / self.problem.n
        if self.kind == "BB" and self.snapshot is not None:
            moved, bent = self.weights - self.snapshot, full_grad - self.full_grad
            denominator = self.inner_steps * (moved * bent).sum()
            if denominator > 0:
                self.scale_rate((moved**2).sum() / denominator / self.rate)
        self.snapshot, self.full_grad = self.weights.copy(), full_grad
        self.num_snapshots += 1
        self.stored = gradients if store else []
        self.inner_steps = 0

    def _from_table(self, gradient: np.ndarray, count: int, position: int) -> np.ndarray:
        """The estimate of SAGA, or of SAG, which moves the row and the mean of the table."""
        estimate = gradient + count * self.mean
        if position in self.table:
            estimate = estimate - self.table[position]
        before = self.entries
        if position not in self.table:
            self.entries += count
        self.mean = ((before - count) * self.mean + estimate) / self.entries
        self.table[position] = gradient
        return estimate if self.kind == "SAGA" else count * self.mean

    def step(self, index: np.ndarray, position: int | None = None) -> None:
        """Make one step."""
        gradient = self._gradient(self.weights, index)
        self.inner_steps += 1
        if self.kind in TABLES:
            assert position is not None
            gradient = self._from_table(gradient, len(index), position)
        elif self.snapshot is not None:
            if position is None:
                at_snapshot = self._gradient(self.snapshot, index)
            else:
                at_snapshot = self.stored[position]
            gradient = gradient - (at_snapshot - len(index) * self.full_grad)
            if self.kind == "SARAH":
                self.snapshot, self.full_grad = self.weights, gradient / len(index)
        self.weights = self.weights - self._rate * (self.rescale * gradient)


def drive(solver: Any, kind: str, seed: int) -> Iterator[float]:
    """Train without end.

    Samples are drawn with replacement; with stored gradients, fixed minibatches are. SAGA visits
    all minibatches once an epoch, in a new order each time. SAG does so in its first epoch alone:
    it diverges at much lower rates where each minibatch comes once an epoch.

    Parameters
    ----------
    solver : Trained or Reference
        Who computes.
    kind : str
        As in `Method`.
    seed : int
        Of the samples, and of the coins of the loopless variant.

    Yields
    ------
    float
        Data passes so far, after each epoch of steps.
    """
    problem, size = solver.problem, solver.batch_size
    n, rng = problem.n, np.random.RandomState(seed)
    everything = np.arange(n)
    pieces = [everything[start : start + size] for start in range(0, n, size)]
    whole = solver.load(pieces if kind in ("stored", *TABLES) else [everything])
    schedule = Loopless(size / n, seed)
    epoch = 0
    while True:
        if kind == "decaying SGD":
            solver.scale_rate(1 / (1 + epoch))
        if kind in ("SVRG", "stored", "BB", "SARAH"):
            solver.refresh(whole, store=kind == "stored")
        if kind == "stored" or kind in TABLES:
            is_shuffled = kind == "SAGA" or (kind == "SAG" and not epoch)
            draw = rng.permutation if is_shuffled else partial(rng.randint, 0, len(pieces))
            for position in draw(len(pieces)):
                solver.step(whole[position], int(position))
        else:
            for batch in solver.load(list(rng.randint(0, n, (n // size, size)))):
                if kind == "loopless" and schedule.due(solver.trainer):
                    solver.refresh(whole)
                solver.step(batch)
        epoch += 1
        yield solver.grad_evaluations / n
