"""Public members; and `gluon.Trainer`, without a snapshot or with coefficient 0, bit for bit."""

import copy
import inspect
from contextlib import nullcontext
from functools import partial

import kit
import mxnet as mx
import numpy as np
import oracle
import pytest
from kit import amp, assert_unchanged, backward, everything, plain_step, scale_losses, svrg_step
from mxnet import autograd, gluon
from plays import BATCHES, PROBLEM, TWO, Play, each_method
from problems import array, distance, parameters, values
from test_files import OPTIMIZERS

import gluon_svrg
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
    step: ["step", "learning_rate"],
    allreduce_grads: ["allreduce_grads", "update"],
    optimizer: ["optimizer", "set_learning_rate"],
    load_states: ["load_states", "save_states"],
}


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("program", [*MEMBERS, with_amp])
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
    members = {name for name in dir(gluon.Trainer) if not name.startswith("_")}
    assert members == {name for names in MEMBERS.values() for name in names}
    theirs = inspect.signature(gluon.Trainer.__init__).parameters
    ours = inspect.signature(SVRGTrainer.__init__).parameters
    assert set(theirs) - {"self"} == set(ARGUMENTS)
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default
        assert ours[name].kind == parameter.kind


# --- every optimizer consumes the estimate as it consumes a gradient -----------------------------
SETTINGS = {
    "dcasgd": {},  # with momentum, 1.9.1 fails under gluon.Trainer too
    "lars": {"momentum": 0.9, "eta": 0.1},
    "lbsgd": {"momentum": 0.9},
    "nag": {"momentum": 0.9},
    "sgd": {"momentum": 0.9, "wd": 0.01},
}
#: In both versions it asserts that weights have two dimensions and no weight decay: made for
#: embeddings, it refuses biases under gluon.Trainer too.
NAMES = [name for name in OPTIMIZERS if name != "groupadagrad"]


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


# --- what can be seen, what counts, what is passed, and what is shown ----------------------------
ALL = np.arange(len(PROBLEM.X))
TRAINERS = [getattr(gluon_svrg, name) for name in gluon_svrg.__all__ if name.endswith("Trainer")]
make = partial(kit.make, PROBLEM)


def test_counters():
    """Before the first snapshot; those of each method are in `test_methods`."""
    _, loss_of, trainer = make()
    assert isinstance(trainer, gluon.Trainer) and trainer
    for count in (0, 5, 10):
        counters = trainer.num_snapshots, trainer.inner_steps, trainer.grad_evaluations
        assert counters == (0, 0, count)
        assert trainer.snapshot is None and trainer.full_grads is None
        with pytest.raises(
            RuntimeError, match="needs a snapshot, and SVRGTr"
        ), trainer.at_snapshot():
            pass
        trainer.step(5, closure=lambda: loss_of(ALL[:5]))
    for name in ("num_snapshots", "inner_steps", "grad_evaluations", "snapshot", "full_grads"):
        with pytest.raises(AttributeError):
            setattr(trainer, name, 3)


def test_what_is_read_is_a_copy():
    net, _, trainer = make(data=BATCHES)
    before = everything(trainer, net)
    for held in (trainer.snapshot, trainer.full_grads):
        assert list(held) == trainer._params
        for row in held.values():
            for each in row:
                each[:] = 7
    trainer.history[0]["steps"] = 7
    assert_unchanged(before, everything(trainer, net))
    assert trainer.history[0]["steps"] == 0
    weight = parameters(net)[0]
    assert type(trainer.full_grads[weight][0]) is type(weight.grad())
    assert type(trainer.snapshot[weight][0]) is type(weight.data())


