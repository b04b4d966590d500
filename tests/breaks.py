"""Breaks the package on purpose, one line at a time: the tests must see each, see `.ci/long`.

``python tests/breaks.py [FILE ...]`` tries all breaks, or those of some files of the package. A new
break is a row of `BREAKS`.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
COPIED = ("gluon_svrg", "tests", "benchmarks", "pyproject.toml")
SECONDS = 300  # for the tests of one break
TOGETHER = 2  # processes


class Break(NamedTuple):
    """A line to replace, and the tests of which one must fail."""

    file: str  # in gluon_svrg
    old: str  # stands there exactly once
    new: str
    tests: str  # patterns of names in tests, without "test_"


METHODS = "methods halves recursive saga tables stored"
PASSES = "blocks dtypes* losses passes* random*"
FILES = "files saving* saved*"
WORKERS = "workers toy_kvstore"
BREAKS = [
    # The formulas
    Break("svrg.py", "Terms(b=-alpha, k=alpha,", "Terms(b=-alpha, k=1.0,", METHODS),
    Break("svrg.py", "(-float(count), 1)", "(-1.0, 1)", METHODS),
    Break("svrg.py", "rate * (1 - optimizer.momentum)", "rate", "barzilai_borwein"),
    Break("svrg.py", "bool(is_over(num_snapshots))", "False", "schedule"),
    Break("saga.py", "share = 1.0 if self._is_complete", "share = 1.0 if True", METHODS),
    Break("saga.py", "after = before + added", "after = before + 2 * added", METHODS),
    Break("saga.py", "(0, ((1.0 * factor, 1),))", "(0, ((2.0 * factor, 1),))", METHODS),
    Break("sarah.py", "Terms(b=-1.0, k=1.0,", "Terms(b=-1.0, k=0.9,", METHODS),
    Break("storm.py", "rest = 1 - self.mixing", "rest = self.mixing", METHODS),
    Break("mars.py", "scale_to_norm(treated, self.clip * scale, entries)", "pass", METHODS),
    Break("mars.py", "len(p.shape) > 1", "len(p.shape) > 0", METHODS),
    Break("mars.py", "(self.s / (1 + self.s), 2)", "(self.s, 2)", METHODS),
    Break("recursive.py", "1.0 / (entries * scale), 1", "1.0 / entries, 1", METHODS),
    Break("recursive.py", "self._take(live.following.in_objective)", "pass", METHODS),
    # Passes
    Break("passes/estimate.py", "terms.k / terms.b * count, 2", "terms.k / terms.b, 2", METHODS),
    Break("passes/random_lock.py", '.astype("float64").ravel()', ".ravel()", PASSES),
    Break("passes/full_pass.py", "sum_to_first(total)", "pass", METHODS),
    Break("passes/live_gradients.py", "self.entries += found", "self.entries = found", "halves"),
    Break("passes/live_gradients.py", "sum_to_first(self._apart)", "pass", "halves"),
    Break("passes/network.py", "copy(self.spare, self.live)", "pass", PASSES),
    Break("passes/random_lock.py", "relative if relative > rounding else 0.0", "0.0", PASSES),
    Break("trainer.py", "[weights], [grads], p.grad_req", '[weights], [grads], "write"', "blocks"),
    # Workers
    Break("kvstore/workers.py", "range(0, len(total), BLOCK)", "range(0, 1)", WORKERS),
    Break("passes/live_gradients.py", "sum_arrays(dict(", "(lambda _: 0)(dict(", WORKERS),
    Break("kvstore/collective.py", "out=[array])", "out=[array.copy()])", WORKERS),
    # Files
    Break("saving/container.py", "if not first or content[", "if not first and content[", FILES),
    Break("saving/parameters.py", "int(part) if part.isdigit()", "part if 0", FILES),
    Break("saving/optimizer.py", "max(row.get(n, 0), most.get(n, 0))", "0", FILES),
    Break("trainer.py", "self._progress.inner_steps = 0  # of", "pass  # of", f"states {FILES}"),
    # What surrounds the trainers
    Break("prox.py", "/ (1 - momentum)", "", "prox"),
    Break("prox.py", "setdefault(parameter, operator)", "update({parameter: operator})", "prox"),
    Break("schedule.py", "self.asked += 1", "pass", "schedule"),
    Break("schedule.py", "(trainer.num_snapshots - 1)", "trainer.num_snapshots", "schedule"),
    Break("schedule.py", "self.draws += 1", "pass", "schedule"),
    Break("variance.py", "self._plain[k] += count * g", "self._plain[k] += g", "variance"),
    Break("variance.py", "in units) - count", "in units)", "variance"),
    Break("estimator.py", "(batch, devices, batch_axis)", "(batch, devices)", "estimator"),
    Break("estimator.py", "self._count.epochs += 1", "pass", "estimator"),
    Break("commands/compare.py", "math.pi * done", "math.pi", "compare"),
]


def files(patterns):
    """The files of tests; those of one pattern may have been renamed, but not all of them."""
    found = {p for each in patterns.split() for p in (ROOT / "tests").glob(f"test_{each}.py")}
    assert found, f"no tests are called {patterns}"
    return sorted(f"tests/{path.name}" for path in found)


def run_tests(each, paths):
    """Run tests with a broken copy of the package, or with a whole one; the status and output."""
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(folder, name))
        if each is not None:
            file = Path(folder, "gluon_svrg", each.file)
            file.write_text(file.read_text().replace(each.old, each.new))
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *paths],
            cwd=folder,  # where Python looks for the package first
            env={**os.environ, "PYTHONPATH": folder, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=None if each is None else SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        return process.returncode, output


def verdict(each):
    """Whether the tests see a break, in a word."""
    status, output = run_tests(each, files(each.tests))
    word = {0: "survived", 1: "died", -signal.SIGKILL: "took too long"}.get(status, "never ran")
    seen = re.findall(r"^FAILED \S+?::(\w+)", output, re.M)
    print(word, each.file, each.old, "->", each.new or "nothing", *seen, sep="  ", flush=True)
    if word != "died":
        print(output[-3000:], flush=True)
    return word


def main():
    """Try all breaks; 1 if the tests do not see one."""
    chosen = [each for each in BREAKS if each.file in sys.argv[1:] or not sys.argv[1:]]
    for each in chosen:
        count = (ROOT / "gluon_svrg" / each.file).read_text().count(each.old)
        assert count == 1, f"{each.file} has {count} times: {each.old}"
    with ThreadPoolExecutor(TOGETHER) as pool:
        words = list(pool.map(verdict, chosen))
    status, output = run_tests(None, sorted({p for each in chosen for p in files(each.tests)}))
    print("Without a break:", output.splitlines()[-1])
    print(f"{words.count('died')} of {len(words)} breaks died.")
    return int(status != 0 or {*words} != {"died"})


if __name__ == "__main__":
    sys.exit(main())
