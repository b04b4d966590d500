"""Break lines of the package, one at a time: a test must fail each time.

Every mutant of `mutants.py` is a copy of the package with one line changed, tested in a process of
its own.
"""

import ast
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import FORMULA, MUTANTS, SUITES

import gluon_svrg

TESTS = Path(__file__).parent
PACKAGE = Path(gluon_svrg.__file__).parent
OF_THE_FORMULA = ("methods/", "passes/estimate")
CLUSTERS = {"distributed", "launch"}  # test files that start clusters: one at a time
SOURCES = {path.relative_to(PACKAGE): path.read_text() for path in PACKAGE.rglob("*.py")}
ALL = [(module, name) for module, mutants in MUTANTS.items() for name in mutants]


def suite_of(module):
    return SUITES[max(filter(module.startswith, SUITES), key=len)]


def suite_of_mutant(module, name):
    """The tests of a mutant, the one that is known to see it first."""
    return [*MUTANTS[module][name][2:], *suite_of(module)]


def mutated(module, name):
    """The path of a file in the package, and its source with the change."""
    original, changed, *_ = MUTANTS[module][name]
    assert changed != original
    for shift in (0, 4, -4, 8, -8):
        before, after = indented(original, shift), indented(changed, shift)
        found = {path: source for path, source in SOURCES.items() if before in source}
        own = Path(f"{module}.py")
        places = {own: found[own]} if own in found else found
        if places:
            where = {str(path): source.count(before) for path, source in places.items()}
            assert sum(where.values()) == 1, (
                f"it must stand once, and stands in {where}: {before!r}"
            )
            ((path, source),) = places.items()
            return path, source.replace(before, after)
    raise AssertionError(f"it stands nowhere in the package: {original!r}")


def indented(text, shift):
    """The text with the lines that it indents moved to the right, or to the left."""
    return "".join(
        " " * shift + line[max(0, -shift) :] if line.startswith(" ") else line
        for line in text.splitlines(keepends=True)
    )


def run_suite(folder, suite, deadline=400):
    """The tests of a suite against the package in a folder, without the long ones."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "HYPOTHESIS_PROFILE": "mutants",
        "OMP_NUM_THREADS": "1",
        "GLUON_SVRG_TEST_DEADLINE": "40",  # a healthy cluster takes less than 10
    }
    options = ["-x", "-q", "-p", "no:cacheprovider", "-c", str(TESTS.parent / "pyproject.toml")]
    options += [
        "-o",
        "addopts=",
        "-m",
        "not mutants and not convergence and not long and not launchers",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *suite],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"not done within {deadline} s: {suite}") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, output


def files(suite):
    """The paths of test files; ``"name::test"`` is one test of a file."""
    found = [name.partition("::") for name in suite]
    return [f"{TESTS / f'test_{name}.py'}{colons}{test}" for name, colons, test in found]


@pytest.mark.parametrize("module", MUTANTS)
def test_each_mutant_changes_one_place(module):
    for name in MUTANTS[module]:
        for path in files(suite_of_mutant(module, name)):
            path, _, test = path.partition("::")
            assert f"def {test}(" in Path(path).read_text() or not test
        ast.parse(mutated(module, name)[1])


def test_a_text_that_has_moved_is_found(monkeypatch):
    moved = {Path("new.py"): "if a:\n    if b:\n        c = 1\n", Path("old.py"): "a = 1\n"}
    monkeypatch.setattr(sys.modules[__name__], "SOURCES", moved)
    monkeypatch.setitem(MUTANTS, "old", {"moved": ("    if b:\n        c = 1\n", "    pass\n")})
    assert mutated("old", "moved") == (Path("new.py"), "if a:\n    pass\n")
    moved[Path("new.py")] = "if b:\n    c = 1\n"
    assert mutated("old", "moved") == (Path("new.py"), "pass\n")
    moved[Path("newer.py")] = "if b:\n    c = 1\n"
    with pytest.raises(AssertionError, match=r"must stand once.*new.py.*newer.py"):
        mutated("old", "moved")
    moved.clear()
    with pytest.raises(AssertionError, match="stands nowhere"):
        mutated("old", "moved")


def marks(module):
    """Mutants whose tests start clusters run one after the other; `.ci/run` runs some of them."""
    names = {name.partition("::")[0] for name in suite_of(module)}
    found = [pytest.mark.xdist_group("clusters")] if CLUSTERS & names else []
    return [*found, pytest.mark.formula] if module.startswith(OF_THE_FORMULA) else found


@pytest.mark.mutants
@pytest.mark.parametrize(
    ("module", "name"),
    [pytest.param(*mutant, marks=marks(mutant[0]), id=": ".join(mutant)) for mutant in ALL],
)
def test_mutant(module, name, tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "gluon_svrg")  # with its compiled files, which save time
    path, source = mutated(module, name)
    (tmp_path / "gluon_svrg" / path).write_text(source)
    status, output = run_suite(tmp_path, files(suite_of_mutant(module, name)))
    assert status == 1, f"survived:\n{output[-2000:]}"
    assert "error during collection" not in output.lower()


@pytest.mark.mutants
def test_the_suite_passes_without_a_mutant(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "gluon_svrg")
    status, output = run_suite(tmp_path, files(["schedule", "variance", "prox", *FORMULA]))
    assert status == 0, output[-2000:]


@pytest.mark.mutants
def test_the_copy_is_what_is_tested(tmp_path):
    (tmp_path / "gluon_svrg").mkdir()
    (tmp_path / "gluon_svrg" / "__init__.py").write_text("raise ZeroDivisionError\n")
    status, output = run_suite(tmp_path, files(["schedule"]))
    assert status != 0
    assert "ZeroDivisionError" in output
