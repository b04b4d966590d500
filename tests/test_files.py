"""Files on disk: damaged ones, those of others, crafted ones, and what goes on after loading."""

import copyreg
import os
import pickle
import random
import signal
import stat
import struct
import sys
import time
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from jobs import start
from kit import assert_unchanged, everything, sequence, table
from mxnet import gluon
from mxnet.lr_scheduler import FactorScheduler, LRScheduler
from problems import array
from saving_kit import OF_0_6, play_0_6

from gluon_svrg import SAGATrainer, SVRGTrainer, saving
from gluon_svrg.saving import file_format, values
from gluon_svrg.saving.parameters import Description, match

DATA = Path(__file__).parent / "data"
GENERATION = mx.__version__[0]
OTHER = {"1": "2", "2": "1"}[GENERATION]


class Chain(LRScheduler):
    """A scheduler with two others and a list, in its attributes."""

    def __init__(self, *steps):
        super().__init__(base_lr=0.1)
        self.first, self.second = (FactorScheduler(n, 0.5, base_lr=0.1 * n) for n in steps)
        self.asked = []

    def __call__(self, num_update):
        self.asked = [num_update]
        return self.first(num_update) + self.second(num_update)


class Training:
    """A network of two or more layers and its trainer."""

    def __init__(self, optimizer="sgd", settings=None, sizes=(3, 4, 2), devices=1, *,
                 dtype="float32", frozen=False, **kwargs):  # fmt: skip
        self.devices = [mx.cpu(n) for n in range(devices)]
        layers = (gluon.nn.Dense(units, in_units=n) for n, units in zip(sizes, sizes[1:]))
        self.net = sequence(*layers, devices=self.devices)
        self.net.cast(dtype)
        if frozen:
            self.net[0].bias.grad_req = "null"
        self.use(self.net.collect_params(), optimizer, settings, **kwargs)

    def use(self, parameters, *arguments, **kwargs):
        self.trainer = SVRGTrainer(parameters, *arguments, **kwargs)
        self.optimizer = self.trainer.optimizer
        self.save, self.load = self.trainer.save_states, self.trainer.load_states
        self.save_as_gluon = self.trainer.export_optimizer_states

    @property
    def states(self):
        """Of the optimizer, by device; a file is applied before."""
        _ = self.trainer.snapshot
        return [updater.states for updater in self.trainer._all_updaters]

    def step(self, times=1, seed=0):
        """Give every weight a gradient of its own, by its place in the network, and update."""
        trained = {id(p) for p in self.trainer._params}
        for number in range(times):
            for place, parameter in enumerate(self.in_order()):
                if id(parameter) in trained:
                    numbers = np.arange(np.prod(parameter.shape)).reshape(parameter.shape)
                    value = np.cos(numbers * (1 + place) + number + seed) / len(self.devices)
                    for grad, data in zip(parameter.list_grad(), parameter.list_data()):
                        grad[:] = array(value, grad.dtype)
                        data._fresh_grad = True
            self.trainer.step(1)
        mx.nd.waitall()

    def refresh(self):
        X = array(np.ones((2, self.net[0].weight.shape[1])), "float32")
        self.trainer.update_full_grads(lambda: self.net(X).sum(axis=1), [()])

    def in_order(self):
        """Parameters by layer, whatever their order in the trainer."""
        return [p for layer in self.net for p in (layer.weight, layer.bias)]

    def weights(self):
        return [d.asnumpy() for p in self.in_order() for d in p.list_data()]

    def resume(self, other, path, save="save"):
        """Take the weights of another training, and its states by a file."""
        for mine, its in zip(self.in_order(), other.in_order()):
            mine.set_data(its.list_data()[0].copy())
        getattr(other, save)(path)
        self.load(path)

    def everything(self):
        """All that a file must not change when it is refused."""
        return repr(flat([everything(self.trainer, self.net), vars(self.optimizer), self.states]))


def refused(run, content, path, message="cannot be loaded"):
    """A file of this content is refused, and changes nothing."""
    before = run.everything()
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"({message}).* Nothing was changed"):
        run.load(path)
    assert run.everything() == before


