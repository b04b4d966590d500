"""Whole trajectories against the NumPy oracle."""

import numpy as np
import oracle
import pytest
from problems import Dense, distance, values

from gluon_svrg import SVRGTrainer

PROBLEMS = {
    "linear regression": (Dense("regression", seed=1), 0.05),
    "softmax regression": (Dense("classification", seed=2), 0.01),
    "MLP": (Dense("classification", hidden=(6, 5), seed=3), 0.01),
}
EPOCHS, REFRESH_EVERY, BATCH_SIZE = 24, 6, 5  # 4 refreshes, 120 inner steps, 23 = 4 * 5 + 3


@pytest.mark.parametrize("coefficient", [1.0, 0.7])
@pytest.mark.parametrize("hybridize", [None, {}, {"static_alloc": True, "static_shape": True}])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-5)])
@pytest.mark.parametrize("name", PROBLEMS)
def test_sgd_with_momentum_and_weight_decay(name, dtype, tolerance, hybridize, coefficient):
    problem, rate = PROBLEMS[name]
    hyperparameters = {"learning_rate": rate, "momentum": 0.9, "wd": 0.01}
    net = problem.network(dtype, hybridize=hybridize)
    loss_of = problem.closure(net, dtype)
    trainer = SVRGTrainer(net.collect_params(), "sgd", hyperparameters, coefficient=coefficient)
    reference = oracle.SVRG(problem.gradient, problem.initial, coefficient)
    optimizer = oracle.SGD(**hyperparameters)
    rng = np.random.RandomState(0)

    for epoch in range(EPOCHS):
        if epoch % REFRESH_EVERY == 0:
            trainer.update_full_grads(loss_of, problem.batches(7))
            reference.refresh(problem.batches(7))
        for index in problem.batches(BATCH_SIZE, rng.permutation(len(problem.X))):
            trainer.step(len(index), closure=lambda: loss_of(index))
            optimizer.step(reference.weights, reference.estimate(index), len(index))

    assert trainer.num_snapshots == 4
    assert distance(values(net), reference.weights) < tolerance
    assert distance(values(net), problem.initial) > 0.1  # it did move
