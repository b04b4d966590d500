"""Every optimizer of MXNet consumes the estimate as it consumes a gradient.

The reference is the optimizer itself: `gluon.Trainer` with the same one, fed the oracle's
gradients.
"""

import mxnet as mx
import numpy as np
import oracle
import pytest
from mxnet import gluon
from problems import Dense, array, distance, parameters, values

from gluon_svrg import SVRGTrainer

PROBLEM = Dense("classification", hidden=(5,), seed=5)
SETTINGS = {
    "dcasgd": {},  # with momentum, 1.9.1 fails under gluon.Trainer too
    "lars": {"momentum": 0.9, "eta": 0.1},
    "lbsgd": {"momentum": 0.9},
    "nag": {"momentum": 0.9},
    "sgd": {"momentum": 0.9, "wd": 0.01},
}
EXCLUDED = {
    # In both versions it asserts that weights have two dimensions and no weight decay: made for
    # embeddings, it refuses biases under gluon.Trainer too.
    "groupadagrad",
}
NAMES = sorted(set(mx.optimizer.Optimizer.opt_registry) - EXCLUDED)


def feed(trainer, net, grads, batch_size):
    """Let `gluon.Trainer` take a step with given gradients."""
    for p, grad in zip(parameters(net), grads):
        p.grad()[:] = array(grad)
        p.data()._fresh_grad = True
    trainer.step(batch_size)


def compare(make_trainer, tolerance=1e-10, epochs=4, problem=PROBLEM, dtype="float64"):
    """Train one network with SVRG, a second one with the oracle's gradients."""
    net, twin = problem.network(dtype), problem.network(dtype)
    trainer = make_trainer(SVRGTrainer, net.collect_params())
    reference_trainer = make_trainer(gluon.Trainer, twin.collect_params())
    reference = oracle.SVRG(problem.gradient, problem.initial)
    loss_of = problem.closure(net, dtype)
    for epoch in range(epochs):
        if epoch % 2 == 0:
            trainer.update_full_grads(loss_of, problem.batches(7))
            reference.refresh(problem.batches(7))
        for index in problem.batches(5):
            mx.random.seed(epoch)  # SGLD adds noise
            trainer.step(len(index), closure=lambda: loss_of(index))
            mx.random.seed(epoch)
            feed(reference_trainer, twin, reference.estimate(index), len(index))
            reference.weights = values(twin)
    assert distance(values(net), values(twin)) < tolerance
    assert distance(values(net), problem.initial) > 1e-4
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


@pytest.mark.parametrize("by", ["name", "instance"])
@pytest.mark.parametrize("name", NAMES)
def test_registry(name, by):
    settings = {"learning_rate": 0.01, **SETTINGS.get(name, {})}

    def make(cls, params):
        if by == "name":
            return cls(params, name, settings)
        return cls(params, mx.optimizer.create(name, **settings))

    compare(make, **precision(name))


def test_excluded_optimizers_fail_with_gluon_trainer_too():
    net = PROBLEM.network()
    trainer = gluon.Trainer(net.collect_params(), "groupadagrad")
    with pytest.raises(AssertionError):
        feed(trainer, net, PROBLEM.gradient(PROBLEM.initial, np.arange(5))[0], 5)


def test_a_registered_optimizer_of_ones_own():
    @mx.optimizer.Optimizer.register
    class HalfStep(mx.optimizer.Optimizer):
        def create_state(self, index, weight):
            return None

        def update(self, index, weight, grad, state):  # 1.9.1, one parameter; 2.0, lists
            rows = (
                zip(index, weight, grad)
                if isinstance(index, (list, tuple))
                else [(index, weight, grad)]
            )
            for i, w, g in rows:
                w -= 0.5 * self._get_lr(i) * self.rescale_grad * g

        step = update

    compare(lambda cls, params: cls(params, "halfstep", {"learning_rate": 0.1}))
    del mx.optimizer.Optimizer.opt_registry["halfstep"]


# --- hyperparameters ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"wd": 0.1},
        {"clip_gradient": 0.05},
        {"momentum": 0.5, "clip_gradient": 0.02, "wd": 0.01},
    ],
)
def test_sgd_settings(settings):
    compare(lambda cls, params: cls(params, "sgd", {"learning_rate": 0.1, **settings}))


def test_multipliers():
    def make(cls, params):
        trainer = cls(params, "sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.1})
        for number, parameter in enumerate(trainer._params):
            parameter.lr_mult, parameter.wd_mult = 1 / (number + 1), number
        return trainer

    compare(make)


def test_lr_scheduler():
    def make(cls, params):
        scheduler = mx.lr_scheduler.FactorScheduler(step=3, factor=0.7, base_lr=0.2)
        return cls(params, "sgd", {"momentum": 0.9, "lr_scheduler": scheduler})

    trainer = compare(make)
    assert trainer.learning_rate < 0.2 * 0.7**4  # it went on with every step


def test_multi_precision_of_float32():
    settings = {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": True}
    compare(lambda cls, params: cls(params, "sgd", settings), tolerance=1e-5, dtype="float32")


def test_learning_rate_in_warm_up():
    """`set_learning_rate` and assignment take effect in the next step, and only there."""
    problem = PROBLEM
    net = problem.network()
    loss_of = problem.closure(net)
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    reference = oracle.SVRG(problem.gradient, problem.initial)
    for number in range(12):
        rate = 0.01 * (number + 1)
        if number == 6:
            trainer.update_full_grads(loss_of, problem.batches(7))
            reference.refresh(problem.batches(7))
        if number % 2:
            trainer.set_learning_rate(rate)
        else:
            trainer.learning_rate = rate
        assert trainer.learning_rate == rate
        index = problem.batches(5)[number % 5]
        trainer.step(len(index), closure=lambda: loss_of(index))
        oracle.SGD(rate).step(reference.weights, reference.estimate(index), len(index))
    assert distance(values(net), reference.weights) < 1e-12


def test_learning_rate_with_a_scheduler_is_refused_as_by_gluon_trainer():
    scheduler = mx.lr_scheduler.FactorScheduler(step=3)
    trainer = SVRGTrainer(PROBLEM.network().collect_params(), "sgd", {"lr_scheduler": scheduler})
    with pytest.raises(UserWarning, match="LRScheduler"):
        trainer.learning_rate = 0.1
