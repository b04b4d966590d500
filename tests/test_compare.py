"""`gluon-svrg compare`, as a user runs it: by its arguments."""

import io
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import mxnet as mx
import numpy as np
import oracle
import pytest
import sklearn.datasets

from gluon_svrg.commands import cli, datasets, plot, report, settings
from gluon_svrg.commands.compare import compare, next_rates
from gluon_svrg.commands.palette import STYLES
from gluon_svrg.commands.settings import LADDER, LEARNING_RATES, METHODS, Settings
from gluon_svrg.commands.training import Run

QUICK = ["--epochs", "2", "--batch-size", "64", "--seeds", "1"]
TWO_RATES = ["--learning-rates", "0.03,0.1"]


def run_alone(*arguments, folder):
    """The command in a process of its own, as a user runs it."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "gluon_svrg", "compare", *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def run(*arguments, folder):
    """The command in this process, which saves the seconds of its imports."""
    out, err, before = io.StringIO(), io.StringIO(), Path.cwd()
    os.chdir(folder)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            status = cli.main(["compare", *map(str, arguments)])
    except SystemExit as ended:  # by argparse
        status = ended.code
    finally:
        os.chdir(before)
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def best(results, method):
    return results["runs"][results["best"][method]]


def write_csv(path, columns):
    names = list(columns)
    rows = [",".join(names)] + [",".join(map(str, row)) for row in zip(*columns.values())]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def columns_of(loader, rows=120):
    X, y = loader(return_X_y=True)
    return {**{f"x{i}": X[:rows, i] for i in range(3)}, "y": y[:rows]}


@pytest.mark.convergence
def test_svrg_reaches_what_no_plain_rate_reaches(tmp_path):
    """The main job, with its defaults, on the smallest classification."""
    done = run_alone("breast_cancer", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    gaps = {"plain": [], "plain-decay": [], "SVRG": []}
    for record in results["runs"]:
        if record["losses"][-1] is not None:
            gaps[record["method"]].append(min(record["losses"]) - results["best_known_loss"])
    assert 0 <= min(gaps["SVRG"]) < min(gaps["plain"]) / 1000
    assert min(gaps["SVRG"]) < min(gaps["plain-decay"]) / 100
    passes = {record["data_passes"][-1] for record in results["runs"] if not record["diverged"]}
    # One minibatch more in each refresh shows that its gradients can be added up.
    assert min(passes) == 51.0 and max(passes) < 52
    assert (tmp_path / "results" / "curves.png").read_bytes()[:4] == b"\x89PNG"
    header, _, plain, decay, svrg = done.stdout.splitlines()[:5]
    assert [word for word in header.split() if word != "data"] == [
        *("method", "best", "rate", "loss", "gap", "lowest", "highest"),
        *("|gradient|", "accuracy", "passes", "seconds"),
    ]
    assert (plain.split()[0], decay.split()[0]) == ("sgd", "sgd-decay")
    assert svrg.split()[:3] == ["SVRG", "+", "sgd"]
    assert "0.005 |w|^2 over all weights and biases (--weight-decay 0.01)" in done.stdout
    assert "gap: the distance to the minimum\n" in done.stdout
    assert "curves.png" in done.stdout.splitlines()[-1]


# --- methods, learning rates, weight decay ------------------------------------------------------


def test_all_methods(tmp_path):
    options = [
        "--methods",
        " SGD,sgd-decay,svrg,alpha-svrg,saga,sag,sarah,storm, mars",
        "--weight-decay",
        0.1,
    ]
    options += ["--learning-rates", "0.3,0.03", *QUICK]
    done = run("breast_cancer", *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    titles = ["plain", "plain-decay", "SVRG", "alpha-SVRG", "SAGA", "SAG", "SARAH", "STORM", "MARS"]
    assert list(results["best"]) == titles
    assert results["settings"]["methods"] == list(METHODS)
    assert results["settings"]["learning_rates"] == [0.03, 0.3]
    assert results["settings"]["weight_decay"] == 0.1
    for title in titles:
        records = [record for record in results["runs"] if record["method"] == title]
        assert [record["learning_rate"] for record in records] == [0.03, 0.3]
        for record in records:  # equal passes: at most one minibatch more, with its two gradients
            assert 6 <= record["data_passes"][-1] <= 6 + 2 * 64 / 569
    lines = done.stdout.splitlines()
    assert [line.rsplit(maxsplit=7)[0].strip() for line in lines[2:11]] == [
        "sgd",
        "sgd-decay",
        *(f"{title} + sgd" for title in titles[2:]),
    ]
    assert "0.05 |w|^2 over all weights and biases (--weight-decay 0.1)" in done.stdout
    assert (tmp_path / "results" / "curves.png").read_bytes()[:4] == b"\x89PNG"


SMALL = Settings(epochs=4, batch_size=64, weight_decay=0.03, learning_rates=(0.05,), seeds=1)


def twin_of(name, gradient, weights):
    if name.startswith("sgd"):
        return oracle.Method(gradient, weights)
    return {"alpha-svrg": oracle.SVRG}.get(name, getattr(oracle, name.upper(), None))(
        gradient, weights
    )


@pytest.mark.parametrize(
    ("name", "plain_epochs"),
    [*((name, 1) for name in METHODS), ("svrg", 0), ("alpha-svrg", 2), ("sarah", 2), ("saga", 2)],
)
def test_each_method_against_its_twin(name, plain_epochs):
    """Diabetes has 442 samples: the last minibatch has 58."""
    dataset = datasets.load("diabetes")
    settings = SMALL._replace(methods=(name,), plain_epochs=plain_epochs)
    budget = (10 + plain_epochs) * len(dataset.X)
    (record,) = compare(dataset, settings)["runs"]
    X, y, n, decay = dataset.X, dataset.y[:, None], 442, settings.weight_decay

    def residual(weights, index=slice(None)):
        return X[index] @ weights[0].T + weights[1] - y[index]

    def gradient(weights, index):
        wrong = residual(weights, index)
        sums = wrong.T @ X[index], wrong.sum(axis=0)
        return [g + len(index) * decay * w for g, w in zip(sums, weights)], len(index)

    def loss(weights):
        return (residual(weights) ** 2).mean() / 2 + decay / 2 * sum((w**2).sum() for w in weights)

    twin = twin_of(name, gradient, [np.zeros((1, 10)), np.zeros(1)])
    optimizer, rng = oracle.SGD(0.05), np.random.RandomState(0)
    has_snapshots = name in ("svrg", "alpha-svrg", "sarah")
    cost = 2 if has_snapshots or name in ("storm", "mars") else 1
    fixed = name in ("saga", "sag")
    order, evaluations, losses, passes = None, 0, [loss(twin.weights)], [0.0]
    for epoch in range(13):
        if order is None or not fixed:
            order = rng.permutation(n)
        batches = list(enumerate(order[i : i + 64] for i in range(0, n, 64)))
        if fixed and (epoch == 0 or name == "saga"):
            batches = [batches[i] for i in rng.permutation(len(batches))]
        elif fixed:
            batches = [batches[i] for i in rng.randint(0, len(batches), len(batches))]
        since = epoch - plain_epochs
        if has_snapshots and since >= 0:
            if since % 2 == 0:
                twin.refresh([batch for _, batch in batches])
                evaluations += n
            if name == "alpha-svrg":
                twin.coefficient = oracle.rounded(0.75 * (1 - since // 2 / 2))
        for row, batch in batches:
            if evaluations >= budget:
                break
            if name == "sgd-decay":
                optimizer.learning_rate = 0.025 * (1 + np.cos(np.pi * evaluations / budget))
            is_plain = has_snapshots and since < 0
            is_first = name in ("storm", "mars") and evaluations == 0
            evaluations += len(batch) * (1 if is_first or is_plain else cost)
            twin.step(optimizer, batch, rows=[row])
        losses.append(loss(twin.weights))
        passes.append(evaluations / n)
        if evaluations >= budget:
            break
    assert evaluations >= budget
    np.testing.assert_allclose(record["data_passes"], passes, rtol=1e-14)
    # L2Loss of MXNet 2.0 returns float32, which rounds what STORM and MARS multiply losses by.
    is_rounded = name in ("storm", "mars") and mx.__version__.startswith("2")
    np.testing.assert_allclose(record["losses"], losses, rtol=1e-7 if is_rounded else 1e-10)


def test_the_search_goes_on_at_an_end():
    """With this much weight decay, all built-in rates are too high."""
    settings = Settings(
        epochs=1, plain_epochs=0, methods=("sgd", "svrg"), batch_size=64, weight_decay=300, seeds=1
    )
    shown = []
    results = compare(
        datasets.load("diabetes"),
        settings,
        lambda what, done, planned: shown.append((done, planned)),
    )
    for title in ("plain", "SVRG"):
        rates = [record["learning_rate"] for record in results["runs"] if record["method"] == title]
        assert rates[:6] == [0.01, 0.03, 0.1, 0.3, 1.0, 3.0]
        assert rates[6:] == sorted(rates[6:], reverse=True) != []
        assert min(rates) < best(results, title)["learning_rate"] < 0.01
    assert results["best_rate_at_an_end"] == []
    assert "*" not in report.table(results)
    assert shown[0] == (1.0, 12 * 3)
    assert shown[-1] == (len(results["runs"]) * 3, len(results["runs"]) * 3)


def test_rates_of_the_user_are_all():
    """A best rate at an end is marked, where there was a choice."""
    settings = Settings(epochs=1, batch_size=64, learning_rates=(1e-4, 1e-3), seeds=1)
    results = compare(datasets.load("diabetes"), settings)
    assert len(results["runs"]) == 6
    assert results["best_rate_at_an_end"] == ["plain", "plain-decay", "SVRG"]
    table = report.table(results)
    assert table.count(" 0.001* ") == 3
    assert "*: the lowest or highest rate that was tried; others may be better" in table
    results = compare(datasets.load("diabetes"), settings._replace(learning_rates=(1e-3,)))
    assert results["best_rate_at_an_end"] == []


def ended(losses):
    """Runs with these losses at their ends, by their learning rates."""
    return [
        Run("plain", rate, 0, [0, 1], [1.0, end], 0.0, None, 0.0) for rate, end in losses.items()
    ]


def test_next_rates():
    assert LEARNING_RATES == (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
    grid = dict.fromkeys(LEARNING_RATES, 0.5)
    assert next_rates(ended({**grid, 0.1: 0.4})) == []
    assert next_rates(ended({**grid, 0.01: 0.4})) == [0.003]
    assert next_rates(ended({**grid, 3.0: 0.4})) == [10]
    assert next_rates(ended({**grid, 3.0: 0.4, 10.0: 0.3})) == [30]
    assert next_rates(ended({**grid, 3.0: 0.4, 10.0: 0.5})) == []
    assert next_rates(ended(dict.fromkeys(LEARNING_RATES, float("inf")))) == [0.003]
    assert next_rates(ended({**dict.fromkeys(LADDER, 0.5), 1e-5: 0.4})) == []


def ridge(X, y, decay):
    X = np.hstack([X, np.ones((len(X), 1))])
    w = np.linalg.solve(X.T @ X + decay * len(X) * np.eye(X.shape[1]), X.T @ y)
    return ((X @ w - y) ** 2).mean() / 2 + decay / 2 * w @ w


def logistic(X, y, decay):
    X, w = np.hstack([X, np.ones((len(X), 1))]), np.zeros(X.shape[1] + 1)
    for _ in range(30):  # Newton's method
        p = 1 / (1 + np.exp(-X @ w))
        hessian = (X.T * p * (1 - p)) @ X / len(X) + decay * np.eye(len(w))
        w -= np.linalg.solve(hessian, X.T @ (p - y) / len(X) + decay * w)
    return (np.logaddexp(0, X @ w) - y * (X @ w)).mean() + decay / 2 * w @ w


@pytest.mark.parametrize(
    ("name", "decay", "expected"),
    [
        ("diabetes", 0.0, ridge),
        ("diabetes", 0.3, ridge),
        ("breast_cancer", 0.3, logistic),
        ("breast_cancer", 1e-4, logistic),
        ("breast_cancer", 0.0, None),  # separable: there is none
    ],
)
def test_the_minimum(name, decay, expected):
    dataset = datasets.load(name)
    settings = Settings(epochs=1, batch_size=128, learning_rates=(0.01,), weight_decay=decay)
    results = compare(dataset, settings)
    table = report.table(results)
    assert ("no L2 penalty (--weight-decay 0)" in table) == (decay == 0)
    if expected is None:
        assert results["minimum"] is None
        assert results["best_known_loss"] == min(min(run["losses"]) for run in results["runs"])
        assert "gap: the distance to the lowest loss of all runs; no minimum is known" in table
        assert plot.finding(results).startswith("sgd has the lowest loss: ")
    else:
        np.testing.assert_allclose(results["minimum"], expected(dataset.X, dataset.y, decay))
        assert results["best_known_loss"] == results["minimum"]


def found(minimum, **ends):
    """A finding from the methods' losses at the end, and at the start."""
    runs = [
        {"method": name, "losses": [1.0, end], "diverged": not end <= 1}
        for name, end in ends.items()
    ]
    settings, best = {"optimizer": "adam"}, {name: number for number, name in enumerate(ends)}
    results = {"runs": runs, "best": best, "settings": settings, "dtype": "float64"}
    return plot.finding({**results, "minimum": minimum, "best_known_loss": minimum or 0.0})