def flat(value):
    """Values that can be compared by their ``repr``."""
    value = vars(value) if isinstance(value, LRScheduler) else value
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items() if key != "param_dict"}
    if isinstance(value, (list, tuple)):
        return [flat(item) for item in value]
    value = value.asnumpy() if isinstance(value, mx.nd.NDArray) else value
    return value.tolist() if isinstance(value, np.ndarray) else value


def both_go_on(one, other, steps=3):
    for run in (one, other):
        mx.random.seed(3)
        run.step(steps, seed=5)
    assert_unchanged(one.weights(), other.weights())


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
    "scheduler": ({"settings": {**MOMENTUM, "lr_scheduler": FactorScheduler(5)}},
                  "its lr_scheduler was none and is FactorScheduler here"),
    "no momentum": ({"settings": {}}, OF_MOMENTUM),
    "shape": ({"sizes": (3, 5, 2)}, r"was float32 \(4, 3\) and is float32 \(5, 3\) here"),
    "number": ({"sizes": (3, 4, 4, 2)}, "it has 4 parameters, and there are 6"),
    "dtype": ({"dtype": "float64"}, "was float32 .* and is float64"),
    "frozen": ({"frozen": True}, "was with gradients, here it is not"),
}  # fmt: skip


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


@table(
    "then, now, positions",
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


# --- pickles that were crafted to run code, or to crash MXNet's own reader -----------------------
def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def of_bytes(content):
    return b"B" + struct.pack("<I", len(content)) + content


def named(module, name):
    return b"c%s\n%s\n" % (module.encode(), name.encode())


def mxnet_array(raw):
    """An array as MXNet pickles it, with whatever bytes."""
    state = b"}" + text("handle") + named("builtins", "bytearray") + of_bytes(raw) + b"\x85Rs"
    return named("mxnet.ndarray.ndarray", "NDArray") + b"N\x85R" + state + b"b"


def numpy_array(dtype, size, content):
    made = named("numpy.core.multiarray", "_reconstruct") + named("numpy", "ndarray") + b")N\x87R"
    of_dtype = named("numpy", "dtype") + text(dtype) + b"\x85R(K\x03" + text("<") + b"tb"
    shape = b"\x8a\x08" + struct.pack("<q", size) + b"\x85"
    return made + b"(K\x01" + shape + of_dtype + b"\x89" + content + b"tb"


def row_sparse(rows, index):
    """A row_sparse array of a row of two numbers, of a size that it claims."""
    head = struct.pack("<Iiiqqiqq", 0xF993FAC9, 1, 2, 1, 2, 2, rows, 2)
    return head + struct.pack("<iii", 1, 0, 0) + struct.pack("<iiqffq", 6, 1, 1, 0, 0, index)


def with_attribute(name):
    optimizer = mx.optimizer.SGD()
    vars(optimizer)[name] = 1
    return pickle.dumps(optimizer, 4)[2:-1]


OPTIMIZER = pickle.dumps(mx.optimizer.SGD(), 4)[2:-1]
RAW = bytes(mx.nd.ones((4,)).__getstate__()["handle"])


def states(value, optimizer=OPTIMIZER):
    """What `gluon.Trainer` would save if the state of parameter 0 were this."""
    return b"\x80\x04}K\x00" + value + b"s" + optimizer + b"\x86."


#: The content, and what is said.
PICKLES = [
    (states(numpy_array("O8", 1, of_bytes(b"\x10" * 8))), "of a dtype that is no number"),
    (states(numpy_array("f8", 1, b"(Nl")), "without content"),
    (states(numpy_array("f8", 10**8, b"N")), "without content"),  # NumPy would take new memory
    (states(numpy_array("f8", 2**40, of_bytes(b""))), "damaged"),
    (states(mxnet_array(RAW[:12] + b"\xff" * 6 + b"\0\0" + RAW[20:])), "damaged"),
    (states(mxnet_array(RAW[:8] + b"\xff\xff\xff\x7f" + RAW[12:])), "damaged"),
    (states(mxnet_array(row_sparse(3, 7))), "damaged"),
    (states(named("mxnet.ndarray.ndarray", "NDArray") + b"N\x85R"), "damaged"),
    (states(b"]q\xffh\xffa"), "damaged"),  # contains itself
    (states(b"Pos.system\n"), "persistent"),
    (states(named("os", "system") + text("true") + b"\x85R"), "it contains os.system"),
    (states(text("os") + text("system") + b"\x93" + text("true") + b"\x85R"), "contains os.system"),
    (states(named("builtins", "eval") + text("1") + b"\x85R"), "builtins.eval.*could run code"),
    (states(named("mxnet.optimizer", "SGD.update")), "it contains mxnet.optimizer.SGD.update"),
    (states(b"}}" + text("__class__") + b"Nsb"), "damaged"),
    (states(OPTIMIZER), "and must be"),
    *((states(b"N", with_attribute(name)), "cannot have") for name in ("update", "learning_rate")),
    (states(b"N", mxnet_array(RAW)), "not of the states of a gluon.Trainer"),
    (b"\x80\x02R.", "damaged"),
]


def test_crafted_pickles(tmp_path):
    run = Training()
    for content, message in PICKLES:
        refused(run, content, tmp_path / "states", message)


CODE = b"\x82\xf0"  # of an extension


def test_codes_of_extensions_are_refused(tmp_path, monkeypatch):
    """Python keeps what a code stands for, and would not ask an unpickler again."""
    monkeypatch.chdir(tmp_path)
    run, path = Training(), tmp_path / "states"
    copyreg.add_extension("posix", "system", 240)
    try:
        assert pickle.loads(b"\x80\x02" + CODE + b".") is os.system
        harm = CODE + text("touch owned") + b"\x85R"
        refused(run, states(harm), path, "the code of an extension, 240")
        # A frame ends after two of six bytes. Python drops these and reads six more; `genops` does
        # not, and takes the code for a part of the second value.
        frame = b"\x80\x04\x95" + struct.pack("<Q", 4) + b"U\x06ab"
        refused(run, frame + b"cdef" + b"U%c" % len(harm) + harm + b".", path)
    finally:
        copyreg.remove_extension("posix", "system", 240)
    assert not (tmp_path / "owned").exists()


# --- what is loaded goes on to the last bit ------------------------------------------------------
OPTIMIZERS = sorted(
    {cls.__name__.lower() for cls in mx.optimizer.Optimizer.opt_registry.values()
     if cls.__module__.startswith("mxnet.")}
)  # fmt: skip
of_both_kinds = pytest.mark.parametrize("save", ["save", "save_as_gluon"])


@of_both_kinds
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_resumes(name, save, tmp_path):
    def make():
        scheduler = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.02)
        run = Training(name, {"lr_scheduler": scheduler})
        if name == "groupadagrad":  # it takes matrices only
            run.use([layer.weight for layer in run.net], name, {"lr_scheduler": scheduler})
        return run

    first, second = make(), make()
    first.step(3)
    second.step(1)  # it has states already, and loses them
    second.resume(first, tmp_path / "states", save)
    both_go_on(first, second)


