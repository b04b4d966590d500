"""The same program with `gluon.Trainer`, to the last bit: without a snapshot, or coefficient 0.

Every public member, every argument, and every optimizer.
"""

import copy
import inspect
from functools import partial

import mxnet as mx
import numpy as np
import oracle
import pytest
from kit import amp, assert_unchanged, backward, plain_step, scale_losses, svrg_step, table
from mxnet import autograd, gluon
from plays import BATCHES, PROBLEM, TWO
from problems import array, distance, parameters, values

from gluon_svrg import SVRGTrainer


class Program:
    def __init__(self, svrg, snapshot=False, devices=None, params=None, **kwargs):
        mx.random.seed(3)
        self.svrg, self.snapshot = svrg, snapshot
        self.net = PROBLEM.network("float32", devices)
        params = params(self.net) if params else self.net.collect_params()
        if kwargs.setdefault("optimizer", "sgd") == "sgd":
            kwargs.setdefault("optimizer_params", {"learning_rate": 0.1, "momentum": 0.9})
        if svrg:
            kwargs["coefficient"] = 0.0
        self.trainer = (SVRGTrainer if svrg else gluon.Trainer)(params, **kwargs)
        self.loss_of = PROBLEM.closure(self.net, "float32", devices)
        self.take_snapshot()

    def take_snapshot(self):
        if self.svrg and self.snapshot:
            self.trainer.update_full_grads(self.loss_of, PROBLEM.batches(7))

    def backward(self, index):
        if self.svrg:
            return self.trainer.correct_grads(lambda: self.loss_of(index))
        return backward(lambda: self.loss_of(index))

    def step(self, index, **kwargs):
        make = svrg_step if self.svrg else plain_step
        return make(self.trainer, lambda: self.loss_of(index), len(index), **kwargs)

    def train(self, **kwargs):
        for index in BATCHES:
            self.step(index, **kwargs)
        return self.values()

    def values(self):
        return [d.asnumpy() for p in parameters(self.net) for d in p.list_data()]


def step(make, folder):
    scheduler = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.5)
    program = make(optimizer_params={"learning_rate": 0.5, "lr_scheduler": scheduler})
    found = [program.trainer.learning_rate]
    for index in BATCHES:
        found += [program.step(index).asnumpy(), program.trainer.learning_rate]
    program.step(BATCHES[0], ignore_stale_grad=True)
    return found + program.values()


def allreduce_grads(make, folder):
    program, found = make(devices=TWO, update_on_kvstore=False), []
    for index in BATCHES:
        program.backward(index)
        program.trainer.allreduce_grads()
        found += [g.asnumpy() for p in parameters(program.net) for g in p.list_grad()]
        program.trainer.update(len(index), ignore_stale_grad=True)
    return found + program.values()


def optimizer(make, folder):
    """With a rate for each epoch, on one device, and by the kvstore of two."""
    found = []
    for devices in (None, TWO):
        program = make(optimizer=mx.optimizer.Adam(wd=0.1), devices=devices)
        assert isinstance(program.trainer.optimizer, mx.optimizer.Adam)
        program.trainer.optimizer.set_wd_mult({0: 0.0})
        for rate in (0.01, 0.02, 0.03):
            program.trainer.set_learning_rate(rate)
            found += program.train()
        found += [program.trainer.learning_rate, program.trainer.optimizer.num_update]
    return found


def load_states(make, folder):
    program = make()
    program.train()
    program.trainer.save_states(str(folder / "states"))
    saved, after = program.values(), program.train()
    PROBLEM.assign(program.net, saved)
    program.trainer.load_states(str(folder / "states"))
    program.take_snapshot()
    assert_unchanged(after, program.train())
    return after


def with_amp(make, folder):
    """The scale of the losses grows every three steps."""
    program = make()
    scaler = scale_losses(program.trainer)
    scaler._scale_seq_len = 3
    for index in BATCHES * 2:
        if program.svrg:
            program.step(index)
            continue
        with autograd.record(), amp.scale_loss(program.loss_of(index), program.trainer) as scaled:
            autograd.backward(scaled)
        program.trainer.step(len(index))
    assert scaler.loss_scale > 2**16
    return [*program.values(), scaler.loss_scale]


MEMBERS = {
    "step": step,
    "allreduce_grads": allreduce_grads,
    "update": allreduce_grads,
    "learning_rate": step,
    "set_learning_rate": optimizer,
    "optimizer": optimizer,
    "save_states": load_states,
    "load_states": load_states,
}


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("program", [*dict.fromkeys(MEMBERS.values()), with_amp])
def test_members(program, snapshot, tmp_path):
    makes = [partial(Program, svrg, snapshot) for svrg in (False, True)]
    assert_unchanged(*(program(make, tmp_path) for make in makes))


COMPRESSED = {"compression_params": {"type": "2bit", "threshold": 0.5}, "devices": TWO}
ARGUMENTS = {
    "params": [{"params": parameters}, {"params": lambda net: parameters(net)[:3]}],
    "optimizer": [{"optimizer": "adam"}, {"optimizer": mx.optimizer.NAG()}],
    "optimizer_params": [{"optimizer_params": {"learning_rate": 0.3, "wd": 0.1}}],
    "kvstore": [
        *({"kvstore": name} for name in (None, "local")),
        *({"kvstore": name, "devices": TWO} for name in ("local", "device")),
    ],
    "compression_params": [{**COMPRESSED, "kvstore": "device"}],
    "update_on_kvstore": [
        {"update_on_kvstore": value, "devices": TWO, "kvstore": "local"} for value in (True, False)
    ],
}


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("settings", [one for rows in ARGUMENTS.values() for one in rows])
def test_arguments(settings, snapshot):
    found = []
    for svrg in (False, True):
        program = Program(svrg, snapshot, **copy.deepcopy(settings))
        first, second = (program.train(ignore_stale_grad=True) for _ in range(2))
        found.append(first + second)
    assert_unchanged(*found)


