"""Saving and loading: resume to the last bit, and trust no file."""

import os
import pickle
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loops import plain_step
from mxnet import gluon
from problems import Dense, values

from gluon_svrg import SVRGTrainer

PROBLEM = Dense("classification", hidden=(5,), seed=16, samples=60)
BATCHES = PROBLEM.batches(5)
TWO = [mx.cpu(0), mx.cpu(1)]
OPTIMIZERS = {
    "sgd": ("sgd", {"learning_rate": 0.1, "momentum": 0.9}),
    "adam": ("adam", {"learning_rate": 0.01}),
    "lars": ("lars", {"learning_rate": 0.1, "momentum": 0.9}),
}


class Run:
    """A network that is trained, with BatchNorm and, if wanted, dropout."""

    def __init__(self, optimizer="sgd", devices=None, dropout=0.0, deferred=False, **kwargs):
        name, settings = OPTIMIZERS.get(optimizer, (optimizer, {"learning_rate": 0.1}))
        self.devices = devices
        self.net = gluon.nn.HybridSequential()
        self.net.add(
            gluon.nn.Dense(6, activation="tanh", in_units=0 if deferred else 4),
            gluon.nn.BatchNorm(in_channels=0 if deferred else 6),
            gluon.nn.Dropout(dropout),
            gluon.nn.Dense(3, in_units=0 if deferred else 6),
        )
        self.net.initialize(mx.init.Xavier(), ctx=devices)
        self.net.hybridize()
        settings = {**settings, **kwargs.pop("optimizer_params", {})}
        self.trainer = SVRGTrainer(self.net.collect_params(), name, settings, **kwargs)
        self.loss_of = PROBLEM.closure(self.net, "float32", devices)

    def train(self, batches):
        for index in batches:
            self.trainer.step(len(index), closure=lambda: self.loss_of(index))

    def refresh(self):
        self.trainer.update_full_grads(self.loss_of, PROBLEM.batches(7))

    def save(self, folder):
        self.trainer.save_states(folder / "states")
        self.net.save_parameters(str(folder / "weights"))

    def load(self, folder, states_first=False):
        if states_first:
            self.trainer.load_states(folder / "states")
        self.net.load_parameters(str(folder / "weights"), ctx=self.devices)
        if not states_first:
            self.trainer.load_states(folder / "states")

    def values(self):
        """The weights; `save_parameters` averages running statistics over devices."""
        mx.nd.waitall()
        params = [p for p in self.net.collect_params().values() if p.grad_req != "null"]
        return [d.asnumpy() for p in params for d in p.list_data()]


def everything(trainer):
    """All that a file must not change when it is refused."""
    mx.nd.waitall()
    found = [
        trainer.num_snapshots,
        trainer.inner_steps,
        trainer.grad_evaluations,
        trainer.coefficient,
        trainer.learning_rate,
        trainer.optimizer.num_update,
    ]
    for held in (trainer.snapshot, trainer.full_grads):
        found += [] if held is None else [a.asnumpy() for row in held.values() for a in row]
    for updater in trainer._updaters:
        for index, state in sorted(updater.states.items()):
            found += [index] if state is None else [index, state.asnumpy()]
    return found


def assert_same(these, those):
    assert len(these) == len(those)
    for this, that in zip(these, those):
        np.testing.assert_array_equal(this, that)


# --- resuming ----------------------------------------------------------------------------------


@pytest.mark.parametrize("states_first", [False, True])
@pytest.mark.parametrize("update_on_kvstore", [False, True])
@pytest.mark.parametrize("devices", [None, TWO])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resume_in_mid_epoch(optimizer, devices, update_on_kvstore, states_first, tmp_path):
    def make():
        kvstore = mx.kv.create("device") if update_on_kvstore else "device"
        return Run(optimizer, devices, kvstore=kvstore, update_on_kvstore=update_on_kvstore or None)

    straight = make()
    straight.train(BATCHES[:3])
    straight.refresh()
    straight.train(BATCHES[:5])
    straight.save(tmp_path)
    resumed = make()
    resumed.load(tmp_path, states_first)
    for run in (straight, resumed):
        run.train(BATCHES[5:])
        run.refresh()
        run.train(BATCHES * 4)
    assert_same(straight.values(), resumed.values())
    for name in ("num_snapshots", "inner_steps", "grad_evaluations", "coefficient"):
        assert getattr(straight.trainer, name) == getattr(resumed.trainer, name)