def test_the_finding():
    assert found(0.5, SVRG=0.5 + 2**-20, SAGA=0.75, plain=0.875) == (
        "SVRG + adam comes closest to the minimum: 1e-06 (adam: 4e-01)"
    )
    assert found(0.5, SVRG=0.5, plain=0.75, **{"plain-decay": 0.625}) == (
        "SVRG + adam reaches the minimum (adam: 2e-01, adam-decay: 1e-01)"
    )
    assert found(0.5, SVRG=0.6, **{"plain-decay": 0.5}) == (
        "adam-decay reaches the minimum (SVRG + adam: 1e-01)"
    )
    assert found(0.5, SVRG=0.5, plain=0.75) == "SVRG + adam reaches the minimum (adam: 2e-01)"
    assert found(0.5, SAGA=0.5, SVRG=0.5) == "SAGA + adam and SVRG + adam reach the minimum"
    assert found(0.5, plain=0.6, SVRG=2.0) == "adam comes closest to the minimum: 1e-01"
    assert found(0.5, SAGA=0.6, SVRG=0.8) == (
        "SAGA + adam comes closest to the minimum: 1e-01 (SVRG + adam: 3e-01)"
    )
    assert found(None, plain=0.25, SVRG=0.5) == (
        "adam has the lowest loss: 0.25 (SVRG + adam: 0.5)"
    )
    assert found(0.5, plain=float("inf"), SVRG=float("nan")) == "All runs diverged"


