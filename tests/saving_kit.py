"""What tests of files share: a network that takes whatever gradients, and comparisons."""

from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from kit import assert_unchanged, everything, make, sequence
from mxnet import gluon
from mxnet.lr_scheduler import FactorScheduler, LRScheduler, PolyScheduler
from problems import Dense, array

from gluon_svrg import Nystrom, SAGATrainer, SVRGTrainer
from gluon_svrg.schedule import EverySteps, Linear

DATA = Path(__file__).parent / "data"
GENERATION = mx.__version__[0]
OTHER = {"1": "2", "2": "1"}[GENERATION]

#: Trainings of which version 0.6.0 has written a file, see `data/write_0_6.py`.
PROBLEM = Dense("regression", hidden=(2,), seed=3)
BATCHES = PROBLEM.batches(5)
OF_0_6 = {
    "svrg": lambda: {
        "settings": {"momentum": 0.9, "lr_scheduler": PolyScheduler(20, 0.1, warmup_steps=3)},
        "coefficient": Linear(0.75, 4),
    },
    "saga": lambda: {"cls": SAGATrainer, "optimizer": "adam"},
    "nystrom": lambda: {"optimizer": "nag", "settings": {}, "preconditioner": Nystrom(2)},
}


def play_0_6(name, moves, load=None):
    """A training with a refresh before step 3."""
    _, loss_of, trainer = make(PROBLEM, "float32", **OF_0_6[name]())
    schedule = EverySteps(4, 2)
    trainer.register(schedule)
    if load is not None:
        trainer.load_states(load)
    for number in moves:
        if number == 3 and name != "saga":
            trainer.update_full_grads(loss_of, BATCHES)
        row = {"batch_index": number % 5} if name == "saga" else {}
        trainer.step(5, closure=lambda: loss_of(BATCHES[number % 5]), **row)
        schedule.due(trainer)
    return trainer


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


class Chain(LRScheduler):
    """A scheduler with two others and a list, in its attributes."""

    def __init__(self, *steps):
        super().__init__(base_lr=0.1)
        self.first, self.second = (FactorScheduler(n, 0.5, base_lr=0.1 * n) for n in steps)
        self.asked = []

    def __call__(self, num_update):
        self.asked = [num_update]
        return self.first(num_update) + self.second(num_update)
