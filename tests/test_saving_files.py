"""Files on disk: damaged ones, those of others, and writing completely or not at all."""

import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from saving_kit import GENERATION, Chain, Training

from gluon_svrg import SAGATrainer, SVRGTrainer, saving
from gluon_svrg.saving import container

DATA = Path(__file__).parent / "data"


@pytest.fixture
def run():
    run = Training(settings={"momentum": 0.9, "lr_scheduler": Chain(1, 2)})
    run.step(3)
    return run


@pytest.fixture
def content(run, tmp_path):
    run.save(tmp_path / "states")
    return (tmp_path / "states").read_bytes()


def refused(run, content, path, message="cannot be loaded"):
    before = run.everything()
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"({message}).* Nothing was changed"):
        run.load(path)
    assert run.everything() == before


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_damaged_files(count, run, content, tmp_path):
    """With a bit flipped, or truncated."""
    rng = random.Random(1)
    for _ in range(count):
        damaged = bytearray(content)
        damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        refused(run, bytes(damaged), tmp_path / "states")
    for length in [0, 1, 19, 84, 85, 89, *(rng.randrange(len(content)) for _ in range(count))]:
        refused(run, content[:length], tmp_path / "states")


def test_other_formats_methods_and_parts(run, content, tmp_path):
    path = tmp_path / "states"
    first = content.replace(b"states 2", b"states 1", 1)
    refused(run, first, path, "it has format 1, and this version of gluon_svrg reads format 2")
    header, _, _ = container.unpack(content)
    for states, message in [
        ({"optimizer": {}}, "its optimizer is malformed"),
        ({"optimizer_states": {"states": {"x": 1}}}, "it has a state for parameter x"),
        ({"newer": 1}, "it has a state of 'newer', and this trainer has none"),
    ]:
        container.write(path, header, states)
        refused(run, path.read_bytes(), path, f"does not fit this trainer: {message}")
    container.write(path, header, {"newer": None})
    run.load(path)  # it may have less
    container.write(path, {}, {})
    refused(run, path.read_bytes(), path, "cannot be loaded: it is damaged: KeyError")
    SAGATrainer(run.net.collect_params(), "sgd").save_states(path)
    refused(run, path.read_bytes(), path, "it was saved with SAGA, and this trainer uses SVRG")


@pytest.mark.parametrize("dtype, name", [("float32", "gluon"), ("float16", "gluon-float16")])
def test_momentum_and_master_copy_of_this_mxnet_alone(dtype, name):
    """They are -1 and 0. The other MXNet's, in the other order, would step without an error."""
    layer = gluon.nn.Dense(3, in_units=5, use_bias=False, dtype=dtype)
    layer.initialize(mx.init.Zero())
    settings = {"momentum": 0.9, "multi_precision": dtype == "float16"}
    trainer = SVRGTrainer(layer.collect_params(), "sgd", settings)
    other = "1" if GENERATION == "2" else "2"
    with pytest.raises(ValueError, match=rf"saved with MXNet {other}, and this is MXNet"):
        trainer.load_states(DATA / f"{name}-mxnet{other}.states")
    trainer.load_states(DATA / f"{name}-mxnet{GENERATION}.states")
    assert (trainer.optimizer.momentum, trainer.optimizer.lr) == (0.5, 0.5)
    layer.weight.grad()[:] = 2
    layer.weight.data()._fresh_grad = True
    trainer.step(1)
    np.testing.assert_array_equal(layer.weight.data().asnumpy(), np.full((3, 5), -1.5))


def test_a_link_and_permissions_stay(tmp_path):
    target, link = tmp_path / "real", tmp_path / "link"
    link.symlink_to("real")
    before = os.umask(0o027)
    try:
        for mode in (0o640, 0o604):  # the target is made, then replaced
            saving.write_bytes(link, b"con", b"tent")
            assert link.is_symlink() and target.read_bytes() == b"content"
            assert stat.S_IMODE(target.stat().st_mode) == mode
            target.chmod(0o604)
    finally:
        os.umask(before)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]


def test_an_error_leaves_the_old_file_and_names_it(tmp_path):
    path, gone = tmp_path / "states", tmp_path / "gone" / "states"
    path.write_bytes(b"old")
    with pytest.raises(TypeError):
        saving.write_bytes(path, b"new", "no bytes")
    assert path.read_bytes() == b"old"
    with pytest.raises(FileNotFoundError) as found:
        saving.write_bytes(gone, b"new")
    assert found.value.filename == str(gone)
    os.mkfifo(tmp_path / "pipe")
    for special in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(OSError, match=r"is a folder: name a file in it|is a device"):
            saving.write_bytes(special, b"new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pipe", "states"]


SAVING = """
import signal; import sys; import numpy as np; from gluon_svrg.saving import container
signal.alarm(60)
for number in range(10_000):
    container.write(sys.argv[1], {}, {"number": number, "array": np.full(200_000, number)})
    print(number, flush=True)
"""


@pytest.mark.parametrize("count", [4, pytest.param(50, marks=pytest.mark.slow)])
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
        assert states["number"] in (last, last + 1) and np.all(array == states["number"])
        found.add(states["number"])
    assert min(found) >= 2 and len(found) > 1
