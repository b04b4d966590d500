"""LARS with all its parameters, and that nothing of the trainer's aliases what it changes."""

import inspect

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from problems import distance, parameters, values
from test_optimizers import PROBLEM, compare

from gluon_svrg import SVRGTrainer

IS_2 = "use_fused_step" in inspect.signature(mx.optimizer.LARS).parameters
COMMON = [
    {"learning_rate": 0.2},
    {"momentum": 0.9},
    {"momentum": 0.9, "eta": 0.02},
    {"momentum": 0.9, "lazy_update": True},
    {"momentum": 0.9, "lazy_update": False, "wd": 0.01},
    {"momentum": 0.9, "clip_gradient": 0.05},
]
OF_VERSION = (
    [
        {"momentum": 0.9, "epsilon": 0.1},
        {"momentum": 0.9, "epsilon": 0.1, "aggregate_num": 4},
        {"momentum": 0.9, "aggregate_num": 1, "use_fused_step": False},
        {"momentum": 0.9, "aggregate_num": 4, "use_fused_step": False},
        {"momentum": 0.9, "aggregate_num": 4, "use_fused_step": True},
        {"aggregate_num": 4},
    ]
    if IS_2
    else [
        {"momentum": 0.9, "eps": 0.1},
        {"momentum": 0.9, "momentum_correction": True},
        {"momentum": 0.9, "momentum_correction": False},
    ]
)


@pytest.mark.parametrize("settings", COMMON + OF_VERSION, ids=str)
def test_parameters(settings):
    settings = {"learning_rate": 0.1, "eta": 0.1, **settings}
    compare(lambda cls, params: cls(params, "lars", settings))


@pytest.mark.skipif(IS_2, reason="2.0 has the argument aggregate_num instead")
@pytest.mark.parametrize("size", ["1", "4"])
def test_aggregation_size_of_the_environment(size, monkeypatch):
    monkeypatch.setenv("MXNET_OPTIMIZER_AGGREGATION_SIZE", size)
    settings = {"learning_rate": 0.1, "momentum": 0.9, "eta": 0.1}
    trainer = compare(lambda cls, params: cls(params, "lars", settings))
    assert trainer.optimizer.aggregate_num == int(size)


@pytest.mark.skipif(IS_2, reason="momentum_correction exists in 1.9.1 only")
@pytest.mark.parametrize("correction", [True, False])
def test_momentum_correction_when_the_learning_rate_changes(correction):
    def make(cls, params):
        scheduler = mx.lr_scheduler.FactorScheduler(step=3, factor=0.5, base_lr=0.2)
        settings = {"momentum": 0.9, "eta": 0.1, "momentum_correction": correction}
        return cls(params, "lars", {"lr_scheduler": scheduler, **settings})

    compare(make)


def test_warm_up():
    def make(cls, params):
        trainer = cls(params, "lars", {"learning_rate": 0.1, "momentum": 0.9, "eta": 0.1})
        trainer.set_learning_rate(0.02)
        return trainer

    assert compare(make).learning_rate == 0.02


@pytest.mark.parametrize("named", [False, True])
def test_exemption_of_bias_gamma_and_beta(named):
    """Gluon leaves `idx2name` empty, so LARS scales biases too, unless it is filled."""

    def make(cls, params):
        trainer = cls(params, "lars", {"learning_rate": 0.1, "eta": 0.1})
        if named:
            trainer.optimizer.idx2name = {i: p.name for i, p in enumerate(trainer._params)}
        return trainer

    compare(make)
    steps = {}
    for cls in (gluon.Trainer, SVRGTrainer):
        net = PROBLEM.network()
        trainer = make(cls, net.collect_params())
        loss_of = PROBLEM.closure(net)
        index = np.arange(len(PROBLEM.X))
        with mx.autograd.record():
            loss = loss_of(index)
        loss.backward()
        trainer.step(len(index))
        steps[cls] = [new - old for new, old in zip(values(net), PROBLEM.initial)]
    assert distance(steps[SVRGTrainer], steps[gluon.Trainer]) == 0
    gradient = PROBLEM.gradient(PROBLEM.initial, index)[0]
    plain = [-0.1 * g / len(index) for g in gradient]
    for number, (step, unscaled) in enumerate(zip(steps[SVRGTrainer], plain)):
        is_bias = number % 2 == 1
        assert np.allclose(step, unscaled, rtol=1e-6) == (named and is_bias)


@pytest.mark.parametrize("settings", [{}, {"use_fused_step": False}] if IS_2 else [{}], ids=str)
def test_what_it_does_to_gradients_reaches_nothing_that_is_kept(settings):
    net = PROBLEM.network()
    loss_of = PROBLEM.closure(net)
    trainer = SVRGTrainer(net.collect_params(), "lars", {"momentum": 0.9, "wd": 0.1, **settings})
    trainer.update_full_grads(loss_of, PROBLEM.batches(5))

    def kept():
        arrays = [*trainer.snapshot.values(), *trainer.full_grads.values()]
        return [array.asnumpy() for row in arrays for array in row]

    before = kept()
    for index in PROBLEM.batches(5):
        trainer.step(len(index), closure=lambda: loss_of(index))
        for p in parameters(net):
            p.grad()[:] = 1e6
    for old, new in zip(before, kept()):
        np.testing.assert_array_equal(old, new)
