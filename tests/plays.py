"""The table of all methods, and a trainer that trains beside its twin in NumPy."""

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Optional

import kit
import numpy as np
import oracle
import pytest
from problems import Dense, Partly, array, contexts, distance, parameters, values

import gluon_svrg

PROBLEM = Dense("classification", hidden=(5,), seed=40)
PARTLY = Partly("classification", hidden=(5,), seed=49)
BATCHES = PROBLEM.batches(5)  # 23 = 4 * 5 + 3
SETTINGS = {"learning_rate": 0.05, "momentum": 0.5, "wd": 0.01}
TWO = contexts(2)
STATIC = {"static_alloc": True, "static_shape": True}


@dataclass(frozen=True)
class Case:
    """A method: its trainer and its twin."""

    trainer: str  # its name in `gluon_svrg`
    twin: Callable[..., oracle.Method]  # its class in `oracle`
    settings: Dict[str, Any] = field(default_factory=dict)  # arguments of both, all their own
    gradients: int = 2  # how many of each minibatch a step takes
    indexed: bool = False  # whether a step names the minibatch's row of a table
    needs_refresh: bool = False  # whether it is plain until the first `update_full_grads`
    plain: Optional[Dict[str, Any]] = None  # settings with which it is plain, refreshed or not

    @property
    def replaces_grads(self):
        """Whether the method computes the optimizer's gradient when gradients are reduced."""
        return self.trainer in ("SAGTrainer", "MARSTrainer")

    def make_twin(self, gradient=PROBLEM.gradient, weights=PROBLEM.initial):
        return self.twin(gradient, weights, **self.settings)

    def make_trainer(self, params, optimizer="sgd", optimizer_params=SETTINGS, **kwargs):
        make = getattr(gluon_svrg, self.trainer)
        return make(params, optimizer, optimizer_params, **{**self.settings, **kwargs})

    def row(self, number):
        """The arguments of `step` and `correct_grads` that name the minibatch."""
        return {"batch_index": number} if self.indexed else {}


def svrg(coefficient, **kwargs):
    settings = {"coefficient": coefficient}
    return Case("SVRGTrainer", oracle.SVRG, settings, needs_refresh=True, **kwargs)


def mars(plain=None, **settings):
    gradients = 2 if settings.get("exact", True) else 1
    return Case("MARSTrainer", oracle.MARS, settings, gradients, plain=plain)


UNCLIPPED = {"gamma": 0, "clip": None}
#: All methods. A new one is a line here.
CASES = {
    "SVRG": svrg(1.0, plain={"coefficient": 0}),
    "alpha-SVRG": svrg(0.7),
    "SAGA": Case("SAGATrainer", oracle.SAGA, gradients=1, indexed=True),
    "SAG": Case("SAGTrainer", oracle.SAG, gradients=1, indexed=True),
    "SARAH": Case("SARAHTrainer", oracle.SARAH, needs_refresh=True),
    "STORM": Case("STORMTrainer", oracle.STORM, {"mixing": 0.3}, plain={"mixing": 1}),
    "MARS": mars(gamma=0.1, clip=0.1, plain=UNCLIPPED),
    "approximate MARS": mars(gamma=0.1, exact=False, include_vectors=True, plain=UNCLIPPED),
}
#: A table may also come from a refresh of SVRG.
WITH_STORED = {**CASES, "stored": svrg(0.75, gradients=1, indexed=True)}
each_method = pytest.mark.parametrize("case", WITH_STORED.values(), ids=WITH_STORED)
#: How an update is made: by `step`; in halves, where the user changes gradients before and after
#: they are reduced; in halves too, of two minibatches that accumulate.
HOWS = ("step", "halves", "add")
ways = pytest.mark.parametrize("how, devices", [("step", None), ("halves", TWO), ("add", None)])
#: The minibatches of a training, with a refresh between each two parts.
PARTS = ((1, 3, 1), (4, 0, 2, 0), (3, 1, 4, 1))
LARGEST = 2.0  # the norm to which the user clips


