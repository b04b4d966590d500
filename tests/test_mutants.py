"""Break each line of the estimator once: a test must fail each time.

Every mutant is a copy of the package with one line changed, tested in a process of its own.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gluon_svrg

TESTS = Path(__file__).parent
PACKAGE = Path(gluon_svrg.__file__).parent
SUITE = [
    "operations",
    "part_of_network",
    "random_lock",
    "accumulation",
    "blocks",
    "interface",
    "stores",
    "identities",
]  # the fast ones first

#: Modules with tests of their own. A mutant may name others, where its line is not theirs alone.
OWN = {
    "stored": ["stored"],
    "stored_subtract": ["stored"],
    "memory": ["stored"],
    "states": ["states"],
    "plain_data": ["states"],
    "checkpoint": ["states"],
    "mixed_precision": ["mixed_precision"],
    "schedule": ["schedule"],
    "variance": ["variance"],
    "estimator": ["estimator"],
}

MUTANTS = {
    # control_variate.py
    "sign of the control variate": ("control_variate", "rate=coefficient", "rate=-coefficient"),
    "coefficient ignored": ("control_variate", "rate=coefficient", "rate=1.0"),
    "full gradient missing": ("control_variate", "decay=count", "decay=0"),
    "sign of the full gradient": ("control_variate", "decay=count", "decay=-count"),
    "full gradient not scaled": ("control_variate", "decay=count", "decay=1"),
    "operation of another count": ("control_variate", "key = device, count,", "key = device, 0,"),
    "operation of another device": ("control_variate", "key = device, count,", "key = 0, count,"),
    "operation of another coefficient": (
        "control_variate",
        "count, coefficient\n",
        "count, 0.0\n",
    ),
    "old full gradient": (
        "control_variate",
        "copy_all(full_grads, self.full_grads)",
        "pass",
    ),
    "old snapshot": ("control_variate", "        self.snapshot.replace(snapshot)\n", ""),
    "snapshot not bound to new buffers": ("control_variate", "        self.snapshot.bind()\n", ""),
    "buffer not bound to new buffers": (
        "control_variate",
        "        self.buffer.bind(self.snapshot.buffers)\n",
        "",
    ),
    "operations on old buffers": (
        "control_variate",
        "(self.snapshot.buffers)\n        self._forget_operations()",
        "(self.snapshot.buffers)",
    ),
    "not bound to new buffers": ("trainer", "        held.bind()\n", ""),
    # buffer.py
    "snapshot gradient not kept": ("buffer", "            copy()\n", "            pass\n"),
    "sum not started anew": ("buffer", "            zero(column)\n", "            pass\n"),
    "sum of another device": ("buffer", "self._sums[device].add()", "self._sums[0].add()"),
    # full_gradient.py
    "last minibatch only": (
        "full_gradient",
        "    entries, losses, ever",
        "    batches = list(batches)[-1:]\n    entries, losses, ever",
    ),
    "entries of one device": (
        "full_gradient",
        "entries += sum(evaluation.counts)",
        "entries += evaluation.counts[0]",
    ),
    "entries counted as batches": (
        "full_gradient",
        "entries += sum(evaluation.counts)",
        "entries += 1",
    ),
    "mean not taken": (
        "full_gradient",
        "    divide([total for total, *_ in sums], divisor)\n",
        "",
    ),
    "mean over devices": (
        "full_gradient",
        "*_ in sums], divisor)",
        "*_ in sums], divisor / len(sums[0]))",
    ),
    "a device not summed": (
        "full_gradient",
        "            total += addend.copyto(_mxnet.device_of(total))\n",
        "",
    ),
    "a device without the mean": ("full_gradient", "            total.copyto(target)\n", ""),
    "gradients not put back": (
        "full_gradient",
        "        copy_all(spare, snapshot.buffers)\n",
        "",
    ),
    "infinite accepted": ("full_gradient", "if not all_finite", "if None and all_finite"),
    # estimate.py and random_lock.py
    "snapshot gradient mistaken for the current one": (
        "estimate",
        "    held.buffer.keep()\n",
        "",
    ),
    "gradients of the snapshot accumulate": (
        "estimate",
        "    held.snapshot.clear_accumulated()\n",
        "",
    ),
    "gradients of before accumulate": ("gradient", "    snapshot.clear_accumulated()\n", ""),
    "accumulated gradients lost": (
        "snapshot",
        "                buffer += addend\n",
        "                pass\n",
    ),
    "accumulated gradients lost by an error": (
        "snapshot",
        "            copy_all(before, self._accumulating)\n",
        "",
    ),
    "unlocked at the snapshot": (
        "estimate",
        "    random_lock.start(seed)\n    with",
        "    with",
    ),
    "unlocked at the current weights": (
        "estimate",
        "    random_lock.start(seed)\n    return",
        "    return",
    ),
    "one seed for all steps": ("random_lock", "        self._count += 1\n", ""),
    "lock not kept": ("estimate", "            lock.locked = True\n", ""),
    "lock kept after an error": (
        "random_lock",
        "self.locked, self._count = was_locked, count",
        "pass",
    ),
    "statistics moved twice by the check": (
        "estimate",
        "            copy_all(before, states)  # where",
        "            # where",
    ),
    "statistics moved by an error": (
        "estimate",
        "    except BaseException:\n        copy_all(before, states)\n",
        "    except BaseException:\n",
    ),
    "compared at other weights": (
        "trainer",
        "compare=compare and held.snapshot.is_current()",
        "compare=compare",
    ),
    "never compared again": ("trainer", "self._corrected = self._compared = False", "pass"),
    # others.py
    "statistics of others moved": ("others", "[value.copy() for value in weights]", "weights"),
    "gradients of others not put back": (
        "others",
        "                saved.copyto(grad)\n",
        "                pass\n",
    ),
    "gradients of others doubled": ("others", 'parameter.grad_req == "add" or', "False or"),
    "marks of others changed": (
        "others",
        "            _mxnet.take_fresh([weights])\n            _mxnet.mark",
        "            _mxnet.mark",
    ),
    "others not found": (
        "others",
        "            if self._others.find(parameter):",
        "            if False:",
    ),
    # gradient.py
    "stale buffers": ("gradient", "        if not all(flags):", "        if False:"),
    "idle device marked stale": ("gradient", "[any(flags)] * len", "[all(flags)] * len"),
    "marks forgotten": (
        "gradient",
        "        _mxnet.mark(weights, fresh, fresh=True)\n",
        "        pass\n",
    ),
    "old marks taken for new ones": (
        "gradient",
        "fresh = _mxnet.take_fresh(weights)",
        "fresh = _mxnet.fresh(weights)",
    ),
    "captured weights accepted": ("gradient", "if any(map(any, reached)):", "if False:"),
    # snapshot.py
    "snapshot is the live weights": (
        "snapshot",
        "            if own or _mxnet.has_sparse_values(p)\n",
        "            if _mxnet.has_sparse_values(p)\n",
    ),
    "snapshot pass at the live weights": (
        "snapshot",
        "self.weights + self._scratch",
        "[_mxnet.data(p) for p in self.parameters] + self._scratch",
    ),
    "live statistics used at the snapshot": (
        "snapshot",
        "parameters = self.parameters + self.auxiliaries",
        "parameters = self.parameters",
    ),
    "statistics of the last pass": ("snapshot", "            reset()\n", "            pass\n"),
    "statistics of the first snapshot": (
        "snapshot",
        "        copy_all(other.states, self.states)\n",
        "",
    ),
    "weights of the first snapshot": (
        "snapshot",
        "        copy_all(other.weights, self.weights)\n",
        "",
    ),
    # trainer.py
    "coefficient of the last snapshot": (
        "trainer",
        "        self._coefficient = coefficient\n        self._num",
        "        self._num",
    ),
    "silently plain": (
        "trainer",
        "if self._corrected or self._held() is None:",
        "if True:",
    ),
    "estimate used twice": (
        "trainer",
        "    def _finish_step(self) -> None:\n        self._corrected = False",
        "    def _finish_step(self) -> None:\n        pass",
    ),
    "marks of the snapshot kept": ("trainer", "            snapshot.forget_gradients()\n", ""),
    "store created too late": (
        "trainer",
        "            self._initialize_store()\n            self._share",
        "            self._share",
    ),
    # operations.py
    "target overwritten": ("operations", '"momentum": 1.0', '"momentum": 0.0'),
    "arrays in the wrong order": (
        "operations",
        "zip(others, minuends, targets)",
        "zip(minuends, others, targets)",
    ),
    "small sums subtract": ("operations", "rate=-1, decay=0", "rate=1, decay=0"),
    "small sums doubled": ("operations", "rate=-1, decay=0", "rate=-1, decay=1"),
    "large sums subtract": ("operations", "elemwise_add", "elemwise_sub"),
    "copies of float64 add up": (
        "operations",
        "                zero(targets)\n",
        "                pass\n",
    ),
    "updates not published": (
        "operations",
        "mx.nd.reset_arrays(*self._empty_views",
        "all(*self._empty_views",
    ),
    # stored.py, memory.py, and what uses them
    "random numbers of a position not kept": ("stored", "seeds.append(seed)", "seeds.append(None)"),
    "another size of a stored minibatch accepted": (
        "stored",
        "if tuple(counts) != self.counts[index]:",
        "if False:",
    ),
    "no look for random numbers": ("stored", "if not self.grads and lock", "if False and lock"),
    "reshuffled data accepted": (
        "estimate",
        "if difference > comparison.tolerance(held.snapshot.buffers):\n        message",
        "if False:\n        message",
        ["stored"],
    ),
    "stored gradient with other random numbers": (
        "estimate",
        "        random_lock.start(stored.seeds[index])\n        evaluation",
        "        evaluation",
        ["stored"],
    ),
    "random numbers start again": (
        "estimate",
        "stack.callback(lock.move_on)",
        "pass",
        ["stored"],
    ),
    "gradients accumulate beside a stored one": (
        "estimate",
        "        held.snapshot.clear_accumulated()\n        random_lock.start(stored",
        "        random_lock.start(stored",
        ["stored"],
    ),
    "stored operation of another count": (
        "control_variate",
        "key = device, count, coefficient, scale",
        "key = device, coefficient, scale",
        ["stored"],
    ),
    "scale of stored gradients ignored": (
        "control_variate",
        "factor=scale / stored.scale,",
        "factor=1.0,",
        ["stored"],
    ),
    "old mean in stored operations": (
        "control_variate",
        "        self._operations_of_stored.clear()\n",
        "",
        ["stored"],
    ),
    "old stored gradients": (
        "control_variate",
        "        self.stored = stored\n        self._operations",
        "        self._operations",
        ["stored"],
    ),
    "stored: another order than with two passes": (
        "stored_subtract",
        "return bool(target.asscalar())",
        "return not target.asscalar()",
    ),
    "stored: the full gradient missing": ("stored_subtract", "[o * _product", "[0 * o * _product"),
    "memory not looked at": ("memory", "            check(count)\n", "            pass\n"),
    "memory not watched": ("memory", "check(position + 1)", "check(1)"),
    # states.py and below
    "momentum not loaded": (
        "states",
        'updater.states = plain_data.decode(manifest["states"], arrays)',
        "pass",
    ),
    "lock starts again": ("states", '"_base", "_count")', '"_base")'),
    "full gradient not loaded": ("states", "*zip(full_grads, means)]", "]"),
    "optimizer's numbers not loaded": (
        "states",
        '    plain_data.assign(manifest["optimizer"], arrays, trainer._optimizer)\n',
        "",
    ),
    # mixed_precision.py
    "scale not undone": ("mixed_precision", "_amp_original_scale / self.scale", "_scale"),
    "scale not kept after an error": (
        "mixed_precision",
        "vars(self._scaler).update(before)",
        "pass",
    ),
    "mean of scaled gradients": (
        "full_gradient",
        "all_entries * network.scale",
        "all_entries",
        ["mixed_precision"],
    ),
    "overflow pushed": (
        "trainer",
        "        if not self._update_on_kvstore:\n            return False",
        "        if True:\n            return False",
        ["mixed_precision"],
    ),
    # schedule.py
    "linear decay upwards": ("schedule", "(self.initial - self.final) * left", "left"),
    "cosine of another angle": ("schedule", "math.cos(math.pi * done)", "math.cos(done)"),
    "over too late": ("schedule", "index >= self.snapshots", "index > self.snapshots"),
    "epoch missed": ("schedule", "epoch % self.epochs == 0", "epoch % self.epochs == 1"),
    "coin on its side": ("schedule", "coin < self.probability", "coin > self.probability"),
    "no doubling": ("schedule", "self.first * 2 ** (taken - 1)", "self.first * taken"),
    # variance.py
    "means not subtracted": ("variance", "-= [np.dot(g, g)", "-= [0 * np.dot(g, g)"),
    "minibatches of equal weight": (
        "variance",
        "self._plain[k] += count * g",
        "self._plain[k] += g",
    ),
    "coefficient not squared": ("variance", "self._coefficient**2 * control", "control"),
    "gradients changed by a variance": (
        "variance",
        "        copy_all(spare, here.buffers)\n",
        "        pass\n",
    ),
    # estimator.py
    "epochs not counted": ("estimator", "self._count.epochs += 1", "pass"),
    "refresh without a snapshot missed": ("estimator", " or _has_none(estimator))", ")"),
    "epochs not saved": ("estimator", "        estimator.trainer._remember(self._count)\n", ""),
}


def run_suite(folder, suite=SUITE):
    environment = {**os.environ, "PYTHONPATH": str(folder), "HYPOTHESIS_PROFILE": "mutants"}
    files = [str(TESTS / f"test_{name}.py") for name in suite]
    options = ["-x", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    options += ["-c", str(TESTS.parent / "pyproject.toml")]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant(name, tmp_path):
    module, original, changed, *suite = MUTANTS[name]
    shutil.copytree(PACKAGE, tmp_path / "gluon_svrg", ignore=shutil.ignore_patterns("*.pyc"))
    path = tmp_path / "gluon_svrg" / f"{module}.py"
    source = path.read_text()
    assert original in source, f"the line that this mutant breaks is gone: {original}"
    path.write_text(source.replace(original, changed))
    done = run_suite(tmp_path, suite[0] if suite else OWN.get(module, SUITE))
    assert done.returncode == 1, f"survived:\n{done.stdout[-2000:]}"
    assert "error during collection" not in done.stdout.lower()


def test_the_suite_passes_without_a_mutant(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "gluon_svrg")
    done = run_suite(tmp_path, ["operations", "stored", "schedule", "variance"])  # that it can run
    assert done.returncode == 0, done.stdout[-2000:]
