"""`gluon-svrg compare`: what it reads, trains on, says and writes."""

import gzip
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from jobs import run
from kit import table
from problems import array
from test_compare_engine import lowest

from gluon_svrg.commands import cli, compare

for package in ("sklearn", "pandas", "matplotlib", "scipy", "tqdm"):
    pytest.importorskip(package, reason=f"gluon-svrg compare needs {package}")

SMALL = ["diabetes", "--passes", 4, "--batch-size", 64, "--learning-rates", "0.05", "--seeds", 1]


def model_of(*arguments):
    return compare.Problem(cli.parser().parse_args(["compare", *map(str, arguments)]))


def interrupt(*args):
    raise KeyboardInterrupt


@pytest.fixture
def call(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        try:
            status = cli.main(["compare", *map(str, arguments)])
        except SystemExit as ended:
            status = ended.code
        return status, *capsys.readouterr()

    def saved(*arguments, folder="results"):
        """What a call that succeeds prints, and what it saves."""
        status, printed, log = run(*arguments)
        assert status == 0, log
        return printed, json.loads(Path(folder, "results.json").read_text())

    run.saved = saved
    return run


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 3])
def test_the_verdict_on_wine(seed, call):
    """A rate that one seed likes is not taken: three were 1.6e-7 and 4e-2 apart at such a one."""
    methods = ["--methods", "sgd,svrg,svrg+nag"]
    rows = call.saved("wine", "--seed", seed, *methods)[1]["table"]
    gaps = {name: row["gap"] for name, row in rows.items()}
    assert gaps["svrg+nag"] < gaps["svrg"] < gaps["sgd"] / 10
    assert all(row["highest"] < 1e-4 for name, row in rows.items() if "svrg" in name)


@table("decay, l1", (0.0, 0.0), (1e-4, 0.0), (0.3, 0.0), (0.0, 0.05), (0.01, 0.05))
@pytest.mark.parametrize("name", ["diabetes", "breast_cancer"])
def test_the_minimum(name, decay, l1):
    model, is_class = model_of(name, "--weight-decay", decay, "--l1", l1), name == "breast_cancer"
    loss, rivals = model.minimum()
    if is_class and not decay + l1:
        assert (loss, rivals) == (None, {})
        return
    expected = lowest(model.X, model.y, decay, l1, is_class)[1]
    assert loss == pytest.approx(expected, rel=1e-10)
    ours = "saga" if is_class else "coordinate descent"
    assert [*rivals] == [f"scikit-learn {ours if l1 else model.solver()[0]}"]


def test_a_solver_that_has_not_converged(capsys):
    """Its loss is no minimum, but a row of the table."""
    model = model_of("breast_cancer")
    loss, rivals = model.minimum(limit=0.0)
    (row,) = rivals.values()
    assert loss is None and row["loss"] > model.minimum()[0] * (1 + 1e-9)
    line = r"scikit-learn newton-cholesky has not converged in \S+ s: losses are compared"
    assert re.match(line, capsys.readouterr().err)


def test_solvers_for_many_inputs(call):
    """A Hessian of many weights takes minutes and memory; most inputs of categories are zeros."""
    rng = np.random.RandomState(0)
    rows = np.c_[rng.normal(size=(60, 400)).round(6), rng.randint(4, size=60)]
    header = ",".join(map(str, range(401)))
    np.savetxt("wide.csv", rows, "%g", ",", header=header, comments="")
    loss, rivals = model_of("wide.csv", "--target", "400").minimum()
    assert [*rivals] == ["scikit-learn newton-cg"] and 0.01 < loss < np.log(4)
    rows = (f"{'abcdefgh'[n % 8]},{rng.normal():.4f},{n % 3 // 2}\n" for n in range(96))
    Path("own.csv").write_text(f"x,z,y\n{''.join(rows)}")
    status, printed, log = call("own.csv", "--target", "y", *SMALL[1:], "--methods", "svrg")
    assert status == 0 and "scikit-learn newton-cholesky, sparse" in printed, log
    model = model_of("own.csv", "--target", "y")
    expected = lowest(model.X, model.y, 0.01, 0.0, True)[1]
    assert model.minimum()[0] == pytest.approx(expected, rel=1e-10)


def test_a_penalty_of_the_weights_alone(call):
    """All find the same minimum, and who cannot have the penalty is left out."""
    methods = ["--methods", "svrg+nag,lbfgs,adam", "--momenta", "0.9", "--passes", 60]
    printed, saved = call.saved("breast_cancer", "--l1", 0.05, "--seeds", 1, *methods)
    assert [*saved["table"]] == ["svrg+nag", "scikit-learn saga"]
    assert saved["table"]["svrg+nag"]["gap"] < 1e-4
    assert "Left out: lbfgs." in printed and "Left out: adam." in printed
    assert "with its penalties (weight decay 0.01, L1 0.05)\n" in printed
    assert "prox={'.*weight': L1(strength=0.05)}" in printed


