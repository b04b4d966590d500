"""What many workers must find: what one process finds over the union of their data."""

from functools import lru_cache

import mxnet as mx
import numpy as np
import oracle
from problems import values
from worker import PROBLEM, Tied

from gluon_svrg import SVRGTrainer

COUNT = len(PROBLEM.initial)
#: Of all workers: two full passes, with what it takes to trust their gradients, and four epochs of
#: two gradients a step.
SIZES = list(map(len, np.array_split(np.arange(len(PROBLEM.X)), 4)))
EVALUATIONS = 2 * 4 * len(PROBLEM.X) + 2 * sum(SIZES)


def weights(found, name="w"):
    return [found[f"{name}{i}"] for i in range(COUNT)]


def reference(epochs=4, rates=(), initial=PROBLEM.initial):
    """SVRG with SGD and momentum, in NumPy, on all data."""
    svrg, optimizer = oracle.SVRG(PROBLEM.gradient, initial), oracle.SGD(0.1, 0.9)
    batches = np.array_split(np.arange(len(PROBLEM.X)), 4)
    for epoch in range(epochs):
        if epoch < len(rates):
            optimizer.learning_rate = np.float32(rates[epoch])
        if epoch % 2 == 0:
            svrg.refresh(batches)
        for batch in batches:
            optimizer.step(svrg.weights, svrg.estimate(batch), len(batch))
    return svrg


def assert_identical(found):
    """All ranks end bit-identical."""
    for other in found[1:]:
        for name in found[0]:
            if name != "evaluations" and name in other:
                np.testing.assert_array_equal(found[0][name], other[name])


def run_alone(optimizer):
    """The same training in one process."""
    net = PROBLEM.network()
    trainer = SVRGTrainer(net.collect_params(), optimizer, {"learning_rate": 0.1})
    loss_of = PROBLEM.closure(net)
    batches = np.array_split(np.arange(len(PROBLEM.X)), 4)
    for epoch in range(4):
        if epoch % 2 == 0:
            trainer.update_full_grads(loss_of, batches)
        for batch in batches:
            trainer.step(len(batch), closure=lambda: loss_of(batch))
    mx.nd.waitall()
    return values(net)


def assert_close(found, expected, tolerance):
    assert set(found) == set(expected)
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], atol=tolerance, err_msg=name)


@lru_cache(maxsize=None)
def tied_alone():
    """Tied layers in one process, of which each minibatch holds those of both workers."""
    problem = Tied([mx.cpu()])
    trainer = SVRGTrainer(
        problem.net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}
    )
    problem.parameters[-1].lr_mult = 0.5
    parts = [np.array_split(np.arange(24)[rank::2], 3) for rank in range(2)]
    for epoch in range(4):
        if epoch % 2 == 0:
            trainer.update_full_grads(problem.loss_of, [np.arange(24)])
        for pair in zip(*parts):
            trainer.step(8, closure=lambda: problem.loss_of(np.concatenate(pair)))
    return {f"w{i}": p.list_data()[0].asnumpy() for i, p in enumerate(problem.parameters)}
