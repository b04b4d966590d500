"""What the benchmarks rest on: problems, references, trainers, and counts of what is exchanged."""

import itertools
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from cluster import run
from mxnet import autograd

from benchmarks import (
    convergence,
    distributed,
    methods,
    network,
    pays,
    problems,
    record,
    start,
    summary,
)

PASSES = {1e-3: 9, 1e-6: 15, 1e-9: 24}  # breast_cancer, batch 1, rate 1 / (3 L_max)
OUTER_ITERATION = 3  # data passes: a full gradient, and two gradients for each of n steps


@pytest.mark.parametrize("name", [*problems.NAMES, problems.RIDGE])
def test_minimum(name):
    problem = problems.problem(name)
    assert np.linalg.norm(problem.gradient(problem.solution)) / problem.n < 1e-14
    assert np.linalg.eigvalsh(problem.hessian(problem.solution))[0] > 0
    nearby = problem.solution + 1e-3 * np.random.standard_normal(problem.shape)
    assert problem.gap(problem.solution) == 0 < problem.gap(nearby)


@pytest.mark.parametrize("name", [*problems.NAMES, problems.RIDGE])
def test_gradient(name):
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

    make = mx.np.array if mx.util.is_np_array() else mx.nd.array
    net = problem.network()
    net.weight.set_data(make(weight, dtype="float64"))
    X, y = problem.arrays()
    with autograd.record():
        loss = net(make(X[index], dtype="float64"), make(y[index], dtype="float64"))
    loss.backward()
    assert loss.size == len(index)
    np.testing.assert_allclose(net.weight.grad().asnumpy(), both[0], rtol=1e-9, atol=1e-12)


def test_hessian():
    problem = problems.problem("digits")
    weight = 0.1 * np.random.standard_normal(problem.shape)
    direction = np.random.standard_normal(problem.shape)
    h = 1e-5
    ends = [problem.gradient(weight + sign * h * direction) for sign in (1, -1)]
    expected = (ends[0] - ends[1]) / (2 * h * problem.n)
    found = (problem.hessian(weight) @ direction.ravel()).reshape(problem.shape)
    np.testing.assert_allclose(found, expected, atol=1e-8)


def test_passes_of_the_reference_and_of_the_trainer():
    problem = problems.problem("breast_cancer")
    rate = 1 / (3 * problem.smoothness)
    reference = methods.Reference(problem, rate, 1)
    trained = methods.Trained(problem, methods.Method("SVRG"), rate, 1)
    found = {"reference": {}, "trainer": {}}
    both = [methods.drive(solver, "SVRG", seed=1) for solver in (reference, trained)]
    for passes, counted in zip(*both):
        assert passes == counted
        for name, solver in (("reference", reference), ("trainer", trained)):
            for level in PASSES:
                if problem.gap(solver.weights) <= level:
                    found[name].setdefault(level, passes)
        if passes >= 27:
            break
    assert found["reference"] == PASSES
    for level, expected in PASSES.items():
        assert abs(found["trainer"][level] - expected) <= OUTER_ITERATION
    np.testing.assert_allclose(trained.weights, reference.weights, rtol=1e-10)


@pytest.mark.parametrize(
    "kind",
    ["SVRG", "loopless", "stored", "BB", "SAGA", "SAG", "SARAH", "SGD", "decaying SGD"],
)
def test_the_trainer_follows_the_reference(kind):
    problem = problems.problem("breast_cancer")
    solvers = (
        methods.Reference(problem, 0.7, 32, kind),
        methods.Trained(problem, methods.Method(kind), 0.7, 32),
    )
    for epoch, (passes, counted) in enumerate(zip(*(methods.drive(s, kind, 3) for s in solvers))):
        # After each refresh, stored gradients are compared with some that are computed again.
        checks = 3 * 32 / problem.n * (epoch + 1) if kind == "stored" else 0
        assert passes <= counted <= passes + checks
        if epoch == 3:
            break
    np.testing.assert_allclose(solvers[1].weights, solvers[0].weights, rtol=1e-10)


def passes(solver, kind, seed=1, most=60, levels=(1e-3, 1e-6, 1e-9)):
    """The data passes to each level."""
    found = {}
    for done in methods.drive(solver, kind, seed):
        gap = solver.problem.gap(solver.weights.reshape(solver.problem.shape))
        for level in levels:
            if gap <= level:
                found.setdefault(level, done)
        if len(found) == len(levels) or done > most:
            return list(found.values())


