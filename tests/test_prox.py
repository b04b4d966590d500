"""Proximal operators against NumPy, and trainers with them against their twins."""

import math
from dataclasses import replace

import kit
import mxnet as mx
import numpy as np
import oracle
import pytest
from cluster import run_cluster
from hypothesis import given
from hypothesis import strategies as st
from kit import assert_unchanged, everything
from loops import plain_step, split_at
from mxnet import gluon
from mxnet.lr_scheduler import FactorScheduler
from problems import Dense, array, contexts, distance, parameters, values
from test_methods import CASES

import gluon_svrg
from gluon_svrg import SAGATrainer, STORMTrainer, SVRGTrainer
from gluon_svrg.prox import L1, Box, ElasticNet, GroupLasso, Prox

PROBLEM = Dense("classification", hidden=(5,), seed=42)
BATCHES = PROBLEM.batches(5)  # 23 = 4 * 5 + 3
RATE = 0.1
TWO = contexts(2)

#: Each operator, and its twin: a function of the weight and the step.
TWINS = {
    L1(0.3): lambda w, step: oracle.l1(w, step, 0.3),
    ElasticNet(0.2, 0.7): lambda w, step: oracle.elastic_net(w, step, 0.2, 0.7),
    GroupLasso(0.15): lambda w, step: oracle.group_lasso(w, step, 0.15, tuple(range(1, w.ndim))),
    GroupLasso(0.2, axis=None): lambda w, step: oracle.group_lasso(w, step, 0.2),
    Box(-0.3, 0.4): lambda w, step: oracle.box(w, step, -0.3, 0.4),
    Box(0, math.inf): oracle.non_negative,
}


# --- operators -----------------------------------------------------------------------------------

numbers = st.floats(-5, 5, allow_subnormal=False)
strengths = st.floats(0, 3, allow_subnormal=False)
steps = st.floats(0, 2, allow_subnormal=False)
shapes = st.sampled_from([(1,), (4,), (3, 2), (1, 5), (2, 3, 1), (2, 3, 2, 2)])
weights = shapes.flatmap(
    lambda shape: st.lists(
        st.one_of(numbers, st.just(0.0)),
        min_size=math.prod(shape),
        max_size=math.prod(shape),
    ).map(lambda entries: np.array(entries).reshape(shape))
)


def applied(operator, w, step, dtype="float64"):
    result = operator(mx.nd.array(w, dtype=dtype), step)
    assert (result.shape, np.dtype(result.dtype)) == (w.shape, np.dtype(dtype))
    return result.asnumpy()


def assert_is(operator, w, step, expected):
    np.testing.assert_allclose(applied(operator, w, step), expected, rtol=0, atol=1e-12)
    narrow = applied(operator, w, step, "float32")
    np.testing.assert_allclose(narrow, expected, rtol=0, atol=1e-5)


@given(w=weights, step=steps, strength=strengths)
def test_l1(w, step, strength):
    assert_is(L1(strength), w, step, oracle.l1(w, step, strength))


@given(w=weights, step=steps, l1=strengths, l2=strengths)
def test_elastic_net(w, step, l1, l2):
    assert_is(ElasticNet(l1, l2), w, step, oracle.elastic_net(w, step, l1, l2))


@given(w=weights, step=steps, strength=strengths, axis=st.sampled_from([None, 0, 1, 2]))
def test_group_lasso(w, step, strength, axis):
    """The groups are the slices along an axis; along that of a vector its entries."""
    if axis is not None and axis >= w.ndim:
        axis = 0
    others = tuple(n for n in range(w.ndim) if n != axis)
    expected = oracle.group_lasso(w, step, strength, others)
    assert_is(GroupLasso(strength, axis), w, step, expected)


@given(w=weights, step=steps, low=numbers, width=st.floats(0, 3))
def test_box(w, step, low, width):
    assert_is(Box(low, low + width), w, step, oracle.box(w, step, low, low + width))
    assert_is(Box(low, math.inf), w, step, oracle.box(w, step, low, np.inf))
    assert_is(Box(0, math.inf), w, step, oracle.non_negative(w, step))


