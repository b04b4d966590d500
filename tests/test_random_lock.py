"""Random numbers in both passes of a step: locked, unlocked, and found out."""

import re
import warnings
from contextlib import contextmanager

import kit
import mxnet as mx
import numpy as np
import pytest
from kit import HYBRIDIZE
from mxnet import gluon
from problems import Dense, array, contexts

from gluon_svrg import SVRGTrainer

PROBLEM = Dense("classification", hidden=(5,), seed=11, samples=40)
ALL = np.arange(len(PROBLEM.X))


def make(lock_random="auto", hybridize=None, norm=False, rate=0.1, devices=None):
    net = kit.with_dropout(devices, hybridize, norm)
    trainer = SVRGTrainer(
        net.collect_params(), "sgd", {"learning_rate": rate}, lock_random=lock_random
    )
    loss_of = PROBLEM.closure(net, "float32", devices)
    return net, loss_of, trainer


def is_full_gradient(trainer, count):
    """Whether v equals mu, to 1e-6."""
    pairs = [(p.grad().asnumpy(), row[0].asnumpy()) for p, row in trainer.full_grads.items()]
    scale = max(np.abs(mean).max() for _, mean in pairs)
    return max(np.abs(v / count - mean).max() for v, mean in pairs) < 1e-6 * scale


@contextmanager
def reported():
    """Expect the warning, once. (pytest.warns passes MXNet's own warnings on.)"""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found = [str(w.message) for w in caught if w.category is UserWarning]
    assert len(found) == 1
    assert re.search("computed twice, differ by .*lock_random=True", found[0])


@pytest.mark.parametrize("hybridize", HYBRIDIZE)
def test_locked(hybridize):
    _, loss_of, trainer = make(True, hybridize)
    for _ in range(2):
        trainer.update_full_grads(loss_of, PROBLEM.batches(8))
        for index in PROBLEM.batches(8):
            trainer.correct_grads(lambda: loss_of(index))
            assert is_full_gradient(trainer, len(index))
        trainer.step(8)


def test_locked_on_two_devices():
    devices = contexts(2)
    _, loss_of, trainer = make(True, devices=devices)
    trainer.update_full_grads(loss_of, PROBLEM.batches(8))
    trainer.correct_grads(lambda: loss_of(ALL[:8]))
    for p, mean in trainer.full_grads.items():
        for device, mu in zip(devices, mean):
            np.testing.assert_allclose(p.grad(device).asnumpy(), 4 * mu.asnumpy(), atol=1e-6)


@pytest.mark.parametrize("hybridize", HYBRIDIZE)
def test_unlocked_dropout_is_found_locked_and_reported_once(hybridize):
    _, loss_of, trainer = make("auto", hybridize)
    for epoch in range(3):
        if epoch == 0:
            with reported():
                trainer.update_full_grads(loss_of, PROBLEM.batches(8))
        else:
            trainer.update_full_grads(loss_of, PROBLEM.batches(8))
        for number, index in enumerate(PROBLEM.batches(8)):
            trainer.correct_grads(lambda: loss_of(index))
            if number == 0:
                assert is_full_gradient(trainer, len(index))
            trainer.step(len(index))
    assert trainer.lock_random == "auto"


@pytest.mark.parametrize("lock_random", [False, "auto"])
@pytest.mark.parametrize("coefficient", [0.3, 1.7])
def test_factors_of_float64(lock_random, coefficient):
    """A coefficient and a number of entries that are no powers of two."""
    problem = Dense("classification", hidden=(5,), seed=11, samples=57)
    net = problem.network()
    own = {"lock_random": lock_random, "coefficient": coefficient}
    trainer = SVRGTrainer(net.collect_params(), "sgd", **own)
    loss_of, every = problem.closure(net), np.arange(57)
    trainer.update_full_grads(loss_of, problem.batches(8))
    trainer.correct_grads(lambda: loss_of(every))
    for p, (mean, *_) in trainer.full_grads.items():
        expected = 57 * mean.asnumpy()
        np.testing.assert_allclose(p.grad().asnumpy(), expected, rtol=0, atol=1e-13)


def test_left_unlocked():
    _, loss_of, trainer = make(False)
    trainer.update_full_grads(loss_of, PROBLEM.batches(8))
    trainer.correct_grads(lambda: loss_of(ALL[:8]))
    assert not is_full_gradient(trainer, 8)


def test_it_can_be_set():
    net, loss_of, trainer = make(False)
    assert trainer.lock_random is False
    trainer.lock_random = True
    trainer.update_full_grads(loss_of, PROBLEM.batches(8))
    trainer.correct_grads(lambda: loss_of(ALL[:8]))
    assert is_full_gradient(trainer, 8)
    for bad in ("yes", None, 1, 0.0):
        with pytest.raises(ValueError, match="lock_random must be True, False or 'auto'"):
            trainer.lock_random = bad
    assert trainer.lock_random is True
    with pytest.raises(ValueError, match="lock_random must be"):
        SVRGTrainer(net.collect_params(), "sgd", lock_random="maybe")


def masks(trainer, steps=3):
    """What dropout keeps, in the live pass of each step."""
    drop = gluon.nn.Dropout(0.5)
    weight = next(iter(trainer.full_grads))
    kept = []
    for _ in range(steps):
        seen = []

        def closure(seen=seen):
            mask = drop(array(np.ones(64), "float32"))
            seen.append(mask.asnumpy())
            return weight.data().sum() + 0 * mask.sum()

        trainer.step(1, ignore_stale_grad=True, closure=closure)
        kept.append(seen)
    return kept


