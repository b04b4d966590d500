"""Pickles of `gluon.Trainer`, and crafted ones: nothing runs, nothing bursts, nothing hangs."""

import copyreg
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import crafted
import mxnet as mx
import numpy as np
import pytest
from saving_kit import GENERATION, Training, both_go_on

from gluon_svrg.saving import pickles

TESTS = Path(__file__).parent


def refused(content, path, message, run):
    before = run.everything()
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"Nothing was changed") as found:
        run.load(path)
    assert re.search(message, str(found.value)), str(found.value)[:1000]
    assert run.everything() == before


@pytest.mark.parametrize("name", crafted.PICKLES)
def test_crafted_pickles(name, tmp_path):
    content, message = crafted.PICKLES[name]
    refused(content, tmp_path / "states", message, Training())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is limited as on Linux")
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_changed_pickles(count, tmp_path, record_property):
    """Python reports whatever a program opens, imports, starts or compiles: there is nothing."""
    folders = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    command = [sys.executable, "-W", "ignore", str(TESTS / "crafted.py"), str(count), str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": folders}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    record_property("counted", done.stdout.strip())
    loaded, said = map(int, re.findall(r"(?:loaded|refused) (\d+)", done.stdout))
    assert loaded > 3 and said > count / 2 and loaded + said == count


@pytest.mark.parametrize("function", [os.system, eval])
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_nothing_runs(function, protocol, tmp_path):
    command = {os.system: "touch {}", eval: "open({!r}, 'w')"}[function]
    harm = crafted.Runs(function, command.format(str(tmp_path / "owned")))
    content = pickle.dumps(({0: harm}, mx.optimizer.SGD()), protocol)
    content = content if protocol else b"\x80\x02" + content
    message = f"it contains {function.__module__}.{function.__name__}, .* it could run code"
    refused(content, tmp_path / "states", message, Training())
    assert not (tmp_path / "owned").exists()


def test_codes_of_extensions_are_refused(tmp_path):
    """Python keeps what a code stands for, and would not ask an unpickler again."""
    copyreg.add_extension("posix", "system", 240)
    try:
        assert pickle.loads(b"\x80\x02\x82\xf0.") is os.system
        harm = b"\x82\xf0" + crafted.text(f"touch {tmp_path / 'owned'}") + b"\x85R"
        refused(crafted.states(harm), tmp_path / "states", "the operation EXT1", Training())
    finally:
        copyreg.remove_extension("posix", "system", 240)
    assert not (tmp_path / "owned").exists()


class Custom(mx.optimizer.SGD):
    """An optimizer whose own `__setstate__` would be noticed."""

    ran = 0

    def __setstate__(self, state):
        type(self).ran += 1
        super().__setstate__(state)


@pytest.mark.parametrize("protocol", [3, 4])
def test_no_method_of_a_class_is_called(protocol, tmp_path):
    first, second = (Training(Custom(momentum=0.9), {}) for _ in range(2))
    first.optimizer.more = [np.arange(6.0).reshape(2, 3).T, np.int64(5), {1: (2, 2.5)}, True]
    second.optimizer.more = None
    first.step(3)
    second.take_weights(first)
    state = first.updaters[0].states, first.optimizer
    (tmp_path / "states").write_bytes(pickle.dumps(state, protocol))
    second.load(tmp_path / "states")
    assert not Custom.ran
    array, *others = second.optimizer.more
    np.testing.assert_array_equal(array, first.optimizer.more[0])
    assert others == first.optimizer.more[1:]
    both_go_on(first, second)


@pytest.mark.skipif(GENERATION == "2", reason="MXNet 2.0 cannot pickle sparse arrays")
def test_sparse_states():
    """MXNet 1.9.1 keeps row_sparse momentum for row_sparse weights."""
    for dense in (mx.nd.array([[0, 0], [1, 2], [0, 0]]), mx.nd.zeros((4, 2))):
        content = pickle.dumps(({0: dense.tostype("row_sparse")}, mx.optimizer.SGD()))
        states, _, _ = pickles.loads(content, 0)
        np.testing.assert_array_equal(states[0], dense.asnumpy())
        assert (states[0].kind, states[0].stype) == ("nd", "row_sparse")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64", "uint8"])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 2, 3), (0, 2)])
def test_arrays_of_every_dtype(dtype, shape):
    if 0 in shape and GENERATION == "1":
        pytest.skip("MXNet 1.9.1 has no empty arrays")
    array = mx.nd.array(np.arange(np.prod(shape)).reshape(shape), dtype=dtype)
    found, _, _ = pickles.loads(pickle.dumps(({0: (array,)}, mx.optimizer.SGD())), 0)
    np.testing.assert_array_equal(found[0][0], array.asnumpy())
    assert found[0][0].dtype == np.dtype(dtype)
