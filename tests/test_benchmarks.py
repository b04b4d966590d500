"""What the benchmarks rest on: problems, references, trainers, searches and tables."""

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from mxnet import autograd

pytest.importorskip("sklearn", reason="the benchmarks need scikit-learn")
pytest.importorskip("matplotlib", reason="the benchmarks need matplotlib")
pytest.importorskip("tqdm", reason="the benchmarks need tqdm")

sys.path.append(str(Path(__file__).parent.parent))  # after the package, which may be installed
from benchmarks import methods, problems, tuning
from benchmarks.networks import array

KINDS = ["SVRG", "loopless", "stored", "BB", "SAGA", "SAG", "SARAH", "SGD", "decaying SGD"]


@pytest.mark.parametrize("name", problems.NAMES)
def test_minimum(name):
    """By strong convexity, no loss is lower by more than |gradient|^2 / (2 l2)."""
    problem = problems.problem(name)
    gradient = problem.gradient(problem.solution) / problem.n
    assert (gradient**2).sum() / (2 * problem.l2) < 1e-14
    nearby = problem.solution + 1e-3 * np.random.standard_normal(problem.shape)
    assert problem.gap(problem.solution) == 0 < problem.gap(nearby)


@pytest.mark.parametrize("name", problems.NAMES)
def test_gradient(name):
    """Of NumPy, against differences of the loss, and of the network."""
    problem = problems.problem(name)
    weight = 0.1 * np.random.standard_normal(problem.shape)
    direction = np.random.standard_normal(problem.shape)
    h = 1e-5
    difference = problem.loss(weight + h * direction) - problem.loss(weight - h * direction)
    slope = (problem.gradient(weight) * direction).sum() / problem.n
    assert difference / (2 * h) == pytest.approx(slope, rel=1e-7)

    index = np.array([3, 1, 4, 1, 5])
    both = problem.gradient(np.stack([weight, direction]), index)
    np.testing.assert_allclose(both[0], problem.gradient(weight, index), rtol=1e-12)
    net = problems.PenalizedLoss(problem)
    net.weight.set_data(array(weight, "float64"))
    with autograd.record():
        loss = net(array(problem.X[index], "float64"), array(problem.y[index], "float64"))
    loss.backward()
    assert loss.shape == index.shape
    np.testing.assert_allclose(net.weight.grad().asnumpy(), both[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_trainer_follows_the_reference(kind):
    problem = problems.problem("breast_cancer")
    solvers = [cls(problem, 0.7, 32, kind) for cls in (methods.Reference, methods.Trained)]
    both = zip(*(methods.drive(solver, kind, seed=3) for solver in solvers))
    for passes, counted in itertools.islice(both, 4):
        assert passes == counted
    np.testing.assert_allclose(solvers[1].weights, solvers[0].weights, rtol=1e-10)


@pytest.mark.slow
def test_sag_wants_minibatches_that_are_drawn():
    """At its best rate for draws, each minibatch once an epoch diverges; SAGA does not."""
    problem, gaps = problems.problem("digits"), {}
    for kind, order in (("SAG", "SAG"), ("SAG", "SAGA"), ("SAGA", "SAGA")):
        twin = methods.Reference(problem, 4 / (3 * problem.smoothness), 1, kind)
        with np.errstate(all="ignore"):
            list(itertools.islice(methods.drive(twin, order, 1), 13))
        gaps[kind, order] = problem.gap(twin.weights)
    assert max(gaps["SAG", "SAG"], gaps["SAGA", "SAGA"]) < 2e-3
    assert gaps["SAG", "SAGA"] > 1


@pytest.mark.parametrize("guess", [-5, -2, 0, 1])
def test_the_rate_of_a_search_is_never_at_an_edge(guess):
    losses = {**dict(zip(range(-6, 1), [0.9, 0.8, 0.7, 0.5, 0.4, 0.1, 0.3])), 1: np.inf, 2: np.inf}
    exponents = (guess - 1, guess, guess + 1)
    assert tuning.best(lambda ks: [losses[k] for k in ks], exponents) == (-1, 0.1)