@pytest.mark.parametrize("seed", [1, 2])
def test_both_passes_draw_the_same_and_every_step_another(seed):
    found = []
    for _ in range(2):
        _, loss_of, trainer = make(True)
        mx.random.seed(seed)
        trainer.update_full_grads(loss_of, PROBLEM.batches(8))
        found.append(masks(trainer))
        for there, here in found[-1]:
            np.testing.assert_array_equal(there, here)
        first, second, third = (here for _, here in found[-1])
        assert not np.array_equal(first, second)
        assert not np.array_equal(second, third)
        assert not np.array_equal(first, third)
    np.testing.assert_array_equal(*found)  # mx.random.seed makes it repeatable


def test_two_runs_with_other_seeds_differ():
    found = []
    for seed in (1, 2):
        _, loss_of, trainer = make(True)
        mx.random.seed(seed)
        trainer.update_full_grads(loss_of, PROBLEM.batches(8))
        found.append(masks(trainer))
    assert not np.array_equal(*found)


def test_where_nothing_is_random_the_random_stream_is_not_touched():
    net = PROBLEM.network()
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    loss_of = PROBLEM.closure(net)
    mx.random.seed(5)
    expected = [mx.nd.random.uniform(shape=(3,)).asnumpy() for _ in range(2)]
    mx.random.seed(5)
    found = [mx.nd.random.uniform(shape=(3,)).asnumpy()]
    trainer.update_full_grads(loss_of, PROBLEM.batches(8))
    for index in PROBLEM.batches(8):
        trainer.step(len(index), closure=lambda: loss_of(index))
    found.append(mx.nd.random.uniform(shape=(3,)).asnumpy())
    np.testing.assert_array_equal(found, expected)


def test_the_check_moves_running_statistics_once():
    found = []
    for lock_random in (True, "auto"):
        net, loss_of, trainer = make(lock_random, norm=True, rate=0.0)
        if lock_random == "auto":
            with reported():
                trainer.update_full_grads(loss_of, PROBLEM.batches(8))
        else:
            trainer.update_full_grads(loss_of, PROBLEM.batches(8))
        for index in PROBLEM.batches(8):
            trainer.step(len(index), closure=lambda: loss_of(index))
        found.append([net[0].running_mean.data().asnumpy(), net[0].running_var.data().asnumpy()])
    np.testing.assert_array_equal(*found)


def next_minibatch(net, loss_of):
    iterator = iter(PROBLEM.batches(8))
    return lambda: loss_of(next(iterator))


def numpy_noise(net, loss_of):
    return lambda: loss_of(ALL[:8]) * array(np.random.rand(8), "float32")


def carried_state(net, loss_of):
    state = [1.0]

    def closure():
        state[0] *= 2
        return loss_of(ALL[:8]) * state[0]

    return closure


@pytest.mark.parametrize("bad", [next_minibatch, numpy_noise, carried_state])
def test_a_closure_that_is_not_repeatable(bad):
    net = PROBLEM.network("float32")
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    loss_of = PROBLEM.closure(net, "float32")
    trainer.update_full_grads(loss_of, PROBLEM.batches(8))
    evaluations = trainer.grad_evaluations
    with pytest.raises(
        RuntimeError,
        match=r"differ by .*minibatch \(next\(iterator\)\), .*carry a state .*outside MXNet",
    ):
        trainer.step(8, closure=bad(net, loss_of))
    assert trainer.inner_steps == 0
    assert trainer.grad_evaluations == evaluations
    mx.random.seed(3)
    expected = mx.nd.random.uniform(shape=(3,)).asnumpy()
    mx.random.seed(3)
    trainer.step(8, closure=lambda: loss_of(ALL[:8]))  # works on, and is not locked
    np.testing.assert_array_equal(mx.nd.random.uniform(shape=(3,)).asnumpy(), expected)


def test_a_bad_closure_leaves_running_statistics_alone():
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.BatchNorm(in_channels=4), gluon.nn.Dense(3, in_units=4))
    net.initialize()
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    loss_of = PROBLEM.closure(net, "float32")
    trainer.update_full_grads(loss_of, PROBLEM.batches(8))
    before = net[0].running_mean.data().asnumpy()
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="carry a state"):
        warnings.simplefilter("ignore")
        trainer.step(8, closure=next_minibatch(net, loss_of))
    np.testing.assert_array_equal(net[0].running_mean.data().asnumpy(), before)


def test_weights_that_the_user_changed_are_told_apart():
    net = PROBLEM.network("float32")
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    loss_of = PROBLEM.closure(net, "float32")
    trainer.update_full_grads(loss_of, PROBLEM.batches(8))
    bias = net[0].bias
    bias.set_data(bias.data() + 0.1)
    trainer.step(8, closure=numpy_noise(net, loss_of))  # nothing to compare, no warning
    trainer.update_full_grads(loss_of, PROBLEM.batches(8))
    with pytest.raises(RuntimeError, match="numbers from outside MXNet"):
        trainer.step(8, closure=numpy_noise(net, loss_of))


def test_statistics_that_were_trained_after_the_refresh_are_told_apart():
    """BatchNorm with global statistics: they are part of what the loss depends on."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.BatchNorm(in_channels=4, use_global_stats=True), gluon.nn.Dense(3, in_units=4))
    net.initialize()
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    loss_of = PROBLEM.closure(net, "float32")
    trainer.update_full_grads(loss_of, PROBLEM.batches(8))
    net[0].running_mean.set_data(net[0].running_mean.data() + 1)
    trainer.step(8, closure=lambda: loss_of(ALL[:8]))


def test_a_gradient_of_zero_is_no_difference():
    net = PROBLEM.network("float32")
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    loss_of = PROBLEM.closure(net, "float32")
    trainer.update_full_grads(loss_of, PROBLEM.batches(8))
    trainer.step(8, closure=lambda: 0 * loss_of(ALL[:8]))
