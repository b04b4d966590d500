"""`gluon-svrg compare`: what it reads, trains on, says and writes."""

import gzip
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from jobs import run
from problems import array

from gluon_svrg.commands import cli, compare

for package in ("sklearn", "pandas", "matplotlib", "scipy", "tqdm"):
    pytest.importorskip(package, reason=f"gluon-svrg compare needs {package}")

SMALL = ["diabetes", "--passes", 4, "--batch-size", 64, "--learning-rates", "0.05", "--seeds", 1]


def options_of(*arguments):
    return cli.parser().parse_args(["compare", *map(str, arguments)])


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
@pytest.mark.parametrize("seed", [0, 3])
def test_the_verdict_on_wine(seed, call):
    """A rate that one seed likes is not taken: three were 1.6e-7 and 4e-2 apart at such a one."""
    methods = ["--methods", "sgd,svrg,svrg+nag"]
    status, printed, log = call("wine", "--seed", seed, *methods)
    assert status == 0 and "After 30 passes svrg+nag is lowest" in printed, log
    rows = json.loads(Path("results/results.json").read_text())["table"]
    gaps = {name: row["gap"] for name, row in rows.items()}
    assert gaps["svrg+nag"] < gaps["svrg"] < gaps["sgd"] / 10
    assert all(row["highest"] < 1e-4 for name, row in rows.items() if "svrg" in name)


def lowest_loss(X, y, decay, is_class):
    """By Newton's method."""
    w = np.zeros(X.shape[1])
    for _ in range(30):
        p = 1 / (1 + np.exp(-X @ w)) if is_class else X @ w
        hessian = (X.T * (p * (1 - p) if is_class else 1)) @ X / len(X) + decay * np.eye(len(w))
        w -= np.linalg.solve(hessian, X.T @ (p - y) / len(X) + decay * w)
    losses = np.logaddexp(0, X @ w) - y * (X @ w) if is_class else (X @ w - y) ** 2 / 2
    return losses.mean() + decay / 2 * w @ w


@pytest.mark.parametrize("decay", [0.0, 1e-4, 0.3])
@pytest.mark.parametrize("name", ["diabetes", "breast_cancer"])
def test_the_minimum(name, decay):
    problem = compare.LinearModel(options_of(name, "--weight-decay", decay))
    found = problem.minimum()
    if name == "breast_cancer" and not decay:
        assert found == {"loss": None, "solver": None, "seconds": None}
    else:
        expected = lowest_loss(problem.X, problem.y, decay, name == "breast_cancer")
        assert found["loss"] == pytest.approx(expected, rel=1e-10)


def lowest_with_l1(X, y, decay, l1, is_class):
    """By FISTA with restarts; the last weight is the bias, which has no penalty."""
    X, has_penalty = np.c_[X, np.ones(len(X))], np.r_[np.ones(X.shape[1]), 0]
    step = 1 / (np.linalg.eigvalsh(X.T @ X / len(X))[-1] + decay)
    w = z = np.zeros(X.shape[1])
    number = 1.0
    for _ in range(20000):
        p = 1 / (1 + np.exp(-X @ z)) if is_class else X @ z
        moved = z - step * (X.T @ (p - y) / len(X) + decay * has_penalty * z)
        new = np.sign(moved) * np.maximum(np.abs(moved) - step * l1 * has_penalty, 0)
        number = 1.0 if (z - new) @ (new - w) > 0 else number
        following = (1 + np.sqrt(1 + 4 * number**2)) / 2
        z, w, number = new + (number - 1) / following * (new - w), new, following
    losses = np.logaddexp(0, X @ w) - y * (X @ w) if is_class else (X @ w - y) ** 2 / 2
    w = w[:-1]
    return losses.mean() + decay / 2 * w @ w + l1 * np.abs(w).sum()


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("name", ["diabetes", "breast_cancer"])
def test_the_minimum_with_l1(name, decay):
    problem = compare.LinearModel(options_of(name, "--weight-decay", decay, "--l1", 0.05))
    found, is_class = problem.minimum(), name == "breast_cancer"
    expected = lowest_with_l1(problem.X, problem.y, decay, 0.05, is_class)
    assert found["loss"] == pytest.approx(expected, rel=1e-10)
    assert found["solver"] == ("saga" if is_class else "coordinate descent")