def test_an_interrupt_is_130(call, monkeypatch):
    from gluon_svrg.compare import search, training

    trainings = iter([training.train])  # the next one finds none
    monkeypatch.setattr(search, "train", lambda *args: next(trainings, interrupt)(*args))
    status, printed, _ = call(*SMALL, "--methods", "sgd,svrg")
    assert status == 130 and "Not trained: svrg." in printed


def test_the_end_of_the_time_is_0(call):
    some = ["--seconds", 3, "--passes", 4, "--seeds", 1000]  # of which there is time for a few
    status, printed, _ = call("diabetes", "--methods", "sgd", *some)
    assert status == 0 and "It ended early, and not all was tried." in printed


@pytest.mark.parametrize("name", ["wine", "breast_cancer"])
def test_several_classes_and_the_accuracy(name):
    """In float64, which losses of Gluon are not with MXNet 2.0."""
    problem = model_of(name, "--weight-decay", 0.1)
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
    printed, saved = call.saved(*SMALL, *methods, *rates)
    runs, best = saved["runs"], saved["table"]["svrg+nag"]
    assert {row["seed"] for row in runs} == {5, 6}
    assert {row["options"] for row in runs} == {"", "momentum 0.5", "momentum 0.8"}
    assert {row["learning_rate"] for row in runs} == {0.01, 0.1, 300}
    assert None in {row["loss"] for row in runs}  # 300 diverges
    assert max(row["data_passes"] for row in runs) == pytest.approx(9, abs=0.2)
    for key, text in (("options", best["options"]), ("gap", f"{best['gap']:.2g}")):
        assert re.search(rf"^{key} .*{re.escape(text)}", printed, re.M)
    assert Path("results/curves.png").read_bytes()[:4] == b"\x89PNG"


def test_a_momentum_that_no_method_takes(call):
    _, saved = call.saved(*SMALL, "--methods", "svrg-nystrom+nag", "--batch-size", 8)
    assert [*saved["table"]][:1] == ["svrg-nystrom+nag"]


def test_the_defaults(call):
    rates = ["--learning-rates", "0.1,1", "--output", "deep/er", "--batch-size", 32]
    printed, saved = call.saved("breast_cancer", *SMALL[1:], *rates, folder="deep/er")
    assert " ".join([*saved["table"]][:6]) == "sgd nag-decay lbfgs svrg svrg+nag svrg-nystrom"
    options = {"", "momentum 0.9", "momentum 0.99", "memory 30"}
    assert {row["options"] for row in saved["runs"]} == options
    assert saved["verdict"] in printed and "scikit-learn newton-c" in [*saved["table"]][6]
    assert saved["table"]["sgd"]["search trainings"] == 1
    assert re.search(r"^learning rate +(0.1|1)\* ", printed, re.M)  # at an end of the user's rates
    assert printed.endswith("written: deep/er/curves.png, deep/er/results.json\n")


def test_one_thread(tmp_path, monkeypatch):
    """Unless the user says otherwise."""
    words = ["compare", *map(str, SMALL), "--methods", "sgd"]
    program = f"import os; from gluon_svrg.commands import cli; cli.main({words!r}); "
    program += "print('threads', os.environ['OMP_NUM_THREADS'])"
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for given in ({}, {"OMP_NUM_THREADS": "2"}):
        status, output = run([sys.executable, "-c", program], tmp_path, **given)
        assert status == 0 and f"threads {given.get('OMP_NUM_THREADS', 1)}\n" in output


def scaled(*columns):
    values = np.array(columns, dtype="float64").T
    return (values - values.mean(axis=0)) / values.std(axis=0)


ROWS = """\
the size,who,color,sold,when,empty,day,price,
1.5,Ann,red,True,2020,,2020-01-01,10.5,1
,Bob, blue,False,?,,2020-01-02,20,2
2.5,Cid,red,True,2021,NA,2020-01-01,30,3
7,Dan,,False,2022,,2020-01-01,,4
5,Eve,blue,False,2025,,2020-01-02,40.5,5
-3,Flo,,True,2020,,2020-01-02 00:00:00+00:00,50,6
4,Hal,red,True,2024,,2020-01-01,45,7
"""


