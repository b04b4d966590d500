"""Files on disk: damaged ones, those of others, and writing completely or not at all."""

import os
import pickle
import random
import signal
import stat
import sys
import time

import mxnet as mx
import numpy as np
import pytest
from jobs import start
from kit import assert_unchanged
from mxnet import gluon
from saving_kit import DATA, GENERATION, OF_0_6, OTHER, Chain, Training, play_0_6, refused

from gluon_svrg import SAGATrainer, SVRGTrainer, saving
from gluon_svrg.saving import file_format, values
from gluon_svrg.saving.parameters import Description, match


@pytest.fixture
def run():
    run = Training(settings={"momentum": 0.9, "lr_scheduler": Chain(1, 2)})
    run.step(3)
    run.refresh()
    return run


@pytest.fixture
def content(run, tmp_path):
    run.save(tmp_path / "states")
    return (tmp_path / "states").read_bytes()


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_damaged_files(count, run, content, tmp_path):
    rng = random.Random(1)
    for _ in range(count):
        damaged = bytearray(content)
        damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        refused(run, bytes(damaged), tmp_path / "states")
    for length in [0, 1, 19, 84, 85, 89, *(rng.randrange(len(content)) for _ in range(count))]:
        refused(run, content[:length], tmp_path / "states")


def test_other_formats_methods_and_parts(run, content, tmp_path):
    path = tmp_path / "states"
    for number in (b"1", b"3"):
        other = content.replace(b"states 2", b"states " + number, 1)
        message = f"it has format {number.decode()}, and this version of gluon_svrg reads format 2"
        refused(run, other, path, message)
    header, _, _ = file_format.unpack(content)
    for states, message in [
        ({"optimizer": {}}, "its optimizer is malformed"),
        ({"optimizer_states": {"states": {"x": 1}}}, "it has a state for parameter x"),
        ({"newer": 1}, "it has a state of 'newer', and this trainer has none"),
        ({"method": {}}, "it lacks weights, .* its method is malformed"),
    ]:
        file_format.write(path, header, states)
        refused(run, path.read_bytes(), path, f"does not fit this trainer: {message}")
    file_format.write(path, {}, {})
    refused(run, path.read_bytes(), path, "cannot be loaded: it is damaged: KeyError")
    SAGATrainer(run.net.collect_params(), "sgd").save_states(path)
    refused(run, path.read_bytes(), path, "it needs a trainer of SAGA, and this one uses SVRG")
    for foreign, message in [
        (b"hello", "no file of states"),
        (b"\x80\x04", "damaged"),
        (pickle.dumps([1, 2]), "a pickle, but not of the states"),
        (pickle.dumps(({0: None}, 3)), "a pickle, but not of the states"),
    ]:
        refused(run, foreign, path, message)
    with pytest.raises(FileNotFoundError):
        run.load(tmp_path / "nothing")
    file_format.write(path, header, {"newer": None})
    run.load(str(path))  # it may have less


@pytest.mark.parametrize("dtype, name", [("float32", "gluon"), ("float16", "gluon-float16")])
def test_momentum_and_master_copy_of_this_mxnet_alone(dtype, name):
    """They are -1 and 0. The other MXNet's, in the other order, would step without an error."""
    layer = gluon.nn.Dense(3, in_units=5, use_bias=False, dtype=dtype)
    layer.initialize(mx.init.Zero())
    settings = {"momentum": 0.9, "multi_precision": dtype == "float16"}
    trainer = SVRGTrainer(layer.collect_params(), "sgd", settings)
    with pytest.raises(ValueError, match=rf"needs MXNet {OTHER}.*, and this is MXNet"):
        trainer.load_states(DATA / f"{name}-mxnet{OTHER}.states")
    trainer.load_states(DATA / f"{name}-mxnet{GENERATION}.states")
    assert (trainer.optimizer.momentum, trainer.optimizer.lr) == (0.5, 0.5)
    layer.weight.grad()[:] = 2
    layer.weight.data()._fresh_grad = True
    trainer.step(1)
    np.testing.assert_array_equal(layer.weight.data().asnumpy(), np.full((3, 5), -1.5))


@pytest.mark.parametrize("name", OF_0_6)
def test_files_of_0_6_0(name, tmp_path):
    """Training goes on from them, and they say the same when they are saved again."""
    path, again = DATA / f"0.6.0-{name}-mxnet{GENERATION}.states", tmp_path / "again"
    play_0_6(name, [], path).save_states(again)
    then, now = (file_format.unpack(file.read_bytes()) for file in (path, again))
    if name != "nystrom":  # later versions may keep more of the curvature
        assert then[1] == now[1]
        assert_unchanged(then[2], now[2])
    trainer = play_0_6(name, range(5, 9), path)
    assert trainer.optimizer.num_update == 9 and trainer.inner_steps == (9 if name == "saga" else 6)


def test_objects_in_containers_of_0_6(run, content, tmp_path):
    """Sets still load. Schedulers in a list do not, and the message says so."""
    header, parts, arrays = file_format.unpack(content)
    states = {name: values.decode(part, arrays, range(4)) for name, part in parts.items()}
    own = states["optimizer"]["attributes"].attributes
    own["own"] = [{"x": saving.SavedObject("PolyScheduler", {})}]
    file_format.write(tmp_path / "states", header, states)
    message = "its own contains objects, which this version does not load"
    refused(run, (tmp_path / "states").read_bytes(), tmp_path / "states", message)
    for kind, found in (("set", {4, "y"}), ("frozenset", frozenset("z"))):
        assert values.decode({"kind": kind, "items": list(found)}, [], []) == found
        run.optimizer.own = found
        run.save_as_gluon(tmp_path / "states")
        run.optimizer.own = None
        run.load(tmp_path / "states")
        assert run.optimizer.own == found


