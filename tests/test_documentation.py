"""The README and the docstrings: that they are complete, and that what they show runs."""

import doctest
import importlib
import inspect
import pkgutil
import re
import sys
from pathlib import Path

import pytest
from cluster import launch
from numpydoc.validate import validate

import gluon_svrg
import gluon_svrg.estimator
import gluon_svrg.schedule
import gluon_svrg.variance

README = Path(__file__).parent.parent / "README.md"
MODULES = [
    module.name
    for module in pkgutil.walk_packages(gluon_svrg.__path__, "gluon_svrg.")
    if module.name != "gluon_svrg.__main__"
]
PUBLIC = [
    *(f"gluon_svrg.{name}" for name in ("SAGATrainer", "SAGTrainer", "SVRGTrainer")),
    *(f"gluon_svrg.schedule.{name}" for name in gluon_svrg.schedule.__all__),
    *(f"gluon_svrg.variance.{name}" for name in gluon_svrg.variance.__all__),
    *(f"gluon_svrg.estimator.{name}" for name in gluon_svrg.estimator.__all__),
]
ACCEPTED = {
    "ES01": "a summary can be enough",
    "EX01": "one example per class",
    "SA01": "see also where there is something to see",
    "GL01": "numpydoc 1.7, the last for Python 3.8, wants the summary on a line of its own",
    "GL08": "raised for __init__, which its class documents",
    "YD01": "at_snapshot is a context manager and yields nothing",
}


def public_objects():
    for name in PUBLIC:
        yield name
        module, _, attribute = name.rpartition(".")
        owner = getattr(importlib.import_module(module), attribute)
        if inspect.isclass(owner):
            for member, value in vars(owner).items():
                if not member.startswith("_") and (callable(value) or isinstance(value, property)):
                    yield f"{name}.{member}"


@pytest.mark.parametrize("name", list(public_objects()))
def test_docstrings_are_complete(name):
    errors = [error for error in validate(name)["errors"] if error[0] not in ACCEPTED]
    assert errors == []


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


def test_the_doctests_are_found():
    assert doctest.testmod(importlib.import_module("gluon_svrg.trainer")).attempted > 5


def readme_blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.M | re.S)


def test_the_code_of_the_readme_runs_word_for_word(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = readme_blocks("python")
    assert len(blocks) >= 3
    namespace = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    printed = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"^epoch \d: mean loss ([\d.]+)$", printed, re.M)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


@pytest.mark.xdist_group("clusters")
def test_two_workers_train_what_the_readme_says(tmp_path):
    (script,) = readme_blocks("python train.py")
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, str(tmp_path / "train.py")]
    status, output = launch(["-n", 2, "-s", 1, "--", *command])
    assert status == 0, output
    for worker in range(2):
        said = rf"^\[worker {worker}[^]]*\] epoch \d: mean loss ([\d.]+)$"
        losses = [float(loss) for loss in re.findall(said, output, re.M)]
        assert len(losses) == 3, output
        assert losses[-1] < losses[0] / 2


def test_the_diff_of_the_readme_is_a_program_on_both_sides():
    (block,) = readme_blocks("diff")
    for sign, other in ("+-", "-+"):
        lines = [line[1:] for line in block.splitlines() if not line.startswith(other)]
        compile("\n".join(lines), f"{sign} side", "exec")


def test_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\(((?!http)[^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