class Play:
    """A trainer and its twin, at the same weights, `refreshed` or not.

    `split` cuts an index array into one for each device, `settings` are those of SGD. With
    `ignores_stale`, parameters that no minibatch reaches move by the mean alone.
    """

    def __init__(self, case, problem=PROBLEM, how="step", devices=None, hybridize=None, *,
                 split=None, dtype="float64", settings=SETTINGS, ignores_stale=False,
                 refreshed=False, **kwargs):  # fmt: skip
        self.case, self.how, self.ignores_stale = case, how, ignores_stale
        self.devices, self.device = devices, devices and devices[-1]
        self.stores = case is WITH_STORED["stored"]
        self.shares, self.rank = [problem.batches(5)], 0  # of each worker; the twin has all
        self.net = problem.network(dtype, devices, hybridize=hybridize)
        cut = {"split": split} if split else {}
        self.loss_of = problem.closure(self.net, dtype, devices, **cut)
        kwargs = {"update_on_kvstore": False, "optimizer_params": settings, **kwargs}
        self.trainer = case.make_trainer(self.net.collect_params(), **kwargs)
        self.require("add" if how == "add" else "write")
        self.twin = case.make_twin(problem.gradient, problem.initial)
        self.optimizer = oracle.SGD(**settings)
        if refreshed:
            self.refresh()

    @property
    def batches(self):
        return self.shares[self.rank]

    def of_all(self, numbers):
        """The minibatches of all workers, and their rows in a table."""
        rows = [(rank, number) for number in numbers for rank in range(len(self.shares))]
        return [self.shares[rank][number] for rank, number in rows], rows

    def require(self, grad_req):
        """Set the `grad_req` of all parameters that are not frozen."""
        for p in self.net.collect_params().values():
            p.grad_req = grad_req if p.grad_req != "null" else "null"

    def row(self, number):
        """The arguments that name a row, where there is one."""
        has_rows = not self.stores or self.trainer.has_snapshot
        return self.case.row(number) if has_rows else {}

    def refresh(self):
        """Both start over; the mean loss."""
        batches, rows = self.of_all(range(len(self.batches)))
        is_table = isinstance(self.twin, oracle.SAGA)
        self.twin.refresh(batches, rows) if is_table else self.twin.refresh(batches)
        return self.refresh_alone(self.loss_of, self.batches)

    def discard(self):
        """Both forget all but the weights."""
        self.trainer.discard_snapshot()
        self.twin = self.case.make_twin(self.twin.gradient, self.twin.weights)

    def refresh_alone(self, closure, data):
        stored = {"store_grads": True} if self.stores else {}
        return self.trainer.update_full_grads(closure, data, **stored)

    def correct(self, number):
        index = self.batches[number]
        return self.trainer.correct_grads(lambda: self.loss_of(index), **self.row(number))

    def step_alone(self, number, size=None, closure=None):
        """A step of the trainer; what the closure returned."""
        index = self.batches[number]
        closure = closure or (lambda: self.loss_of(index))
        size = len(index) if size is None else size
        return self.trainer.step(size, self.ignores_stale, closure=closure, **self.row(number))

    def update(self, *numbers):
        """One update of both, by these minibatches: one, or several that accumulate."""
        (batches, rows), optimizer = self.of_all(numbers), self.optimizer
        size = sum(map(len, batches))
        if self.how == "step":
            self.step_alone(*numbers, size)
        else:
            for number in numbers:
                self.correct(number)
            before = 1.0 if self.case.replaces_grads else 0.5  # these refuse it
            scale(self.net, before)
            self.trainer.allreduce_grads()
            grads = [p.list_grad()[0].asnumpy() for p in parameters(self.net)]
            scale(self.net, factor_of(grads))
            self.trainer.update(size, self.ignores_stale)
            optimizer = Scaled(optimizer, before)
        if self.how == "add":
            kit.clear(self.net)
        self.twin.step(optimizer, *batches, rows=rows)

    def epoch(self, order):
        size = 2 if self.how == "add" else 1
        for start in range(0, len(order), size):
            self.update(*order[start : start + size])

    def follow(self, *order):
        """Updates by minibatches in this order; the trainer stays with its twin."""
        self.epoch(order)
        assert self.distance() < 1e-10

    @contextmanager
    def refuses(self, error, message):
        """An error with this message is raised here, and nothing changes."""
        before = kit.everything(self.trainer, self.net)
        with pytest.raises(error, match=message):
            yield
        kit.assert_unchanged(before, kit.everything(self.trainer, self.net))

    def distance(self):
        devices = self.devices or [None]
        return max(distance(values(self.net, each), self.twin.weights) for each in devices)

    def train(self, parts=PARTS):
        """Train, with a refresh between each two parts; the distance after each."""
        for number, order in enumerate(parts):
            if number:
                self.refresh()
            self.epoch(order)
            yield self.distance()

    def run(self, tolerance=1e-10, parts=PARTS):
        """Train; the trainer stays with its twin, and both move."""
        start = oracle.copied(self.twin.weights)
        for number, found in enumerate(self.train(parts)):
            assert found < tolerance, f"part {number}"
        assert distance(self.twin.weights, start) > 1e-3


def factor_of(grads):
    """To clip gradients to a global norm, as users do; MXNet's own clip is of float32."""
    return min(1.0, LARGEST / np.sqrt(sum(np.sum(grad**2.0) for grad in grads)))


def scale(net, factor):
    for grad in (grad for p in parameters(net) for grad in p.list_grad()):
        grad[:] = array(factor * grad.asnumpy(), grad.dtype, grad.context)


class Scaled:
    """A twin's optimizer behind a factor, and behind the same clip."""

    def __init__(self, optimizer, factor):
        self.optimizer, self.factor = optimizer, factor

    def step(self, weights, grads, batch_size):
        grads = [self.factor * grad for grad in grads]
        self.optimizer.step(weights, [factor_of(grads) * grad for grad in grads], batch_size)