@pytest.mark.parametrize("kind", [list, tuple])
def test_step_returns_what_the_closure_returned(kind):
    """That of its last call, at the current weights: the snapshot comes first."""
    net, loss_of, trainer = make(data=BATCHES)
    weight, seen = parameters(net)[0], []
    weight.data()[:] += 1
    expected = loss_of(ALL[:6]).asnumpy()

    def closure():
        seen.append(weight.data().asnumpy())
        return kind([loss_of(ALL[:2]), loss_of(ALL[2:6])])

    losses = trainer.step(6, closure=closure)
    assert type(losses) is kind
    found = np.concatenate([loss.asnumpy() for loss in losses])
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(seen[0] + 1, seen[1])


def test_gradients_and_their_marks_survive_a_refresh_and_an_error():
    net, loss_of, trainer = make()
    backward(lambda: loss_of(ALL[:5]))
    before = kit.gradients(net)
    for is_fresh in (True, False):
        for _ in range(2):
            trainer.update_full_grads(loss_of, BATCHES)
            assert_unchanged(before, kit.gradients(net))
        trainer.discard_snapshot()
        with pytest.raises(ZeroDivisionError):
            trainer.correct_grads(lambda: 1 / 0)
        stale = pytest.raises(UserWarning, match="has not been updated")
        with nullcontext() if is_fresh else stale:
            trainer.step(5)


def test_a_data_iter_is_reset_before_and_after():
    """The closure gets its batches as they are, and can cut their padding off."""
    net = PROBLEM.network("float32")
    loss_function, trainer = PROBLEM.loss_function(), SVRGTrainer(net.collect_params(), "sgd")
    X, y = (part.astype("float32") for part in (PROBLEM.X, PROBLEM.y))
    data = mx.io.NDArrayIter(X, y, batch_size=5)  # 23 = 4 * 5 + 3
    next(data)

    def loss_of(batch):
        used = 5 - batch.pad
        X, y = (array(part[0].asnumpy()[:used], "float32") for part in (batch.data, batch.label))
        return loss_function(net(X), y)

    trainer.update_full_grads(loss_of, data)
    assert trainer.grad_evaluations == 23
    expected, _ = PROBLEM.gradient(PROBLEM.initial, ALL)
    assert distance(kit.full_gradients(trainer, net), [grad / 23 for grad in expected]) < 1e-5
    for batch in data:
        trainer.step(5 - batch.pad, closure=lambda: loss_of(batch))
    assert trainer.inner_steps == 5


SHOWN = {
    "SVRGTrainer": ("no snapshot, coefficient 1", "snapshot 1, 2 steps since, coefficient 1"),
    "SAGATrainer": ("0 gradients stored", "5 gradients stored"),
    "SAGTrainer": ("0 gradients stored", "5 gradients stored"),
    "SARAHTrainer": ("no snapshot", "snapshot 1, 2 steps since"),
    "STORMTrainer": ("mixing 0.1", "mixing 0.1"),
    "MARSTrainer": ("gamma 0.025, beta 0.95, clip 1, exact",) * 2,
}


@pytest.mark.parametrize("cls", TRAINERS)
def test_a_trainer_is_shown_with_where_it_stands(cls):
    (_, loss_of, trainer), (before, after) = make(cls=cls), SHOWN[cls.__name__]
    assert repr(trainer) == f"{cls.__name__}(sgd, {before})"
    trainer.update_full_grads(loss_of, BATCHES)
    for number in range(2):
        row = {"batch_index": number} if "stored" in before else {}
        trainer.step(5, closure=lambda: loss_of(BATCHES[number]), **row)
    assert repr(trainer) == f"{cls.__name__}(sgd, {after})"


@each_method
def test_a_copy_of_the_best_network(case):
    """On 1.9.1 its parameters know their trainer. 2.0 itself copies layers, and not sequences."""
    play = Play(case, refreshed=True)
    play.epoch((0, 1))
    best, expected = copy.deepcopy(play.net[0]), play.net[0].weight.data().asnumpy()
    play.refresh()
    play.update(1)
    assert distance([play.net[0].weight.data().asnumpy()], [expected]) > 0
    assert_unchanged([expected], [best.weight.data().asnumpy()])