@pytest.mark.parametrize("when", ["at once", "after a step"])
def test_resume_with_random_numbers(when, tmp_path):
    """The seeds of the lock go on; what else draws is the user's."""
    straight = Run(dropout=0.5, lock_random=True)
    straight.refresh()
    straight.train(BATCHES[:5])
    straight.save(tmp_path)
    straight.train(BATCHES[5:] + BATCHES * 4)
    mx.random.seed(99)
    resumed = Run(dropout=0.5, lock_random=True)
    if when == "after a step":
        resumed.train(BATCHES[:1])
    resumed.load(tmp_path)
    resumed.train(BATCHES[5:] + BATCHES * 4)
    assert_same(straight.values(), resumed.values())


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("first", ["step", "update_full_grads", "look", "save"])
def test_before_the_first_step_and_with_deferred_parameters(deferred, first, tmp_path):
    straight = Run()
    straight.refresh()
    straight.train(BATCHES[:5])
    straight.save(tmp_path)
    resumed = Run(deferred=deferred)
    resumed.trainer.load_states(tmp_path / "states")
    assert resumed.trainer.num_snapshots == 1
    assert resumed.trainer.inner_steps == 5
    if first == "save":  # before it is initialized
        resumed.trainer.save_states(tmp_path / "again")
        resumed = Run(deferred=deferred)
        resumed.trainer.load_states(tmp_path / "again")
    if first == "look" and deferred:
        with pytest.raises(RuntimeError, match="waits for the parameters to be initialized"):
            _ = resumed.trainer.snapshot
        with pytest.raises(RuntimeError, match="waits for the parameters"):
            resumed.trainer.step(5)
        with pytest.raises(RuntimeError, match="before the parameters are initialized"):
            resumed.trainer.export_optimizer_states(tmp_path / "export")
    if first in ("look", "save"):
        resumed.net.load_parameters(str(tmp_path / "weights"))
        assert_same(everything(straight.trainer), everything(resumed.trainer))
    else:  # the first pass initializes the network; then the weights are put in
        if first == "step":
            resumed.train(BATCHES[:1])
        else:
            resumed.refresh()
        assert resumed.trainer.snapshot is not None
        momentum = [u.states[0].asnumpy() for u in resumed.trainer._updaters]
        assert np.abs(momentum).max() > 0
        resumed.load(tmp_path)
    for run in (straight, resumed):
        run.train(BATCHES)
    assert_same(straight.values(), resumed.values())


def test_a_loaded_snapshot_can_be_discarded_before_it_is_applied(tmp_path):
    straight = Run()
    straight.refresh()
    straight.save(tmp_path)
    resumed = Run(deferred=True)
    resumed.trainer.load_states(tmp_path / "states")
    resumed.trainer.discard_snapshot()
    assert resumed.trainer.snapshot is None


def test_without_a_snapshot_there_is_none_afterwards(tmp_path):
    first, second = Run(), Run()
    first.train(BATCHES[:2])
    first.save(tmp_path)
    second.refresh()
    second.load(tmp_path)
    assert second.trainer.snapshot is None


def test_schedulers_and_settings_resume(tmp_path):
    def make():
        scheduler = mx.lr_scheduler.FactorScheduler(7, 0.9, base_lr=0.2)
        params = {"learning_rate": 0.2, "lr_scheduler": scheduler, "wd": 0.01}
        return Run(optimizer_params=params, coefficient=0.5)

    straight = make()
    straight.refresh()
    straight.train(BATCHES)
    straight.trainer.coefficient = 0.25
    straight.save(tmp_path)
    resumed = make()
    resumed.load(tmp_path)
    assert resumed.trainer.coefficient == 0.25
    for run in (straight, resumed):
        run.train(BATCHES)
    assert straight.trainer.learning_rate == resumed.trainer.learning_rate < 0.2
    assert_same(straight.values(), resumed.values())


class Falling:
    """A coefficient schedule with a state of its own."""

    def __init__(self):
        self.asked = 0

    def __call__(self, index):
        self.asked += 1
        return 1 / self.asked


def test_the_schedule_of_the_coefficient_resumes(tmp_path):
    straight, resumed = Run(coefficient=Falling()), Run(coefficient=Falling())
    straight.refresh()
    straight.save(tmp_path)
    straight.refresh()
    resumed.load(tmp_path)
    assert resumed.trainer.coefficient == 1 / 2  # asked once at construction
    resumed.refresh()
    assert resumed.trainer.coefficient == straight.trainer.coefficient
    with pytest.raises(ValueError, match="the coefficient was Falling and is a number here"):
        Run().trainer.load_states(tmp_path / "states")


