"""Every public member and argument of `gluon.Trainer`: the same program with both trainers.

Without a snapshot and with coefficient 0, everything is equal to the last bit.
"""

import inspect

import mxnet as mx
import numpy as np
import pytest
from loops import plain_step, svrg_step
from mxnet import autograd, gluon
from problems import Dense, contexts, parameters

from gluon_svrg import SVRGTrainer

PROBLEM = Dense("classification", hidden=(5,), seed=14)
BATCHES = PROBLEM.batches(5)
TWO = contexts(2)


class Program:
    """A network with one of the trainers."""

    def __init__(self, svrg, snapshot=False, devices=None, params=None, **kwargs):
        mx.random.seed(3)
        self.svrg, self.snapshot = svrg, snapshot
        self.net = PROBLEM.network("float32", devices)
        params = params(self.net) if params else self.net.collect_params()
        kwargs.setdefault("optimizer", "sgd")
        if kwargs["optimizer"] == "sgd":
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
        with autograd.record():
            loss = self.loss_of(index)
        autograd.backward(loss)
        return loss

    def step(self, index, **kwargs):
        make = svrg_step if self.svrg else plain_step
        return make(self.trainer, lambda: self.loss_of(index), len(index), **kwargs)

    def train(self):
        for index in BATCHES:
            self.step(index)

    def values(self):
        return [d.asnumpy() for p in parameters(self.net) for d in p.list_data()]


def step(make, folder):
    program = make()
    losses = [program.step(index).asnumpy() for index in BATCHES]
    program.step(BATCHES[0], ignore_stale_grad=True)
    return losses + program.values()


def allreduce_grads(make, folder):
    program = make(devices=TWO, update_on_kvstore=False)
    found = []
    for index in BATCHES:
        program.backward(index)
        program.trainer.allreduce_grads()
        found += [g.asnumpy() for p in parameters(program.net) for g in p.list_grad()]
        program.trainer.update(len(index))
    return found + program.values()


def update(make, folder):
    program = make(update_on_kvstore=False)
    for index in BATCHES:
        program.backward(index)
        program.trainer.allreduce_grads()
        program.trainer.update(len(index), ignore_stale_grad=True)
    return program.values()


def learning_rate(make, folder):
    program = make()
    found = [np.array(program.trainer.learning_rate)]
    program.train()
    scheduled = make(
        optimizer_params={
            "learning_rate": 0.5,
            "lr_scheduler": mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.5),
        }
    )
    for index in BATCHES:
        scheduled.step(index)
        found.append(np.array(scheduled.trainer.learning_rate))
    return found + program.values() + scheduled.values()


def set_learning_rate(make, folder):
    found = []
    for devices in (None, TWO):
        program = make(devices=devices)
        for epoch in range(3):
            program.trainer.set_learning_rate(0.1 * (epoch + 1))
            program.train()
        found += [np.array(program.trainer.learning_rate), *program.values()]
    return found


def optimizer(make, folder):
    program = make(optimizer=mx.optimizer.Adam(learning_rate=0.01))
    assert isinstance(program.trainer.optimizer, mx.optimizer.Adam)
    program.trainer.optimizer.set_wd_mult({0: 0.0})
    program.train()
    return [np.array(program.trainer.optimizer.num_update), *program.values()]


def save_states(make, folder):
    """What is saved without a snapshot can be loaded by the other; see load_states."""
    program = make()
    program.train()
    program.trainer.save_states(str(folder / "states"))
    assert (folder / "states").stat().st_size > 0
    program.train()
    return program.values()


def load_states(make, folder):
    program = make()
    program.train()
    program.trainer.save_states(str(folder / "states"))
    saved = program.values()
    program.train()
    after = program.values()
    for p, value in zip(parameters(program.net), saved):
        p.set_data(mx.np.array(value) if mx.util.is_np_array() else mx.nd.array(value))
    program.trainer.load_states(str(folder / "states"))
    program.take_snapshot()
    program.train()
    for resumed, straight in zip(program.values(), after):
        np.testing.assert_array_equal(resumed, straight)
    return program.values()


MEMBERS = {
    program.__name__: program
    for program in (
        step,
        allreduce_grads,
        update,
        learning_rate,
        set_learning_rate,
        optimizer,
        save_states,
        load_states,
    )
}


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("name", MEMBERS)
def test_members(name, snapshot, tmp_path):
    found = []
    for svrg in (False, True):

        def make(svrg=svrg, **kwargs):
            return Program(svrg, snapshot, **kwargs)

        folder = tmp_path / str(svrg)
        folder.mkdir()
        found.append(MEMBERS[name](make, folder))
    assert len(found[0]) == len(found[1])
    for ours, theirs in zip(*found):
        np.testing.assert_array_equal(ours, theirs)


def test_all_members_are_tested():
    assert {name for name in dir(gluon.Trainer) if not name.startswith("_")} == set(MEMBERS)


def some(net):
    return [p for p in parameters(net) if p is not net[1].bias]


ARGUMENTS = {
    "params": [{"params": lambda net: list(net.collect_params().values())}, {"params": some}],
    "optimizer": [{"optimizer": "adam"}, {"optimizer": mx.optimizer.NAG(learning_rate=0.1)}],
    "optimizer_params": [{"optimizer_params": {"learning_rate": 0.3, "wd": 0.1}}],
    "kvstore": [
        {"kvstore": None},
        {"kvstore": "local", "devices": TWO},
        {"kvstore": "device", "devices": TWO},
        {"kvstore": "local"},
    ],
    "compression_params": [
        {
            "compression_params": {"type": "2bit", "threshold": 0.5},
            "kvstore": "device",
            "devices": TWO,
        }
    ],
    "update_on_kvstore": [
        {"update_on_kvstore": value, "devices": TWO, "kvstore": "local"} for value in (True, False)
    ],
}


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize(
    "name, number",
    [(name, number) for name, values in ARGUMENTS.items() for number in range(len(values))],
)
def test_arguments(name, number, snapshot):
    settings = ARGUMENTS[name][number]
    found = []
    for svrg in (False, True):
        mine = dict(settings)
        if not isinstance(mine.get("optimizer", ""), str):
            mine["optimizer"] = mx.optimizer.NAG(learning_rate=0.1)
        program = Program(svrg, snapshot, **mine)
        for _ in range(2):
            for index in BATCHES:
                program.step(index, ignore_stale_grad=True)
        found.append(program.values())
    for ours, theirs in zip(*found):
        np.testing.assert_array_equal(ours, theirs)


def test_all_arguments_are_tested():
    signature = inspect.signature(gluon.Trainer.__init__)
    assert set(signature.parameters) - {"self"} == set(ARGUMENTS)
    ours = inspect.signature(SVRGTrainer.__init__)
    assert list(ours.parameters)[: len(signature.parameters)] == list(signature.parameters)
    for name, parameter in signature.parameters.items():
        assert ours.parameters[name].default == parameter.default
        assert ours.parameters[name].kind == parameter.kind