@pytest.mark.parametrize("operator", [L1(1e-300), ElasticNet(1e-300, 1e-300), GroupLasso(1e-300)])
@pytest.mark.parametrize("step", [1e-9, 1e-12])
def test_penalties_too_small_to_matter(operator, step):
    """MXNet's operators refuse a number below 2.2e-308: "Out of range value for scalar"."""
    w = np.array([[0.5, 0.0], [-3.0, 1e-30]])
    np.testing.assert_array_equal(applied(operator, w, step), w)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_zeros_are_exact_and_nothing_is_nan(dtype):
    w = np.array([[0.1, -0.1, 0.05], [0.0, 0.0, 0.0]])
    for strength in (0.1, 0.0, 1e-60):
        for operator in (L1(strength), GroupLasso(strength), GroupLasso(strength, axis=1)):
            found = applied(operator, w, 1.0, dtype)
            assert np.isfinite(found).all()
            assert not found[1].any()
    assert not applied(L1(0.1), w, 1.0, "float64").any()
    assert not applied(GroupLasso(0.2), w, 1.0, dtype).any()


def test_what_has_diverged_can_be_seen():
    """A weight that is no number stays none."""
    for operator in TWINS:
        assert np.isnan(applied(operator, np.array([[np.nan, 1.0]]), 0.1)).any(), operator


# --- trajectories --------------------------------------------------------------------------------


class Proximal:
    """An optimizer of the oracle, and operators after each of its updates.

    Parameters
    ----------
    operators : list of callable or None
        The twin of the operator of each weight.
    rate : float
        The learning rate.
    lr_mult : list of float, optional
        Of each weight.
    scheduler : callable, optional
        The learning rate of the n-th update.
    """

    def __init__(self, operators, rate=RATE, momentum=0.0, wd=0.0, lr_mult=None, scheduler=None):
        self.operators, self.rate, self.scheduler = operators, rate, scheduler
        self.lr_mult = lr_mult or [1.0] * len(operators)
        self.momentum = oracle.rounded(momentum)
        self.inner = [oracle.SGD(rate, momentum, wd) for _ in operators]
        self.updates = 0

    def step(self, weights, grads, batch_size):
        self.updates += 1
        for n, inner in enumerate(self.inner):
            rate = self.rate if self.scheduler is None else self.scheduler(self.updates)
            inner.learning_rate = rate * self.lr_mult[n]
            inner.step(weights[n : n + 1], grads[n : n + 1], batch_size)
            if self.operators[n] is not None:
                step = oracle.rounded(inner.learning_rate) / (1 - self.momentum)
                weights[n][:] = self.operators[n](weights[n], step)


def follow(trainer, net, loss_of, twin, optimizer, *, epochs=4, row=lambda number: {}):
    """A refresh every second epoch, from the second on; the order changes."""
    rng = np.random.RandomState(0)
    for epoch in range(epochs):
        if epoch % 2 == 1:
            trainer.update_full_grads(loss_of, BATCHES)
            twin.refresh(BATCHES)
        for number in rng.permutation(len(BATCHES)):
            index = BATCHES[number]
            trainer.step(len(index), closure=lambda: loss_of(index), **row(number))
            twin.step(optimizer, index, rows=[number])
        assert distance(values(net), twin.weights) < 1e-10, f"epoch {epoch}"


@pytest.mark.parametrize("operator", TWINS, ids=repr)
@pytest.mark.parametrize("name", ["SVRG", "SAGA"])
@pytest.mark.parametrize("devices", [None, TWO], ids=["one device", "two devices"])
def test_trajectory(name, operator, devices):
    case, twins = CASES[name], [TWINS[operator]] * 4
    net = PROBLEM.network("float64", devices)
    loss_of = PROBLEM.closure(net, "float64", devices, split_at([0.3]))
    trainer = case.make_trainer(net.collect_params(), "sgd", {"learning_rate": RATE}, prox=operator)
    twin = case.make_twin(PROBLEM.gradient, PROBLEM.initial)
    follow(trainer, net, loss_of, twin, Proximal(twins), row=case.row)
    if devices:
        assert_unchanged(values(net, TWO[0]), values(net, TWO[1]))
    plain = case.make_twin(PROBLEM.gradient, PROBLEM.initial)
    for number, index in enumerate(BATCHES):
        plain.step(oracle.SGD(RATE), index, rows=[number])
    assert distance(plain.weights, twin.weights) > 0.01  # the operator did something