@mx.optimizer.register
class OwnOptimizer(mx.optimizer.Optimizer):
    """An optimizer of one's own, with plain data of every kind, also in its states."""

    ran = 0  # the method that a pickle calls

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.calls = 0
        self.own = {"seen": [1, 2.5, None, "x", (True,)], (1, "y"): {4: []}, 3: np.int64(6)}
        self.array, self.columns = mx.nd.array([1.0, 2.0]), np.arange(6.0).reshape(2, 3).T

    def __setstate__(self, state):
        type(self).ran += 1

    def create_state(self, index, weight):
        return mx.nd.zeros(weight.shape, dtype=weight.dtype), (None, [0])

    def update_multi_precision(self, index, weight, grad, state):
        is_many = isinstance(index, (list, tuple))
        rows = zip(index, weight, grad, state) if is_many else [(index, weight, grad, state)]
        for number, w, g, (momentum, (_, counts)) in rows:
            self._update_count(number)
            self.calls += 1
            counts[0] += 1
            momentum[:] = 0.5 * momentum + g * self.rescale_grad
            w[:] = w - self._get_lr(number) / (1 + 0.01 * self.calls + counts[0]) * momentum


@of_both_kinds
def test_an_optimizer_of_ones_own(save, tmp_path):
    first, second = (Training("ownoptimizer", {"lr_scheduler": Chain(1, 2)}) for _ in range(2))
    first.step(3)
    first.optimizer.lr_scheduler.second.factor = 0.75
    first.optimizer.own["more"] = [1, {"x": 2}]
    for run in (first, second):
        run.optimizer.set_lr_mult({"mine": 0.5})  # Gluon has those of its parameters elsewhere
    first.states[0][1] = first.states[0][1][0], ("filled", [3])  # what was None at the start
    second.resume(first, tmp_path / "states", save)
    assert (second.states[0][0][1], second.states[0][1][1]) == ((None, [3]), ("filled", [3]))
    one, other = first.optimizer, second.optimizer
    assert other.lr_mult == {"mine": 0.5}
    assert one.own == other.own and other.own["seen"][4] == (True,)
    assert type(other.own[3]) is np.int64
    assert flat(one.lr_scheduler) == flat(other.lr_scheduler)
    assert type(other.array) is mx.nd.NDArray
    assert_unchanged([one.array.asnumpy(), one.columns], [other.array.asnumpy(), other.columns])
    assert one.columns.flags.fnc and other.columns.flags.fnc  # products may differ in the last bit
    both_go_on(first, second)
    assert not OwnOptimizer.ran
    first.states[0][1][1][1].append(1)
    first.save(tmp_path / "states")
    with pytest.raises(ValueError, match=r"state of parameter 1 \(.*\) is .* and must be"):
        second.load(tmp_path / "states")


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("then, now", [(1, 2), (2, 1), (2, 2), (2, 3)])
@pytest.mark.parametrize("update_on_kvstore", [False, True])
def test_from_some_devices_to_others(then, now, name, update_on_kvstore, tmp_path):
    """All devices get states and counts: Adam corrects by counts, so devices would drift apart."""

    def make(count, on_kvstore):
        return Training(name, devices=count, update_on_kvstore=on_kvstore if count > 1 else None)

    first, second = make(then, update_on_kvstore), make(now, False)
    first.step(3)
    second.resume(first, tmp_path / "states")
    second.step(4, seed=2)
    for parameter in second.in_order():
        one, *others = (data.asnumpy() for data in parameter.list_data())
        assert_unchanged([one] * len(others), others)
    counts = second.optimizer._all_index_update_counts
    assert {n for device in range(now) for n in counts[device].values()} == {7}
    if then == now and not update_on_kvstore:
        first.step(4, seed=2)
        assert_unchanged(first.weights(), second.weights())


