"""Files on disk: no content is trusted, and one is written completely or not at all."""

import hashlib
import json
import os
import pickle
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from saving_kit import Chain, Training

from gluon_svrg import saving
from gluon_svrg.saving import container, disk, values

# --- crafted files of our own ------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A file with everything that a file can have, by its optimizer."""
    found = {}
    for name in ("sgd", "adam"):
        with mx.name.NameManager():
            run = Training(name, crowded(name))
            run.step(3)
            path = tmp_path_factory.mktemp("written") / "states"
            run.save(path)
            found[name] = path.read_bytes()
    return found


def crowded(name):
    chain = Chain(
        mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1),
        mx.lr_scheduler.MultiFactorScheduler([2, 4], 0.5, base_lr=0.1),
        mx.lr_scheduler.CosineScheduler(20, 0.1),
    )
    return {"lr_scheduler": chain, **({"momentum": 0.9} if name == "sgd" else {})}


def taken_apart(content):
    first, _, rest = content.split(b"\n", 2)
    length, rest = rest.split(b"\n", 1)
    return first, json.loads(rest[: int(length)]), rest[int(length) :]


def put_together(first, manifest, body):
    text = json.dumps(manifest).encode()
    rest = b"%d\n" % len(text) + text + body
    return first + b"\n" + hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest


def places(value, path=()):
    """All places in a value of JSON."""
    yield path
    items = ()
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield from places(item, (*path, key))


JUNK = st.one_of(
    st.sampled_from(
        [None, True, -1, 0, 1, 2**31, 2**63, 10**400, -(10**18), 1e308, float("nan"), float("inf"),
         "", "x", "default", "row_sparse", "float32", "lr", "__class__", [], {}, [[]], [None], [-1],
         [0, 0], {"kind": "nd", "array": 0}, {"kind": "numpy", "array": 10**6},
         {"kind": "list", "items": [1]}, {"kind": "dict", "items": [[{}, 1]]},
         {"kind": "object", "class": "SGD", "attributes": []}, {"kind": []},
         {"kind": "parameters", "items": [[-1, 1]]}, {"kind": "parameters", "items": [["a", 1]]}]
    ),
    st.integers(), st.floats(), st.text(max_size=3),
)  # fmt: skip


def mutate(manifest, draw):
    """Change one place of a value of JSON: another value, another's value, gone, twice, deeper."""
    found = [path for path in places(manifest) if path]
    *path, key = draw(st.sampled_from(found))
    target = manifest
    for step in path:
        target = target[step]
    how = draw(st.sampled_from(["junk", "junk", "swap", "gone", "twice", "deep", "nudge"]))
    if how == "junk":
        target[key] = draw(JUNK)
    elif how == "swap":
        other = manifest
        for step in draw(st.sampled_from(found)):
            other = other[step]
        target[key] = json.loads(json.dumps(other))
    elif how == "gone":
        del target[key]
    elif how == "twice" and isinstance(target, list):
        target.append(target[key])
    elif how == "deep":
        for _ in range(draw(st.sampled_from([1, 70, 400]))):
            target[key] = {"kind": "list", "items": [target[key]]}
    elif isinstance(target[key], (int, float)):
        target[key] = target[key] * draw(st.sampled_from([-1, 0.5, 2, 10**9])) + 1


def with_attribute(name, value):
    def change(state):
        attributes = {**state["attributes"].attributes, name: value}
        return {**state, "attributes": saving.SavedObject("Adam", attributes)}

    return change


def with_scheduler(number, **values):
    def change(state):
        attributes = dict(state["attributes"].attributes)
        chain = attributes["lr_scheduler"].attributes
        one = chain["parts"][number]
        parts = [*chain["parts"]]
        parts[number] = saving.SavedObject(one.class_name, {**one.attributes, **values})
        attributes["lr_scheduler"] = saving.SavedObject("Chain", {**chain, "parts": parts})
        return {**state, "attributes": saving.SavedObject("Adam", attributes)}

    return change


def without(state):
    attributes = {k: v for k, v in state["attributes"].attributes.items() if k != "beta1"}
    return {**state, "attributes": saving.SavedObject("Adam", attributes)}