@pytest.mark.parametrize("name", CASES)
def test_every_trainer(name):
    """For the weights only, with momentum and weight decay, by a pattern of their names."""
    case, settings = CASES[name], {"learning_rate": 0.05, "momentum": 0.5, "wd": 0.01}
    if "gamma" in case.settings:
        # MXNet 2.0 differentiates means in float32: s / (1 + s) must be exact there.
        case = replace(case, settings={**case.settings, "gamma": 1.0, "beta": 0.5})
    net = PROBLEM.network()
    loss_of = PROBLEM.closure(net)
    prox = {".*weight": L1(0.3)}
    trainer = case.make_trainer(net.collect_params(), "sgd", settings, prox=prox)
    twin = case.make_twin(PROBLEM.gradient, PROBLEM.initial)
    operators = [TWINS[L1(0.3)], None] * 2
    optimizer = Proximal(operators, 0.05, momentum=0.5, wd=0.01)
    follow(trainer, net, loss_of, twin, optimizer, row=case.row)
    assert sum((w == 0).sum() for w in values(net)[::2]) > 0
    assert not any((w == 0).any() for w in values(net)[1::2])


def test_multipliers_and_schedulers():
    net = PROBLEM.network()
    settings = {"learning_rate": 0.2, "lr_scheduler": FactorScheduler(4, 0.7, base_lr=0.2)}
    lr_mult = [1.0, 0.5, 2.0, 0.0]
    for p, factor in zip(parameters(net), lr_mult):
        p.lr_mult = factor
    loss_of = PROBLEM.closure(net)
    trainer = SVRGTrainer(net.collect_params(), "sgd", settings, prox=L1(0.3))
    twin = oracle.SVRG(PROBLEM.gradient, PROBLEM.initial)
    scheduler = FactorScheduler(4, 0.7, base_lr=0.2)
    optimizer = Proximal([TWINS[L1(0.3)]] * 4, lr_mult=lr_mult, scheduler=scheduler)
    follow(trainer, net, loss_of, twin, optimizer)
    assert_unchanged(values(net)[3:], PROBLEM.initial[3:])  # its learning rate is zero


def test_a_learning_rate_that_is_set():
    net = PROBLEM.network()
    loss_of = PROBLEM.closure(net)
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 9.0}, prox=L1(0.3))
    twin = oracle.SVRG(PROBLEM.gradient, PROBLEM.initial)
    optimizer = Proximal([TWINS[L1(0.3)]] * 4)
    for rate in (0.3, 0.05):
        trainer.set_learning_rate(rate)
        optimizer.rate = rate
        follow(trainer, net, loss_of, twin, optimizer, epochs=2)


def test_gradients_by_hand():
    """After `correct_grads`, `allreduce_grads` and `update` as well as after `step`."""
    found = []
    for by_hand in (False, True):
        net = PROBLEM.network()
        loss_of = PROBLEM.closure(net)
        trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": RATE}, prox=L1(0.3))
        trainer.update_full_grads(loss_of, BATCHES)
        for index in BATCHES:
            if by_hand:
                trainer.correct_grads(lambda: loss_of(index))
                trainer.allreduce_grads()
                trainer.update(len(index))
            else:
                trainer.step(len(index), closure=lambda: loss_of(index))
        found.append(values(net))
    assert_unchanged(*found)