MOMENTUM = {"momentum": 0.9}
OF_MOMENTUM = r"state of parameter 0 .* is .* and must be .*: was it saved with another momentum"
#: What is another in a training than in that of a file, and what is said.
CHANGES = {
    "optimizer": ({"optimizer": "adam", "settings": {}}, "the optimizer was SGD and is Adam here"),
    "scheduler": (
        {"settings": {**MOMENTUM, "lr_scheduler": mx.lr_scheduler.FactorScheduler(5)}},
        "its lr_scheduler was none and is FactorScheduler here",
    ),
    "no momentum": ({"settings": {}}, OF_MOMENTUM),
    "shape": ({"sizes": (3, 5, 2)}, r"was float32 \(4, 3\) and is float32 \(5, 3\) here"),
    "number": ({"sizes": (3, 4, 4, 2)}, "it has 4 parameters, and there are 6"),
    "dtype": ({"dtype": "float64"}, "was float32 .* and is float64"),
    "frozen": ({"frozen": True}, "was with gradients, here it is not"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_does_not_fit(name, tmp_path):
    change, message = CHANGES[name]
    run, other = Training(settings=MOMENTUM), Training(**{"settings": MOMENTUM, **change})
    run.step(2)
    run.refresh()
    run.save(tmp_path / "states")
    refused(other, (tmp_path / "states").read_bytes(), tmp_path / "states", message)
    if name in ("no momentum", "shape"):  # of gluon.Trainer
        run.save_as_gluon(tmp_path / "plain")
        message = OF_MOMENTUM if name == "no momentum" else "state of parameter 0 .* and must be"
        refused(other, (tmp_path / "plain").read_bytes(), tmp_path / "plain", message)


def test_a_dict_in_another_order(tmp_path):
    """The states of a key go to that key, whatever the layers are called."""

    def make(labels):
        run = Training(sizes=(3, 3, 3))
        given = {f"{label}.w": layer.weight for label, layer in zip(labels, run.net)}
        if GENERATION == "1":  # it takes no plain dict
            given, found = gluon.ParameterDict(), given
            given._params.update(found)
        run.use(given, "sgd", {"momentum": 0.9})
        return run

    def momenta(run):
        places = [run.trainer._params.index(layer.weight) for layer in run.net]
        return [run.states[0][place].asnumpy() for place in places]

    first, second = make("ab"), make("ba")
    first.step(2)
    second.resume(first, tmp_path / "states")
    assert_unchanged(momenta(first), momenta(second)[::-1])
    assert np.abs(np.subtract(*momenta(first))).max() > 0


def described(names):
    return [Description(name, None, (3, 3), "float32", True) for name in names.split()]


@pytest.mark.parametrize(
    "then, now, positions",
    [
        ("dense9_weight dense10_weight", "dense3_weight dense2_weight", [1, 0]),
        ("dense10_weight dense2_weight", "dense107_weight dense97_weight", [0, 1]),
        ("a3_dense12_w a3_dense9_w b_w", "b_w a7_dense0_w a7_dense1_w", [2, 1, 0]),
        ("conv2d5_weight lstm4_l0_i2h", "lstm0_l0_i2h conv2d1_weight", [1, 0]),
        ("w w1", "w9 w", [1, 0]),
        ("weight", "bias", None),
        ("dense0_weight dense1_weight", "dense0_weight dense0_bias", None),
        ("weight bias weight", "weight bias weight", [0, 1, 2]),  # a list of 2.0
        ("weight bias weight", "weight weight bias", None),
        ("w0", "w0 w1", None),
    ],
)
def test_names(then, now, positions):
    if positions is None:
        with pytest.raises(ValueError, match=r"other parameters: .* a dict|parameters, and th"):
            match(described(then), described(now))
    else:
        assert match(described(then), described(now)) == positions


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
        Training().save(gone)
    assert found.value.filename == str(gone)
    os.mkfifo(tmp_path / "pipe")
    for special in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(OSError, match=r"is a folder, a device or a pipe\. Name a file"):
            saving.write_bytes(special, b"new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pipe", "states"]


SAVING = """
import signal; import sys; import numpy as np; from gluon_svrg.saving import file_format
signal.alarm(300)
for number in range(100_000):
    file_format.write(sys.argv[1], {}, {"number": number, "array": np.full(200_000, number)})
    print(number, flush=True)
"""


@pytest.mark.parametrize("count", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_while_saving(count, tmp_path):
    """Whenever it is killed, the file is whole, and it is the last that was saved or the next."""
    path, rng, found = tmp_path / "states", random.Random(3), set()
    for _ in range(count):
        process = start([sys.executable, "-c", SAVING, path])
        try:
            printed = [process.stdout.readline() for _ in range(3)]
            time.sleep(rng.uniform(0, 0.05))
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(30)
        last = int([*printed, *process.stdout.readlines()][-1])
        process.stdout.close()
        _, states, (array,) = file_format.unpack(path.read_bytes())
        assert states["number"] in (last, last + 1) and np.all(array == states["number"])
        found.add(states["number"])
    assert min(found) >= 2
