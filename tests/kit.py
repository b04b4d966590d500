"""What test files share: a trainer on a problem, loops, and a look at all that may change."""

import importlib
import warnings
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from problems import array, parameters

from gluon_svrg import SVRGTrainer
from gluon_svrg.prox import Prox

amp = importlib.import_module("mxnet.amp" if find_spec("mxnet.amp") else "mxnet.contrib.amp")
HYBRIDIZE = [None, {}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True}]


def make(problem, dtype="float64", devices=None, *, cls=SVRGTrainer, optimizer="sgd", settings=None,
         rate=0.1, hybridize=None, deferred=False, net=None, data=None, **kwargs):  # fmt: skip
    """A network at the problem's weights; its loss of an index; a trainer, refreshed on `data`."""
    net = net or problem.network(dtype, devices, deferred, hybridize)
    settings = {"learning_rate": rate} if settings is None else settings
    loss_of = problem.closure(net, dtype, devices)
    trainer = cls(net.collect_params(), optimizer, settings, **kwargs)
    if data is not None:
        trainer.update_full_grads(loss_of, data)
    return net, loss_of, trainer


def sequence(*layers, devices=None, hybridize=None):
    net = gluon.nn.HybridSequential()
    net.add(*layers)
    net.initialize(mx.init.Xavier(), ctx=devices)
    if hybridize is not None:
        net.hybridize(**hybridize)
    return net


def with_dropout(devices=None, hybridize=None, norm=False):
    """A network of 4 inputs and 3 outputs that draws random numbers."""
    layers = [gluon.nn.BatchNorm(in_channels=4)] if norm else []
    layers += [gluon.nn.Dense(20, activation="tanh", in_units=4), gluon.nn.Dropout(0.5)]
    return sequence(*layers, gluon.nn.Dense(3, in_units=20), devices=devices, hybridize=hybridize)


def with_norm(devices=None, hybridize=None, *, deferred=False, dropout=()):
    """A network of 4 inputs and 3 outputs that has running statistics."""
    inputs, units = (0, 0) if deferred else (4, 6)
    layers = [gluon.nn.Dense(6, activation="tanh", in_units=inputs)]
    layers += [gluon.nn.BatchNorm(in_channels=units), *map(gluon.nn.Dropout, dropout)]
    layers += [gluon.nn.Dense(3, in_units=units)]
    return sequence(*layers, devices=devices, hybridize=hybridize)


def scale_losses(trainer):
    """What `amp.init_trainer` does; `amp.init` would change MXNet for the whole process."""
    trainer._amp_loss_scaler = amp.loss_scaler.LossScaler()
    trainer._amp_original_scale = trainer._scale
    return trainer._amp_loss_scaler


def backward(closure):
    """The loss of a closure; its gradients are in the parameters."""
    with autograd.record():
        loss = closure()
    autograd.backward(loss)
    return loss


def plain_step(trainer, closure, batch_size, **kwargs):
    """One step as everybody writes it with `gluon.Trainer`."""
    loss = backward(closure)
    trainer.step(batch_size, **kwargs)
    return loss


def svrg_step(trainer, closure, batch_size, **kwargs):
    return trainer.step(batch_size, closure=closure, **kwargs)


def split_at(cuts):
    """A function that cuts an index array at fractions of its length; pieces may be empty."""

    def split(index):
        ends = [round(cut * len(index)) for cut in sorted(cuts)]
        return [index[a:b] for a, b in zip([0, *ends], [*ends, len(index)])]

    return split


def one_epoch(trainer, loss_of, batches):
    for index in batches:
        trainer.step(len(index), closure=lambda: loss_of(index))


def train(trainer, loss_of, batches, epochs=4, update_freq=2):
    for epoch in range(epochs):
        if epoch % update_freq == 0:
            trainer.update_full_grads(loss_of, batches)
        one_epoch(trainer, loss_of, batches)


def counted(closure):
    """The closure, with the arguments of each call in its list `calls`."""

    def counting(*args):
        counting.calls.append(args)
        return closure(*args)

    counting.calls = []
    return counting