def test_without_a_snapshot():
    """It is the plain optimizer with the operator, also after a backward of the user's own."""
    net = PROBLEM.network()
    loss_of = PROBLEM.closure(net)
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": RATE}, prox=L1(0.3))
    twin, optimizer = (
        oracle.Method(PROBLEM.gradient, PROBLEM.initial),
        Proximal([TWINS[L1(0.3)]] * 4),
    )
    for number, index in enumerate(BATCHES):
        if number % 2:
            plain_step(trainer, lambda: loss_of(index), len(index))
        else:
            trainer.step(len(index), closure=lambda: loss_of(index))
        twin.step(optimizer, index)
    assert distance(values(net), twin.weights) < 1e-10


@pytest.mark.parametrize("name", ["SVRG", "SAGA"])
def test_a_none_is_no_prox(name):
    """The first key that fits is taken; with nothing to apply it is the trainer without a prox."""
    case, found = CASES[name], []
    for prox in (None, {}, {".*": None, ".*weight": L1(1.0)}, L1(0.0)):
        net = PROBLEM.network("float32")
        loss_of = PROBLEM.closure(net, "float32")
        trainer = case.make_trainer(net.collect_params(), prox=prox)
        trainer.update_full_grads(loss_of, BATCHES)
        for number, index in enumerate(BATCHES):
            trainer.step(len(index), closure=lambda: loss_of(index), **case.row(number))
        found.append(values(net))
    for other in found[1:]:
        assert_unchanged(found[0], other)


def test_keys_that_are_parameters_and_a_list_of_parameters():
    found = []
    for as_list in (False, True):
        net = PROBLEM.network()
        loss_of = PROBLEM.closure(net)
        listed = list(net.collect_params().values())
        prox = {net[1].weight: Box(0, math.inf), ".*weight": L1(0.3), net[0].bias: Box(0, 1)}
        trainer = SVRGTrainer(listed if as_list else net.collect_params(), "sgd", prox=prox)
        trainer.set_learning_rate(RATE)
        for index in BATCHES:
            trainer.step(len(index), closure=lambda: loss_of(index))
        found.append(values(net))
    assert_unchanged(*found)
    twins = [TWINS[L1(0.3)], lambda w, step: oracle.box(w, step, 0, 1), oracle.non_negative, None]
    twin, optimizer = oracle.Method(PROBLEM.gradient, PROBLEM.initial), Proximal(twins)
    for index in BATCHES:
        twin.step(optimizer, index)
    assert distance(found[0], twin.weights) < 1e-10


def test_an_operator_of_the_users():
    class Halved(Prox):
        def __call__(self, weight, step):
            return weight * (1 - step)

    net = PROBLEM.network()
    loss_of = PROBLEM.closure(net)
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.5}, prox=Halved())
    twin = oracle.Method(PROBLEM.gradient, PROBLEM.initial)
    optimizer = Proximal([lambda w, step: w * (1 - step)] * 4, rate=0.5)
    for index in BATCHES:
        trainer.step(len(index), closure=lambda: loss_of(index))
        twin.step(optimizer, index)
    assert distance(values(net), twin.weights) < 1e-10
    with pytest.raises(NotImplementedError):
        Prox()(mx.nd.ones(2), 0.1)


# --- where the update does not run ---------------------------------------------------------------


def test_stale_gradients():
    """With `ignore_stale_grad` a parameter that the optimizer leaves alone is left alone."""
    net, other = PROBLEM.network(), gluon.nn.Dense(2, in_units=3, dtype="float64")
    other.initialize(mx.init.Constant(0.5))
    listed = [*net.collect_params().values(), *other.collect_params().values()]
    loss_of, index = PROBLEM.closure(net), BATCHES[0]
    trainer = SVRGTrainer(listed, "sgd", {"learning_rate": RATE}, prox=Box(-0.1, 0.1))
    with pytest.raises(UserWarning, match="stale"):
        trainer.step(5, closure=lambda: loss_of(index))
    assert_unchanged(values(net), PROBLEM.initial)
    trainer.step(5, True, closure=lambda: loss_of(index))
    assert max(np.abs(w).max() for w in values(net)) <= 0.1
    np.testing.assert_array_equal(other.weight.data().asnumpy(), 0.5)


