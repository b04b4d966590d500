"""Mistakes that a reading of the package has found."""

import doctest
from functools import partial

import mxnet as mx
import numpy as np
import pytest
from problems import Dense

import gluon_svrg.estimator
from gluon_svrg import SAGATrainer
from gluon_svrg.variance import variance


def test_the_examples_of_the_estimator_run():
    found = doctest.testmod(gluon_svrg.estimator)
    assert found.attempted >= 17
    assert found.failed == 0


def test_the_variance_of_a_table_with_empty_rows():
    """All measures are those of ``v`` and of the control variate ``g - v``."""
    problem = Dense("regression", seed=3, samples=23)
    net, batches = problem.network(), problem.batches(5)
    loss_of = problem.closure(net)
    trainer = SAGATrainer(net.collect_params(), "sgd", {"learning_rate": 0.05})
    for number in (1, 2, 4):
        closure = partial(loss_of, batches[number])
        trainer.step(len(batches[number]), closure=closure, batch_index=number)
    plain, estimates = [], []
    for number, index in enumerate(batches):
        with mx.autograd.record():
            loss = loss_of(index)
        loss.backward()
        plain.append(gradient(net))
        trainer.correct_grads(partial(loss_of, index), batch_index=number)
        estimates.append(gradient(net))
    counts = np.array(list(map(len, batches)))
    g, v = (np.array(rows) / counts[:, None] for rows in (plain, estimates))
    means = [np.average(x, axis=0, weights=counts) for x in (g, v)]
    g, v = g - means[0], v - means[1]
    plain, estimate, both = (
        np.average(np.sum(x * y, axis=1), weights=counts) for x, y in ((g, g), (v, v), (g, v))
    )
    found = variance(trainer, loss_of, batches)
    assert found.estimate == pytest.approx(estimate, rel=1e-9)
    assert found.bias == pytest.approx(np.linalg.norm(means[0] - means[1]), rel=1e-9)
    best = (plain - both) / (plain - 2 * both + estimate)
    assert found.best_coefficient == pytest.approx(best, rel=1e-9)


def gradient(net):
    grads = [p.grad().asnumpy().ravel() for p in net.collect_params().values()]
    return np.concatenate(grads)
