"""Proximal operators against NumPy, and trainers with them against their twins."""

import math
from dataclasses import replace
from functools import partial

import kit
import mxnet as mx
import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mxnet import gluon
from mxnet.gluon.loss import L2Loss
from mxnet.lr_scheduler import FactorScheduler
from plays import BATCHES, CASES, PROBLEM, TWO, Play
from problems import array, parameters, values
from test_curvature import OPERATORS
from test_penalties import by_scikit_learn, of_scikit_learn

from gluon_svrg import STORMTrainer, SVRGTrainer
from gluon_svrg.prox import L1, Box, ElasticNet, GroupLasso, Prox

RATE = 0.1
make = partial(kit.make, PROBLEM, rate=RATE)

#: Each operator, and its twin: a function of the weight and the step.
TWINS = {operator: twin for operator, (twin, _) in OPERATORS.items()}
L1_TWIN = partial(oracle.l1, strength=0.3)
FOREIGN = PROBLEM.network()[0].weight

numbers = st.floats(-5, 5, allow_subnormal=False)
steps = strengths = st.floats(0, 3, allow_subnormal=False)
shapes = st.sampled_from([(1,), (4,), (3, 2), (1, 5), (2, 3, 1), (2, 3, 2, 2)])
weights = hnp.arrays("float64", shapes, elements=numbers | st.just(0.0))


def applied(operator, w, step, dtype="float64"):
    result = operator(mx.nd.array(w, dtype=dtype), step)
    assert (result.shape, np.dtype(result.dtype)) == (w.shape, np.dtype(dtype))
    return result.asnumpy()


@given(weights, steps, strengths, strengths, numbers, st.integers(0, 2))
def test_operators(w, step, one, two, low, axis):
    """The groups are the slices along an axis; along that of a vector its entries."""
    axis = axis if axis < w.ndim else 0
    inside = tuple(n for n in range(w.ndim) if n != axis)
    for operator, expected in [
        (L1(one), oracle.l1(w, step, one)),
        (ElasticNet(one, two), oracle.elastic_net(w, step, one, two)),
        (GroupLasso(one, axis), oracle.group_lasso(w, step, one, inside)),
        (GroupLasso(one, None), oracle.group_lasso(w, step, one)),
        (Box(low, low + two), oracle.box(w, step, low, low + two)),
        (Box(low, math.inf), oracle.box(w, step, low, np.inf)),
    ]:
        for dtype, bound in (("float64", 1e-12), ("float32", 1e-5)):
            found = applied(operator, w, step, dtype)
            np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_zeros_are_exact_and_only_what_is_nan_stays_nan(dtype):
    """MXNet's operators refuse a number below 2.2e-308: "Out of range value for scalar"."""
    tiny = np.array([[0.5, 0.0], [-3.0, 1e-30]], dtype)
    for operator in (L1(1e-300), ElasticNet(1e-300, 1e-300), GroupLasso(1e-300)):
        np.testing.assert_array_equal(applied(operator, tiny, 1e-9, dtype), tiny)
    w = np.array([[0.1, -0.1, 0.05], [0.0, 0.0, 0.0]])
    for strength in (0.1, 0.0, 1e-60):
        for operator in (L1(strength), GroupLasso(strength), GroupLasso(strength, axis=1)):
            found = applied(operator, w, 1.0, dtype)
            assert np.isfinite(found).all() and not found[1].any()
    assert not applied(L1(0.1), w, 1.0, "float64").any()
    assert not applied(GroupLasso(0.2), w, 1.0, dtype).any()
    for operator in TWINS:
        assert np.isnan(applied(operator, np.array([[np.nan, 1.0]]), 0.1, dtype)).any(), operator