def test_a_frozen_parameter_is_left_alone():
    net = PROBLEM.network()
    frozen = parameters(net)[0]
    frozen.grad_req = "null"
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": RATE}, prox=Box(0, 0))
    loss_of = PROBLEM.closure(net)
    trainer.step(5, closure=lambda: loss_of(BATCHES[0]))
    assert_unchanged(values(net), [PROBLEM.initial[0], *(0 * w for w in PROBLEM.initial[1:])])


@pytest.mark.parametrize("cls", [SVRGTrainer, STORMTrainer])
def test_a_step_that_amp_skips(cls):
    net = PROBLEM.network("float32")
    loss_of, index = PROBLEM.closure(net, "float32"), BATCHES[0]
    trainer = cls(net.collect_params(), "sgd", {"learning_rate": RATE}, prox=Box(-0.1, 0.1))
    kit.scale_losses(trainer)
    before = values(net)
    trainer.step(5, closure=lambda: loss_of(index) * 1e38)
    assert_unchanged(before, values(net))
    trainer._amp_loss_scaler._loss_scale = trainer._amp_loss_scaler._next_loss_scale = 2.0**8
    trainer.step(5, closure=lambda: loss_of(index))
    assert max(np.abs(w).max() for w in values(net)) <= np.float32(0.1)


def test_an_update_that_fails():
    net = PROBLEM.network()
    loss_of, index = PROBLEM.closure(net), BATCHES[0]
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": RATE}, prox=L1(1.0))
    with pytest.raises(ZeroDivisionError):
        trainer.step(kit.Indivisible(5), closure=lambda: loss_of(index))
    assert_unchanged(values(net), PROBLEM.initial)


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SVRG", "SAGA", "STORM"])
@pytest.mark.parametrize("devices", [None, TWO], ids=["one device", "two devices"])
def test_resume(name, devices, tmp_path):
    """Bit for bit in mid-epoch, if the same prox is passed; files do not hold it."""
    case = CASES[name]

    def begin():
        net = PROBLEM.network("float32", devices)
        settings = {"learning_rate": 0.1, "momentum": 0.5}
        prox = {".*weight": ElasticNet(0.2, 0.1)}
        trainer = case.make_trainer(net.collect_params(), "sgd", settings, prox=prox)
        return net, PROBLEM.closure(net, "float32", devices), trainer

    def go_on(net, loss_of, trainer, numbers):
        for number in numbers:
            index = BATCHES[number]
            trainer.step(len(index), closure=lambda: loss_of(index), **case.row(number))

    net, loss_of, trainer = begin()
    trainer.update_full_grads(loss_of, BATCHES)
    go_on(net, loss_of, trainer, [0, 3, 1])
    trainer.save_states(tmp_path / "states")
    net.save_parameters(str(tmp_path / "weights"))
    resumed = begin()
    resumed[0].load_parameters(str(tmp_path / "weights"), ctx=devices)
    resumed[2].load_states(tmp_path / "states")
    for one in ((net, loss_of, trainer), resumed):
        go_on(*one, [2, 4, 0])
    assert_unchanged(everything(trainer, net), everything(resumed[2], resumed[0]))


# --- what scikit-learn finds ---------------------------------------------------------------------


def standardised(load):
    X, y = load(return_X_y=True)
    return (X - X.mean(axis=0)) / X.std(axis=0), y.astype("float64")


def solve(cls, X, y, loss_fn, prox, settings, size, epochs):
    """The weights of a linear model after some epochs, without a bias."""
    order = np.random.RandomState(0).permutation(len(X))
    parts = [order[start : start + size] for start in range(0, len(X), size)]
    batches = [(array(X[part]), array(y[part, None])) for part in parts]
    net = gluon.nn.Dense(1, in_units=X.shape[1], use_bias=False, dtype="float64")
    net.initialize(mx.init.Constant(0.01))
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = cls(net.collect_params(), "sgd", settings, prox=prox)
    rng = np.random.RandomState(1)
    for epoch in range(epochs):
        if epoch % 4 == 0 and cls is SVRGTrainer:
            trainer.update_full_grads(lambda data, label: loss_fn(net(data), label), batches)
        for number in rng.permutation(len(batches)):
            data, label = batches[number]
            row = {"batch_index": number} if cls is SAGATrainer else {}
            trainer.step(len(data), closure=lambda: loss_fn(net(data), label), **row)
    return net.weight.data().asnumpy()[0]