@pytest.mark.convergence
@pytest.mark.parametrize(
    ("kind", "name", "rate", "expected"),
    [
        ("SAGA", "breast_cancer", 1.0, [3, 6, 10]),
        ("SAGA", "Gaussian", 0.5, [3, 6, 10]),
        ("SAGA", "digits", 8.0, [11, 36, 53]),
        ("SAG", "breast_cancer", 0.25, [5, 12, 22]),
        ("SAG", "Gaussian", 0.125, [7, 14, 21]),
        ("SAG", "digits", 4.0, [13, 31, 53]),
    ],
)
def test_tables_at_batch_size_1(kind, name, rate, expected):
    """copt's SAGA needs 3, 6 and 9 and 3, 7 and 10 on the first two: the first pass trains.

    The rates are the best of the grid, in units of ``1 / (3 L_max)``. On digits, the trainer goes
    the first part of the way, with the same weights.
    """
    problem = problems.problem(name)
    rate = rate / (3 * problem.smoothness)
    twin = methods.Reference(problem, rate, 1, kind)
    assert passes(twin, kind) == expected
    levels = (1e-3,) if name == "digits" else (1e-3, 1e-6, 1e-9)
    solvers = (
        methods.Reference(problem, rate, 1, kind),
        methods.Trained(problem, methods.Method(kind), rate, 1),
    )
    for solver in solvers:
        assert passes(solver, kind, levels=levels) == expected[: len(levels)]
    np.testing.assert_allclose(solvers[1].weights, solvers[0].weights, rtol=1e-9, atol=1e-12)


def test_sag_wants_minibatches_that_are_drawn():
    """At its best rate for draws, each minibatch once an epoch diverges; SAGA does not."""
    problem = problems.problem("digits")
    rate = 4 / (3 * problem.smoothness)
    gaps = {}
    for kind, order in (("SAG", "SAG"), ("SAG", "SAGA"), ("SAGA", "SAGA")):
        twin = methods.Reference(problem, rate, 1, kind)
        with np.errstate(all="ignore"):
            list(itertools.islice(methods.drive(twin, order, 1), 13))
        gaps[kind, order] = problem.gap(twin.weights)
    assert max(gaps["SAG", "SAG"], gaps["SAGA", "SAGA"]) < 2e-3
    assert gaps["SAG", "SAGA"] > 1


@pytest.mark.convergence
@pytest.mark.parametrize(
    ("name", "size", "ratio"),
    [("breast_cancer", 10, 2), ("Gaussian", 10, 2), ("diabetes", 1, 2), ("diabetes", 10, 3)],
)
def test_barzilai_borwein_beside_the_best_rate(name, size, ratio):
    """How many times the passes of the best constant rate it needs at most."""
    problem = problems.problem(name)
    _, best = convergence._tuned(problem, "SVRG", size, 60)
    assert convergence._grid(problem)[0] < best < convergence._grid(problem)[-1]
    start = 1 / (3 * problem.smoothness)
    for seed in (1, 2, 3):
        tuned, own = (
            passes(methods.Reference(problem, rate, size, kind), kind, seed, 150, levels=[1e-9])
            for rate, kind in ((best, "SVRG"), (start, "BB"))
        )
        assert own[0] < ratio * tuned[0]
    trained = methods.Trained(problem, methods.Method("BB"), start, size)
    assert passes(trained, "BB", 3, 150, levels=[1e-9]) == pytest.approx(own, abs=0.3)


@pytest.mark.parametrize("plain_epochs", [0, 1, 3])
def test_a_plain_start(plain_epochs):
    """The trainer and NumPy see the same; SVRG begins after the plain epochs."""
    problem = problems.problem("breast_cancer")
    solvers = (
        methods.Reference(problem, 0.7, 32),
        methods.Trained(problem, methods.Method("SVRG"), 0.7, 32),
    )
    ours, theirs = (list(start.train(solver, 5, plain_epochs, 8)) for solver in solvers)
    np.testing.assert_allclose(theirs, ours, rtol=1e-9)
    np.testing.assert_allclose(solvers[1].weights, solvers[0].weights, rtol=1e-10)
    done = [passes for passes, _ in ours]
    ends = np.cumsum([*[1] * plain_epochs, *[3, 2] * 3])  # of epochs
    assert {round(end, 9) for end in ends if end <= 8} <= {round(value, 9) for value in done}
    steps = np.diff([0.0, *done])
    assert max(steps[:plain_epochs], default=0) < 0.2 < 1 < max(steps)  # no full gradient, then one
    assert 8 <= done[-1] < 8.5


def test_the_rate_of_a_search_is_no_end():
    losses = {-3: 0.5, -2: 0.4, -1: 0.1, 0: 0.3, 1: np.inf, 2: np.inf}
    for guess in (-2, -1, 0, 1):
        assert pays._lowest(losses.__getitem__, guess) == (-1, 0.1)


def test_many_rates_at_once():
    problem = problems.problem("breast_cancer")
    rates = np.array([0.1, 1.0])
    together = methods.Reference(problem, rates, 32)
    next(methods.drive(together, "SVRG", 0))
    for number, rate in enumerate(rates):
        alone = methods.Reference(problem, rate, 32)
        next(methods.drive(alone, "SVRG", 0))
        np.testing.assert_allclose(together.weights[number], alone.weights, rtol=1e-12)


