"""Documents and docstrings: what they show runs, and what they name exists."""

import argparse
import doctest
import importlib
import inspect
import itertools
import json
import logging
import pkgutil
import pydoc
import re
import runpy
import sys
from pathlib import Path

import pytest
from jobs import GLUON_SVRG, run

import gluon_svrg
from gluon_svrg.commands import cli

ROOT = Path(__file__).parent.parent
README, INDEX = ROOT / "README.md", ROOT / "notebooks" / "README.md"
PAGES = sorted((ROOT / "notebooks" / "guide").glob("*.md"))
PATTERNS = ("*.md", ".github/**/*.md", "benchmarks/*.md", "notebooks/**/*.md")
DOCUMENTS = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern))
HISTORY = ROOT / ".github" / "CHANGELOG.md"  # it names what is gone, too
SUPPORTING = ("compare", "estimator", "prox", "schedule", "variance")
WALK = pkgutil.walk_packages(gluon_svrg.__path__, "gluon_svrg.")
MODULES = [module.name for module in WALK if module.name != "gluon_svrg.__main__"]
ACCEPTED = {
    "ES01": "a summary can be enough",
    "EX01": "one example per class",
    "SA01": "see also where there is something to see",
    "GL01": "numpydoc 1.7, the last for Python 3.8, wants the summary on a line of its own",
    "GL08": "raised for __init__, which its class documents",
    "YD01": "at_snapshot is a context manager and yields nothing",
}


def name_of(path):
    return str(path.relative_to(ROOT))


OWNERS = [gluon_svrg, *(getattr(gluon_svrg, name) for name in SUPPORTING)]
NAMES = [(owner, name) for owner in OWNERS for name in owner.__all__ if name != "__version__"]
PUBLIC = {f"{owner.__name__}.{name}": getattr(owner, name) for owner, name in NAMES}


def described():
    """Public names, and what users call of public classes; `Estimator` itself calls handlers."""
    for name, owner in PUBLIC.items():
        yield name
        is_called = inspect.isclass(owner) and owner.__module__ != "gluon_svrg.estimator"
        for member, value in vars(owner).items() if is_called else ():
            if not member.startswith("_") and (callable(value) or isinstance(value, property)):
                yield f"{name}.{member}"


def test_docstrings_are_complete():
    validate = pytest.importorskip("numpydoc.validate", reason="needs numpydoc").validate
    errors = {name: validate(name)["errors"] for name in described()}
    wrong = {n: [e for e in found if e[0] not in ACCEPTED] for n, found in errors.items()}
    assert {name: found for name, found in wrong.items() if found} == {}


def test_public_names_have_an_example():
    """A `Variance` is made by `variance`, whose example shows it; so is a `Comparison`."""
    without = {name for name, value in PUBLIC.items() if ">>> " not in inspect.getdoc(value)}
    assert without == {"gluon_svrg.compare.Comparison", "gluon_svrg.variance.Variance"}


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.failed == 0
    if name == "gluon_svrg.svrg":
        assert found.attempted > 5


def test_public_names_are_in_the_reference():
    """A module is there as a whole, with the members of its `__all__`."""
    pages = [*(ROOT / ".github" / "docs").rglob("*.rst"), *(ROOT / ".github/docs").rglob("*.md")]
    text = "\n".join(path.read_text() for path in pages)
    classes = {*re.findall(r"auto(?:class|function|module):: ([\w.]+)", text)}
    for name in PUBLIC:
        module, _, own = name.rpartition(".")
        assert classes & {name, *([own] if module == "gluon_svrg" else [module])}, name


def test_the_reference_is_of_the_docstrings():
    path = ROOT / ".github" / "docs" / "reference.py"
    written = runpy.run_path(str(path))["text"]()
    assert path.with_suffix(".md").read_text() == written, f"run python {name_of(path)}"


def test_folders_and_the_way_of_a_step_are_of_the_code():
    """A file has the names that follow it on the page; each file of the package has a line."""
    guide = (ROOT / ".github" / "CONTRIBUTING.md").read_text().partition("## How a step runs")[2]
    for file, names in re.findall(r"^\d\. `([\w/]+\.py)`: (.*?)(?=^\d\. |^$)", guide, re.M | re.S):
        code = (ROOT / "gluon_svrg" / file).read_text()
        for name in re.findall(r"`(\w+)`", names):
            assert f"def {name}(" in code, f"{file}: {name}"
    text = (ROOT / ".github" / "FOLDERS.md").read_text()
    sections = re.findall(r"^## (gluon_svrg[\w/]*)(.*?)(?=^## )", text, re.M | re.S)
    named = {f"{folder}/{f}" for folder, rows in sections for f in re.findall(r"`(\w+\.py)`", rows)}
    files = {name_of(path) for path in (ROOT / "gluon_svrg").rglob("[!_]*.py")}
    assert files <= named, files - named
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_what_is_cited_is_this_version():
    cited = (ROOT / ".github" / "CITATION.cff").read_text()
    assert f"\nversion: {gluon_svrg.__version__}\n" in cited
    assert f"## {gluon_svrg.__version__}\n" in HISTORY.read_text()


def blocks(document, language="python"):
    """The blocks of code, each with the line where it begins."""
    text = document.read_text()
    for found in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.M | re.S):
        yield text.count("\n", 0, found.start(1)), found[1]


