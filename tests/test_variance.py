"""The variance over a data set, against NumPy on enumerated minibatches."""

from functools import partial

import kit
import mxnet as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mxnet import gluon
from problems import Dense, array, contexts, flat, parameters, values

from gluon_svrg import MARSTrainer, SAGATrainer, SVRGTrainer
from gluon_svrg.variance import variance

PROBLEM = Dense("classification", hidden=(5,), seed=22)
ALL = np.arange(len(PROBLEM.X))
TWO = contexts(2)
make = partial(kit.make, PROBLEM, rate=0.3)


def cosine_distance(rows):
    """The mean over pairs of rows that are not zero."""
    units = [row / np.linalg.norm(row) for row in rows if row.any()]
    pairs = [1 - a @ b for i, a in enumerate(units) for j, b in enumerate(units) if i != j]
    return np.mean(pairs) if pairs else np.nan


def by_numpy(now, there, batches, coefficient):
    mu = flat(PROBLEM.gradient(there, ALL)[0]) / len(ALL)
    counts = np.array([len(b) for b in batches], dtype=float)
    weights = counts / counts.sum()
    plain = np.array([flat(PROBLEM.gradient(now, b)[0]) / len(b) for b in batches])
    control = np.array([flat(PROBLEM.gradient(there, b)[0]) / len(b) for b in batches]) - mu

    def covariance(g, c):
        return weights @ ((g - weights @ g) * (c - weights @ c)).sum(axis=1)

    svrg = plain - coefficient * control
    ends = np.cumsum([w.size for w in now])[:-1]
    parts = zip(np.split(plain, ends, axis=1), np.split(control, ends, axis=1))
    return {
        "plain": covariance(plain, plain),
        "estimate": covariance(svrg, svrg),
        "noise": covariance(plain, plain) / ((weights @ plain) ** 2).sum(),
        "ratio": covariance(svrg, svrg) / covariance(plain, plain),
        "cosine_distance_plain": cosine_distance(plain),
        "cosine_distance_estimate": cosine_distance(svrg),
        "best_coefficient": covariance(plain, control) / covariance(control, control),
        "best_coefficients": [covariance(g, c) / covariance(c, c) for g, c in parts],
        "distance": np.linalg.norm(flat(now) - flat(there)),
        "gradient_norm": np.linalg.norm(weights @ plain),
    }


@given(
    size=st.integers(2, 12),
    steps=st.integers(1, 12),
    coefficient=st.sampled_from([0.3, 1.0]),
    devices=st.sampled_from([None, TWO]),
)
def test_against_numpy(size, steps, coefficient, devices):
    net, loss_of, trainer = make(devices=devices, coefficient=coefficient)
    trainer.update_full_grads(loss_of, PROBLEM.batches(7))
    kit.one_epoch(trainer, loss_of, [ALL[step : step + 6] for step in range(steps)])
    found = variance(trainer, loss_of, PROBLEM.batches(size))
    now = values(net, devices and TWO[0])
    expected = by_numpy(now, PROBLEM.initial, PROBLEM.batches(size), coefficient)
    best = [found.best_coefficients[p] for p in parameters(net)]
    np.testing.assert_allclose(best, expected.pop("best_coefficients"), rtol=1e-6)
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(found, name), value, rtol=1e-6, err_msg=name)
    assert found.minibatches == len(PROBLEM.batches(size))


def regression(data, dtype, **kwargs):
    """The variance of a linear model of zeros, at its snapshot."""
    net = gluon.nn.Dense(1, in_units=2, use_bias=False, dtype=dtype)
    net.initialize(mx.init.Zero())
    trainer = SVRGTrainer(net.collect_params(), "sgd", **kwargs)
    batches = [(array([x], dtype), array([[y]], dtype)) for x, y in data]
    loss_function = gluon.loss.L2Loss()

    def loss_of(X, y):
        return loss_function(net(X), y)

    trainer.update_full_grads(loss_of, batches)
    return variance(trainer, loss_of, batches)


@pytest.mark.parametrize(
    "targets", [(1, 1, 0, 0), (0, 0, 0), (2, 0), (1, 0, -3, 0), (1, 2, -1, 4, 0, -2)], ids=str
)
def test_cosines_of_gradients_that_have_a_direction(targets):
    """A zero gradient has none: pairs with one are left out, and of no pair the mean is nan."""
    data = [([1.0, k % 3], float(y)) for k, y in enumerate(targets)]
    found = regression(data, "float64", coefficient=0.5)
    plain = np.array([[-y, -y * (k % 3)] for k, y in enumerate(targets)], dtype=float)
    for rows, name in ((plain, "plain"), (plain - 0.5 * (plain - plain.mean(axis=0)), "estimate")):
        value = getattr(found, f"cosine_distance_{name}")
        np.testing.assert_allclose(value, cosine_distance(rows), atol=1e-12, err_msg=name)


def test_noise_where_there_is_no_gradient():
    found = regression([([1.0, 0.0], sign) for sign in (1, -1)], "float32")
    assert (found.plain, found.gradient_norm, found.noise) == (1.0, 0.0, np.inf)


def test_errors():
    """The message about a coefficient of 0 does not deny the snapshot."""
    _, loss_of, trainer = make()
    with pytest.raises(RuntimeError, match="there is no snapshot"):
        variance(trainer, loss_of, PROBLEM.batches(4))
    trainer.update_full_grads(loss_of, PROBLEM.batches(7))
    with pytest.raises(ValueError, match="no data to compute a variance"):
        variance(trainer, loss_of, [])
    with pytest.raises(TypeError, match="closure must be a function"):
        variance(trainer, 3, PROBLEM.batches(4))
    trainer.coefficient = 0
    with pytest.raises(RuntimeError, match=r"as it is set up here, SVRG corrects no gradients"):
        variance(trainer, loss_of, PROBLEM.batches(7))
    net, loss_of, _ = make()
    trainer = MARSTrainer([layer.bias for layer in net], "sgd")
    trainer.step(5, closure=lambda: loss_of(PROBLEM.batches(5)[0]))
    with pytest.raises(RuntimeError, match=r"MARS corrects no gradients.*include_vectors"):
        variance(trainer, loss_of, PROBLEM.batches(5))


def test_dropout_under_the_lock_and_without():
    """At the reference there is none under the lock. MXNet's own random numbers go on."""
    net, drawn, batches = kit.with_dropout(), set(), PROBLEM.batches(7)
    for cls, lock_random in ((SVRGTrainer, True), (SAGATrainer, True), (SVRGTrainer, False)):
        _, loss_of, trainer = make("float32", net=net, cls=cls, lock_random=lock_random)
        trainer.update_full_grads(loss_of, batches)
        for _ in range(2):
            ratio = variance(trainer, loss_of, batches).ratio
            assert ratio < 1e-10 if lock_random else ratio > 0.5
            drawn.add(mx.nd.random.uniform(shape=(1,)).asscalar())
    assert len(drawn) == 6