class Proximal:
    """SGD of the oracle with a rate for each weight, and an operator after each update."""

    def __init__(self, operators, learning_rate=RATE, momentum=0.0, wd=0.0, lr_mult=(1,) * 4):
        self.operators, self.lr_mult, self.updates = operators, lr_mult, 0
        self.rate = learning_rate if callable(learning_rate) else lambda update: learning_rate
        self.momentum = oracle.rounded(momentum)
        self.inner = [oracle.SGD(None, momentum, wd) for _ in operators]

    def step(self, weights, grads, batch_size):
        self.updates += 1
        for n, (inner, operator) in enumerate(zip(self.inner, self.operators)):
            inner.learning_rate = self.rate(self.updates) * self.lr_mult[n]
            inner.step(weights[n : n + 1], grads[n : n + 1], batch_size)
            if operator is not None:
                step = oracle.rounded(inner.learning_rate) / (1 - self.momentum)
                weights[n][:] = operator(weights[n], step)


def start(case, choice, operators=(), dtype="float64", devices=None, **settings):
    settings = {"learning_rate": RATE, **settings}
    play = Play(case, PROBLEM, "step", devices, dtype=dtype, settings=settings, prox=choice)
    play.optimizer = Proximal(operators or [None] * 4, **settings)
    return play


@pytest.mark.parametrize("name", CASES)
def test_every_trainer(name):
    """For the weights only, with momentum and weight decay, by a pattern of their names."""
    case, settings = CASES[name], {"learning_rate": 0.05, "momentum": 0.6, "wd": 0.01}
    if "gamma" in case.settings:
        # MXNet 2.0 differentiates means in float32: s / (1 + s) must be exact there.
        case = replace(case, settings={**case.settings, "gamma": 1.0, "beta": 0.5})
    play = start(case, {".*weight": L1(0.3)}, [L1_TWIN, None] * 2, **settings)
    play.run()
    assert sum((w == 0).sum() for w in values(play.net)[::2]) > 0
    assert not any((w == 0).any() for w in values(play.net)[1::2])


def test_the_step_has_the_rate_of_the_update():
    """Of a scheduler, of `lr_mult`, and of `set_learning_rate`."""
    ours, theirs = (FactorScheduler(4, 0.7, base_lr=0.2) for _ in range(2))
    settings = {"learning_rate": 0.2, "lr_scheduler": theirs}
    play = Play(CASES["SVRG"], PROBLEM, optimizer_params=settings, prox=L1(0.3))
    lr_mult = [1.0, 0.5, 2.0, 0.0]
    for p, factor in zip(parameters(play.net), lr_mult):
        p.lr_mult = factor
    play.optimizer = Proximal([L1_TWIN] * 4, ours, lr_mult=lr_mult)
    play.run()
    kit.assert_unchanged(values(play.net)[3:], PROBLEM.initial[3:])  # its learning rate is zero
    play = start(CASES["SVRG"], L1(0.3), learning_rate=9.0)
    for rate in (0.3, 0.05):
        play.trainer.set_learning_rate(rate)
        play.optimizer = Proximal([L1_TWIN] * 4, rate)
        play.run()


def test_all_ways_of_a_step():
    """`step`, its halves, and a backward of the user's own; with an operator of a user."""

    class Halved(Prox):
        def __call__(self, weight, step):
            return weight * (1 - step)

    twins = [lambda w, step: w * (1 - step)] * 4
    play = start(CASES["SVRG"], Halved(), twins, learning_rate=0.5)
    for number, index in enumerate(BATCHES[:4]):
        kit.plain_step(play.trainer, lambda: play.loss_of(index), 5)
        play.twin.step(play.optimizer, index)
        play.how = ("step", "halves")[number % 2]
        play.follow(number)
    with pytest.raises(NotImplementedError):
        Prox()(mx.nd.ones(2), 0.1)


@pytest.mark.parametrize("name", ["SVRG", "SAGA"])
def test_a_none_is_no_prox(name):
    """The first key that fits is taken; with nothing to apply it is the trainer without a prox."""
    found = []
    for choice in (None, {}, {".*": None, ".*weight": L1(1.0)}, L1(0.0)):
        play = start(CASES[name], choice, dtype="float32")
        play.refresh()
        play.epoch(range(5))
        found.append(values(play.net))
    for other in found[1:]:
        kit.assert_unchanged(found[0], other)


