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
from benchmarks import convergence, documents, methods, problems, record, tuning
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


def test_many_rates_at_once():
    problem, rates = problems.problem("digits"), [0.1, 1.0]
    solvers = [methods.Reference(problem, r, 32, "SAGA") for r in (np.array(rates), *rates)]
    for solver in solvers:
        next(methods.drive(solver, "SAGA", 0))
    for alone, together in zip(solvers[1:], solvers[0].weights):
        np.testing.assert_allclose(together, alone.weights, rtol=1e-12)


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


def test_documents_get_the_tables_of_saved_records(tmp_path):
    entry = {"problem": "digits", "batch_size": 1, "method": "SAGATrainer", "rate": "1"}
    points = [[1.0, 0.5, 1e-2], [3.0, 2.5, 1e-4]], [[1.0, 0.5, 1e-1], [5.0, 0.1, 1e-9]]
    records = [{**entry, "seed": s, "passes_seconds_gap": p} for s, p in enumerate(points)]
    others = [{**each, "method": "sklearn SAG"} for each in records]
    path = record.save("convergence", records + others, False, tmp_path)
    (tmp_path / "README.md").write_text("<!-- convergence 1 --><!-- /convergence 1 --> and more")
    documents.write(tmp_path, {"convergence": convergence}, tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "| SAGATrainer |  |  |  |  | 4/-/- | - |" in text
    assert text.endswith("|\n<!-- /convergence 1 --> and more")
    path.write_text(path.read_text().replace('"quick": false', '"quick": true'))
    with pytest.raises(ValueError, match="whose figures mean nothing"):
        documents.write(tmp_path, {"convergence": convergence}, tmp_path)
