"""A training that is saved and resumed is the same to the last bit, wherever it is saved."""

from pathlib import Path

import kit
import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from saving_kit import GENERATION, assert_same
from test_methods import BATCHES, CASES, PROBLEM

DATA = Path(__file__).parent / "data"
OTHER = "1" if GENERATION == "2" else "2"
OPTIMIZERS = {
    "sgd": {"learning_rate": 0.05, "momentum": 0.9},
    "adam": {"learning_rate": 0.01},
    "lars": {"learning_rate": 0.05, "momentum": 0.9},
}
METHODS = [*CASES, "SVRG, stored"]
#: What is done before the file is written, and after it: refreshes, discards, and minibatches.
MOMENTS = {
    "at the start": ([], ["refresh", 0, 1, 2]),
    "before a refresh": ([0, 1], ["refresh", 2, 3, 4]),
    "after a refresh": (["refresh"], [0, 1, 2, "refresh", 3]),
    "in mid-epoch": ([0, "refresh", 3, 1], [2, 0, 4, "refresh", 1, 3]),
    "after a discard": (["refresh", 3, 1, "discard", 0], [4, "refresh", 2, 3]),
    "without a refresh": ([3, 1], [0, 1, 2, 3]),
}


class Run:
    """A network with BatchNorm that a method trains, on one or several devices."""

    def __init__(self, method, optimizer="sgd", devices=None, dropout=0.0, deferred=False,
                 dtype="float32"):  # fmt: skip
        self.is_stored = method == "SVRG, stored"
        self.case, self.devices = CASES["SVRG" if self.is_stored else method], devices
        units = [0, 0] if deferred else [4, 6]
        self.net = kit.sequence(
            gluon.nn.Dense(6, activation="tanh", in_units=units[0]),
            gluon.nn.BatchNorm(in_channels=units[1]),
            gluon.nn.Dropout(dropout),
            gluon.nn.Dense(3, in_units=units[1]),
            devices=devices,
        )
        self.net.cast(dtype)
        self.trainer = self.case.make_trainer(
            self.net.collect_params(), optimizer, OPTIMIZERS[optimizer], lock_random=dropout > 0
        )
        self.loss_of = PROBLEM.closure(self.net, dtype, devices)

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

    def weights(self):
        """All on one device; several have running statistics of their own, which no file keeps."""
        params = [p for layer in self.net for p in layer.collect_params().values()]
        chosen = [p for p in params if p.grad_req != "null" or self.devices is None]
        return [data.asnumpy() for p in chosen for data in p.list_data()]

    def everything(self):
        names = ("num_snapshots", "inner_steps", "grad_evaluations", "learning_rate")
        return [*(getattr(self.trainer, name) for name in names), *self.weights()]


def resumes(moment, folder, order=("weights", "states"), deferred=False, is_new=True, **kwargs):
    before, after = MOMENTS[moment]
    straight, resumed = Run(**kwargs), Run(deferred=deferred, **kwargs)
    straight.play(before)
    straight.trainer.save_states(folder / "states")
    straight.net.save_parameters(str(folder / "weights"))
    mx.random.seed(99)  # MXNet's own random numbers are those of another process
    if not is_new:
        resumed.play(["refresh", 2])  # what it has is forgotten
    for kind in order:
        if kind == "states":
            resumed.trainer.load_states(folder / "states")
        else:
            resumed.net.load_parameters(str(folder / "weights"), ctx=resumed.devices)
    for run in (straight, resumed):
        run.play(after)
    assert_same(straight.everything(), resumed.everything())


ORDERS = [["weights", "states"], ["states", "weights"]]
all_methods = pytest.mark.parametrize("method", METHODS)


@all_methods
@pytest.mark.parametrize("moment", MOMENTS)
def test_at_every_moment(moment, method, tmp_path):
    resumes(moment, tmp_path, method=method)
    resumes(moment, tmp_path, ORDERS[1], is_new=False, method=method)
    for order in ORDERS:
        resumes(moment, tmp_path, order, method=method, deferred=True)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "approximate MARS"])
@pytest.mark.parametrize("moment", ["at the start", "after a refresh", "in mid-epoch"])
def test_with_the_lock_on(moment, method, tmp_path):
    """The seeds of the lock go on, from the first on; a method of one gradient has none."""
    resumes(moment, tmp_path, method=method, dropout=0.5)


@pytest.mark.slow
@all_methods
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("devices", [None, [mx.cpu(0), mx.cpu(1)]], ids=["one", "two"])
@pytest.mark.parametrize("moment", ["in mid-epoch", "after a discard"])
def test_with_every_optimizer_and_two_devices(moment, devices, optimizer, method, tmp_path):
    for order in ORDERS:
        resumes(moment, tmp_path, order, method=method, optimizer=optimizer, devices=devices)


@all_methods
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_files_of_0_3_0(optimizer, method, tmp_path):
    """They resume to the weights that 0.3.0 had; the other MXNet's are refused by name."""
    run = Run(method, optimizer, dtype="float64")
    for generation in (OTHER, GENERATION):
        with np.load(DATA / f"0.3.0-mxnet{generation}.npz") as file:
            (tmp_path / "states").write_bytes(file[f"{method} {optimizer}"])
            then, later = file[f"{method} {optimizer} weights"]
        if generation == OTHER:
            with pytest.raises(ValueError, match=rf"saved with MXNet {OTHER}\..*, and this is MXN"):
                run.trainer.load_states(tmp_path / "states")
            assert run.trainer.num_snapshots == run.trainer.optimizer.num_update == 0
    run.trainer.load_states(tmp_path / "states")
    params = [p for layer in run.net for p in layer.collect_params().values()]
    for p, values in zip(params, np.split(then, np.cumsum([np.prod(p.shape) for p in params]))):
        array = mx.np.array if GENERATION == "2" else mx.nd.array
        p.set_data(array(values.reshape(p.shape), dtype="float64"))
    run.play(MOMENTS["in mid-epoch"][1])
    found = np.concatenate([weight.ravel() for weight in run.weights()])
    np.testing.assert_allclose(found, later, rtol=1e-10, atol=1e-12)
    assert np.abs(found - then).max() > 1e-2
