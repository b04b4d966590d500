"""`gluon-svrg compare`, as a user runs it: in a process of its own."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import sklearn.datasets

from gluon_svrg.commands import datasets

QUICK = ["--epochs", "2", "--batch-size", "64"]


def run(*arguments, folder):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "gluon_svrg", "compare", *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


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


def test_svrg_reaches_what_no_plain_rate_reaches(tmp_path):
    """The main job, with its defaults, on the smallest classification."""
    done = run("breast_cancer", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    gaps = {"plain": [], "SVRG": []}
    for record in results["runs"]:
        if record["losses"][-1] is not None:
            gaps[record["method"]].append(min(record["losses"]) - results["best_known_loss"])
    assert 0 <= min(gaps["SVRG"]) < min(gaps["plain"]) / 1000
    passes = {record["data_passes"][-1] for record in results["runs"] if not record["diverged"]}
    # One minibatch more in each refresh shows that its gradients can be added up.
    assert min(passes) == 50.0 and max(passes) < 51
    assert (tmp_path / "results" / "curves.png").read_bytes()[:4] == b"\x89PNG"
    header, _, plain, svrg = done.stdout.splitlines()[:4]
    assert [word for word in header.split() if word != "data"] == [
        *("method", "best", "rate", "loss", "gap", "|gradient|", "accuracy", "passes", "seconds")
    ]
    assert plain.split()[0] == "sgd"
    assert svrg.split()[:3] == ["SVRG", "+", "sgd"]
    assert "curves.png" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments",
    [
        ["digits", "--model", "mlp", "--coefficient", "0.5", "--seed", "3"],
        ["diabetes", "--optimizer", "adam", "--update-freq", "1"],
        ["diabetes", "--optimizer", "adagrad"],  # its states are float32
        ["breast_cancer", "--model", "mlp", "--optimizer", "lars"],
    ],
    ids=" ".join,
)
def test_options(arguments, tmp_path):
    done = run(*arguments, *QUICK, "--output", "deep/er", folder=tmp_path)
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
        done = run("diabetes", *QUICK, "--seed", seed, "--model", "mlp", folder=tmp_path)
        assert done.returncode == 0, done.stderr
        results = json.loads((tmp_path / "results" / "results.json").read_text())
        losses.append([record["losses"] for record in results["runs"]])
    assert losses[0] == losses[1] != losses[2]


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
    with pytest.raises(datasets.DataError, match="line 5 holds 'x'"):
        datasets.load(str(path), "y", "regression")
    path.write_text("x,c,y\n1,7,0.5\n\n2,7,1.5\n3,7,2.75\n")
    dataset = datasets.load(str(path), "y")
    assert dataset.task == "regression"
    np.testing.assert_array_equal(dataset.X[:, 1], 0)
    np.testing.assert_allclose(dataset.X[:, 0].std(), 1)


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
    "text": (table_with(b=[1, "two", 3, 4]), ["--target", "y"], "'b' .* line 3 holds 'two'"),
    "empty column": (table_with(b=[""] * 4), ["--target", "y"], "column 'b' .* is empty"),
    "empty cell": (table_with(b=[1, 2, "", 4]), ["--target", "y"], "'b' .* no value in line 4"),
    "NaN": (table_with(a=[1, "NaN", 3, 4]), ["--target", "y"], "'a' .* no value in line 3"),
    "NaN target": (table_with(y=[1, 0, "nan", 0]), ["--target", "y"], "'y' .* no value in line 4"),
    "infinity": (table_with(a=[1, "inf", 3, 4]), ["--target", "y"], "'a' .* line 3 holds 'inf'"),
    "too large": (table_with(a=[1e308, -1e308, 1e308, 3]), ["--target", "y"], "are too large"),
    "one number, written twice": (
        table_with(y=["1", "1.0", "1", "1.00"]),
        ["--target", "y"],
        "target 'y' .* constant",
    ),
    "words to regress": (
        table_with(y=["u", "v", "u", "v"]),
        ["--target", "y", "--task", "regression"],
        "'y' .* is not numeric: line 2 holds 'u'",
    ),
    "no class twice": (
        table_with(y=["u", "v", "w", "x"]),
        ["--target", "y"],
        "every row .* a class of its own",
    ),
    "no features": ({"y": [0, 1, 0, 1]}, ["--target", "y"], "no column beside the target"),
    "no rows": ({"a": [], "y": []}, ["--target", "y"], "0 rows of data"),
    "nameless column": (
        {"a": [1, 2], "": [3, 4], "y": [0, 1]},
        ["--target", "y"],
        "a different name for each column",
    ),
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
        (b"a,y\n1,0\n2,1,7\n", "line 3 .* has 3 cells, expected 2"),
        (b"\xff\xfe\x00\x01", "cannot read"),
    ],
)
def test_broken_files(content, message, tmp_path):
    (tmp_path / "bad.csv").write_bytes(content)
    with pytest.raises(datasets.DataError, match=message):
        datasets.load(str(tmp_path / "bad.csv"), "y")


BAD_CALLS = {
    "unknown data": (["iris"], "unknown data set 'iris': choose digits, breast_cancer, diabetes"),
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
    "model": (["digits", "--model", "cnn"], "invalid choice: 'cnn'"),
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
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "curves.png",
        "folder.csv",
        "good.csv",
    ]


def test_a_run_that_diverges_is_reported_as_it_is(tmp_path):
    """Every rate of the grid is too high for features of this size."""
    rng = np.random.RandomState(0)
    columns = {f"x{i}": np.full(40, 1.0) + rng.randn(40) * 1e-3 * i for i in range(2)}
    columns.update({f"z{i}": rng.randn(40) for i in range(200)}, y=rng.randn(40))
    write_csv(tmp_path / "wide.csv", columns)
    done = run("wide.csv", "--target", "y", "--epochs", "30", "--batch-size", "1", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    assert any(record["diverged"] for record in results["runs"])
    assert any(record["losses"][-1] is None for record in results["runs"])
