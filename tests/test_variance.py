"""The variance over a data set, against NumPy on enumerated minibatches."""

import copy
from functools import partial

import kit
import mxnet as mx
import numpy as np
import oracle
import pytest
from kit import assert_unchanged, split_at
from mxnet import gluon
from plays import BATCHES, CASES, PROBLEM, TWO, Play
from problems import array, flat, parameters

from gluon_svrg import MARSTrainer, SAGATrainer, SVRGTrainer
from gluon_svrg.variance import variance

make = partial(kit.make, PROBLEM)


def cosine_distance(rows):
    """The mean over pairs of rows that are not zero."""
    units = [row / np.linalg.norm(row) for row in rows if row.any()]
    pairs = [1 - a @ b for i, a in enumerate(units) for j, b in enumerate(units) if i != j]
    return np.mean(pairs) if pairs else np.nan


@pytest.mark.parametrize("split", [None, split_at([0.4])], ids=["one device", "two devices"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_numpy(case, split):
    """Of v and of the control variate g - v; on one device, a table has empty rows."""
    play = Play(case, how="add" if split else "step", devices=split and TWO, split=split)
    if case.needs_refresh or (case.indexed and split):
        play.refresh()
    play.epoch((3, 0, 4))
    play.correct(1)
    before = kit.everything(play.trainer, play.net), kit.gradients(play.net)
    found = variance(play.trainer, play.loss_of, BATCHES)  # changes nothing, also in mid-step
    assert_unchanged(before[0], kit.everything(play.trainer, play.net))
    assert_unchanged(before[1], kit.gradients(play.net))
    play.trainer.step(5)  # the gradients are still fresh
    counts, now = np.array(list(map(len, BATCHES))), play.twin.weights
    plain = [flat(PROBLEM.gradient(now, index)[0]) for index in BATCHES]
    estimates = []
    for number, index in enumerate(BATCHES):
        twin, row = copy.deepcopy(play.twin), (0, number)
        estimates.append(flat(twin.advance(twin.estimate(index, row), [index], [row])))
    g, v = (np.array(rows) / counts[:, None] for rows in (plain, estimates))
    mean, bias = (np.average(rows, axis=0, weights=counts) for rows in (g, g - v))

    def covariance(these, those):
        these, those = (x - np.average(x, axis=0, weights=counts) for x in (these, those))
        return np.average((these * those).sum(axis=1), weights=counts)

    expected = {
        "plain": covariance(g, g),
        "estimate": covariance(v, v),
        "ratio": covariance(v, v) / covariance(g, g),
        "noise": covariance(g, g) / (mean @ mean),
        "gradient_norm": np.linalg.norm(mean),
        "cosine_distance_plain": cosine_distance(g),
        "cosine_distance_estimate": cosine_distance(v),
        "minibatches": len(BATCHES),
    }
    moved = flat(now) - flat(play.twin.reference) if case.gradients == 2 else np.nan
    expected["distance"] = np.linalg.norm(moved)
    if case.trainer in ("SVRGTrainer", "SAGATrainer"):
        ends = np.cumsum([w.size for w in now])[:-1]
        parts = [(g, g - v), *zip(*(np.split(x, ends, axis=1) for x in (g, g - v)))]
        best, *of_each = (covariance(x, c) / covariance(c, c) for x, c in parts)
        factor = oracle.rounded(case.settings.get("coefficient", 1))
        expected["best_coefficient"] = factor * best
        coefficients = [found.best_coefficients[p] for p in parameters(play.net)]
        np.testing.assert_allclose(coefficients, factor * np.array(of_each), rtol=1e-6)
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(found, name), value, rtol=1e-9, err_msg=name)
    np.testing.assert_allclose(found.bias, np.linalg.norm(bias), rtol=1e-9, atol=1e-10)
    is_unbiased = case.trainer == "SVRGTrainer" or (case.trainer == "SAGATrainer" and split)
    assert (found.bias < 1e-9) == bool(is_unbiased)


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


@kit.table("targets", (1, 1, 0, 0), (0, 0, 0), (2, 0), (1, 0, -3, 0), (1, 2, -1, 4, 0, -2), ids=str)
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