def test_what_cannot_be_loaded_is_not_saved(tmp_path):
    run, circle = Training(), [1]
    circle.append({"again": circle})
    for value, message in [
        (circle, "An attribute contains itself, and cannot be saved"),
        (object(), "SGD.own is a object, which cannot be saved"),
        ({4, 5}, "SGD.own is a set, which cannot be saved"),
        ([mx.lr_scheduler.PolyScheduler(5)], r"SGD.own\[...\] is a PolyScheduler, which cannot be"),
        (mx.optimizer.Adam(), "SGD.own is a Adam, which cannot be saved"),
        ({(1, (2,)): 3}, "SGD.own is a dict, .* numbers and strings as keys"),
        ([len], r"SGD.own\[...\] is a builtin_function_or_method"),
        (np.array([object()]), "is a ndarray, which cannot be saved"),
    ]:
        run.optimizer.own = value
        with pytest.raises(TypeError, match=message):
            run.save(tmp_path / "states")
    assert list(tmp_path.iterdir()) == []


def test_an_object_is_its_attributes():
    class Coin:
        def __init__(self):
            self.asked, self.function, self.more = 0, len, lambda: 1

    old, new, arrays = Coin(), Coin(), []
    assert list(saving.by_attributes(old).attributes) == ["asked"]
    old.asked, old.later = 3, np.arange(4)[::2]
    found = values.decode(values.encode(saving.by_attributes(old), arrays, "it"), arrays, [])
    assert list(saving.object_problems(found, new, "the coin")) == []
    saving.assign_object(found, new)
    assert (new.asked, new.function, new.later.tolist()) == (3, len, [0, 2])
    bad = saving.SavedObject("Other", {})
    assert "the coin was Other and is Coin" in next(saving.object_problems(bad, new, "the coin"))
