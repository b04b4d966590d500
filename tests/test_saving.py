"""A training that is saved and resumed is the same to the last bit, wherever it is saved."""

import kit
import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from saving_kit import assert_same
from test_methods import BATCHES, CASES, PROBLEM

OPTIMIZERS = {
    "sgd": {"learning_rate": 0.05, "momentum": 0.9},
    "adam": {"learning_rate": 0.01},
    "lars": {"learning_rate": 0.05, "momentum": 0.9},
}
#: What is done before the file is written, and after it: refreshes, discards, and minibatches.
MOMENTS = {
    "at the start": ([], ["refresh", 0, 1, 2]),
    "before a refresh": ([0, 1], ["refresh", 2, 3, 4]),
    "after a refresh": (["refresh"], [0, 1, 2, "refresh", 3]),
    "in mid-epoch": ([0, "refresh", 3, 1], [2, 0, 4, "refresh", 1, 3]),
    "after a discard": (["refresh", 3, 1, "discard", 0], [4, "refresh", 2, 3]),
    "without a refresh": ([3, 1], [0, 1, 2, 3]),
}
METHODS = [(name, False) for name in CASES] + [("SVRG", True)]


class Run:
    """A network with BatchNorm that a method trains, on one or several devices."""

    def __init__(self, method, optimizer="sgd", devices=None, dropout=0.0, deferred=False):
        name, self.is_stored = method
        self.case, self.devices = CASES[name], devices
        units = [0, 0] if deferred else [4, 6]
        self.net = kit.sequence(
            gluon.nn.Dense(6, activation="tanh", in_units=units[0]),
            gluon.nn.BatchNorm(in_channels=units[1]),
            gluon.nn.Dropout(dropout),
            gluon.nn.Dense(3, in_units=units[1]),
            devices=devices,
        )
        self.trainer = self.case.make_trainer(
            self.net.collect_params(), optimizer, OPTIMIZERS[optimizer], lock_random=dropout > 0
        )
        self.loss_of = PROBLEM.closure(self.net, "float32", devices)

    def play(self, actions):
        for action in actions:
            if action == "refresh":
                keeps = {"store_grads": True} if self.is_stored else {}
                self.trainer.update_full_grads(self.loss_of, BATCHES, **keeps)
            elif action == "discard":
                self.trainer.discard_snapshot()
            else:
                is_indexed = self.is_stored and self.trainer.has_snapshot
                row = {"batch_index": action} if is_indexed else self.case.row(action)
                index = BATCHES[action]
                self.trainer.step(len(index), closure=lambda: self.loss_of(index), **row)

    def save(self, folder):
        self.trainer.save_states(folder / "states")
        self.net.save_parameters(str(folder / "weights"))

    def load(self, folder, order):
        for kind in order:
            if kind == "states":
                self.trainer.load_states(folder / "states")
            else:
                self.net.load_parameters(str(folder / "weights"), ctx=self.devices)

    def everything(self):
        """Weights and counters; `save_parameters` averages running statistics over devices."""
        params = [p for p in self.net.collect_params().values() if p.grad_req != "null"]
        names = ("num_snapshots", "inner_steps", "grad_evaluations", "learning_rate")
        counters = [np.array(getattr(self.trainer, name)) for name in names]
        return [*counters, *(data.asnumpy() for p in params for data in p.list_data())]


def resumes(moment, folder, order=("weights", "states"), is_first=True, **kwargs):
    before, after = MOMENTS[moment]
    straight = Run(**kwargs)
    straight.play(before)
    straight.save(folder)
    resumed = Run(**kwargs)
    mx.random.seed(99)  # MXNet's own random numbers are those of another process
    if not is_first:
        resumed.play(["refresh", 2])  # what it has is forgotten
    resumed.load(folder, order)
    for run in (straight, resumed):
        run.play(after)
    assert_same(straight.everything(), resumed.everything())


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("moment", MOMENTS)
def test_at_every_moment(moment, method, tmp_path):
    resumes(moment, tmp_path, method=method)
    resumes(moment, tmp_path, method=method, order=["states", "weights"], is_first=False)


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("moment", ["at the start", "after a refresh", "in mid-epoch"])
def test_with_the_lock_on(moment, method, tmp_path):
    """The seeds of the lock go on, from the first on; what else draws is the user's."""
    if CASES[method[0]].gradients == 1 and not CASES[method[0]].indexed:
        pytest.skip("it takes one gradient a step: there is nothing to lock")
    resumes(moment, tmp_path, method=method, dropout=0.5)


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("order", [["weights", "states"], ["states", "weights"]], ids=str)
def test_deferred_parameters(order, method, tmp_path):
    resumes("in mid-epoch", tmp_path, order, method=method, deferred=True)


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("devices", [None, [mx.cpu(0), mx.cpu(1)]], ids=["one", "two"])
@pytest.mark.parametrize("moment", ["in mid-epoch", "after a discard"])
def test_with_every_optimizer_and_two_devices(moment, devices, optimizer, method, tmp_path):
    for order in (["weights", "states"], ["states", "weights"]):
        kwargs = {"method": method, "optimizer": optimizer, "devices": devices}
        resumes(moment, tmp_path, order, **kwargs)
