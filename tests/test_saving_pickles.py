"""Pickles of `gluon.Trainer`, and files that were made to do harm: nothing runs, nothing bursts."""

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
from hypothesis import given, settings
from hypothesis import strategies as st
from saving_kit import Training

TESTS = Path(__file__).parent


def load(content, path, run=None):
    """It is refused, and nothing is changed; or it is loaded, and the next steps work."""
    run = run or Training("adam")
    before = run.everything()
    path.write_bytes(content)
    try:
        run.load(path)
    except ValueError as error:
        assert run.everything() == before
        return str(error)
    run.step(2)
    return ""


@pytest.mark.parametrize("name", crafted.PICKLES)
def test_crafted_pickles(name, tmp_path):
    content, message = crafted.PICKLES[name]
    found = load(content, tmp_path / "states", Training())
    assert re.search(message, found) and "Nothing was changed" in found, found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is limited as on Linux")
def test_crafted_files_take_little_memory_and_time(tmp_path):
    files = {**crafted.PICKLES, **crafted.own_files()}
    for name, (content, _) in files.items():
        (tmp_path / name).write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(TESTS / "crafted.py"), str(tmp_path)],
        capture_output=True, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])},
    )  # fmt: skip
    found = [line.split("\t") for line in done.stdout.splitlines() if "\t" in line]
    assert {name for name, *_ in found} == {*files}, done.stderr[-2000:]
    for name, seconds, said in found:
        assert re.search(files[name][1], said), (name, said)
        assert float(seconds) < 20, name


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is limited as on Linux")
def test_thousands_of_changed_pickles():
    """Python reports whatever a program opens, imports, starts or compiles: there is nothing."""
    command = [sys.executable, "-W", "ignore", str(TESTS / "crafted.py"), "mutated", "3000", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    loaded, refused = (int(part.split()[0]) for part in done.stdout.split(","))
    assert loaded > 100 and refused > 1000 and loaded + refused == 3000


@pytest.mark.parametrize("function", [os.system, eval])
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_nothing_runs(function, protocol, tmp_path):
    command = {os.system: "touch {}", eval: "open({!r}, 'w')"}[function]
    harm = crafted.Runs(function, command.format(str(tmp_path / "owned")))
    content = pickle.dumps(({0: harm}, mx.optimizer.SGD()), protocol)
    if protocol == 0:
        content = b"\x80\x02" + content
    name = f"{function.__module__}.{function.__name__}"
    found = load(content, tmp_path / "states")
    assert re.search(f"it contains ({name}|__builtin__.eval).*could run code", found), found
    assert not (tmp_path / "owned").exists()


def test_codes_of_extensions_are_refused(tmp_path):
    """Python keeps what a code stands for, and does not ask the unpickler again."""
    copyreg.add_extension("posix", "system", 240)
    try:
        assert pickle.loads(b"\x80\x02\x82\xf0.") is os.system
        harm = b"\x82\xf0" + crafted.text(f"touch {tmp_path / 'owned'}") + b"\x85R"
        assert "it is damaged" in load(crafted.states(harm), tmp_path / "states")
    finally:
        copyreg.remove_extension("posix", "system", 240)
    assert not (tmp_path / "owned").exists()


class Custom(mx.optimizer.SGD):
    """An optimizer whose own `__setstate__` would be noticed."""

    ran = 0

    def __setstate__(self, state):
        type(self).ran += 1
        super().__setstate__(state)


def test_no_method_of_a_class_is_called(tmp_path):
    optimizer = Custom(learning_rate=0.3)
    run = Training(Custom(), {})
    assert not load(pickle.dumps(({}, optimizer)), tmp_path / "states", run)
    assert run.optimizer.lr == 0.3 and not Custom.ran


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_every_protocol(name, protocol, tmp_path):
    first, second = Training(name), Training(name)
    first.optimizer.more = [np.arange(6.0).reshape(2, 3).T, np.int64(5), {1, 2}, frozenset([3])]
    second.optimizer.more = None
    first.step(3)
    state = first.updaters[0].states, first.optimizer
    second.take_weights(first)
    assert not load(pickle.dumps(state, protocol), tmp_path / "states", second)
    first.step(2)
    for one, other in zip(first.weights(), second.weights()):
        np.testing.assert_array_equal(one, other)
    array, number, *sets = second.optimizer.more
    np.testing.assert_array_equal(array, first.optimizer.more[0])
    assert number == 5 and sets == [{1, 2}, frozenset([3])]


def test_sparse_states():
    """MXNet 1.9.1 keeps row_sparse momentum for row_sparse weights."""
    if mx.__version__.startswith("2"):
        pytest.skip("MXNet 2.0 cannot pickle sparse arrays")
    from gluon_svrg.saving import raw_arrays

    for array in (mx.nd.array([[0, 0], [1, 2], [0, 0]]), mx.nd.zeros((4, 2))):
        raw = array.tostype("row_sparse").__getstate__()["handle"]
        dense, stype = raw_arrays.from_mxnet(bytes(raw), 100)
        np.testing.assert_array_equal(dense, array.asnumpy())
        assert stype == "row_sparse"


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64", "uint8"])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 2, 3), (0, 2)])
def test_arrays_of_every_dtype(dtype, shape):
    from gluon_svrg.saving import raw_arrays

    if 0 in shape and not mx.__version__.startswith("2"):
        pytest.skip("MXNet 1.9.1 has no empty arrays")
    size = int(np.prod(shape))
    array = mx.nd.array(np.arange(size).reshape(shape), dtype=dtype)
    found, _ = raw_arrays.from_mxnet(bytes(array.__getstate__()["handle"]), 0)
    np.testing.assert_array_equal(found, array.asnumpy())
    assert found.dtype == np.dtype(dtype)


@pytest.fixture(scope="module")
def pickled():
    with mx.name.NameManager():
        scheduler = mx.lr_scheduler.MultiFactorScheduler([2, 4], 0.5, base_lr=0.1)
        run = Training("adam", {"lr_scheduler": scheduler})
        run.step(3)
        return run.updaters[0].get_states(dump_optimizer=True)


@settings(max_examples=150)
@given(data=st.data())
def test_any_change_of_the_bytes_of_a_pickle(pickled, tmp_path_factory, data):
    content = bytearray(pickled)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        how = data.draw(st.sampled_from(["bit", "byte", "gone", "copied"]))
        if how == "bit":
            content[place] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "byte":
            content[place] = data.draw(st.sampled_from(b"\x00\xff.()}]0Rb\x85\x86\x93\x94jrsu"))
        elif how == "gone":
            del content[place : place + data.draw(st.integers(1, 9))]
        else:
            content[place:place] = content[place : place + data.draw(st.integers(1, 40))]
    with mx.name.NameManager():
        scheduler = mx.lr_scheduler.MultiFactorScheduler([2, 4], 0.5, base_lr=0.1)
        run = Training("adam", {"lr_scheduler": scheduler})
    load(bytes(content), tmp_path_factory.mktemp("pickles") / "states", run)
