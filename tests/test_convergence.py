"""Linear convergence on a strongly convex problem, which plain SGD does not have."""

import numpy as np
import pytest
from plays import WITH_STORED, Play
from problems import Dense, values

RIDGE = 0.125  # exact in float32, as MXNet takes it
PROBLEM = Dense("classification", samples=32, features=10, seed=48)
PROBLEM.X /= np.linalg.norm(PROBLEM.X, axis=1, keepdims=True)


def norm(weights):
    """Of the gradient, with a penalty on all weights: zero at the optimum."""
    grads, count = PROBLEM.gradient(weights, np.arange(len(PROBLEM.X)))
    return np.sqrt(sum(np.sum((g / count + RIDGE * w) ** 2) for g, w in zip(grads, weights)))


@pytest.mark.parametrize("name", ["SVRG", "stored", "SAGA", "SAG"])
def test_passes_to_an_accuracy(name):
    """Batch size 1: the gradient shrinks to 1e-9 of what it was, as in NumPy."""
    case = WITH_STORED[name]
    largest = 0.5 * (1 + 1) + RIDGE  # the curvature, with the bias
    settings = {"learning_rate": 1 / (3 * largest), "wd": RIDGE}
    own = {"coefficient": 1.0} if case.needs_refresh else {}
    play = Play(case, PROBLEM, settings=settings, hybridize={"static_alloc": True}, **own)
    play.twin, play.shares = (
        case.twin(PROBLEM.gradient, PROBLEM.initial, **own),
        [PROBLEM.batches(1)],
    )
    rng, first = np.random.RandomState(0), norm(PROBLEM.initial)
    for epoch in range(40):
        if case.needs_refresh and epoch % 2 == 0:
            play.refresh()
        play.epoch(rng.permutation(len(PROBLEM.X)))
        assert play.distance() < 1e-9
        if norm(values(play.net)) < 1e-9 * first:
            break
    assert norm(values(play.net)) < 1e-9 * first