def test_all_diverged(tmp_path):
    """A picture and a table all the same."""
    dataset = datasets.load("diabetes")
    results = compare(dataset, Settings(epochs=1, batch_size=64, learning_rates=(30.0, 300.0)))
    report.write(results, tmp_path)
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert "(ended above the start) with every rate: sgd, sgd-decay, SVRG + sgd" in report.table(
        results
    )


def test_every_method_is_in_the_help_and_has_a_style(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["compare", "--help"])
    text = " ".join(capsys.readouterr().out.split()).replace("sgd- decay", "sgd-decay")
    assert f"{', '.join(METHODS)}." in text
    assert " ".join(settings.RULES.split()) in text
    assert "(default: sgd,sgd-decay,svrg)" in text and "(default: 0.01)" in text
    assert "these are 0.01, 0.03, 0.1, 0.3, 1, 3, and" in text
    titles = {method.title for method in METHODS.values()}
    assert titles <= set(STYLES)
    assert len({STYLES[title] for title in titles}) == len(titles) == 9
    assert len({STYLES[title].color for title in titles}) == 8  # of which a plain one has two


# --- other options ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["digits", "--model", "mlp", "--coefficient", "0.5", "--seed", "3"],
        ["diabetes", "--optimizer", "adam", "--update-freq", "1", "--plain-epochs", "0"],
        ["diabetes", "--optimizer", "adagrad"],  # its states are float32
        ["breast_cancer", "--model", "mlp", "--optimizer", "lars"],
    ],
    ids=" ".join,
)
def test_options(arguments, tmp_path):
    rates = TWO_RATES if "mlp" in arguments else []
    done = run(*arguments, *QUICK, *rates, "--output", "deep/er", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "deep" / "er" / "results.json").read_text())
    settings = results["settings"]
    for name, value in zip(arguments[1::2], arguments[2::2]):
        assert str(settings[name[2:].replace("-", "_")]) == value
    assert results["dtype"] == ("float32" if "adagrad" in arguments else "float64")
    assert sorted(p.name for p in (tmp_path / "deep" / "er").iterdir()) == [
        "curves.png",
        "results.json",
    ]
    assert (results["task"] == "regression") == ("accuracy" not in done.stdout)