def failing(closure, good_calls, error=KeyError):
    """The closure, that raises an error, "mine", after some good calls."""
    calls = []

    def wrapped(*args):
        calls.append(args)
        if len(calls) > good_calls:
            raise error("mine")
        return closure(*args)

    return wrapped


def table(names, *rows, **kwargs):
    """A test runs on each row."""
    return pytest.mark.parametrize(names, rows, **kwargs)


def refusals(*rows):
    """A test of calls: each row has one, the error that it raises, and what its message says."""

    @table("call, error, message", *rows)
    def test(call, error, message):
        with pytest.raises(error, match=message):
            call()

    return test


@contextmanager
def noticed():
    """The texts of the package's warnings, all at lines of tests; MXNet's have other categories."""
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        yield texts
    texts += [str(w.message) for w in caught]
    assert {Path(w.filename).parent for w in caught} <= {Path(__file__).parent}


def gradients(net):
    """Of the weights of a `Dense` problem, in float64: the sums over the devices."""
    rows = [p.list_grad() for p in parameters(net)]
    return [sum(grad.asnumpy().astype("float64") for grad in row) for row in rows]


def full_gradients(trainer, net):
    """The mean gradient of the weights of a `Dense` problem, in float64."""
    return [trainer.full_grads[p][0].asnumpy().astype("float64") for p in parameters(net)]


def clear(net):
    """Set the gradients to zero. (`Parameter.zero_grad` itself fails on MXNet 2.0.0b1.)"""
    (net if hasattr(net, "zero_grad") else net.collect_params()).zero_grad()


def everything(trainer, net):
    """All that must not change on an error, by name: not the gradients."""
    mx.nd.waitall()
    names = ("num_snapshots", "inner_steps", "grad_evaluations", "coefficient")
    found = {name: getattr(trainer, name) for name in names if hasattr(trainer, name)}
    found["learning rate"], found["updates"] = trainer.learning_rate, trainer.optimizer.num_update
    found["modes"] = [autograd.is_recording(), autograd.is_training()]
    params = [*enumerate(net.collect_params().values())]
    arrays = {f"parameter {n}": p.list_data() for n, p in params if p._data is not None}
    for name in ("snapshot", "full_grads"):
        mean = getattr(trainer, name)
        found[f"has {name}"] = mean is not None
        for number, row in enumerate((mean or {}).values()):
            arrays[f"{name} {number}"] = row
    for device, updater in enumerate(trainer._updaters):
        for key, state in updater.states.items():
            arrays[f"optimizer state {key} on device {device}"] = _flat(state)
    for name, row in arrays.items():
        for device, value in enumerate(row):
            found[f"{name} [{device}]"] = value.asnumpy()
    return found


def _flat(state):
    if state is None:
        return []
    if isinstance(state, (tuple, list)):
        return [part for inner in state for part in _flat(inner)]
    return [state]


def assert_unchanged(before, after):
    """Equal to the last bit: lists of arrays and numbers, or what `everything` returned."""
    if isinstance(before, dict):
        assert list(before) == list(after)
        for name, value in before.items():
            np.testing.assert_array_equal(value, after[name], err_msg=name)
        return
    assert len(before) == len(after)
    for this, that in zip(before, after):
        np.testing.assert_array_equal(this, that)


def move(net, amount, seed=0):
    rng = np.random.RandomState(seed)
    for p in parameters(net):
        step = amount * rng.standard_normal(p.shape)
        p.set_data(array(p.data().asnumpy() + step, p.dtype))


class Asymmetric(Prox):
    """An operator of a user: the penalty has a slope above 0."""

    def __init__(self, slope):
        self.slope = slope

    def __call__(self, weight, step):
        return weight - mx.nd.minimum(mx.nd.maximum(weight, 0), self.slope * step)

    def value(self, weight):
        return self.slope * mx.nd.relu(weight).sum()

    def __repr__(self):  # the name of a case, the same in each process
        return f"Asymmetric({self.slope})"


class Indivisible(float):
    """A batch size by which `gluon.Trainer` cannot divide: its update fails at the beginning."""

    def __rtruediv__(self, other):
        raise ZeroDivisionError