both = pytest.mark.parametrize("cls", [SVRGTrainer, SAGATrainer])


@both
def test_l1_logistic_regression_of_scikit_learn(cls):
    """With momentum: the penalty that is minimized does not depend on it."""
    from sklearn.datasets import load_breast_cancer
    from sklearn.linear_model import LogisticRegression

    X, y = standardised(load_breast_cancer)
    strength, n = 0.05, len(X)
    model = LogisticRegression(
        penalty="l1",
        C=1 / (strength * n),
        solver="liblinear",
        fit_intercept=False,
        tol=1e-12,
        max_iter=100000,
    )
    expected = model.fit(X, y).coef_[0]
    loss_fn = gluon.loss.SigmoidBinaryCrossEntropyLoss()
    settings = {"learning_rate": 0.5, "momentum": 0.95}
    found = solve(cls, X, y, loss_fn, L1(strength), settings, size=143, epochs=200)
    assert 0 < np.count_nonzero(expected) < len(expected)
    np.testing.assert_array_equal(found != 0, expected != 0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@both
def test_lasso_of_scikit_learn(cls):
    from sklearn.datasets import load_diabetes
    from sklearn.linear_model import Lasso

    X, y = standardised(load_diabetes)
    y -= y.mean()
    model = Lasso(alpha=5.0, fit_intercept=False, tol=1e-12, max_iter=100000)
    expected = model.fit(X, y).coef_
    settings = {"learning_rate": 0.2}
    found = solve(cls, X, y, gluon.loss.L2Loss(), L1(5.0), settings, size=111, epochs=80)
    assert 0 < np.count_nonzero(expected) < len(expected)
    np.testing.assert_array_equal(found != 0, expected != 0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_elastic_net_of_scikit_learn():
    """With NAG, and its momentum."""
    from sklearn.datasets import load_diabetes
    from sklearn.linear_model import ElasticNet as Model

    X, y = standardised(load_diabetes)
    y -= y.mean()
    model = Model(alpha=4.0, l1_ratio=0.75, fit_intercept=False, tol=1e-12, max_iter=100000)
    expected = model.fit(X, y).coef_
    net = gluon.nn.Dense(1, in_units=X.shape[1], use_bias=False, dtype="float64")
    net.initialize(mx.init.Constant(0.01))
    settings = {"learning_rate": 0.1, "momentum": 0.5}
    trainer = SVRGTrainer(net.collect_params(), "nag", settings, prox=ElasticNet(3.0, 1.0))
    loss_fn, data, label = gluon.loss.L2Loss(), array(X), array(y[:, None])
    for _ in range(120):
        trainer.step(len(X), closure=lambda: loss_fn(net(data), label))
    found = net.weight.data().asnumpy()[0]
    np.testing.assert_array_equal(found != 0, expected != 0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: L1(-0.1), ValueError, r"strength must be finite, at least 0, got -0.1"),
        (lambda: L1(math.inf), ValueError, r"strength must be finite"),
        (lambda: L1("0.1"), TypeError, r"strength must be a number, got str"),
        (lambda: L1(True), TypeError, r"strength must be a number, got bool"),
        (lambda: ElasticNet(-1, 0), ValueError, r"l1 must be finite"),
        (lambda: ElasticNet(0, math.nan), ValueError, r"l2 must be finite"),
        (lambda: GroupLasso(-1), ValueError, r"strength must be finite"),
        (lambda: GroupLasso(1, 0.0), TypeError, r"axis must be a whole number, got float"),
        (lambda: GroupLasso(1, True), TypeError, r"axis must be a whole number, got bool"),
        (lambda: GroupLasso(1, -1), ValueError, r"axis must be 0 or more, got -1"),
        (lambda: Box(1, 0), ValueError, r"Box\(low=1, high=0\) holds no number: low must not be"),
        (lambda: Box(math.nan, 0), ValueError, r"holds no number"),
        (lambda: Box(math.inf, math.inf), ValueError, r"holds no number"),
        (lambda: Box(-math.inf, -math.inf), ValueError, r"holds no number"),
        (lambda: Box(None, 0), TypeError, r"low must be a number, got NoneType"),
        (lambda: Box(0, "1"), TypeError, r"high must be a number, got str"),
    ],
)
def test_arguments_of_operators(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("prox", "error", "message"),
    [
        (0.1, TypeError, r"prox must be an operator of gluon_svrg.prox, .* got 0.1"),
        (L1, TypeError, r"prox must be an operator of gluon_svrg.prox, .* got <class"),
        ({".*": 0.1}, TypeError, r"prox must be an operator of gluon_svrg.prox, .*: 0.1}"),
        ({1: L1(0.1)}, TypeError, r"prox must be .* keys are parameters, or patterns .* got {1: "),
        ({".*wait": L1(0.1)}, ValueError, r"the key '.\*wait', which fits none of .*weight.*bias"),
        ({"*weight": L1(0.1)}, ValueError, r"the key '\*weight', which is no regular expression"),
        (
            GroupLasso(1, axis=1),
            ValueError,
            r"GroupLasso\(strength=1, axis=1\) cannot group .*bias",
        ),
    ],
)
def test_a_prox_that_cannot_be(prox, error, message):
    params = PROBLEM.network().collect_params()
    with pytest.raises(error, match=message):
        SVRGTrainer(params, "sgd", prox=prox)


