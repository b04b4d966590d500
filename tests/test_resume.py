"""A training that is saved and resumed is the same to the last bit, wherever it is saved."""

import warnings

import kit
import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from plays import BATCHES, PROBLEM, TWO, WITH_STORED, Play
from problems import Dense, values

from gluon_svrg import Nystrom, SVRGTrainer
from gluon_svrg.schedule import Linear

MOMENTUM = {"learning_rate": 0.05, "momentum": 0.9}
OPTIMIZERS = {"sgd": MOMENTUM, "adam": {"learning_rate": 0.01}, "lars": MOMENTUM}
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in WITH_STORED if name != "SVRG"]
#: What is done before the file is written, and after it: refreshes, discards, and minibatches.
MOMENTS = {
    "at the start": ([], ["refresh", 0, 1, 2]),
    "before a refresh": ([0, 1], ["refresh", 2, 3, 4]),
    "after a refresh": (["refresh"], [0, 1, 2, "refresh", 3]),
    "in mid-epoch": ([0, "refresh", 3, 1], [2, 0, 4, "refresh", 1, 3]),
    "after a discard": (["refresh", 3, 1, "discard", 0], [4, "refresh", 2, 3]),
    "without a refresh": ([3, 1], [0, 1, 2, 3]),
}


class Run(Play):
    """A training by a method, on one or several devices; its twin has no part in this."""

    def __init__(self, method="SVRG", optimizer="sgd", devices=None, dropout=(), deferred=False,
                 lock=False, params=(), **kwargs):  # fmt: skip
        if kwargs.get("kvstore") == "instance":  # of this trainer alone
            kwargs["kvstore"] = mx.kv.create("device")
        kwargs.update(optimizer=optimizer, lock_random=lock, update_on_kvstore=None)
        kwargs["optimizer_params"] = {**OPTIMIZERS[optimizer], **dict(params)}
        problem = Dense("classification", seed=40)
        layers = {"deferred": deferred, "dropout": dropout}
        problem.network = lambda dtype, devices, hybridize: kit.with_norm(devices, **layers)
        super().__init__(WITH_STORED[method], problem, devices=devices, dtype="float32", **kwargs)

    def play(self, actions):
        for action in actions:
            if action == "refresh":
                self.refresh_alone(self.loss_of, BATCHES)
            elif action == "discard":
                self.trainer.discard_snapshot()
            else:
                self.step_alone(action)

    def save(self, folder):
        self.trainer.save_states(folder / "states")
        self.net.save_parameters(str(folder / "weights"))

    def load(self, folder, order=("weights", "states")):
        for kind in order:
            if kind == "states":
                self.trainer.load_states(folder / "states")
            else:
                self.net.load_parameters(str(folder / "weights"), ctx=self.devices)

    def weights(self):
        """All on one device; several have running statistics of their own, which no file keeps."""
        params = [p for layer in self.net for p in layer.collect_params().values()]
        chosen = [p for p in params if p.grad_req != "null" or self.devices is None]
        return [data.asnumpy() for p in chosen for data in p.list_data()]

    def everything(self):
        names = "num_snapshots", "inner_steps", "grad_evaluations", "learning_rate", "history"
        found = [getattr(self.trainer, name, None) for name in (*names, "coefficient")]
        return [*found, *self.weights()]


ORDERS = [["weights", "states"], ["states", "weights"]]
#: Into what a file is loaded: the order, whether parameters are deferred, and what was done before.
NEW = [(ORDERS[0], False, [])]
INTO = [(ORDERS[1], False, ["refresh", 2]), (ORDERS[0], True, []), (ORDERS[1], True, [])]


def resumes(moment, folder, into=NEW, **kwargs):
    before, after = MOMENTS[moment]
    straight = Run(**kwargs)
    straight.play(before)
    straight.save(folder)
    straight.play(after)
    for order, deferred, earlier in into:
        mx.random.seed(99)  # MXNet's own random numbers are those of another process
        resumed = Run(deferred=deferred, **kwargs)
        resumed.play(earlier)  # what it has is forgotten
        resumed.load(folder, order)
        resumed.play(after)
        kit.assert_unchanged(straight.everything(), resumed.everything())