@pytest.mark.parametrize("as_list", [False, True])
def test_keys_that_are_parameters_and_a_list_of_parameters(as_list):
    twins = [partial(oracle.box, low=0, high=high) for high in (1, math.inf)]
    play = start(CASES["SVRG"], None, [L1_TWIN, *twins, None])
    net, params = play.net, play.net.collect_params()
    choice = {net[1].weight: Box(0, math.inf), ".*weight": L1(0.3), net[0].bias: Box(0, 1)}
    params = [*params.values()] if as_list else params
    play.trainer = SVRGTrainer(params, "sgd", {"learning_rate": RATE}, prox=choice)
    play.run()


def test_parameters_that_the_optimizer_leaves_alone():
    """Stale ones with `ignore_stale_grad`, and frozen ones."""
    net, other = PROBLEM.network(), gluon.nn.Dense(2, in_units=3, dtype="float64")
    other.initialize(mx.init.Constant(0.5))
    listed = [*net.collect_params().values(), *other.collect_params().values()]
    loss_of = PROBLEM.closure(net)
    trainer = SVRGTrainer(listed, "sgd", {"learning_rate": RATE}, prox=Box(-0.1, 0.1))
    with pytest.raises(UserWarning, match="stale"):
        kit.one_epoch(trainer, loss_of, BATCHES)
    kit.assert_unchanged(values(net), PROBLEM.initial)
    parameters(net)[0].grad_req = "null"
    trainer.step(5, True, closure=lambda: loss_of(BATCHES[0]))
    kit.assert_unchanged(values(net)[:1], PROBLEM.initial[:1])
    assert max(np.abs(w).max() for w in values(net)[1:]) <= 0.1
    np.testing.assert_array_equal(other.weight.data().asnumpy(), 0.5)


@pytest.mark.parametrize("cls", [SVRGTrainer, STORMTrainer])
def test_a_step_that_does_not_update(cls):
    """Because AMP skips it, or because the update fails."""
    net, loss_of, trainer = make("float32", cls=cls, prox=Box(-0.1, 0.1))
    before = values(net)
    with pytest.raises(ZeroDivisionError):
        trainer.step(kit.Indivisible(5), closure=lambda: loss_of(BATCHES[0]))
    kit.scale_losses(trainer)
    trainer.step(5, closure=lambda: loss_of(BATCHES[0]) * 1e38)
    kit.assert_unchanged(before, values(net))
    trainer._amp_loss_scaler._loss_scale = trainer._amp_loss_scaler._next_loss_scale = 2.0**8
    kit.one_epoch(trainer, loss_of, BATCHES[:1])
    assert max(np.abs(w).max() for w in values(net)) <= np.float32(0.1)