def test_a_parameter_of_another_network():
    params = PROBLEM.network().collect_params()
    with pytest.raises(ValueError, match=r"prox has the key '.*weight', which fits none"):
        SVRGTrainer(params, "sgd", prox={PROBLEM.network()[0].weight: L1(0.1)})


@pytest.mark.parametrize(
    "name", ["adam", "adagrad", "rmsprop", "lars", "lamb", "signum", "sgld", "ftrl", "nadam"]
)
def test_optimizers_with_another_step(name):
    params = PROBLEM.network().collect_params()
    message = (
        rf"L1\(strength=0.1\) needs an optimizer .* but (?i:{name}) has another step.*'sgd'.*Box"
    )
    with pytest.raises(ValueError, match=message):
        SVRGTrainer(params, name, prox=L1(0.1))
    with pytest.raises(ValueError, match=message):
        SVRGTrainer(params, mx.optimizer.create(name), prox={".*weight": L1(0.1)})
    SVRGTrainer(params, name, prox={".*weight": Box(0, math.inf), ".*bias": Box(-1, 1)})


def test_optimizers_of_the_users():
    class Mine(mx.optimizer.SGD):
        """A step as that of SGD."""

    params = PROBLEM.network().collect_params()
    for optimizer in (Mine(), mx.optimizer.NAG(momentum=0.9), "nag"):
        SVRGTrainer(params, optimizer, prox=L1(0.1))
    with pytest.raises(ValueError, match="unknown"):  # MXNet's own words
        SVRGTrainer(params, "unknown", prox=L1(0.1))


@pytest.mark.parametrize("momentum", [1.0, -0.5])
def test_a_momentum_without_end(momentum):
    params = PROBLEM.network().collect_params()
    with pytest.raises(ValueError, match=rf"momentum of at least 0 and below 1, got {momentum}"):
        SVRGTrainer(params, "sgd", {"momentum": momentum}, prox=L1(0.1))
    with pytest.raises(ValueError, match=rf"momentum of at least 0 and below 1, got {momentum}"):
        SVRGTrainer(params, mx.optimizer.SGD(momentum=momentum), prox=L1(0.1))


def test_projections_with_adam():
    net = PROBLEM.network("float64", TWO)
    loss_of = PROBLEM.closure(net, "float64", TWO)
    trainer = SVRGTrainer(
        net.collect_params(), "adam", {"learning_rate": 0.5}, prox={".*weight": Box(0, math.inf)}
    )
    for index in BATCHES:
        trainer.step(len(index), closure=lambda: loss_of(index))
    assert all((w >= 0).all() for w in values(net)[::2])
    assert any((w < 0).any() for w in values(net)[1::2])
    assert_unchanged(values(net, TWO[0]), values(net, TWO[1]))