def test_all_members_and_arguments_are_tested():
    assert {name for name in dir(gluon.Trainer) if not name.startswith("_")} == set(MEMBERS)
    theirs = inspect.signature(gluon.Trainer.__init__).parameters
    ours = inspect.signature(SVRGTrainer.__init__).parameters
    assert set(theirs) - {"self"} == set(ARGUMENTS)
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default
        assert ours[name].kind == parameter.kind


# --- every optimizer consumes the estimate as it consumes a gradient -----------------------------

IS_2 = "use_fused_step" in inspect.signature(mx.optimizer.LARS).parameters
SETTINGS = {
    "dcasgd": {},  # with momentum, 1.9.1 fails under gluon.Trainer too
    "lars": {"momentum": 0.9, "eta": 0.1},
    "lbsgd": {"momentum": 0.9},
    "nag": {"momentum": 0.9},
    "sgd": {"momentum": 0.9, "wd": 0.01},
}
#: In both versions it asserts that weights have two dimensions and no weight decay: made for
#: embeddings, it refuses biases under gluon.Trainer too.
EXCLUDED = {"groupadagrad"}
NAMES = sorted(set(mx.optimizer.Optimizer.opt_registry) - EXCLUDED)


def feed(trainer, net, grads, batch_size):
    for p, grad in zip(parameters(net), grads):
        p.grad()[:] = array(grad)
        p.data()._fresh_grad = True
    trainer.step(batch_size)


def compare(make_trainer, tolerance=1e-10, dtype="float64"):
    """Train one network with SVRG, a second one with the oracle's gradients."""
    net, twin = PROBLEM.network(dtype), PROBLEM.network(dtype)
    trainer = make_trainer(SVRGTrainer, net.collect_params())
    fed = make_trainer(gluon.Trainer, twin.collect_params())
    reference, loss_of = oracle.SVRG(PROBLEM.gradient, PROBLEM.initial), PROBLEM.closure(net, dtype)
    for epoch in range(4):
        if epoch % 2 == 0:
            trainer.update_full_grads(loss_of, PROBLEM.batches(7))
            reference.refresh(PROBLEM.batches(7))
        for index in BATCHES:
            mx.random.seed(epoch)  # SGLD adds noise
            trainer.step(len(index), closure=lambda: loss_of(index))
            mx.random.seed(epoch)
            feed(fed, twin, reference.estimate(index), len(index))
            reference.weights = values(twin)
    assert distance(values(net), values(twin)) < tolerance
    assert distance(values(net), PROBLEM.initial) > 1e-4
    return trainer


def precision(name):
    """float64, or float32 where MXNet's optimizer has states of float32 only."""
    net = PROBLEM.network("float64")
    trainer = gluon.Trainer(net.collect_params(), name, SETTINGS.get(name, {}))
    try:
        feed(trainer, net, PROBLEM.gradient(PROBLEM.initial, np.arange(5))[0], 5)
    except mx.base.MXNetError as error:
        assert "float32" in str(error)
        return {"dtype": "float32", "tolerance": 1e-5}
    return {"dtype": "float64", "tolerance": 1e-10}


@pytest.mark.parametrize("name", NAMES)
def test_registry(name):
    settings = {"learning_rate": 0.01, **SETTINGS.get(name, {})}
    compare(lambda cls, params: cls(params, name, settings), **precision(name))


LARS = {"momentum": 0.9, "eta": 0.1}
OF_VERSION = (
    [{"epsilon": 0.1, "aggregate_num": 4}, {"aggregate_num": 1, "use_fused_step": False}]
    if IS_2
    else [{"eps": 0.1}, {"momentum_correction": True}, {"momentum_correction": False}]
)


@table(
    "name, settings",
    ("sgd", {"clip_gradient": 0.05}),
    ("sgd", {"momentum": 0.9, "multi_precision": True}),
    ("sgd", {"momentum": 0.5, "clip_gradient": 0.02, "wd": 0.1}),
    ("lars", {"lazy_update": True}),
    ("lars", {**LARS, "lazy_update": False, "wd": 0.01}),
    ("lars", {**LARS, "clip_gradient": 0.05}),
    *(("lars", {**LARS, **settings}) for settings in OF_VERSION),
    ids=str,
)
def test_settings(name, settings):
    is_float32 = settings.get("multi_precision")
    precision = {"tolerance": 1e-5, "dtype": "float32"} if is_float32 else {}
    compare(lambda cls, params: cls(params, name, {"learning_rate": 0.1, **settings}), **precision)


@pytest.mark.parametrize("name", ["sgd", "lars"])
def test_multipliers_and_a_scheduler(name):
    """It goes on with every step; LARS on 1.9.1 corrects its momentum."""

    def make(cls, params):
        scheduler = mx.lr_scheduler.FactorScheduler(step=3, factor=0.7, base_lr=0.2)
        trainer = cls(params, name, {"momentum": 0.9, "wd": 0.1, "lr_scheduler": scheduler})
        for number, parameter in enumerate(trainer._params):
            parameter.lr_mult, parameter.wd_mult = 1 / (number + 1), number
        return trainer

    assert compare(make).learning_rate < 0.2 * 0.7**4