@pytest.mark.parametrize(
    "change, message",
    [
        (without, "the optimizer .Adam. lacks its beta1"),
        (with_attribute("update", 1), "has an attribute 'update' that a Adam cannot have"),
        (with_attribute("learning_rate", 1.0), "has an attribute 'learning_rate' that"),
        (with_attribute("beta1", "x"), "its beta1 was a str and is a number here"),
        (with_attribute("beta1", float("nan")), "its beta1 is nan and must be finite"),
        (with_attribute("beta1", 10**30), "its beta1 is too large"),
        (with_attribute("beta1", None), "its optimizer does not work .TypeError"),
        (
            with_attribute("epsilon", np.zeros(3)),
            r"its epsilon was an array of shape \(3,\) and is",
        ),
        (with_attribute("num_update", 2**40), "counts of updates must be whole numbers"),
        (with_attribute("num_update", 1), "it counts 1 updates, and 3 of one parameter"),
        (with_scheduler(1, cur_step_ind=-9), "MultiFactorScheduler is at step -9 of 2"),
        (with_scheduler(1, cur_step_ind=3), "MultiFactorScheduler is at step 3 of 2"),
        (with_scheduler(0, step=0), "cannot count from 2 by 0 to 3"),
        (with_scheduler(0, count=-(10**9)), "cannot count from -1000000000 by 2 to 3"),
        (with_scheduler(0, base_lr=1e308), "does not work .MXNetError"),
        (with_scheduler(1, step=[None], cur_step_ind=0), "does not work .TypeError"),
        (lambda state: {**state, "counts": {0: {0: -1}}}, "must be whole numbers from 0"),
        (lambda state: {**state, "counts": {-1: {0: 1}}}, "belong to no device"),
        (lambda state: {**state, "counts": {0: [1]}}, "malformed"),
        (lambda state: {**state, "counts": {0: {9: 1}}}, "has parameter 9, and there are 4"),
        (lambda state: {**state, "by_index": {"lr_mult": {0: "x"}}}, "'x', which is no number"),
        (lambda state: {**state, "by_index": {"idx2name": {0: 1}}}, "'1', which is no name"),
        (lambda state: {**state, "by_index": {"update": {}}}, "malformed"),
        (lambda state: {**state, "mxnet": None}, "malformed"),
        (lambda state: [state], "malformed"),
    ],
)
def test_settings_that_would_break_the_next_step(change, message, written, tmp_path):
    (tmp_path / "states").write_bytes(written["adam"])
    with mx.name.NameManager():
        run = Training("adam", crowded("adam"))
    before = run.everything()
    saved = saving.read(tmp_path / "states", run.header())
    assert saved.problems(run.parts(), run.header()) == []
    saved._states["optimizer"] = change(saved._states["optimizer"])
    with pytest.raises(ValueError, match=f"does not fit this trainer: .*({message})"):
        saved.check(run.parts(), run.header())
    assert run.everything() == before


@pytest.mark.parametrize(
    "encoded, message",
    [
        ({"kind": "dict", "items": [[1, 2], [1, 3]]}, "the keys of a dict"),
        ({"kind": "dict", "items": [[{"kind": "list", "items": []}, 2]]}, "the keys of a dict"),
        ({"kind": "dict", "items": [[1, 2, 3]]}, "a dict"),
        ({"kind": "set", "items": [{"kind": "list", "items": []}]}, "a set"),
        ({"kind": "object", "class": 1, "attributes": []}, "a value of kind 'object'"),
        ({"kind": "object", "class": "A", "attributes": [[1, 2]]}, "a value of kind 'object'"),
        ({"kind": "parameters", "items": [["a", 2]]}, "a value of kind 'parameters'"),
        ({"kind": "nd", "array": True}, "array True does not exist"),
        ({"kind": "nd", "array": -1}, "array -1 does not exist"),
        ({"kind": "scalar", "array": 0}, "an array"),
        ({"kind": "nd", "array": 0, "stype": "dense"}, "an array"),
        ([1], "a value"),
        ({"kind": ["list"], "items": []}, "a value of kind"),
    ],
)
def test_plain_data_of_another_form(encoded, message):
    with pytest.raises(ValueError, match=f"its manifest is malformed: {message}"):
        values.decode(encoded, [np.zeros(3)])


@pytest.mark.parametrize("name", ["sgd", "adam"])
@settings(max_examples=100)
@given(data=st.data())
def test_any_change_of_the_manifest(name, written, tmp_path_factory, data):
    """It is refused, and nothing is changed; or it is accepted, and the next steps work."""
    first, manifest, body = taken_apart(written[name])
    for _ in range(data.draw(st.integers(1, 2))):
        mutate(manifest, data.draw)
    path = tmp_path_factory.mktemp("crafted") / "states"
    path.write_bytes(put_together(first, manifest, body))
    with mx.name.NameManager():
        run = Training(name, crowded(name))
    run.step(1)
    before = run.everything()
    try:
        run.load(path)
    except ValueError as error:
        assert "Nothing was changed" in str(error)
        assert run.everything() == before
    else:
        run.step(2)


@settings(max_examples=50)
@given(data=st.data())
def test_any_change_of_the_bytes(written, tmp_path_factory, data):
    content = bytearray(written["sgd"])
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] ^= 1 << data.draw(st.integers(0, 7))
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    if bytes(content) == written["sgd"]:
        return
    path = tmp_path_factory.mktemp("damaged") / "states"
    path.write_bytes(content)
    with mx.name.NameManager():
        run = Training("sgd", crowded("sgd"))
    before = run.everything()
    with pytest.raises(ValueError, match=r"cannot be loaded: .* Nothing was changed"):
        run.load(path)
    assert run.everything() == before


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "it is empty"),
        (b"hello", "it is no file of states"),
        (b"\x80\x04", "its pickle ends too early"),
        (pickle.dumps([1, 2]), "a pickle, but not of the states"),
        (pickle.dumps(({0: None}, 3)), "a pickle, but not of the states"),
        (b"gluon_svrg states 3\n", "it has format 3, and this version of gluon_svrg reads"),
        (b"gluon_svrg states 2\nabc\n9999999999\n", "its checksum is wrong"),
    ],
)
def test_foreign_files(content, message, tmp_path):
    (tmp_path / "states").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Training().load(tmp_path / "states")