def test_a_solver_that_has_not_converged(capsys):
    """Its loss is no minimum, but a row of the table."""
    problem = compare.LinearModel(options_of("breast_cancer"))
    found, whole = problem.minimum(limit=0.0), problem.minimum()
    (row,) = found["rivals"].values()
    assert found["loss"] is None and row["loss"] > whole["loss"] * (1 + 1e-9)
    line = r"scikit-learn newton-cholesky has not converged in \S+ s: losses are compared"
    assert re.match(line, capsys.readouterr().err)


def test_a_wide_file(tmp_path):
    """There a Hessian would take minutes and memory."""
    rng = np.random.RandomState(0)
    rows = np.c_[rng.normal(size=(60, 400)).round(6), rng.randint(4, size=60)]
    path = tmp_path / "own.csv"
    np.savetxt(path, rows, "%g", ",", header=",".join(map(str, range(401))), comments="")
    found = compare.LinearModel(options_of(path, "--target", "400")).minimum()
    assert found["solver"] == "newton-cg" and 0.01 < found["loss"] < np.log(4)


def test_a_sparse_matrix_for_scikit_learn(call):
    """Where most inputs are zeros, as those of categories."""
    rng = np.random.RandomState(0)
    rows = (f"{'abcdefgh'[n % 8]},{rng.normal():.4f},{n % 3 // 2}\n" for n in range(96))
    Path("own.csv").write_text(f"x,z,y\n{''.join(rows)}")
    status, printed, log = call("own.csv", "--target", "y", *SMALL[1:], "--methods", "svrg")
    assert status == 0 and "scikit-learn newton-cholesky, sparse" in printed, log
    problem = compare.LinearModel(options_of("own.csv", "--target", "y"))
    assert problem.minimum()["loss"] == pytest.approx(
        lowest_loss(problem.X, problem.y, 0.01, True), rel=1e-10
    )


def test_a_penalty_of_the_weights_alone(call):
    """All find the same minimum, and who cannot have the penalty is left out."""
    methods = ["--methods", "svrg+nag,lbfgs,adam", "--momenta", "0.9", "--passes", 60]
    status, printed, log = call("breast_cancer", "--l1", 0.05, "--seeds", 1, *methods)
    assert status == 0, log
    saved = json.loads(Path("results/results.json").read_text())
    assert [*saved["table"]] == ["svrg+nag", "scikit-learn saga"]
    assert saved["table"]["svrg+nag"]["gap"] < 1e-4
    assert "Left out: lbfgs." in printed and "Left out: adam." in printed
    assert "plus 0.05 times |w|, without the bias\n" in printed
    assert "prox={'.*weight': L1(strength=0.05)}" in printed


@pytest.mark.parametrize("seconds", [(), ("--seconds", 60)])
def test_an_interrupt_is_130(seconds, call, monkeypatch):
    from gluon_svrg.compare import search, training

    trained = []

    def interrupted(*args):
        if trained:
            raise KeyboardInterrupt
        trained.append(training.train(*args))

    monkeypatch.setattr(search, "train", interrupted)
    status, printed, _ = call(*SMALL, "--methods", "sgd,svrg", *seconds)
    assert status == 130 and "Not trained: svrg." in printed


def test_the_end_of_the_time_is_0(call):
    some = ["--seconds", 3, "--passes", 4, "--seeds", 1000]  # of which there is time for a few
    status, printed, _ = call("diabetes", "--methods", "sgd", *some)
    assert status == 0 and "It ended early, and not all was tried." in printed