@mx.optimizer.register
class Heavy(mx.optimizer.Optimizer):
    """An optimizer of one's own, with a counter that matters."""

    def __init__(self, scheduler=None, **kwargs):
        super().__init__(**kwargs)
        self.calls = 0
        self.own = {"seen": [1, 2.5, None, "x", (True,)], 3: np.arange(3.0)}

    def create_state(self, index, weight):
        return mx.nd.zeros(weight.shape, weight.context, dtype=weight.dtype)

    def update(self, index, weight, grad, state):
        indices = index if isinstance(index, (list, tuple)) else [index]
        for array in (weight, grad, state):
            assert isinstance(array, (list, tuple)) == isinstance(index, (list, tuple))
        rows = zip(weight, grad, state) if isinstance(index, (list, tuple)) else [
            (weight, grad, state)
        ]  # fmt: skip
        for number, (w, g, s) in zip(indices, rows):
            self._update_count(number)
            self.calls += 1
            s[:] = 0.5 * s + g * self.rescale_grad
            w[:] = w - self._get_lr(number) / (1 + 0.01 * self.calls) * s

    step = update


class Slow(mx.lr_scheduler.LRScheduler):
    def __init__(self):
        super().__init__(base_lr=0.3)
        self.seen = 0

    def __call__(self, num_update):
        self.seen = max(self.seen, num_update)
        return self.base_lr / (1 + 0.1 * self.seen)


def test_optimizers_and_schedulers_of_ones_own_resume(tmp_path):
    def make():
        params = {"learning_rate": 0.3, "lr_scheduler": Slow()}
        return Run("heavy", optimizer_params=params)

    straight = make()
    straight.refresh()
    straight.train(BATCHES[:5])
    straight.trainer.optimizer.own["more"] = {4}
    straight.save(tmp_path)
    resumed = make()
    resumed.load(tmp_path)
    assert resumed.trainer.optimizer.own.keys() == {"seen", 3, "more"}
    assert resumed.trainer.optimizer.own["seen"] == [1, 2.5, None, "x", (True,)]
    for run in (straight, resumed):
        run.train(BATCHES)
    assert_same(straight.values(), resumed.values())
    assert resumed.trainer.optimizer.calls == straight.trainer.optimizer.calls > 50


def test_what_is_no_plain_data_is_refused(tmp_path):
    run = Run("heavy")
    run.trainer.optimizer.own = object()
    with pytest.raises(TypeError, match=r"Heavy.own is a object, which cannot be saved"):
        run.trainer.save_states(tmp_path / "states")
    assert list(tmp_path.iterdir()) == []


# --- gluon.Trainer -----------------------------------------------------------------------------


# MXNet's KVStore.load_optimizer_states leaves its file open.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("devices", [None, TWO])
def test_files_of_gluon_trainer(optimizer, devices, tmp_path):
    """Load one, and export one that it loads."""
    name, settings = OPTIMIZERS[optimizer]
    scheduler = {"lr_scheduler": mx.lr_scheduler.PolyScheduler(100, 0.1)}
    nets = [PROBLEM.network("float32", devices) for _ in range(3)]
    plain, svrg, back = (
        cls(net.collect_params(), name, {**settings, **scheduler})
        for cls, net in zip((gluon.Trainer, SVRGTrainer, gluon.Trainer), nets)
    )
    closures = [PROBLEM.closure(net, "float32", devices) for net in nets]
    for index in BATCHES:
        plain_step(plain, lambda: closures[0](index), len(index))
    plain.save_states(str(tmp_path / "plain"))
    nets[0].save_parameters(str(tmp_path / "weights"))
    nets[1].load_parameters(str(tmp_path / "weights"), ctx=devices)
    svrg.load_states(tmp_path / "plain")
    svrg.export_optimizer_states(tmp_path / "export")
    nets[2].load_parameters(str(tmp_path / "weights"), ctx=devices)
    back.load_states(str(tmp_path / "export"))
    for index in BATCHES:
        plain_step(plain, lambda: closures[0](index), len(index))
        svrg.step(len(index), closure=lambda: closures[1](index))
        plain_step(back, lambda: closures[2](index), len(index))
    assert_same(values(nets[0], devices and TWO[1]), values(nets[1], devices and TWO[1]))
    assert_same(values(nets[0], devices and TWO[1]), values(nets[2], devices and TWO[1]))


def test_a_file_of_gluon_trainer_of_another_network(tmp_path):
    net = gluon.nn.Dense(2, in_units=2)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.9})
    ones = (mx.np if mx.util.is_np_array() else mx.nd).ones((1, 2))
    plain_step(trainer, lambda: net(ones), 1)
    trainer.save_states(str(tmp_path / "plain"))
    run = Run()
    with pytest.raises(ValueError, match=r"state of parameter 0 .* is float32 \(.*and must be"):
        run.trainer.load_states(tmp_path / "plain")


# --- files that are no good --------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run = Run()
    run.refresh()
    run.train(BATCHES[:3])
    run.save(folder)
    return (folder / "states").read_bytes()


def refused(content, path, message):
    run = Run(optimizer_params={"learning_rate": 0.7})
    run.refresh()
    run.train(BATCHES[:1])
    before = everything(run.trainer)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        run.trainer.load_states(path)
    assert_same(before, everything(run.trainer))