def test_a_run_is_divided_by_the_columns_that_another_has_too():
    ours = [{"model": "MLP", "step": 6.0, "pass": 8.0}, {"model": "other", "step": 1.0}]
    theirs = [{"model": "MLP", "step": 3.0, "baseline": 5.0, "pass": 2.0}]
    assert record.divide(ours, theirs) == [{"model": "MLP", "step": 2.0, "pass": 4.0}]
    assert record.as_text(record.divide(ours[1:], theirs)) == "(no row)"


@pytest.mark.parametrize(
    ("name", "versions"),
    [
        ("convergence", ["1.9.1"]),
        ("overhead", ["1.9.1", "2.0.0b1"]),
        ("family", ["1.9.1", "2.0.0b1"]),
        ("forms", ["1.9.1", "2.0.0b1"]),
    ],
)
def test_the_tables_are_those_of_the_saved_runs(name, versions):
    root = Path(__file__).parent.parent / "benchmarks"
    paths = [root / "results" / f"{name}-mxnet-{version}.json" for version in versions]
    document = (root / "README.md").read_text()
    for table in summary.tables(*(json.loads(path.read_text()) for path in paths)):
        assert table in document


@pytest.mark.parametrize(
    ("benchmark", "page"),
    [
        (start, "benchmarks/README.md"),
        (start, "notebooks/02_linear_convergence.ipynb"),
        (pays, "notebooks/guide/variance.md"),
    ],
)
def test_the_table_is_that_of_the_saved_run(benchmark, page):
    root = Path(__file__).parent.parent
    name = benchmark.__name__.rpartition(".")[2]
    run = json.loads((root / f"benchmarks/results/{name}-mxnet-1.9.1.json").read_text())
    table = record.as_text(benchmark.table(run["records"]))
    text = (root / page).read_text()
    if page.endswith("ipynb"):
        text = "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    assert table in text


def test_the_numbers_of_when_it_pays_are_those_of_the_saved_run():
    root = Path(__file__).parent.parent
    path = root / "benchmarks" / "results" / "pays-mxnet-1.9.1.json"
    records = json.loads(path.read_text())["records"]
    page = (root / "notebooks" / "guide" / "variance.md").read_text()
    assert record.as_text(pays.by_ratio(records)) in page
    above = [entry["gain"] > 1 for entry in records if entry["ratio"] >= 0.3]
    below = [entry["gain"] > 1 for entry in records if entry["ratio"] < 0.1]
    plain = f"won {len(above) - sum(above)} of {len(above)} times"
    svrg = f"{sum(below)} of {len(below)} times"
    for text in (page, (root / "README.md").read_text()):
        assert plain in text
        assert svrg in text
    tuning = (root / "notebooks" / "guide" / "tuning.md").read_text()
    assert f"in {len(above) - sum(above)} of {len(above)} cases" in tuning
    won = sum(entry["gain"] > 1 for entry in records)
    assert f"Plain SGD won {len(records) - won} of the {len(records)} times" in page
    assert min(entry["noise"] for entry in records) > 3


def test_the_tables_of_exchanges_are_those_of_the_saved_run():
    root = Path(__file__).parent.parent / "benchmarks"
    run = json.loads((root / "results/distributed-mxnet-2.0.0b1.json").read_text())
    for table in (distributed.by_workers, distributed.model):
        assert record.as_text(table(run["records"])) in (root / "README.md").read_text()


@pytest.mark.jobs
@pytest.mark.xdist_group("clusters")
@pytest.mark.skipif(
    find_spec("horovod") is None, reason="Horovod is not installed: .ci/horovod builds it"
)
def test_what_is_exchanged(tmp_path, marker):
    """Between two workers of Horovod twice the parameters, with a server four times."""
    if (problem := network.missing()) is not None:
        pytest.skip(problem)
    command = [sys.executable, "-m", "benchmarks", "distributed", "--quick", "--output", tmp_path]
    root = Path(__file__).parents[1]
    status, output = run(command, 300, {"PYTHONPATH": str(root)})
    assert status == 0, output
    assert "64 workers" in output
    (path,) = tmp_path.glob("distributed-*.json")
    records = json.loads(path.read_text())["records"]
    found = {(entry["engine"], entry["trainer"]): entry for entry in records}
    assert ("horovod", "hvd.DistributedTrainer") in found
    assert len(found) == len(records) == 4
    for (engine, trainer), entry in found.items():
        times = 2 if engine == "horovod" else 4
        for phase in ("step", "refresh") if trainer == "SVRGTrainer" else ("step",):
            (sent,), (seconds,) = entry[phase]["bytes"], entry[phase]["seconds"]
            # with headers; and Horovod's workers talk all the time
            assert times <= sent / entry["parameters"] < times + 0.2, (engine, trainer, phase)
            assert seconds > 0
