"""`gluon-svrg compare`: its trainings against NumPy, and what a user sees."""

import json
import re
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
import oracle
import pytest

from gluon_svrg.commands import cli, compare

for package in ("sklearn", "pandas", "matplotlib", "tqdm"):
    pytest.importorskip(package, reason=f"gluon-svrg compare needs {package}")

SMALL = ["diabetes", "--epochs", 4, "--batch-size", 64, "--learning-rates", "0.05", "--seeds", 1]


def options_of(*arguments):
    options = cli.parser().parse_args(["compare", *map(str, arguments)])
    compare.check(options)
    return options


def results_of(*arguments):
    options = options_of(*arguments)
    return compare.compare(compare.Problem(options), options)


def ends(runs):
    return [run["losses"][-1] for run in runs]


@pytest.fixture
def call(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        try:
            status = cli.main(["compare", *map(str, arguments)])
        except SystemExit as ended:
            status = ended.code
        return status, *capsys.readouterr()

    return run


@pytest.mark.slow
def test_svrg_reaches_what_no_plain_rate_reaches():
    gaps, results = {}, results_of("breast_cancer")
    for name, part in results["methods"].items():
        lows = [min(run["losses"]) for run in part["rates"] + part["seeds"]]
        gaps[name] = min(lows) - results["minimum"]
        assert all(51 <= run["data_passes"][-1] < 52 for run in part["seeds"])
    assert 0 <= gaps["svrg"] < min(gaps["sgd"] / 1000, gaps["sgd-decay"] / 100)


def epochs(name):
    """The minibatches of each epoch, with their rows; the last one has 58 samples."""
    rng = np.random.RandomState(0)
    while True:
        order = rng.permutation(442)
        batches = [*enumerate(order[start : start + 64] for start in range(0, 442, 64))]
        if name in ("saga", "sag"):
            break
        yield batches
    rows = rng.permutation(7)
    while True:
        yield [batches[row] for row in rows]
        rows = rng.randint(0, 7, 7) if name == "sag" else rng.permutation(7)


@pytest.mark.parametrize("name", compare.METHODS)
@pytest.mark.parametrize("plain_epochs", [0, 2])
def test_each_method_against_its_twin(name, plain_epochs):
    options = options_of(*SMALL, "--methods", name, "--plain-epochs", plain_epochs)
    problem = compare.Problem(options)
    (record,) = compare.compare(problem, options)["methods"][name]["seeds"]
    X, y, n, decay = problem.X, problem.y[:, None], 442, 0.01

    def gradient(weights, index):
        wrong = X[index] @ weights[0].T + weights[1] - y[index]
        sums = wrong.T @ X[index], wrong.sum(axis=0)
        return [g + len(index) * decay * w for g, w in zip(sums, weights)], len(index)

    def loss(weights):
        wrong = X @ weights[0].T + weights[1] - y
        return (wrong**2).mean() / 2 + decay / 2 * sum((w**2).sum() for w in weights)

    has_snapshots = name in ("svrg", "alpha-svrg", "sarah")
    kinds = {"sgd": oracle.Method, "sgd-decay": oracle.Method, "alpha-svrg": oracle.SVRG}
    cls = kinds.get(name) or getattr(oracle, name.upper())
    twin, optimizer = cls(gradient, [np.zeros((1, 10)), np.zeros(1)]), oracle.SGD(0.05)
    budget, evaluations, losses, passes = (10 + plain_epochs) * n, 0, [loss(twin.weights)], [0.0]
    first = -plain_epochs if has_snapshots else 0
    for epoch, batches in zip(range(first, 20), epochs(name)):
        if has_snapshots and epoch >= 0 and epoch % 2 == 0:
            twin.refresh([batch for _, batch in batches])
            twin.coefficient = oracle.rounded(0.75 - 0.375 * (epoch // 2) if "-" in name else 1)
            evaluations += n
        for row, batch in batches:
            if evaluations >= budget:
                break
            optimizer.learning_rate = 0.05
            if name == "sgd-decay":
                optimizer.learning_rate = 0.025 * (1 + np.cos(np.pi * evaluations / budget))
            has_two = epoch >= 0 if has_snapshots else name in ("storm", "mars") and evaluations
            evaluations += len(batch) * (2 if has_two else 1)
            twin.step(optimizer, batch, rows=[row])
        losses.append(loss(twin.weights))
        passes.append(evaluations / n)
        if evaluations >= budget:
            break
    np.testing.assert_allclose(record["data_passes"], passes, rtol=1e-14)
    # L2Loss of MXNet 2.0 returns float32, which rounds what STORM and MARS multiply losses by.
    is_rounded = name in ("storm", "mars") and mx.__version__.startswith("2")
    np.testing.assert_allclose(record["losses"], losses, rtol=1e-7 if is_rounded else 1e-10)


def test_adam_and_the_coefficient():
    """Coefficient 0 is the plain optimizer: fewer data passes, the same losses."""
    options = [*SMALL, "--methods", "sgd,svrg", "--coefficient", 0, "--optimizer"]
    sgd, adam = (results_of(*options, name)["methods"] for name in ("sgd", "adam"))
    assert abs(ends(sgd["sgd"]["seeds"])[0] - ends(adam["sgd"]["seeds"])[0]) > 1e-4
    one, other = (adam[name]["seeds"][0] for name in ("sgd", "svrg"))
    assert one["data_passes"][-1] == other["data_passes"][-1] == 1 + 4 + 2
    np.testing.assert_allclose(other["losses"], one["losses"][: len(other["losses"])], rtol=1e-12)


def test_the_best_rate_trains_with_more_seeds():
    results = results_of(*SMALL, "--learning-rates", "0.01,0.1,1", "--seed", 5, "--seeds", 4)
    for name, part in results["methods"].items():
        best = min(part["rates"], key=lambda run: run["losses"][-1])["learning_rate"]
        assert {run["learning_rate"] for run in part["seeds"]} == {best}
        assert {run["seed"] for run in part["seeds"]} == {5, 6, 7, 8}
        assert ends(part["seeds"]) == sorted({*ends(part["seeds"])})
        run = part["seeds"][0]
        chosen = ["--learning-rates", best, "--seed", run["seed"], "--seeds", 1]
        alone = results_of(*SMALL, *chosen, "--methods", name)
        assert alone["methods"][name]["seeds"] == [run]
    header, *rows = [line.split() for line in compare.table(results).splitlines()[:4]]
    assert header[2:6] == ["loss", "gap", "lowest", "highest"] and "seconds" not in header
    for row, part in zip(rows, results["methods"].values()):
        one, _, two, three = np.array(ends(part["seeds"])) - results["minimum"]
        assert float(row[2]) == pytest.approx(two + results["minimum"], rel=1e-5)
        np.testing.assert_allclose([float(word) for word in row[3:6]], [two, one, three], rtol=0.1)


def lowest_loss(X, y, decay, is_class):
    """By Newton's method."""
    X, w = np.c_[X, np.ones(len(X))], np.zeros(X.shape[1] + 1)
    for _ in range(30):
        p = 1 / (1 + np.exp(-X @ w)) if is_class else X @ w
        hessian = (X.T * (p * (1 - p) if is_class else 1)) @ X / len(X) + decay * np.eye(len(w))
        w -= np.linalg.solve(hessian, X.T @ (p - y) / len(X) + decay * w)
    losses = np.logaddexp(0, X @ w) - y * (X @ w) if is_class else (X @ w - y) ** 2 / 2
    return losses.mean() + decay / 2 * w @ w


@pytest.mark.parametrize("decay", [0.0, 1e-4, 0.3])
@pytest.mark.parametrize("name", ["diabetes", "breast_cancer"])
def test_the_minimum(name, decay):
    options = options_of(name, *SMALL[1:], "--weight-decay", decay, "--methods", "sgd")
    problem = compare.Problem(options)
    results = compare.compare(problem, options)
    if name == "breast_cancer" and not decay:
        lowest = min(results["methods"]["sgd"]["seeds"][0]["losses"])
        assert (results["minimum"], results["lowest"]) == (None, lowest)
        assert "gap: the distance to the lowest loss of all runs;" in compare.table(results)
    else:
        expected = lowest_loss(problem.X, problem.y, decay, name == "breast_cancer")
        assert results["minimum"] == results["lowest"] == pytest.approx(expected, rel=1e-10)
    assert "* " not in compare.table(results)  # there is only one rate


def test_measures_of_several_classes():
    """Against MXNet's loss, which 2.0 rounds to float32, and differences of losses."""
    problem = compare.Problem(options_of("digits", "--weight-decay", 0.1))
    assert (problem.X.min(), problem.X.max()) == (0, 1)
    weights = np.random.RandomState(0).randn(10, 65)
    loss, norm, accuracy = problem.measure(weights)
    problem.net.initialize()
    problem.net.weight.set_data(weights[:, :-1])
    problem.net.bias.set_data(weights[:, -1])
    (((X, y), _),) = next(problem.epochs("sgd", 1797, 0))
    assert loss == pytest.approx(float(problem.loss_of(X, y).mean().asnumpy()), rel=1e-6)
    assert accuracy == (problem.net(X).asnumpy().argmax(axis=1) == y.asnumpy()).mean()
    steps = 1e-6 * np.eye(650).reshape(-1, 10, 65)
    slopes = [problem.measure(weights + d)[0] - problem.measure(weights - d)[0] for d in steps]
    assert norm == pytest.approx(np.linalg.norm(slopes) / 2e-6, rel=1e-6)


def test_what_diverges(call):
    options = [*SMALL, "--epochs", 9, "--methods", "svrg,sgd", "--learning-rates"]
    status, printed, log = call(*options, "0.03,300")
    assert status == 0, log
    for part in json.loads(Path("results/results.json").read_text())["methods"].values():
        good, bad = part["rates"]
        assert ends([bad]) == [compare.INFINITE] and good["losses"][-1] < good["losses"][0]
        assert len(bad["losses"]) == len(bad["data_passes"]) < len(good["losses"])
    assert Path("results/curves.png").read_bytes()[:4] == b"\x89PNG"
    assert re.search(r"^svrg +0\.03\* ", printed, re.M)  # at an end of the user's rates
    status, printed, _ = call(*options, "300")
    assert (status, printed.count(" diverged ")) == (0, 2)


def scaled(*columns):
    values = np.array(columns, dtype="float64").T
    return (values - values.mean(axis=0)) / values.std(axis=0)


ROWS = """\
,the size,who,color,sold,when,empty,day,price
0,1.5,Ann,red,True,2020,,2020-01-01,10.5
1,,Bob, blue,False,?,,2020-01-02,20
2,2.5,Cid,red,True,2021,NA,2020-01-01,30
3,7,Dan,,False,2022,,2020-01-01,
4,5,Eve,blue,False,2025,,2020-01-02,40.5
5,-3,Flo,,True,2020,,2020-01-02,50
6,4,Hal,red,True,2024,,2020-01-01,45
"""


@pytest.mark.parametrize("separator", ",;\t|")
def test_a_file(separator, tmp_path, capsys):
    path = tmp_path / "own.csv"
    path.write_text("\n" + ROWS.replace(",", separator), encoding="utf-8-sig")
    problem = compare.Problem(options_of(path, "--target", "price"))
    np.testing.assert_allclose(problem.y, scaled([10.5, 20, 30, 40.5, 50, 45])[:, 0])
    expected = scaled(
        [1.5, 2, 2.5, 5, -3, 4],
        *([0, 1, 0, 1, 0, 0], [1, 0, 1, 0, 0, 1], [0, 0, 0, 0, 1, 0]),  # blue, red, missing
        *([0, 1, 0, 1, 0, 0], [1, 0, 1, 0, 1, 1]),  # not sold, sold
        [2020, 2022, 2021, 2025, 2020, 2024],
        *([1, 0, 1, 0, 0, 1], [0, 1, 0, 1, 1, 0]),  # both days
    )
    np.testing.assert_allclose(problem.X, expected, atol=1e-12)
    assert capsys.readouterr().err == (
        f"{path}: 6 of 7 rows, 9 inputs, no classes, 3 missing cells, columns left out: "
        "['Unnamed: 0', 'empty', 'who']\n"
    )


def test_classes_and_numbers(tmp_path):
    for cells, classes in [
        (["no", "yes", "no", "yes", "no"], [0, 1, 0, 1, 0]),
        ([7, 3, 7, 3, 9, 9], [1, 0, 1, 0, 2, 2]),
        ([True, False, True, False], [1, 0, 1, 0]),
        ([1, 2, 3, 4, 5], None),
        ([1.5, 2] * 3, None),
        ([*range(21)] * 2, None),
    ]:
        path = tmp_path / "own.csv"
        path.write_text("x,y\n" + "".join(f"{n},{cell}\n" for n, cell in enumerate(cells)))
        problem = compare.Problem(options_of(path, "--target", "y"))
        assert problem.classes == (len(set(cells)) if classes else 0)
        np.testing.assert_allclose(problem.y, classes or scaled(cells)[:, 0])


BAD_FILES = {
    "no column": ("a,b\n1,2\n", r"own.csv has no column 'y': choose a --target from 'a', 'b'$"),
    "constant": ("a,y\n1,3\n2,3\n3,\n", r"target 'y' that nothing can learn: it is constant$"),
    "names": ("a,y\n1,u\n2,v\n3,w\n", r"target 'y' .* it is text with 3 values in 3 rows$"),
    "empty": ("", r"cannot read own.csv as UTF-8 text: Could not determine delimiter$"),
    "infinity": ("a,y\n1,0\ninf,1\n3,0\n4,1\n", r"contains infinity or a value too large"),
    "latin-1": ("a,y\né,0\ne,1\n", r"cannot read own.csv as UTF-8 text: .* byte 0xe9"),
}
BAD_CALLS = {
    "iris": r"cannot read iris as UTF-8 text: .*No such file",
    "digits --methods sgd,SGD": r"--methods: choose each once from sgd, .*, not 'sgd'$",
    "digits --learning-rates 0,1": r"--learning-rates must be positive, as in 0.01,0.1,1$",
    "diabetes --output own.csv": r"File exists: 'own.csv'$",
    "": r"the following arguments are required: DATA$",
}


@pytest.mark.parametrize("name", [*BAD_FILES, *BAD_CALLS])
def test_mistakes(name, call):
    content, message = BAD_FILES.get(name, ("", BAD_CALLS.get(name)))
    Path("own.csv").write_text(content, encoding="latin-1")
    status, printed, log = call(*("own.csv --target y" if name in BAD_FILES else name).split())
    (line,) = re.findall(r"^gluon-svrg compare: error: (.*)", log, re.M)
    assert re.search(message, line), line
    assert (status, printed) == (2, "") and "Traceback" not in log
    assert [*Path().iterdir()] == [Path("own.csv")]


def test_a_package_that_is_not_installed(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)  # so `import` finds none
    hint = "pip install '.[compare]' in a clone"
    line = f"gluon-svrg compare: error: pandas is not installed: {hint}\n"
    assert call("diabetes") == (2, "", line)


def test_the_files_and_the_lines(call):
    rates = [*SMALL, "--learning-rates", "0.1,1", "--output", "deep/er"]
    status, printed, log = call(*rates, "--methods", ",".join(compare.METHODS))
    assert status == 0, log
    saved = json.loads(Path("deep/er/results.json").read_text())
    assert [*saved["methods"]] == [*compare.METHODS]
    assert Path("deep/er/curves.png").read_bytes()[:4] == b"\x89PNG"
    assert [line.split()[0] for line in printed.splitlines()[1:10]] == [*compare.METHODS]
    assert printed.endswith("written: deep/er/curves.png, deep/er/results.json\n")
    for name, part in saved["methods"].items():  # a line for each, where stderr is no terminal
        rate, loss = part["seeds"][0]["learning_rate"], ends(part["seeds"])[0]
        assert f"{name}: best rate {rate:g}, loss {loss:.6g}\n" in log
    assert len({look[1:] for look in compare.METHODS.values()}) == 9
