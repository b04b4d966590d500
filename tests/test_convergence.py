"""Linear convergence on a strongly convex problem, which plain SGD does not have."""

from argparse import Namespace

import numpy as np
import pytest
from kit import table
from plays import WITH_STORED, Play
from problems import Dense, values

from gluon_svrg.commands.compare import Problem
from gluon_svrg.compare import compare

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
    play.twin = case.twin(PROBLEM.gradient, PROBLEM.initial, **own)
    play.shares = [PROBLEM.batches(1)]
    rng, first = np.random.RandomState(0), norm(PROBLEM.initial)
    for epoch in range(40):
        if case.needs_refresh and epoch % 2 == 0:
            play.refresh()
        play.epoch(rng.permutation(len(PROBLEM.X)))
        assert play.distance() < 1e-9
        if norm(values(play.net)) < 1e-9 * first:
            break
    assert norm(values(play.net)) < 1e-9 * first


def least_passes(problem, minimum, method, passes, **search):
    """To a gap of 1e-6: the fewest of all rates and momenta, the median of the seeds."""
    data = problem.X, problem.y
    search.update(l2=problem.decay, methods=[method], batch_size=16, progress=False)
    found = compare(problem.new_net, problem.loss_of, data, passes=passes, **search).runs
    first = found["loss"].iloc[0] - minimum
    arrived = found[found["loss"] - minimum <= 1e-6 * first]
    return arrived.groupby("seed")["data_passes"].min().median()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:An epoch has")  # of the 178 rows of wine
@table("name, l2, passes", ("digits", 0.01, 30), ("diabetes", 1 / 442, 60), ("wine", 0.01, 60))
def test_nothing_to_search(name, l2, passes):
    """A grid of rates and momenta finds little better than what a preconditioner sets."""
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    problem = Problem(Namespace(data=name, target=None, weight_decay=l2, l1=0.0))
    minimum, _ = problem.minimum()
    found = least_passes(problem, minimum, "svrg-nystrom", passes)
    grid = {"nag": [{"momentum": momentum} for momentum in (0, 0.9, 0.97, 0.99)]}
    rates = [0.01, 0.03, 0.1, 0.3, 1, 3]
    search = {"seeds": 1, "learning_rates": rates, "optimizer_params": grid}
    best = least_passes(problem, minimum, "svrg+nag", passes, **search)
    assert found <= 1.5 * best, (found, best)