def test_an_array_is_used_once(tmp_path):
    """A small file cannot become large."""
    array = np.zeros(3)
    twice = {"kind": "list", "items": [{"kind": "numpy", "array": 0}] * 2}
    with pytest.raises(ValueError, match="does not exist or is used twice"):
        values.decode(twice, [array])
    with pytest.raises(ValueError, match="1 arrays are not used"):
        values.decode(1, [array])


def test_a_table_may_be_larger_than_the_parameters(tmp_path):
    run = Training()
    shape = run.trainer._params[1].shape
    most = 4000
    run.toy.values["numbers"] = np.zeros((500, *shape))
    run.save(tmp_path / "states")
    saving.read(tmp_path / "states", run.header(), most)
    run.toy.values["numbers"] = np.zeros((500, 7, 2))
    run.save(tmp_path / "states")
    with pytest.raises(ValueError, match="arrays that are larger than the parameters"):
        saving.read(tmp_path / "states", run.header(), most)


# --- writing -----------------------------------------------------------------------------------


def test_a_symbolic_link_stays(tmp_path):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "real", tmp_path / "link"
    link.symlink_to(Path("there") / "real")
    for content in (b"first", b"second"):  # the target is made, then replaced
        disk.write_bytes(link, content)
        assert link.is_symlink() and target.read_bytes() == content
    target.chmod(0o640)
    disk.write_bytes(link, b"third")
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["link", "real", "there"]


IN_A_CLOSED_FOLDER = """
import os, sys
from gluon_svrg.saving import disk
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
disk.write_bytes(sys.argv[1], b"new")
"""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="root becomes another")
@pytest.mark.parametrize("writable", [True, False])
def test_a_folder_that_takes_no_new_file(writable):
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to others
        os.chmod(folder, 0o755)
        path = Path(folder) / "states"
        path.write_bytes(b"older and longer")
        path.chmod(0o666 if writable else 0o644)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", IN_A_CLOSED_FOLDER, str(path)],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert (done.returncode == 0) == writable, done.stderr
        assert path.read_bytes() == (b"new" if writable else b"older and longer")
        assert writable or f"Permission denied: '{path}'" in done.stderr
        assert [p.name for p in Path(folder).iterdir()] == ["states"]


def test_the_umask_is_never_changed(tmp_path, monkeypatch):
    def umask(mask):
        raise AssertionError("another thread may create a file now")

    before = os.umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", umask)
        disk.write_bytes(tmp_path / "new", b"content")
        disk.write_bytes(tmp_path / "new", b"again")
    finally:
        monkeypatch.undo()
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_an_error_names_the_file_of_the_user(tmp_path):
    with pytest.raises(FileNotFoundError) as found:
        disk.write_bytes(tmp_path / "gone" / "states", b"new")
    assert found.value.filename == str(tmp_path / "gone" / "states")


def test_an_error_leaves_the_old_file(tmp_path):
    path = tmp_path / "states"
    path.write_bytes(b"old")
    path.chmod(0o600)
    with pytest.raises(TypeError):
        disk.write_bytes(path, b"new", "no bytes")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["states"]
    disk.write_bytes(path, b"new")
    assert path.read_bytes() == b"new" and stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(IsADirectoryError, match="is a folder: name a file in it"):
        disk.write_bytes(tmp_path, b"new")
    with pytest.raises(FileNotFoundError):
        disk.write_bytes(tmp_path / "nowhere" / "states", b"new")


def test_a_pipe_gets_the_content(tmp_path):
    path, found = tmp_path / "pipe", []
    os.mkfifo(path)
    thread = threading.Thread(target=lambda: found.append(path.read_bytes()), daemon=True)
    thread.start()
    disk.write_bytes(path, b"through", b" it")
    thread.join(10)
    assert found == [b"through it"] and stat.S_ISFIFO(path.stat().st_mode)


SAVING = """
import sys
import numpy as np
from gluon_svrg.saving import container, disk
for number in range(200):
    chunks = container.pack({}, {"number": number}, [np.full(200_000, number)])
    disk.write_bytes(sys.argv[1], *chunks)
    print(number, flush=True)
"""


def test_killed_while_saving(tmp_path):
    """Whenever it is killed, the file is whole, and it is one of those that were saved."""
    path, found = tmp_path / "states", []
    for moment in np.linspace(0.0, 0.08, 6):
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SAVING, str(path)], stdout=subprocess.PIPE
        )
        try:
            for _ in range(5):
                process.stdout.readline()
            time.sleep(moment)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(30)
            process.stdout.close()
        with open(path, "rb") as file:
            _, checksum = container.first_lines(file)
            content = container.unpack(file, checksum, lambda *_: True)
        assert np.all(content.arrays[0] == content.parts["number"])
        found.append(content.parts["number"])
    assert min(found) >= 4
    assert len(set(found)) > 1