def run_blocks(document, namespace):
    for line, block in blocks(document):
        for package in re.findall(r"^(?:import|from) (\w+)", block, re.M):
            pytest.importorskip(package, reason=f"needs {package}")
        exec(compile("\n" * line + block, str(document), "exec"), namespace)  # errors name the line


@pytest.mark.parametrize("page", [page for page in PAGES if any(blocks(page))], ids=name_of)
def test_code_runs_word_for_word(page, tmp_path, monkeypatch):
    """Each page of the guide continues from the program of the index, and from no other page."""
    assert re.search(rf"\]\({re.escape('../README.md#')}", page.read_text()), "it must say so"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.root, "handlers", [*logging.root.handlers])  # pages add one
    monkeypatch.setattr(logging.root, "level", logging.root.level)
    namespace = {}
    run_blocks(INDEX, namespace)
    assert "trainer" in namespace
    run_blocks(page, namespace)


def test_the_program_prints_what_the_readme_shows(capsys):
    run_blocks(README, {})
    printed, text = capsys.readouterr().out, README.read_text()
    number = r"\d+\.\d+"
    shown = re.search(r"^```python\n.*?^```$.*?^```\n(.*?)^```$", text, re.M | re.S)[1]
    assert re.sub(number, "#", printed) == re.sub(number, "#", shown)
    found, expected = (list(map(float, re.findall(number, each))) for each in (printed, shown))
    assert found == pytest.approx(expected, abs=0.0015)
    assert len(found) == 4
    assert found == sorted(found, reverse=True)


def test_the_diff_and_the_program_are_one_recipe():
    """All lines that the first diff adds are in the program; both of its sides are programs."""
    ((_, block), *_), ((_, program),) = blocks(README, "diff"), blocks(README)
    added = [line[1:] for line in block.splitlines() if re.match(r"\+ *\S", line)]
    assert len(added) > 4
    without_comments = re.sub(r" +#.*", "", program).splitlines()
    assert {re.sub(r" +#.*", "", line) for line in added} <= {*without_comments}
    for other in "+-":
        lines = [line[1:] for line in block.splitlines() if not line.startswith(other)]
        compile("\n".join(lines), f"without {other}", "exec")


def test_two_workers_train_what_the_guide_says(tmp_path):
    """A block with the name of a file is a script for the workers of a job."""
    ((_, script),) = (block for page in PAGES for block in blocks(page, r"python train\.py"))
    if "sklearn" in script:
        pytest.importorskip("sklearn", reason="needs scikit-learn")
    (tmp_path / "train.py").write_text(script)
    words = ["launch", "-n", 2, "-s", 1, "--", sys.executable, tmp_path / "train.py"]
    status, output = run([*GLUON_SVRG, *words])
    assert status == 0, output
    for worker in range(2):
        line = rf"^\[worker {worker}[^]]*\] epoch \d: mean loss ([\d.]+)$"
        losses = [float(loss) for loss in re.findall(line, output, re.M)]
        assert len(losses) == 3, output
        assert losses[-1] < losses[0] / 2


def code_in(document):
    """Python and shell: blocks, and inline code outside of them."""
    text = document.read_text()
    yield from re.findall(r"^```(?:python[^\n]*|sh)\n(.*?)^```$", text, re.M | re.S)
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))


CODE = [(name_of(path), code) for path in DOCUMENTS if path != HISTORY for code in code_in(path)]


def test_names_exist():
    found, missing = 0, []
    for document, code in CODE:
        paths = re.findall(r"(?<![\w/.])(gluon_svrg(?:\.[A-Za-z]\w*)+)(?![\w/])", code)
        for module, names in re.findall(r"from (gluon_svrg[\w.]*) import ([\w, ]+)", code):
            paths += [f"{module}.{name.strip()}" for name in names.split(",")]
        for name in re.findall(r"\b(?:trainer|SVRGTrainer)\.([a-z]\w*)\b(?! = )", code):
            paths += [f"gluon_svrg.SVRGTrainer.{name}"] if name != "py" else []
        found += len(paths)
        missing += [f"{document}: {path}" for path in paths if pydoc.locate(path) is None]
    assert missing == []
    assert found > 30


def test_commands_and_their_options_exist():
    (commands,) = (a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction))
    found, missing = 0, []
    for document, code in CODE:
        for command, rest in re.findall(r"\bgluon-svrg ([a-z]+)([^\n]*)", code):
            assert command in commands.choices, f"{document}: {code}"
            known = commands.choices[command]._option_string_actions
            own = itertools.takewhile(lambda word: word != "--", rest.split())
            options = [w.partition("=")[0] for w in own if re.match(r"--?[a-zA-Z]", w)]
            found += len(options)
            missing += [f"{document}: {code}: {name}" for name in options if name not in known]
    assert missing == []
    assert found > 5


def anchors(document):
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def texts():
    """All that can have links: documents, and the text in notebooks."""
    for document in DOCUMENTS:
        yield document, re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.M | re.S)
    for notebook in INDEX.parent.glob("*.ipynb"):
        for cell in json.loads(notebook.read_text())["cells"]:
            if cell["cell_type"] == "markdown":
                yield notebook, "".join(cell["source"])


def test_links_lead_somewhere():
    broken = []
    for document, text in texts():
        for link in re.findall(r"\]\(((?!http|attachment)[^)\s]+)\)", text):
            path, _, anchor = link.partition("#")
            target = (document.parent / path).resolve() if path else document
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{name_of(document)}: {link}")
    assert broken == []