@given(st.data())
def test_files_with_one_bit_flipped(saved, tmp_path_factory, data):
    position = data.draw(st.integers(0, len(saved) - 1))
    damaged = bytearray(saved)
    damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.mktemp("damaged") / "states"
    refused(bytes(damaged), path, "cannot be loaded: .* Nothing was changed")


@given(st.data())
def test_truncated_files(saved, tmp_path_factory, data):
    length = data.draw(st.integers(0, len(saved) - 1))
    path = tmp_path_factory.mktemp("damaged") / "states"
    refused(saved[:length], path, "cannot be loaded: .* Nothing was changed")


@pytest.mark.parametrize("region", range(12))
def test_every_region_is_checked(saved, tmp_path, region):
    position = region * (len(saved) - 1) // 11
    damaged = bytearray(saved)
    damaged[position] ^= 0xFF
    refused(bytes(damaged), tmp_path / "states", "cannot be loaded")


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "it is empty"),
        (b"hello", "no file of states"),
        (b"\x80\x04", "damaged"),
        (pickle.dumps([1, 2]), "a pickle, but not of the states"),
        (pickle.dumps(({0: None}, 3)), "a pickle, but not of the states"),
    ],
)
def test_foreign_files(content, message, tmp_path):
    refused(content, tmp_path / "states", message)


def test_another_version(saved, tmp_path):
    other = saved.replace(b"states 2\n", b"states 3\n", 1)
    refused(other, tmp_path / "states", "it has format 3, and this version .* reads format 2")


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        Run().trainer.load_states(tmp_path / "nothing")


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


class Sneaky(Malicious):
    def __reduce__(self):
        return eval, (f"open({str(self.path)!r}, 'w')",)


@pytest.mark.parametrize("kind, name", [(Malicious, "posix.system"), (Sneaky, "builtins.eval")])
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_malicious_pickles(kind, name, protocol, tmp_path):
    content = pickle.dumps(({0: kind(tmp_path / "owned")}, mx.optimizer.SGD()), protocol)
    if protocol == 0:
        content = b"\x80\x02" + content
    refused(content, tmp_path / "states", f"it contains {name}.*could run code")
    assert not (tmp_path / "owned").exists()


CHANGES = {
    "optimizer": (lambda: Run("adam"), "the optimizer was SGD and is Adam here"),
    "scheduler": (
        lambda: Run(optimizer_params={"lr_scheduler": mx.lr_scheduler.FactorScheduler(5)}),
        "its lr_scheduler was none and is FactorScheduler here",
    ),
    "number": (
        lambda: Fewer(),
        "it has 8 parameters, and there are 2|it has .* parameters",
    ),
    "shape": (lambda: Wider(), r"was float32 \(3, 6\) and is float32 \(3, 7\) here"),
    "dtype": (lambda: Double(), "was float32 .* and is float64"),
    "frozen": (lambda: Frozen(), "was with gradients, here it is not"),
}


class Fewer(Run):
    def __init__(self):
        super().__init__()
        self.trainer = SVRGTrainer(self.net[0].collect_params(), *OPTIMIZERS["sgd"])


class Wider(Run):
    def __init__(self):
        super().__init__()
        self.net = gluon.nn.HybridSequential()
        self.net.add(
            gluon.nn.Dense(6, in_units=4),
            gluon.nn.BatchNorm(in_channels=6),
            gluon.nn.Dense(3, in_units=7),
        )
        self.net.initialize()
        self.trainer = SVRGTrainer(self.net.collect_params(), *OPTIMIZERS["sgd"])


class Double(Run):
    def __init__(self):
        super().__init__()
        self.net.hybridize(False)
        self.net.cast("float64")
        self.trainer = SVRGTrainer(self.net.collect_params(), *OPTIMIZERS["sgd"])


class Frozen(Run):
    def __init__(self):
        super().__init__()
        self.net[0].bias.grad_req = "null"


@pytest.mark.parametrize("name", CHANGES)
def test_files_that_do_not_fit(saved, name, tmp_path):
    make, message = CHANGES[name]
    (tmp_path / "states").write_bytes(saved)
    run = make()
    with pytest.raises(ValueError, match=f"does not fit this trainer: .*{message}"):
        run.trainer.load_states(tmp_path / "states")
    assert run.trainer.num_snapshots == 0
    assert run.trainer.snapshot is None


# --- writing -----------------------------------------------------------------------------------


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError):
        Run().trainer.save_states(tmp_path / "nowhere" / "states")


def test_paths_of_every_kind(tmp_path):
    run = Run()
    run.trainer.save_states(str(tmp_path / "a"))
    run.trainer.save_states(Path(tmp_path / "b"))
    run.trainer.load_states(str(tmp_path / "a"))
    run.trainer.load_states(Path(tmp_path / "b"))