def test_what_scikit_learn_finds():
    """With momentum: the penalty that is minimized does not depend on it."""
    X, y = of_scikit_learn("diabetes")
    expected = by_scikit_learn("Lasso", alpha=5.0)(X, y)
    net, loss_function = gluon.nn.Dense(1, in_units=10, use_bias=False, dtype="float64"), L2Loss()
    net.initialize(mx.init.Constant(0.01))
    net.hybridize(static_alloc=True, static_shape=True)
    settings = {"learning_rate": 0.02, "momentum": 0.9}
    trainer = SVRGTrainer(net.collect_params(), "sgd", settings, prox=L1(5.0))

    def loss_of(index):
        return loss_function(net(array(X[index])), array(y[index, None]))

    kit.train(trainer, loss_of, np.array_split(np.random.permutation(len(X)), 4), 200)
    found = net.weight.data().asnumpy()[0]
    np.testing.assert_array_equal(found != 0, expected != 0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


ON_KVSTORE = {"update_on_kvstore": True, "prox": L1(0.1)}
ASYNC = {"kvstore": "dist_async", "prox": L1(0.1)}

test_what_cannot_be = kit.refusals(
    (lambda: L1(-0.1), ValueError, r"strength must be finite, at least 0, got -0.1"),
    (lambda: L1("0.1"), TypeError, r"strength must be a number, got str"),
    (lambda: GroupLasso(math.inf), ValueError, r"strength must be finite"),
    (lambda: GroupLasso(1, 0.0), TypeError, r"axis must be a whole number, got float"),
    (lambda: GroupLasso(1, -1), ValueError, r"axis must be 0 or more, got -1"),
    (lambda: Box(1, 0), ValueError, r"Box\(low=1, high=0\) holds no number: low must not be"),
    (lambda: Box(math.nan, 0), ValueError, r"holds no number"),
    (lambda: Box(0, True), TypeError, r"high must be a number, got bool"),
    (lambda: make(prox=0.1), TypeError, r"prox must be an operator of .* got 0.1"),
    (lambda: make(prox={".*": 0.1}), TypeError, r"prox must be an operator of .*: 0.1}"),
    (lambda: make(prox={1: L1(1)}), TypeError, r"keys are parameters, or patterns .* {1: "),
    (lambda: make(prox={".*wait": L1(1)}), ValueError, r"'.\*wait', which fits none .*weight"),
    (lambda: make(prox={"*weight": L1(1)}), ValueError, r"'\*weight', which is no regular"),
    (lambda: make(prox={FOREIGN: L1(1)}), ValueError, r"the key '.*weight', which fits none"),
    (lambda: make("float16", prox=L1(1)), ValueError, r"needs float32 .*weight is float16"),
    (lambda: make(prox=GroupLasso(1, 1)), ValueError, r"GroupLasso\(.*\) cannot group .*bias"),
    (lambda: make(devices=TWO, **ON_KVSTORE), ValueError, r"A prox needs .*Leave that out"),
    (lambda: make(**ASYNC), ValueError, r"A prox needs .*kvstore='dist_async' never reduces"),
)


@pytest.mark.parametrize("name", ["adam", "rmsprop", "lars", "signum", "ftrl"])
def test_optimizers_with_another_step(name):
    message = rf"L1\(.*\) needs an optimizer .* but (?i:{name}) has another step.*'sgd'.*Box"
    for optimizer in (name, mx.optimizer.create(name)):
        with pytest.raises(ValueError, match=message):
            make(optimizer=optimizer, prox={".*weight": L1(0.1)})
    choice = {".*weight": Box(0, math.inf)}
    net, loss_of, trainer = make("float32", TWO, optimizer=name, prox=choice)
    kit.one_epoch(trainer, loss_of, BATCHES)
    for device in TWO:
        assert all((w >= 0).all() for w in values(net, device)[::2])
        assert any((w < 0).any() for w in values(net, device)[1::2])


def test_optimizers_of_the_users():
    class Mine(mx.optimizer.SGD):
        """A step as that of SGD."""

    for optimizer in (Mine(), mx.optimizer.NAG(momentum=0.9), "nag"):
        make(optimizer=optimizer, settings={}, prox=L1(0.1))
    for momentum in (1.0, 1 - 1e-9, -0.5):  # 1 in float32
        for optimizer, settings in (("sgd", {"momentum": momentum}), (Mine(momentum=momentum), {})):
            with pytest.raises(ValueError, match=rf"at least 0 and below 1, got {momentum}"):
                make(optimizer=optimizer, settings=settings, prox=L1(0.1))


def test_deferred_parameters():
    """A shape that is not known yet has its number of axes all the same."""
    net = gluon.nn.Dense(2)
    net.initialize()
    trainer = SVRGTrainer(net.collect_params(), "sgd", prox={".*weight": GroupLasso(1e3, axis=1)})
    trainer.step(3, closure=lambda: net(array(np.ones((3, 4)), "float32")))
    assert not net.weight.data().asnumpy().any()
