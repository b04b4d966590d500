"""Files on disk: those of 0.3.0, damaged ones, and writing completely or not at all."""

import os
import pickle
import random
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from data.write import AFTER, METHODS, OPTIMIZERS
from data.write import Training as Method
from mxnet import gluon
from saving_kit import GENERATION, Training, crowded

from gluon_svrg import saving
from gluon_svrg.saving import container

DATA = Path(__file__).parent / "data"
OTHER = "1" if GENERATION == "2" else "2"
LONG = pytest.param(500, marks=pytest.mark.long)

# --- of 0.3.0, and of the other MXNet ------------------------------------------------------------


@pytest.fixture(scope="module")
def written():
    """What `data/write.py` has written, with either MXNet."""
    found = {}
    for generation in "12":
        with np.load(DATA / f"0.3.0-mxnet{generation}.npz") as file:
            found[generation] = dict(file)
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", METHODS)
def test_files_of_0_3_0(method, optimizer, written, tmp_path):
    """They resume to the weights that 0.3.0 had; the other MXNet's are refused by name."""
    run = Method(method, optimizer)
    (tmp_path / "states").write_bytes(written[OTHER][f"{method} {optimizer}"])
    with pytest.raises(ValueError, match=rf"saved with MXNet {OTHER}\..*, and this is MXNet"):
        run.trainer.load_states(tmp_path / "states")
    assert (run.trainer.num_snapshots, run.trainer.optimizer.num_update) == (0, 0)
    (tmp_path / "states").write_bytes(written[GENERATION][f"{method} {optimizer}"])
    then, later = written[GENERATION][f"{method} {optimizer} weights"]
    run.trainer.load_states(tmp_path / "states")
    places = np.cumsum([np.prod(p.shape) for p in run.parameters()])[:-1]
    for parameter, values in zip(run.parameters(), np.split(then, places)):
        array = (mx.np if GENERATION == "2" else mx.nd).array(values, dtype="float64")
        parameter.set_data(array.reshape(parameter.shape))
    assert (run.trainer.num_snapshots, run.trainer.inner_steps) == (1, 5)
    run.steps(AFTER)
    np.testing.assert_allclose(run.weights(), later, rtol=1e-10, atol=1e-12)
    assert np.abs(run.weights() - then).max() > 1e-2


@pytest.mark.parametrize("dtype, name", [("float32", "gluon"), ("float16", "gluon-float16")])
def test_momentum_and_master_copy_of_this_mxnet_alone(dtype, name):
    """The momentum is -1, the master copy 0: the next step shows which is which.

    The other MXNet keeps them in the other order, and would step wrongly without an error.
    """
    layer = gluon.nn.Dense(3, in_units=5, use_bias=False)
    layer.initialize(mx.init.Zero())
    layer.cast(dtype)
    settings = {"momentum": 0.9, "multi_precision": dtype == "float16"}
    trainer = gluon.Trainer(layer.collect_params(), "sgd", settings)
    params = trainer._params
    files = saving.StateFiles("SVRG", params, layer.collect_params())
    parts = {
        "optimizer": saving.OptimizerSettings(trainer.optimizer, params),
        "optimizer_states": saving.OptimizerStates(trainer.optimizer, trainer._updaters, params),
    }
    with pytest.raises(ValueError, match=rf"saved with MXNet {OTHER}, and this is MXNet"):
        files.load(DATA / f"{name}-mxnet{OTHER}.states", parts)
    files.load(DATA / f"{name}-mxnet{GENERATION}.states", parts)
    files.apply(parts)
    assert (trainer.optimizer.momentum, trainer.optimizer.lr) == (0.5, 0.5)
    layer.weight.grad()[:] = 2
    layer.weight.data()._fresh_grad = True
    trainer.step(1)
    np.testing.assert_array_equal(layer.weight.data().asnumpy(), np.full((3, 5), -1.5))


# --- damaged -------------------------------------------------------------------------------------


def refused(run, content, path, message="cannot be loaded: .* Nothing was changed"):
    before = run.everything()
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        run.load(path)
    assert run.everything() == before


@pytest.fixture
def run():
    return Training("sgd", crowded("sgd"))


@pytest.fixture
def content(run, tmp_path):
    run.step(3)
    run.save(tmp_path / "states")
    return (tmp_path / "states").read_bytes()


@pytest.mark.parametrize("count", [40, LONG])
def test_files_with_a_bit_flipped(count, run, content, tmp_path):
    rng = random.Random(1)
    for _ in range(count):
        damaged = bytearray(content)
        damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        refused(run, bytes(damaged), tmp_path / "states")