@pytest.mark.parametrize("separator", ",;\t|")
def test_a_file(separator, tmp_path, capsys):
    """Texts are inputs of 0 and 1; numbers and dates are scaled, and a missing one is the mean."""
    path = tmp_path / "own.csv.gz"
    path.write_bytes(gzip.compress(("\n" + ROWS.replace(",", separator)).encode("utf-8-sig")))
    model = model_of(path, "--target", "price")
    np.testing.assert_allclose(model.y, scaled([10.5, 20, 30, 40.5, 50, 45])[:, 0])
    size, when = scaled([1.5, 2.5, 5, -3, 4])[:, 0], scaled([2020, 2021, 2025, 2020, 2024])[:, 0]
    expected = [[0, 1, 0, 1, 0, 0], [1, 0, 1, 0, 0, 1], [0, 0, 0, 0, 1, 0]]  # blue, red, missing
    expected += [np.insert(size, 1, 0), *scaled([1, 0, 1, 0, 1, 1]).T]  # sold
    expected += [np.insert(when, 1, 0), *scaled([0, 1, 0, 1, 1, 0]).T, np.ones(6)]  # days
    np.testing.assert_allclose(model.X, np.transpose(expected), atol=1e-12)
    assert capsys.readouterr().err == (
        f"{path}: 6 of 7 rows, no classes; categories: color; left out: 'Unnamed: 8' (6 different "
        "values in 6 rows: 1, 2); 'empty' (0 different values in 0 rows: ); "
        "'who' (6 different values in 6 rows: 'Ann', 'Bob')\n"
    )


@table(
    ("cells", "classes"),
    (["no", "yes", "no", "yes", "no"], [0, 1, 0, 1, 0]),
    (["NA", "None", "a", "NA", "a", "None"], [0, 1, 2, 0, 2, 1]),
    ([7, 3, 7, 3, 9, 9], [1, 0, 1, 0, 2, 2]),
    ([True, False, True, False], [1, 0, 1, 0]),
    ([1, 2, 3, 4, 5], None),
    ([1.5, 2] * 3, None),
    ([*range(21)] * 2, None),
)
def test_classes_and_numbers(cells, classes, tmp_path):
    path = tmp_path / "own.csv"
    text = "".join(f"{n},5;{cell}\n" for n, cell in enumerate(cells))
    path.write_text("x;y\n" + text.replace(".", ","))
    model = model_of(path, "--target", "y", "--decimal", ",")
    assert model.classes == (len(set(cells)) if classes else 0)
    np.testing.assert_allclose(model.y, classes or scaled(cells)[:, 0])
    np.testing.assert_allclose(model.X[:, 0], scaled([*range(len(cells))])[:, 0])


BAD_FILES = {
    "no column": ("a,b\n1,2\n", r"own.csv has no column 'y': choose one from 'a', 'b'$"),
    "same": ("a,y\n1,3\n2,3\n3,\n", r"'y' that cannot be learned: 1 different values in 2 rows"),
    "ids": ("a,y\n1,u\n2,v\n3,w\n", r"cannot be learned: 3 different values in 3 rows: 'u', 'v'$"),
    "infinity": ("a,y\n1,0\ninf,1\n3,0\n4,1\n", r"own.csv has infinite numbers in 'a'$"),
    "header": ("# of a shop\na;b;y\n1;2;0\n", r"has no column 'y': choose one from '# of a shop'$"),
    "words": ("a,y\nsome,0\nother,1\n", r"to learn 'y' from; left out: 'a' \(2 different values"),
    "commas": ("a;y\n0,5;0\n1,5;1\n", r"'0,5', '1,5'; decimal commas need --decimal ','\)$"),
    "latin-1": ("a,y\né,0\ne,1\n", r"cannot read own.csv as UTF-8 text .* byte 0xe9"),
}
BAD_CALLS = {
    "iris": r"there is no file iris; bundled data are digits, breast_cancer, diabetes, wine$",
    "own.csv": r"own.csv needs a --target: choose one from 'a', 'y'$",
    "wine --target y": r"--target is for files; wine has a target of its own$",
    "diabetes --learning-rates 0,1": r"each of learning_rates must be finite, above 0, got 0.0.$",
    "digits --learning-rates 0.1,abc": r"argument --learning-rates: invalid numbers value: '0.1,a",
    "diabetes --output own.csv": r"File exists: 'own.csv'$",
    "diabetes --weight-decay -1 --l1 1": r"--weight-decay must be finite, at least 0, got -1.0.$",
    "diabetes --l1 -1": r"--l1 must be finite, at least 0, got -1.0.$",
    "diabetes --seconds -5": r"--seconds must be finite, at least 0, got -5.0.$",
    "diabetes --seconds 1e-6": r"The seconds were over before any training",
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
    """This does not wait for the figure."""
    monkeypatch.setattr(compare, "find_spec", lambda name: None if name == "matplotlib" else name)
    status, printed, log = call("diabetes")
    assert (status, printed) == (2, "") and "error: matplotlib is not installed: pip inst" in log


@pytest.mark.parametrize("name", ["breast_cancer", "wine"])
def test_accuracy_of_the_bias_alone(name):
    model = model_of(name, "--l1", 0.05)
    net = model.new_net()
    net.bias.data()[-1] = 1.0
    assert model.accuracy(net) == (model.y == model.classes - 1).mean()
