"""Random histories of minibatches, drops, errors, refreshes and files, each against its twin.

A twin is the method in NumPy, in float64. It knows what an update consists of: the minibatches
since the last one that were not dropped. So must the trainer.
"""

import numpy as np
import oracle
import pytest
from loops import split_at
from problems import contexts, distance, values
from test_methods import BATCHES, CASES, SETTINGS, start

HISTORIES = 500  # for each MXNet, in the long suite


class Twin:
    """A method's twin, and what the live gradients hold."""

    def __init__(self, case):
        self.case, self.method = case, case.make_twin()
        self.optimizer = oracle.SGD(**SETTINGS)
        self.drop()

    def drop(self):
        """Forget the minibatches; the gradients are zero."""
        self.numbers, self.total, self.others = [], None, None

    def leave(self):
        """Forget the minibatches; their estimates stay in the gradients."""
        if self.total is not None:
            self.others = plus(self.total, self.others)
        self.numbers, self.total = [], None

    def hold(self, number):
        self.total = plus(self.method.estimate(BATCHES[number], number), self.total)
        self.numbers.append(number)

    def update(self, factor=1.0):
        batches = [BATCHES[number] for number in self.numbers]
        grads = self.method.advance(self.total, batches, self.numbers)
        grads = [factor * g for g in plus(grads, self.others)]
        self.optimizer.step(self.method.weights, grads, 10)
        self.drop()

    def discard(self):
        self.leave()
        self.method = self.case.make_twin(weights=self.method.weights)


def plus(arrays, others):
    return list(arrays) if others is None else [a + b for a, b in zip(arrays, others)]


def zero(net):
    for parameter in net.collect_params().values():
        for grad in parameter.list_grad():
            grad[:] = 0


def scale(net, factor):
    for parameter in net.collect_params().values():
        for grad in parameter.list_grad():
            grad *= factor


def play(case, seed, path, devices, grad_req):
    """Play one history; yield after each update."""
    rng = np.random.RandomState(seed)
    split = None if devices is None else split_at([0.4])
    net, loss_of, trainer = start(case, devices=devices, split=split)
    for parameter in net.collect_params().values():
        parameter.grad_req = grad_req
    twin = Twin(case)
    adds = grad_req == "add"
    replaces = case.trainer in ("SAGTrainer", "MARSTrainer")  # the optimizer's gradient

    def correct(number):
        if not adds:
            twin.drop()
        elif number in twin.numbers and case.indexed:
            return
        trainer.correct_grads(lambda: loss_of(BATCHES[number]), **case.row(number))
        twin.hold(number)

    def fail(number):
        if adds and number in twin.numbers and case.indexed:
            return

        def closure():
            raise KeyError("a bad sample")

        with pytest.raises(KeyError):
            trainer.correct_grads(closure, **case.row(number))
        if not adds:
            twin.drop()

    def finish(kind):
        if twin.others is not None and replaces:
            with pytest.raises(RuntimeError, match="finds other gradients"):
                trainer.step(10)
            zero(net)
            trainer.discard_snapshot()
            twin.discard()
            twin.drop()
            return
        factor = 0.5 if kind == "clip" else 1.0
        if kind == "clip" and not replaces:
            scale(net, factor)
            trainer.step(10)
        elif kind == "clip":
            trainer.allreduce_grads()
            scale(net, factor)
            trainer.update(10)
        else:
            trainer.step(10)
        twin.update(factor)
        zero(net)

    for _ in range(25):
        number = rng.randint(len(BATCHES))
        kind = rng.choice(
            ["correct", "step", "clip", "zero", "fail", "refresh", "discard", "file"],
            p=[0.35, 0.25, 0.1, 0.08, 0.06, 0.06, 0.04, 0.06],
        )
        if kind == "correct":
            correct(number)
        elif kind == "fail":
            fail(number)
        elif kind in ("step", "clip"):
            if not twin.numbers:
                correct(number)
            finish(kind)
            yield distance(values(net), twin.method.weights)
        elif kind == "zero":
            zero(net)
            twin.drop() if adds else None
            if not adds:  # the next minibatch overwrites it
                correct(number)
        else:
            if kind == "refresh":
                trainer.update_full_grads(loss_of, BATCHES)
                twin.leave()
                twin.method.refresh(BATCHES)
            elif kind == "discard":
                trainer.discard_snapshot()
                twin.discard()
            else:
                trainer.save_states(path)
                trainer.load_states(path)
                twin.leave()
            if not adds or rng.rand() < 0.5:
                zero(net)
                twin.drop()
    yield distance(values(net), twin.method.weights)


def check(seed, path):
    rng = np.random.RandomState(seed)
    names = list(CASES)
    case = CASES[names[seed % len(names)]]
    devices = contexts(2) if rng.rand() < 0.3 else None
    grad_req = "write" if rng.rand() < 0.3 else "add"
    for number, error in enumerate(play(case, seed, path, devices, grad_req)):
        assert error < 1e-9, f"{case.trainer}, {devices}, {grad_req}, seed {seed}, {number}"


@pytest.mark.parametrize("seed", range(24))
def test_a_random_history(seed, tmp_path):
    check(seed, tmp_path / "states")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_random_histories(part, tmp_path):
    for seed in range(part, HISTORIES, 10):
        check(1000 + seed, tmp_path / "states")
