"""Every method, trained in every way, and its twin in NumPy beside it."""

import kit
import numpy as np
import oracle
import pytest
from problems import array, contexts, distance, parameters, values
from test_methods import CASES, SETTINGS, Case

#: The methods of all trainers; a table may also come from a refresh of SVRG.
WITH_STORED = {
    **CASES,
    "stored": Case("SVRGTrainer", oracle.SVRG, {"coefficient": 0.75}, 1, True, True),
}
#: How an update is made: by `step`; in halves, where the user changes gradients before and after
#: they are reduced; in halves too, of two minibatches that accumulate.
HOWS = ("step", "halves", "add")
ways = pytest.mark.parametrize(
    "how, devices", [("step", None), ("halves", contexts(2)), ("add", None)]
)
#: The minibatches of a training, with a refresh between each two parts.
PARTS = ((1, 3, 1), (4, 0, 2, 0), (3, 1, 4, 1))
LARGEST = 2.0  # the norm to which the user clips


class Play:
    """A trainer and its twin, at the same weights.

    Parameters
    ----------
    problem : Dense
        Its `gradient` is the twin's.
    settings : dict
        Of SGD.
    ignores_stale : bool
        Whether updates leave parameters alone that no minibatch reaches.

    Attributes
    ----------
    shares : list of list of array
        The minibatches of each worker; the trainer has those of `rank`, the twin has all.
    """

    def __init__(
        self,
        case,
        problem,
        how="step",
        devices=None,
        hybridize=None,
        *,
        dtype="float64",
        settings=SETTINGS,
        ignores_stale=False,
        **kwargs,
    ):
        self.case, self.how, self.ignores_stale = case, how, ignores_stale
        self.devices, self.device = devices, devices and devices[-1]
        self.stores = case is WITH_STORED["stored"]
        self.shares, self.rank = [problem.batches(5)], 0
        self.net = problem.network(dtype, devices, hybridize=hybridize)
        self.loss_of = problem.closure(self.net, dtype, devices)
        kwargs = {"update_on_kvstore": False, "optimizer_params": settings, **kwargs}
        self.trainer = case.make_trainer(self.net.collect_params(), **kwargs)
        self.require("add" if how == "add" else "write")
        self.twin = case.make_twin(problem.gradient, problem.initial)
        self.optimizer = oracle.SGD(**settings)

    @property
    def batches(self):
        return self.shares[self.rank]

    def of_all(self, numbers):
        """The minibatches of all workers, and their rows in a table."""
        rows = [(rank, number) for number in numbers for rank in range(len(self.shares))]
        return [self.shares[rank][number] for rank, number in rows], rows

    def require(self, grad_req):
        """Set the `grad_req` of all parameters."""
        for parameter in parameters(self.net):
            parameter.grad_req = grad_req

    def row(self, number):
        """The arguments that name a row, where there is one."""
        has_rows = not self.stores or self.trainer.has_snapshot
        return self.case.row(number) if has_rows else {}

    def refresh(self):
        """Both start over; the mean loss."""
        batches, rows = self.of_all(range(len(self.batches)))
        is_table = isinstance(self.twin, oracle.SAGA)
        self.twin.refresh(batches, rows) if is_table else self.twin.refresh(batches)
        stored = {"store_grads": True} if self.stores else {}
        return self.trainer.update_full_grads(self.loss_of, self.batches, **stored)

    def correct(self, number):
        """The estimate of a minibatch."""
        index = self.batches[number]
        return self.trainer.correct_grads(lambda: self.loss_of(index), **self.row(number))

    def update(self, *numbers):
        """One update of both, by these minibatches: one, or several that accumulate."""
        (batches, rows), optimizer = self.of_all(numbers), self.optimizer
        size = sum(map(len, batches))
        if self.how == "step":
            (number,) = numbers
            index, row = self.batches[number], self.row(number)
            self.trainer.step(size, self.ignores_stale, closure=lambda: self.loss_of(index), **row)
        else:
            for number in numbers:
                self.correct(number)
            before = 1.0 if self.case.trainer in ("SAGTrainer", "MARSTrainer") else 0.5
            scale(self.net, before)  # these two refuse it
            self.trainer.allreduce_grads()
            grads = [p.list_grad()[0].asnumpy() for p in parameters(self.net)]
            scale(self.net, factor_of(grads))
            self.trainer.update(size, self.ignores_stale)
            optimizer = Scaled(optimizer, before)
        if self.how == "add":
            kit.clear(self.net)
        self.twin.step(optimizer, *batches, rows=rows)

    def epoch(self, order):
        """Updates by minibatches in this order."""
        size = 2 if self.how == "add" else 1
        for start in range(0, len(order), size):
            self.update(*order[start : start + size])

    def distance(self):
        """How far the trainer is from its twin."""
        return distance(values(self.net, self.device), self.twin.weights)

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