@pytest.mark.parametrize("method", WITH_STORED)
@pytest.mark.parametrize("moment", MOMENTS)
def test_at_every_moment(moment, method, tmp_path):
    resumes(moment, tmp_path, INTO, method=method)


@pytest.mark.parametrize("method", WITH_STORED)
@pytest.mark.parametrize("moment, lock", [*((m, True) for m in MOMENTS), ("in mid-epoch", "auto")])
def test_with_the_lock_on(moment, method, lock, tmp_path):
    """The seeds of the lock go on, in plain steps too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*random")
        resumes(moment, tmp_path, method=method, dropout=[0.5], lock=lock)


@pytest.mark.parametrize("method", ["SVRG", *OTHERS])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("devices", [None, TWO], ids=["one", "two"])
@pytest.mark.parametrize("kvstore", ["device", "instance"])  # which updates
def test_wherever_the_update_is(kvstore, devices, optimizer, method, tmp_path):
    kwargs = {"method": method, "optimizer": optimizer, "devices": devices, "kvstore": kvstore}
    for moment in ("in mid-epoch", "after a discard"):
        resumes(moment, tmp_path, [(order, False, []) for order in ORDERS], **kwargs)


def test_the_statistics_of_each_device(tmp_path):
    straight, resumed = Run(devices=TWO), Run(devices=TWO)
    straight.play([0, 1, "refresh"])
    straight.save(tmp_path)
    resumed.load(tmp_path)
    rows = ([*run.trainer.snapshot.values()] for run in (straight, resumed))
    found = [[value.asnumpy() for row in each for value in row] for each in rows]
    kit.assert_unchanged(*found)
    assert sum(not np.array_equal(*pair) for pair in zip(found[0][::2], found[0][1::2])) == 2


@pytest.mark.parametrize("first", ["step", "refresh", "look", "save"])
def test_what_waits_for_deferred_parameters(first, tmp_path):
    straight, resumed = Run(), Run(deferred=True)
    straight.play(["refresh", 0, 1])
    straight.save(tmp_path)
    resumed.trainer.load_states(tmp_path / "states")
    assert (resumed.trainer.num_snapshots, resumed.trainer.inner_steps) == (1, 2)
    if first == "save":  # before it is initialized, with what is set there
        for run in (straight, resumed):
            run.trainer.learning_rate, run.trainer.coefficient = 0.025, 0.25
            run.trainer.lock_random = True
        resumed.trainer.save_states(tmp_path / "states")
        resumed = Run(deferred=True)
    elif first == "look":
        with pytest.raises(RuntimeError, match="waits for the parameters to be initialized"):
            _ = resumed.trainer.snapshot
        with pytest.raises(RuntimeError, match="waits for the parameters"):
            resumed.trainer.step(5)
        with pytest.raises(RuntimeError, match="No mini-batch initializes"):
            resumed.trainer.export_optimizer_states(tmp_path / "export")
    else:  # which initializes the network; then the weights are put in
        resumed.play([2 if first == "step" else first])
        assert max(np.abs(u.states[0].asnumpy()).max() for u in resumed.trainer._updaters) > 0
    resumed.load(tmp_path)
    kit.assert_unchanged(*(kit.everything(run.trainer, run.net) for run in (straight, resumed)))
    assert straight.trainer.lock_random == resumed.trainer.lock_random
    for run in (straight, resumed):
        run.play([3, 4, 0])
    kit.assert_unchanged(straight.everything(), resumed.everything())


WIDE = Dense("classification", hidden=(5,), samples=205, seed=42)  # so many, for a rank of 3


def test_curvature_that_waits_is_discarded(tmp_path):
    """Nothing of it is left for parameters that are initialized later."""
    kwargs = {"optimizer": "nag", "settings": {}, "preconditioner": Nystrom(2)}
    batches = WIDE.batches(12)
    for deferred in (False, True):
        _, loss_of, trainer = kit.make(WIDE, deferred=deferred, **kwargs)
        if deferred:
            trainer.load_states(tmp_path / "states")
            trainer.discard_snapshot()
            assert not trainer.has_snapshot and trainer.snapshot is None
            kit.one_epoch(trainer, loss_of, batches[:1])
            assert not trainer.has_snapshot
        trainer.update_full_grads(loss_of, batches)
        kit.one_epoch(trainer, loss_of, batches[:3])
        trainer.save_states(tmp_path / "states")
    assert trainer.num_snapshots == 2


def test_a_cast_after_loading(tmp_path):
    """What waits fits no more: each step says so, until all of it is discarded."""
    straight, resumed = Run(), Run()
    straight.play(["refresh", 0])
    straight.save(tmp_path)
    resumed.load(tmp_path)
    resumed.net.cast("float64")
    resumed.loss_of = PROBLEM.closure(resumed.net)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"does not fit .* discard_snapshot\(\) to train on"):
            resumed.play([1])
    resumed.trainer.discard_snapshot()
    before = resumed.weights()
    resumed.play([1, "refresh", 2])
    assert resumed.trainer.has_snapshot and not np.array_equal(before[0], resumed.weights()[0])


class Falling:
    """A coefficient schedule with a state of its own."""

    def __init__(self):
        self.asked = 0

    def __call__(self, index):
        self.asked += 1
        return 1 / self.asked


def test_schedules_resume(tmp_path):
    def make(coefficient):
        scheduler = mx.lr_scheduler.FactorScheduler(3, 0.9, base_lr=0.2)
        params = {"lr_scheduler": scheduler, "wd": 0.01}
        return Run("SVRG", params=params, coefficient=coefficient)

    for old, new in ((0.5, 0.75), (Falling(), Falling())):
        straight, resumed = make(old), make(new)
        straight.play(["refresh", 0, 1, 2, 3])
        straight.save(tmp_path)
        resumed.load(tmp_path)
        assert resumed.trainer.coefficient == 0.5  # a schedule is asked once at construction
        for run in (straight, resumed):
            run.play(["refresh", 0, 1, 2, 3])
        assert straight.trainer.learning_rate < 0.2
        kit.assert_unchanged(straight.everything(), resumed.everything())
    for coefficient, message in (
        (1.0, "its coefficient was of another kind"),
        (Linear(1.0, 3), "the coefficient was Falling and is Linear here"),
    ):
        with pytest.raises(ValueError, match=message):
            Run(coefficient=coefficient).trainer.load_states(tmp_path / "states")


# MXNet's KVStore.load_optimizer_states leaves its file open.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("devices", [None, TWO], ids=["one", "two"])
def test_files_of_gluon_trainer(optimizer, devices, tmp_path):
    made = []
    for cls in (gluon.Trainer, SVRGTrainer, gluon.Trainer):
        scheduler = mx.lr_scheduler.PolyScheduler(100, 0.1)
        kwargs = {"settings": {**OPTIMIZERS[optimizer], "lr_scheduler": scheduler}, "cls": cls}
        made.append(kit.make(PROBLEM, "float32", devices, optimizer=optimizer, **kwargs))
    nets, closures, (plain, svrg, back) = zip(*made)
    for index in BATCHES:
        kit.plain_step(plain, lambda: closures[0](index), len(index))
    plain.save_states(str(tmp_path / "plain"))
    nets[0].save_parameters(str(tmp_path / "weights"))
    for net in nets[1:]:
        net.load_parameters(str(tmp_path / "weights"), ctx=devices)
    svrg.load_states(tmp_path / "plain")
    svrg.export_optimizer_states(tmp_path / "export")
    back.load_states(str(tmp_path / "export"))
    for index in BATCHES:
        kit.plain_step(plain, lambda: closures[0](index), len(index))
        svrg.step(len(index), closure=lambda: closures[1](index))
        kit.plain_step(back, lambda: closures[2](index), len(index))
    for device in devices or [None]:
        for net in nets[1:]:
            kit.assert_unchanged(values(nets[0], device), values(net, device))