@pytest.mark.parametrize("count", [40, LONG])
def test_truncated_files(count, run, content, tmp_path):
    rng = random.Random(2)
    for length in [0, 1, 19, 84, 85, 89, *(rng.randrange(len(content)) for _ in range(count))]:
        refused(run, content[:length], tmp_path / "states")


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "it is empty"),
        (b"hello", "it is no file of states"),
        (b"\x80\x04", "it is damaged"),
        (pickle.dumps([1, 2]), "a pickle, but not of the states"),
        (pickle.dumps(({0: None}, 3)), "a pickle, but not of the states"),
        (
            b"gluon_svrg states 1\n",
            "it has format 1, and this version of gluon_svrg reads format 2",
        ),
        (b"gluon_svrg states 2\nabc\n9999999999\n", "its checksum is wrong"),
    ],
)
def test_foreign_files(content, message, run, tmp_path):
    refused(run, content, tmp_path / "states", f"cannot be loaded: .*{message}")


def test_a_state_that_no_version_has_written(run, tmp_path):
    """With a right checksum: it is refused as well, and nothing is changed."""
    run.save(tmp_path / "states")
    header, _, _ = container.unpack((tmp_path / "states").read_bytes())
    for states in ({"optimizer": {}}, {"optimizer": 3}, {"optimizer_states": {"states": {"x": 1}}}):
        container.write(tmp_path / "states", header, states)
        message = "its optimizer is malformed|has a state for parameter x"
        refused(run, (tmp_path / "states").read_bytes(), tmp_path / "states", message)
    container.write(tmp_path / "states", {}, {})
    refused(run, (tmp_path / "states").read_bytes(), tmp_path / "states", "damaged: KeyError")


# --- writing -------------------------------------------------------------------------------------


def test_a_link_and_permissions_stay(tmp_path):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "real", tmp_path / "link"
    link.symlink_to(Path("there") / "real")
    before = os.umask(0o027)
    try:
        for content in (b"first", b"second"):  # the target is made, then replaced
            saving.write_bytes(link, content[:3], content[3:])
            assert link.is_symlink() and target.read_bytes() == content
            assert stat.S_IMODE(target.stat().st_mode) == 0o640
    finally:
        os.umask(before)
    target.chmod(0o604)
    saving.write_bytes(link, b"third")
    assert stat.S_IMODE(target.stat().st_mode) == 0o604
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["link", "real", "there"]


def test_an_error_leaves_the_old_file_and_names_it(tmp_path):
    path = tmp_path / "states"
    path.write_bytes(b"old")
    with pytest.raises(TypeError):
        saving.write_bytes(path, b"new", "no bytes")
    assert path.read_bytes() == b"old"
    gone = tmp_path / "gone" / "states"
    with pytest.raises(FileNotFoundError) as found:
        saving.write_bytes(gone, b"new")
    assert found.value.filename == str(gone)
    os.mkfifo(tmp_path / "pipe")
    for special in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(OSError, match="is a folder, a device or a pipe: name a file"):
            saving.write_bytes(special, b"new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pipe", "states"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="root becomes another")
def test_a_folder_that_takes_no_new_file():
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to others
        os.chmod(folder, 0o755)
        path = Path(folder) / "states"
        path.write_bytes(b"old")
        path.chmod(0o666)
        program = (
            "import os, sys; from gluon_svrg import saving; os.setgroups([]); os.setuid(65534); "
            "saving.write_bytes(sys.argv[1], b'new')"
        )
        command = [sys.executable, "-W", "ignore", "-c", program, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert f"PermissionError: [Errno 13] Permission denied: '{path}'" in done.stderr
        assert path.read_bytes() == b"old" and [*os.listdir(folder)] == ["states"]


SAVING = """
import sys
import numpy as np
from gluon_svrg.saving import container
for number in range(10_000):
    states = {"number": number, "array": np.full(200_000, number)}
    container.write(sys.argv[1], {}, states)
    print(number, flush=True)
"""


@pytest.mark.parametrize("count", [4, pytest.param(50, marks=pytest.mark.long)])
def test_killed_while_saving(count, tmp_path):
    """Whenever it is killed, the file is whole, and it is the last that was saved or the next."""
    path, rng, found = tmp_path / "states", random.Random(3), set()
    for _ in range(count):
        command = [sys.executable, "-W", "ignore", "-c", SAVING, str(path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        try:
            printed = [process.stdout.readline() for _ in range(3)]
            time.sleep(rng.uniform(0, 0.05))
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(30)
        last = int([*printed, *process.stdout.readlines()][-1])
        process.stdout.close()
        _, states, (array,) = container.unpack(path.read_bytes())
        assert states["number"] in (last, last + 1)
        assert np.all(array == states["number"])
        found.add(states["number"])
    assert min(found) >= 2 and len(found) > 1
