"""Every optimizer of MXNet consumes the estimate as it consumes a gradient.

The reference is the optimizer itself: `gluon.Trainer` with the same one, fed the oracle's
gradients.
"""

import inspect

import mxnet as mx
import numpy as np
import oracle
import pytest
from mxnet import gluon
from plays import BATCHES, PROBLEM
from problems import array, distance, parameters, values

from gluon_svrg import SVRGTrainer

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


@pytest.mark.parametrize(
    "name, settings",
    [
        ("sgd", {"clip_gradient": 0.05}),
        ("sgd", {"momentum": 0.9, "multi_precision": True}),
        ("sgd", {"momentum": 0.5, "clip_gradient": 0.02, "wd": 0.1}),
        ("lars", {"lazy_update": True}),
        ("lars", {**LARS, "lazy_update": False, "wd": 0.01}),
        ("lars", {**LARS, "clip_gradient": 0.05}),
        *(("lars", {**LARS, **settings}) for settings in OF_VERSION),
    ],
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