def test_the_seed_decides(tmp_path):
    losses = []
    for seed in (1, 1, 2):
        done = run(
            "diabetes", *QUICK, "--seed", seed, "--model", "mlp", *TWO_RATES, folder=tmp_path
        )
        assert done.returncode == 0, done.stderr
        results = json.loads((tmp_path / "results" / "results.json").read_text())
        losses.append([record["losses"] for record in results["runs"]])
    assert losses[0] == losses[1] != losses[2]


def test_the_best_rate_trains_with_more_seeds():
    """The best run is the one in the middle; each is as with that seed alone."""
    dataset = datasets.load("diabetes")
    settings = SMALL._replace(learning_rates=(0.01, 0.1, 1.0), seed=2**32 - 2, seeds=4)
    shown = []
    results = compare(dataset, settings, lambda *progress: shown.append(progress))
    assert shown[-1][1:] == (3 * 6 * 11, 3 * 6 * 11)
    for name in settings.methods:
        title = METHODS[name].title
        runs = [run for run in results["runs"] if run["method"] == title]
        rate = min(runs[:3], key=lambda run: run["losses"][-1])["learning_rate"]
        assert [run["seed"] for run in runs] == 3 * [2**32 - 2] + [2**32 - 1, 0, 1]
        seeds = [results["runs"][number] for number in results["seeds"][title]]
        assert {run["learning_rate"] for run in seeds} == {rate}
        assert sorted(run["seed"] for run in seeds) == [0, 1, 2**32 - 2, 2**32 - 1]
        ends = [run["losses"][-1] for run in seeds]
        assert ends == sorted(ends) and len(set(ends)) == 4
        assert best(results, title) is seeds[2]
        for run in seeds:
            only = settings._replace(
                methods=(name,), learning_rates=(rate,), seed=run["seed"], seeds=1
            )
            (alone,) = compare(dataset, only)["runs"]
            assert alone["losses"] == run["losses"]
    lines = report.table(results).splitlines()
    assert lines[0].split()[4:7] == ["gap", "lowest", "highest"]
    for line in lines[2:5]:
        gap, lowest, highest = map(float, line.rsplit(maxsplit=6)[1:4])
        assert lowest < gap < highest
    assert "lowest, highest: the gaps of 4 seeds at this rate; all else is of the run" in lines[8]
    one = compare(dataset, settings._replace(learning_rates=(0.01,), seeds=1))
    assert "lowest" not in report.table(one)