@pytest.mark.parametrize("name", ["wine", "breast_cancer"])
def test_several_classes_and_the_accuracy(name):
    """In float64, which losses of Gluon are not with MXNet 2.0."""
    problem = compare.LinearModel(options_of(name, "--weight-decay", 0.1))
    net, rows = problem.new_net(), np.arange(len(problem.y))
    assert not net.weight.data().asnumpy().any()
    net.weight.set_data(0.1 * np.random.RandomState(0).randn(*net.weight.shape))
    weight = net.weight.data().asnumpy()
    outputs = problem.X @ (weight.T if name == "wine" else np.r_[0 * weight, weight].T)
    losses = np.logaddexp.reduce(outputs, axis=1) - outputs[rows, problem.y]
    found = problem.loss_of(net, array(problem.X, "float64"), array(problem.y, "float64"))
    np.testing.assert_allclose(found.asnumpy(), losses, rtol=1e-12)
    assert problem.accuracy(net) == (outputs.argmax(axis=1) == problem.y).mean()


def test_of_each_refresh_and_momentum(call):
    """What options say arrives in the trainings."""
    methods = ["--methods", "svrg,svrg+nag", "--momenta", "0.5,0.8", "--seed", 5]
    rates = ["--learning-rates", "0.01,0.1,300", "--seeds", 2, "--passes", 9]
    status, printed, log = call(*SMALL, *methods, *rates)
    assert status == 0, log
    saved = json.loads(Path("results/results.json").read_text())
    runs, best = saved["runs"], saved["table"]["svrg+nag"]
    assert {row["seed"] for row in runs} == {5, 6}
    assert {row["options"] for row in runs} == {"", "momentum 0.5", "momentum 0.8"}
    assert {row["learning_rate"] for row in runs} == {0.01, 0.1, 300}
    assert None in {row["loss"] for row in runs}  # 300 diverges
    assert max(row["data_passes"] for row in runs) == pytest.approx(9, abs=0.2)
    for key, text in (("options", best["options"]), ("gap", f"{best['gap']:.2g}")):
        assert re.search(rf"^{key} .*{re.escape(text)}", printed, re.M)
    assert Path("results/curves.png").read_bytes()[:4] == b"\x89PNG"


def test_the_defaults(call):
    rates = ["--learning-rates", "0.1,1", "--output", "deep/er", "--batch-size", 32]
    status, printed, log = call("breast_cancer", *SMALL[1:], *rates)
    assert status == 0, log
    saved = json.loads(Path("deep/er/results.json").read_text())
    assert " ".join([*saved["table"]][:6]) == "sgd nag-decay lbfgs svrg svrg+nag svrg-nystrom"
    options = {"", "momentum 0.9", "momentum 0.99", "memory 30"}
    assert {row["options"] for row in saved["runs"]} == options
    assert saved["verdict"] in printed and "scikit-learn newton-c" in [*saved["table"]][6]
    assert saved["table"]["sgd"]["search trainings"] == 1
    assert re.search(r"^learning rate +(0.1|1)\* ", printed, re.M)  # at an end of the user's rates
    assert printed.endswith("written: deep/er/curves.png, deep/er/results.json\n")