def test_where_the_kvstore_updates():
    params = PROBLEM.network(devices=TWO).collect_params()
    settings = {"update_on_kvstore": True, "prox": L1(0.1)}
    with pytest.raises(ValueError, match=r"A prox needs .*Leave that out"):
        SVRGTrainer(params, "sgd", **settings)
    with pytest.raises(ValueError, match=r"STORMTrainer needs the reduced gradient back"):
        STORMTrainer(params, "sgd", **settings)
    with pytest.raises(ValueError, match=r"A prox needs .*kvstore='dist_async' never reduces"):
        SVRGTrainer(params, "sgd", kvstore="dist_async", prox=L1(0.1))
    for update_on_kvstore in (None, False):
        SVRGTrainer(params, "sgd", update_on_kvstore=update_on_kvstore, prox=L1(0.1))


def test_float16():
    """At construction, and after a cast."""
    net = PROBLEM.network("float16")
    message = r"L1\(strength=0.1\) needs float32 or float64, and .*weight is float16"
    with pytest.raises(ValueError, match=message):
        SVRGTrainer(net.collect_params(), "sgd", {"multi_precision": True}, prox=L1(0.1))
    net = PROBLEM.network("float32")
    trainer = SVRGTrainer(net.collect_params(), "sgd", prox={".*weight": L1(0.1)})
    net[0].weight.cast("float16")
    net[0].weight.grad()[:] = 0
    before = values(net)
    with pytest.raises(ValueError, match=message):
        trainer.update(1, ignore_stale_grad=True)
    assert_unchanged(before, values(net))


@pytest.mark.skipif(mx.util.is_np_array(), reason="MXNet 2.0 refuses sparse weights in Gluon")
def test_sparse_weights():
    layer = gluon.contrib.nn.SparseEmbedding(5, 3)
    layer.initialize()
    with pytest.raises(ValueError, match=r"A prox needs .* is a row_sparse weight"):
        SVRGTrainer(layer.collect_params(), "sgd", prox=L1(0.1))


def test_deferred_parameters():
    """A shape that is not known yet has its number of axes all the same."""
    net = gluon.nn.Dense(2)
    net.initialize()
    trainer = SVRGTrainer(net.collect_params(), "sgd", prox={".*weight": GroupLasso(1e3, axis=1)})
    trainer.step(3, closure=lambda: net(array(np.ones((3, 4)), "float32")))
    assert not net.weight.data().asnumpy().any()


def test_all_operators_are_here():
    found = {type(operator).__name__ for operator in TWINS} | {"Prox"}
    assert found == {*gluon_svrg.prox.__all__}


# --- several workers -----------------------------------------------------------------------------


@pytest.mark.xdist_group("clusters")
def test_two_workers(tmp_path):
    """Of unequal shards: the iterates of one process, and the same on both."""
    found = run_cluster(tmp_path, "proximal", worker="worker_methods.py", strength=0.3)
    check_workers(found, 1e-6)


def check_workers(found, tolerance):
    """They are one process in NumPy, with the same weights at zero."""
    problem = Dense("classification", hidden=(5,), seed=17, samples=46)
    shares = [[worker[f"share{n}"] for n in range(4)] for worker in found]
    twin = oracle.SVRG(problem.gradient, problem.initial)
    optimizer = Proximal([TWINS[L1(0.3)], None] * 2, momentum=0.5)
    for _ in range(2):
        twin.refresh([*shares[0], *shares[1]])
        for parts in zip(*shares):
            twin.step(optimizer, *parts)
    weights = [[worker[f"w{n}"] for n in range(4)] for worker in found]
    assert_unchanged(*weights)
    assert distance(weights[0], twin.weights) < tolerance
    assert_unchanged([w == 0 for w in weights[0]], [w == 0 for w in twin.weights])