def test_seeds_that_diverge_are_named():
    """Rows of a table: all rates, or some seeds at the best one."""
    ends = {"plain": (0.1, 0.2, float("inf")), "SVRG": (2.0, 3.0, float("inf"))}
    runs = [
        Run(method, 0.1, 0, [0, 1], [1.0, end], 0.0, None, 0.0)
        for method, losses in ends.items()
        for end in losses
    ]
    results = {
        "task": "regression",
        "settings": Settings(learning_rates=(0.1,))._asdict(),
        "runs": [{**run._asdict(), "diverged": run.diverged} for run in runs],
        "seeds": {"plain": [0, 1, 2], "SVRG": [3, 4, 5]},
        "best": {"plain": 1, "SVRG": 4},
        "best_rate_at_an_end": [],
        "minimum": 0.1,
        "best_known_loss": 0.1,
    }
    table = report.table(results)
    assert "diverged (ended above the start) with every rate: SVRG + sgd\n" in table
    assert "diverged (ended above the start) with some seeds: sgd (1 of 3)" in table


@pytest.mark.parametrize(
    ("loader", "task"),
    [
        (sklearn.datasets.load_diabetes, "regression"),
        (sklearn.datasets.load_breast_cancer, "classification"),
    ],
)
def test_a_csv_file(loader, task, tmp_path):
    write_csv(tmp_path / "own.csv", columns_of(loader))
    done = run("own.csv", "--target", "y", *QUICK, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    assert (results["task"], results["samples"], results["features"]) == (task, 120, 3)


def test_a_csv_file_whose_task_is_given(tmp_path):
    write_csv(tmp_path / "own.csv", columns_of(sklearn.datasets.load_breast_cancer))
    arguments = ("--target", "y", "--task", "regression", *QUICK)
    assert run("own.csv", *arguments, folder=tmp_path).returncode == 0
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    assert results["task"] == "regression"


def test_classes_that_are_words(tmp_path):
    columns = {"x": [1, 2, 3, 4, 5], "y": ["no", "yes", "no", "yes", "no"]}
    dataset = datasets.load(str(write_csv(tmp_path / "words.CSV", columns)), "y")
    assert (dataset.task, dataset.classes, list(dataset.y)) == (
        "classification",
        2,
        [0, 1, 0, 1, 0],
    )


@pytest.mark.parametrize(
    ("cells", "classes"),
    [
        (["007", "7", "007", "7"], 2),  # 007 is no number but a label
        (["1", "1.0", "2", "2.00"], 2),
        (["1_0", "10", "1_0", "10"], 2),
        (["12345678901234567890", "12345678901234567891"] * 2, 2),
    ],
)
def test_labels_that_are_nearly_numbers(cells, classes, tmp_path):
    path = write_csv(tmp_path / "own.csv", {"x": [1, 2, 3, 4], "y": cells})
    dataset = datasets.load(str(path), "y")
    assert (dataset.task, dataset.classes) == ("classification", classes)


def test_padded_numbers_are_numbers_where_numbers_are_wanted(tmp_path):
    path = write_csv(tmp_path / "own.csv", {"x": ["007", "7", "09", "010"], "y": [1, 2, 4, 8]})
    dataset = datasets.load(str(path), "y", "regression")
    assert dataset.X[0] == dataset.X[1] < dataset.X[2] < dataset.X[3]
    assert datasets.load(str(path), "x", "regression").task == "regression"


def test_a_target_of_numbers_with_a_word_among_them(tmp_path):
    """Not silently a classification with a class for each number."""
    cells = [*map(str, range(20)), "bad"]
    path = write_csv(tmp_path / "own.csv", {"x": range(21), "y": cells})
    with pytest.raises(datasets.DataError, match="numbers, but text such as 'bad' in 1 of 21 rows"):
        datasets.load(str(path), "y")
    path = write_csv(tmp_path / "own.csv", {"x": range(42), "y": cells * 2})
    assert datasets.load(str(path), "y", "classification").classes == 21


def test_columns_of_one_name(tmp_path):
    (tmp_path / "own.csv").write_text("a,b,a\n1,2,3\n4,5,7\n")
    with pytest.raises(datasets.DataError, match="has several columns named 'a'"):
        datasets.load(str(tmp_path / "own.csv"), "b")


def test_a_large_column_that_is_nearly_constant(tmp_path):
    columns = {"x": [10**15 + n for n in range(30)], "z": range(30), "y": np.arange(30) ** 0.5}
    dataset = datasets.load(str(write_csv(tmp_path / "own.csv", columns)), "y")
    np.testing.assert_array_equal(dataset.X[:, 0], 0)
    assert dataset.X[:, 1].std() == pytest.approx(1)


@pytest.mark.parametrize("classes", [1000, 1001, 20000])
def test_many_classes(classes, tmp_path):
    """They are refused at once: with 20,000 the comparison would never end."""
    labels = [f"w{i % classes}" for i in range(2 * classes)]
    path = write_csv(tmp_path / "own.csv", {"x": range(2 * classes), "y": labels})
    if classes <= datasets.MOST_CLASSES:
        assert datasets.load(str(path), "y").classes == classes
        return
    with pytest.raises(datasets.DataError, match=f"has {classes} classes.* at most 1000"):
        datasets.load(str(path), "y")


def test_blank_lines_and_constant_columns(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("x,c,y\n1,7,0.5\n\n2,7,1.5\n3,7,x\n")
    with pytest.raises(datasets.DataError, match=r"'y' .* is not numeric: it holds 'x'"):
        datasets.load(str(path), "y", "regression")
    path.write_text("x,c,y\n1,7,0.5\n\n2,7,1.5\n3,7,2.75\n")
    dataset = datasets.load(str(path), "y")
    assert dataset.task == "regression"
    np.testing.assert_array_equal(dataset.X[:, 1], 0)
    np.testing.assert_allclose(dataset.X[:, 0].std(), 1)


def scaled(*columns):
    values = np.array(columns, dtype="float64").T
    return (values - values.mean(axis=0)) / values.std(axis=0)


def test_a_file_as_it_is(tmp_path):
    """Text, gaps, names of rows, semicolons, decimal commas; a notice for what is changed."""
    path = tmp_path / "own.csv"
    path.write_text(
        ";size;who;color; sold ;when;empty;price\n"
        "0;1,5;Ann;red;yes;2020;;10,5\n"
        "1;;Bob; blue;no;?;;20\n"
        "2;2,5;Cid;red;yes;2021;NA;30\n"
        "3;big;Dan;;no;2022;;\n"
        "4;5;Eve;blue;no;2025;;40,5\n"
        '5;-3;"Flo; Gus";red;yes;2020;;50\n',
        encoding="utf-8-sig",
    )
    dataset = datasets.load(str(path), "price")
    assert dataset.task == "regression"
    np.testing.assert_allclose(dataset.y, scaled([10.5, 20, 30, 40.5, 50])[:, 0])
    expected = scaled(
        [1.5, 1.5, 2.5, 5, -3],
        [0, 1, 0, 1, 0],  # blue
        [1, 0, 1, 0, 1],  # red
        [0, 1, 0, 1, 0],  # no
        [1, 0, 1, 0, 1],  # yes
        [2020, 2021.5, 2021, 2025, 2020],
    )
    np.testing.assert_allclose(dataset.X, expected, atol=1e-12)
    assert dataset.notes == (
        "rows left out, because they have no 'price': 1",
        "column 'Unnamed: 0' left out, because it has no name",
        "cells of column 'size' filled with its mean: 1",
        "column 'who' left out, because it is text with too many different values: 5 in 5 rows",
        "cells of column 'when' filled with its mean: 1",
        "column 'empty' left out, because it is empty",
    )


def test_words_among_numbers_and_gaps_in_text(tmp_path):
    columns = {"a": [1, "two", 3, "n/k"], "b": ["u", "", "u", "u"], "y": [0, 1, 0, 1]}
    dataset = datasets.load(str(write_csv(tmp_path / "own.csv", columns)), "y")
    np.testing.assert_allclose(
        dataset.X, np.c_[[-1, 0, 1, 0] / np.sqrt(0.5), scaled([1, 0, 1, 1], [0, 1, 0, 0])]
    )
    assert dataset.notes == (
        "cells of column 'a' that are no numbers, such as 'two', and so count as missing: 2",
        "cells of column 'a' filled with its mean: 2",
        "cells of column 'b' with 'missing' as their value: 1",
    )


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_is_found(delimiter, tmp_path):
    path = tmp_path / ("own.tsv" if delimiter == "\t" else "own.csv")
    lines = ['"first, or second; third",y', "1.5,0", "2.5,1", "3.5,0", "4.5,1"]
    path.write_text("\n" + "\n".join(delimiter.join(line.rsplit(",", 1)) for line in lines))
    dataset = datasets.load(str(path), "y")
    np.testing.assert_allclose(dataset.X, scaled([1.5, 2.5, 3.5, 4.5]))
    assert (dataset.classes, dataset.notes) == (2, ())


def test_tabs_separate_the_columns_of_a_tsv_file(tmp_path):
    path = tmp_path / "own.tsv"
    path.write_text("length, in mm\ty\n1.5\t0\n2.5\t1\n3.5\t0\n4.5\t1\n")
    np.testing.assert_allclose(datasets.load(str(path), "y").X, scaled([1.5, 2.5, 3.5, 4.5]))


@pytest.mark.parametrize("words", [100, 101])
def test_text_with_many_values(words, tmp_path):
    columns = {"x": [f"w{i % words}" for i in range(202)], "z": range(202), "y": [0, 1] * 101}
    dataset = datasets.load(str(write_csv(tmp_path / "own.csv", columns)), "y")
    assert dataset.X.shape == (202, 101 if words == settings.MOST_WORDS else 1)
    assert len(dataset.notes) == (words > settings.MOST_WORDS)


def test_notices_are_shown_and_kept(tmp_path):
    columns = columns_of(sklearn.datasets.load_diabetes)
    columns["x1"] = ["", *columns["x1"][1:]]
    columns["city"] = ["Rome", "Oslo", "Bonn"] * 40
    write_csv(tmp_path / "own.csv", columns)
    done = run("own.csv", "--target", "y", *QUICK, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (note,) = json.loads((tmp_path / "results" / "results.json").read_text())["notes"]
    assert note == "cells of column 'x1' filled with its mean: 1"
    assert f"own.csv: {note}\n" in done.stderr


@pytest.mark.parametrize("name", datasets.BUNDLED)
def test_bundled_data(name):
    dataset = datasets.load(name)
    assert dataset.X.shape[0] == dataset.y.shape[0] > 400
    assert np.isfinite(dataset.X).all()
    assert (dataset.classes > 0) == (dataset.task == "classification")


def table_with(**changes):
    columns = {"a": [1.0, 2.0, 3.0, 4.0], "b": [1.5, 0.5, 2.5, 3.5], "y": [0, 1, 0, 1]}
    return {**columns, **changes}


BAD_FILES = {
    "no such column": (table_with(), ["--target", "z"], "no column 'z'; its columns are a, b, y"),
    "no target": (table_with(), [], "--target is missing"),
    "constant target": (table_with(y=[1] * 4), ["--target", "y"], "target 'y' .* constant"),
    "empty target": (table_with(y=["", "?", "nan", 1]), ["--target", "y"], "1 rows .* of 'y': too"),
    "infinity": (table_with(a=[1, "inf", 3, 4]), ["--target", "y"], "that are infinite"),
    "infinite target": (table_with(y=[1, 2.5, 7, "inf"]), ["--target", "y"], "are infinite"),
    "too large": (table_with(a=[1e308, -1e308, 1e308, 3]), ["--target", "y"], "or too large"),
    "one number, written twice": (
        table_with(y=["1", "1.0", "1", "1.00"]),
        ["--target", "y"],
        "target 'y' .* constant",
    ),
    "words to regress": (
        table_with(y=["u", "v", "u", "v"]),
        ["--target", "y", "--task", "regression"],
        "'y' .* is not numeric: it holds 'u'",
    ),
    "no class twice": (
        table_with(y=["u", "v", "w", "x"]),
        ["--target", "y"],
        "every row .* a class of its own",
    ),
    "no features": ({"y": [0, 1, 0, 1]}, ["--target", "y"], "has no column to learn 'y' from$"),
    "only names of rows": (
        {"": [0, 1, 2, 3], "who": ["u", "v", "w", "x"], "y": [0, 1, 0, 1]},
        ["--target", "y"],
        r"to learn 'y' from \(column 'Unnamed: 0' left out, .* no name; column 'who' left out",
    ),
    "no rows": ({"a": [], "y": []}, ["--target", "y"], "0 rows"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(name, tmp_path):
    columns, arguments, message = BAD_FILES[name]
    path = write_csv(tmp_path / "bad.csv", columns)
    options = dict(zip([a[2:] for a in arguments[::2]], arguments[1::2]))
    with pytest.raises(datasets.DataError, match=message):
        datasets.load(str(path), **options)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"a,y\n1,0\n2,1,7\n", "cannot read .* Expected 2 fields in line 3, saw 3"),
        (b"a,y\n1,0,5\n2,1,7\n", "cannot read .* does not match length of data"),
        (b"\xff\xfe\x00\x01", r"is not UTF-8 text \(byte 0xff\): save it"),
        ("a,y\né,0\ne,1\n".encode("latin-1"), r"is not UTF-8 text \(byte 0xe9\): save it"),
    ],
)
def test_broken_files(content, message, tmp_path):
    (tmp_path / "bad.csv").write_bytes(content)
    with pytest.raises(datasets.DataError, match=message):
        datasets.load(str(tmp_path / "bad.csv"), "y")


BAD_CALLS = {
    "unknown data": (["iris"], "'iris': choose digits, breast_cancer, diabetes or a file that"),
    "missing file": (["gone.csv", "--target", "y"], "there is no file gone.csv"),
    "a folder": (["folder.csv", "--target", "y"], "cannot read folder.csv"),
    "missing target": (["good.csv"], "--target is missing"),
    "target of bundled data": (["digits", "--target", "y"], "leave --target and --task out"),
    "optimizer": (["digits", "--optimizer", "sdg"], "unknown optimizer 'sdg': MXNet .* has ada"),
    "useless optimizer": (
        ["digits", "--optimizer", "groupadagrad"],
        "groupadagrad cannot update a weight matrix and a bias with its defaults: ",
    ),
    "output": (["digits", "--output", "good.csv/x"], "cannot write to good.csv/x: Not a dir"),
    "output in the way": (["digits", "--output", "."], "cannot write to curves.png: Is a dir"),
    "output is a file": (["digits", "--output", "good.csv"], "cannot write to good.csv: File ex"),
    "epochs": (["digits", "--epochs", "0"], "--epochs: expected a positive whole number, got '0'"),
    "batch size": (["digits", "--batch-size", "x"], "--batch-size: expected a positive"),
    "coefficient": (["digits", "--coefficient", "nan"], "expected a number that is not negative"),
    "seed": (["digits", "--seed", "-1"], "--seed: expected a whole number from 0"),
    "seeds": (["digits", "--seeds", "0"], "--seeds: expected a positive whole number, got '0'"),
    "model": (["digits", "--model", "cnn"], "invalid choice: 'cnn'"),
    "method": (
        ["digits", "--methods", "sgd,sgvr"],
        "--methods: unknown method 'sgvr', choose from sgd, sgd-decay, svrg, alpha-svrg, saga, "
        "sag, sarah, storm, mars$",
    ),
    "no method": (
        ["digits", "--methods", ""],
        "--methods: unknown method '', choose from sgd, sgd",
    ),
    "plain method of another optimizer": (
        ["digits", "--methods", "adam-decay"],
        "--methods: unknown method 'adam-decay', choose from sgd, sgd-decay, svrg, ",
    ),
    "plain method by both names": (
        ["digits", "--optimizer", "adam", "--methods", "adam,sgd"],
        "--methods: 'sgd' appears twice, name each method once, from sgd, sgd-decay, ",
    ),
    "plain epochs": (
        ["digits", "--plain-epochs", "-1"],
        "--plain-epochs: expected 0 or a positive",
    ),
    "method twice": (
        ["digits", "--methods", "sgd,SVRG,svrg"],
        "--methods: 'svrg' appears twice, name each method once, from sgd, sgd-decay, svrg, ",
    ),
    "rates": (
        ["digits", "--learning-rates", "0.1;0.2"],
        "--learning-rates: expected positive numbers separated by commas, as in 0.01,0.1,1, got "
        "'0.1;0.2'",
    ),
    "rate of zero": (["digits", "--learning-rates", "0,1"], "expected positive numbers .* '0,1'"),
    "rate not finite": (["digits", "--learning-rates", "nan"], "expected positive numbers"),
    "rate of no float32": (["digits", "--learning-rates", "1e39"], "expected positive numbers"),
    "no rates": (["digits", "--learning-rates", ""], "expected positive numbers .* got ''"),
    "rate twice": (
        ["digits", "--learning-rates", "0.1,1,0.10"],
        "--learning-rates: 0.1 appears twice in '0.1,1,0.10'",
    ),
    "weight decay": (
        ["digits", "--weight-decay", "-0.1"],
        "--weight-decay: expected a number that is not negative, got '-0.1'",
    ),
    "no data": ([], "the following arguments are required: DATA"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(name, tmp_path):
    """One clear line, a status that is not zero, nothing written."""
    arguments, message = BAD_CALLS[name]
    write_csv(tmp_path / "good.csv", table_with())
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "curves.png").mkdir()
    done = run(*arguments, folder=tmp_path)
    assert done.returncode == 2
    # argparse's usage may precede it; what MXNet 2.0 logs when it starts may be on the same line
    (line,) = re.findall("gluon-svrg compare: error: (.*)", done.stderr)
    assert re.search(message, line), line
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    if name in ("optimizer", "epochs", "output"):
        alone = run_alone(*arguments, folder=tmp_path)
        assert alone.returncode == 2
        assert re.search(message, alone.stderr, re.M)
        assert "Traceback" not in alone.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "curves.png",
        "folder.csv",
        "good.csv",
    ]


def test_a_run_that_diverges_is_reported_as_it_is(tmp_path):
    """Both rates are too high for so many features."""
    rng = np.random.RandomState(0)
    columns = {f"x{i}": np.full(40, 1.0) + rng.randn(40) * 1e-3 * i for i in range(2)}
    columns.update({f"z{i}": rng.randn(40) for i in range(200)}, y=rng.randn(40))
    write_csv(tmp_path / "wide.csv", columns)
    options = ["--epochs", 30, "--batch-size", 1, "--learning-rates", "1,3"]
    done = run("wide.csv", "--target", "y", *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "(ended above the start) with every rate: sgd, sgd-decay, SVRG + sgd\n" in done.stdout
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    assert any(record["diverged"] for record in results["runs"])
    assert any(record["losses"][-1] is None for record in results["runs"])