def test_one_thread(tmp_path, monkeypatch):
    """Unless the user says otherwise."""
    program = (
        "import os; from gluon_svrg.commands import cli; "
        f"cli.main({['compare', *map(str, SMALL), '--methods', 'sgd']!r}); "
        "print('threads', os.environ['OMP_NUM_THREADS'])"
    )
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for given in ({}, {"OMP_NUM_THREADS": "2"}):
        status, output = run([sys.executable, "-c", program], tmp_path, **given)
        assert status == 0 and f"threads {given.get('OMP_NUM_THREADS', 1)}\n" in output


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
    """Numbers and dates are scaled; texts are inputs of 0 and 1."""
    path = tmp_path / "own.csv"
    path.write_text("\n" + ROWS.replace(",", separator), encoding="utf-8-sig")
    problem = compare.LinearModel(options_of(path, "--target", "price"))
    np.testing.assert_allclose(problem.y, scaled([10.5, 20, 30, 40.5, 50, 45])[:, 0])
    colors = [0, 1, 0, 1, 0, 0], [1, 0, 1, 0, 0, 1], [0, 0, 0, 0, 1, 0]  # blue, red, missing
    numbers = scaled([1.5, 2, 2.5, 5, -3, 4]), scaled([1, 0, 1, 0, 1, 1])  # size, sold
    expected = [numbers[0], np.transpose(colors), numbers[1]]
    expected += [scaled([2020, 2022, 2021, 2025, 2020, 2024]), scaled([0, 1, 0, 1, 1, 0])]  # days
    expected = np.concatenate([*expected, np.ones((6, 1))], axis=1)
    np.testing.assert_allclose(problem.X, expected, atol=1e-12)
    assert capsys.readouterr().err == (
        f"{path}: 6 of 7 rows, 7 inputs, no classes, 3 missing cells; categories: 'color'; left "
        "out: 'Unnamed: 0' (no name); 'who' (6 texts in 6 rows, as 'Ann'); 'empty' (empty)\n"
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
        problem = compare.LinearModel(options_of(path, "--target", "y"))
        assert problem.classes == (len(set(cells)) if classes else 0)
        np.testing.assert_allclose(problem.y, classes or scaled(cells)[:, 0])


def test_nothing_is_guessed(tmp_path, capsys):
    """Numbers are what pandas reads as such, with --decimal; ISO dates are days; else texts."""
    days = ["2020-02-28", "2020-02-29", *(f"2020-03-{n:02}" for n in range(1, 8))]
    times = [f"{day} 12:00:00+0{1 + n // 5}:00" for n, day in enumerate(days)]  # summer, winter
    rows = enumerate(zip(days, times))
    cells = (
        f'{n}a,{day},{at},"{n},5","{998 + n:,}",0{n + 1}.0{n % 2 + 1}.2020,{n}.5\n'
        for n, (day, at) in rows
    )
    path = tmp_path / "own.csv.gz"
    path.write_bytes(gzip.compress(f"x,day,at,price,sum,swapped,y\n{''.join(cells)}".encode()))
    X = compare.LinearModel(options_of(path, "--target", "y")).X
    hours = scaled([24 * n - n // 5 for n in range(9)])
    np.testing.assert_allclose(X, np.c_[scaled(np.arange(9)), hours, np.ones(9)], atol=1e-12)
    printed = capsys.readouterr().err
    assert "'x' (9 texts in 9 rows, as '0a'); 'price' (9 texts in 9 rows, as '0,5'; dec" in printed
    assert "as '0,5'; decimal commas need --decimal ','); 'sum' (9 texts" in printed
    assert printed.endswith("; 'swapped' (9 texts in 9 rows, as '01.01.2020')\n")
    path = tmp_path / "own.csv"
    path.write_text("x;z;y\n0,5;1.5;1\n1;1.5;0,25\n1,5;2.5;3\n2;2.5;2\n")
    problem = compare.LinearModel(options_of(path, "--target", "y", "--decimal", ","))
    np.testing.assert_allclose(problem.y, scaled([1, 0.25, 3, 2])[:, 0])
    np.testing.assert_allclose(problem.X[:, :1], scaled([0.5, 1, 1.5, 2]))
    assert "categories: 'z'; left" in capsys.readouterr().err


def test_none_and_na_are_classes(tmp_path, capsys):
    path = tmp_path / "own.csv"
    for names, classes in ((("None", "NA", "yes"), 3), (("None", "NA"), 2), (("1", "NA", "0"), 2)):
        cells = "".join(f"{n}.5,{name}\n" for n, name in enumerate(5 * names))
        path.write_text(f"x,y\n{cells}7,\n8,?\n")
        problem = compare.LinearModel(options_of(path, "--target", "y"))
        rows = 10 if "1" in names else 5 * len(names)
        assert problem.classes == classes and len(problem.y) == rows
        assert f"{rows} of {5 * len(names) + 2} rows" in capsys.readouterr().err


BAD_FILES = {
    "no column": ("a,b\n1,2\n", r"own.csv has no column 'y': choose one from 'a', 'b'$"),
    "constant": ("a,y\n1,3\n2,3\n3,\n", r"target 'y' that nothing can learn: it is constant$"),
    "names": ("a,y\n1,u\n2,v\n3,w\n", r"target 'y' .* it is 3 texts in 3 rows, as 'u'$"),
    "empty": ("\n", r"cannot read own.csv as UTF-8 text: No columns to parse from file$"),
    "one": ("y\n1\n", r"own.csv has only one column, 'y'$"),
    "infinity": ("a,y\n1,0\ninf,1\n3,0\n4,1\n", r"own.csv has infinite numbers in 'a'$"),
    "infinite target": ("a,y\n1,0\n2,inf\n3,0.5\n4,1\n", r"has infinite numbers in 'y'$"),
    "sep": ("sep=;\na;b;y\n1;2;0\n2;3;1\n", r"cannot read own.csv .* the first line, 'sep=;"),
    "comment": ("# of a shop\na;b;y\n1;2;0\n2;3;1\n", r"only one column, '# of a shop'$"),
    "comma": ("a;y\n1;0,5\n2;1,5\n3;2\n", r"3 texts in 3 rows, as '0,5'; .* --decimal ','$"),
    "words": ("a,y\nsome,0\nother,1\n", r"left out: 'a' \(2 texts in 2 rows, as 'some'\)$"),
    "latin-1": ("a,y\né,0\ne,1\n", r"cannot read own.csv as UTF-8 text: .* byte 0xe9"),
}
BAD_CALLS = {
    "iris": r"no file iris; bundled data are digits, breast_cancer, diabetes, wine$",
    "own.csv": r"own.csv needs a --target: choose one from 'a', 'y'$",
    "wine --target y": r"--target is for files; wine has a target of its own$",
    "digits --methods sgd,SGD": r"methods must be one or more, each once",
    "diabetes --learning-rates 0,1": r"each of learning_rates must be finite, above 0, got 0.0.$",
    "digits --learning-rates 0.1,abc": r"argument --learning-rates: invalid numbers value: '0.1,a",
    "digits --seeds 1.5": r"argument --seeds: invalid int value: '1.5'$",
    "diabetes --seeds 0": r"seeds, learning_rates and gaps must not be empty.$",
    "diabetes --output own.csv": r"File exists: 'own.csv'$",
    "diabetes --seconds 1e-6": r"The seconds were over before any training",
    "": r"the following arguments are required: DATA$",
}


@pytest.mark.parametrize("name", [*BAD_FILES, *BAD_CALLS])
def test_mistakes(name, call):
    content, message = BAD_FILES.get(name, ("a,y\n1,2\n", BAD_CALLS.get(name)))
    Path("own.csv").write_text(content, encoding="latin-1")
    status, printed, log = call(*("own.csv --target y" if name in BAD_FILES else name).split())
    (line,) = re.findall(r"^gluon-svrg compare: error: (.*)", log, re.M)
    assert re.search(message, line), line
    assert (status, printed) == (2, "") and "Traceback" not in log
    assert not any(Path("results").glob("*"))


def test_a_package_that_is_not_installed(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)  # so `import` finds none
    hint = "pip install '.[compare]' in a clone"
    line = f"gluon-svrg compare: error: pandas is not installed: {hint}\n"
    assert call("diabetes") == (2, "", line)
