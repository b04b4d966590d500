"""Gradients that accumulate: ``grad_req='add'``, over micro-batches, and on errors."""

import kit
import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import HYBRIDIZE, assert_unchanged, clear
from mxnet import autograd, gluon
from problems import Dense, contexts, distance, parameters, values

from gluon_svrg import SVRGTrainer

PROBLEM = Dense("classification", hidden=(5,), seed=12)
ALL = np.arange(len(PROBLEM.X))


def make(hybridize=None, devices=None, adding=None, **kwargs):
    """A trainer; the parameters of these numbers (None: all) accumulate."""
    net, loss_of, trainer = kit.make(PROBLEM, devices=devices, hybridize=hybridize, **kwargs)
    for number, p in enumerate(parameters(net)):
        if adding is None or number in adding:
            p.grad_req = "add"
    return net, loss_of, trainer


def gradients(net):
    return [sum(g.asnumpy() for g in p.list_grad()) for p in parameters(net)]


def add(these, those):
    return [a + b for a, b in zip(these, those)]


@pytest.mark.parametrize("hybridize", HYBRIDIZE)
@pytest.mark.parametrize("devices", [None, contexts(2)])
def test_micro_batches(hybridize, devices):
    """v is added to what is there; two micro-batches are one minibatch."""
    net, loss_of, trainer = make(hybridize, devices)
    reference, optimizer = oracle.SVRG(PROBLEM.gradient, PROBLEM.initial), oracle.SGD(0.1)
    for _ in range(2):
        trainer.update_full_grads(loss_of, PROBLEM.batches(7))
        reference.refresh(PROBLEM.batches(7))
        for index in PROBLEM.batches(6):
            total = None
            for micro in (index[:4], index[4:]):
                if len(micro):
                    trainer.correct_grads(lambda: loss_of(micro))
                    v = reference.estimate(micro)
                    total = v if total is None else add(total, v)
                    assert distance(gradients(net), total) < 1e-10
            trainer.step(len(index))
            optimizer.step(reference.weights, total, len(index))
            clear(net)
    assert trainer.inner_steps == 4
    assert distance(values(net, devices and devices[0]), reference.weights) < 1e-10


@given(
    adding=st.sets(st.integers(0, 3)),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    coefficient=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_some_parameters_accumulate(adding, sizes, coefficient):
    """Those that do not hold the estimate of the last micro-batch, as under `gluon.Trainer`."""
    net, loss_of, trainer = make(adding=adding, coefficient=coefficient)
    reference = oracle.SVRG(PROBLEM.gradient, PROBLEM.initial, coefficient)
    trainer.update_full_grads(loss_of, PROBLEM.batches(7))
    reference.refresh(PROBLEM.batches(7))
    PROBLEM.assign(net, [w + 0.1 for w in PROBLEM.initial])
    reference.weights = values(net)
    clear(net)
    expected = [np.zeros_like(w) for w in PROBLEM.initial]
    for size in sizes:
        trainer.correct_grads(lambda: loss_of(ALL[:size]))
        for number, v in enumerate(reference.estimate(ALL[:size])):
            expected[number] = expected[number] + v if number in adding else v
    assert distance(gradients(net), expected) < 1e-10


@pytest.mark.parametrize("hybridize", HYBRIDIZE)
@pytest.mark.parametrize("coefficient", [0.0, 1.0])
def test_without_snapshot_or_coefficient_it_is_gluon_trainer(hybridize, coefficient):
    found = []
    for cls in (gluon.Trainer, SVRGTrainer):
        kwargs = {} if cls is gluon.Trainer else {"coefficient": coefficient}
        net, loss_of, trainer = make(hybridize, cls=cls, **kwargs)
        if coefficient == 0 and cls is SVRGTrainer:
            trainer.update_full_grads(loss_of, PROBLEM.batches(7))
        for index in PROBLEM.batches(6):
            for micro in (index[:4], index[4:]):
                if cls is SVRGTrainer:
                    trainer.correct_grads(lambda: loss_of(micro))
                else:
                    with autograd.record():
                        loss = loss_of(micro)
                    loss.backward()
            trainer.step(len(index))
            clear(net)
        found.append(values(net))
    assert_unchanged(*found)


def test_a_refresh_leaves_what_has_accumulated():
    net, loss_of, trainer = make()
    for _ in range(2):
        trainer.correct_grads(lambda: loss_of(ALL[:5]))
        before = gradients(net)
        trainer.update_full_grads(loss_of, PROBLEM.batches(7))
        for these, those in zip(gradients(net), before):
            np.testing.assert_array_equal(these, those)
    full = [trainer.full_grads[p][0].asnumpy() * len(ALL) for p in parameters(net)]
    assert distance(full, PROBLEM.gradient(values(net), ALL)[0]) < 1e-12


@pytest.mark.parametrize("good_calls", [0, 1])
def test_an_error_leaves_what_has_accumulated(good_calls):
    net, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, PROBLEM.batches(7))
    trainer.step(5, closure=lambda: loss_of(ALL[:5]))
    before, calls = gradients(net), []

    def closure():
        calls.append(0)
        if len(calls) > good_calls:
            raise KeyError("mine")
        return loss_of(ALL[:5])

    with pytest.raises(KeyError, match="mine"):
        trainer.correct_grads(closure)
    for these, those in zip(gradients(net), before):
        np.testing.assert_array_equal(these, those)


def test_a_change_of_grad_req_after_the_snapshot():
    """From write to add and back: the estimate is the same."""
    net, loss_of, trainer = make(adding=())
    trainer.update_full_grads(loss_of, PROBLEM.batches(7))
    trainer.step(5, closure=lambda: loss_of(ALL[:5]))
    trainer.correct_grads(lambda: loss_of(ALL[5:]))
    expected = gradients(net)
    for p in parameters(net):
        p.grad_req = "add"
    trainer.correct_grads(lambda: loss_of(ALL[5:]))
    assert distance(gradients(net), expected) < 1e-14
    trainer.correct_grads(lambda: loss_of(ALL[5:]))
    assert distance(gradients(net), add(expected, expected)) < 1e-14


def test_clipping_by_global_norm():
    net = PROBLEM.network("float32")  # MXNet's clip_global_norm fails with float64
    loss_of = PROBLEM.closure(net, "float32")
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    reference, optimizer = oracle.SVRG(PROBLEM.gradient, PROBLEM.initial), oracle.SGD(0.1)
    trainer.update_full_grads(loss_of, PROBLEM.batches(7))
    reference.refresh(PROBLEM.batches(7))
    for index in PROBLEM.batches(5):
        trainer.correct_grads(lambda: loss_of(index))
        trainer.allreduce_grads()
        gluon.utils.clip_global_norm([p.grad() for p in parameters(net)], 0.7)
        trainer.update(len(index))
        v = reference.estimate(index)
        norm = np.sqrt(sum(np.sum(g**2) for g in v))
        assert norm > 0.7
        optimizer.step(reference.weights, [g * 0.7 / norm for g in v], len(index))
    assert distance(values(net), reference.weights) < 1e-5


def test_zero_grad_of_what_a_minibatch_left():
    net, loss_of, trainer = make(adding=())
    trainer.update_full_grads(loss_of, PROBLEM.batches(7))
    trainer.correct_grads(lambda: loss_of(ALL[:5]))
    clear(net)
    before = values(net)
    trainer.step(5)
    for these, those in zip(values(net), before):
        np.testing.assert_array_equal(these, those)


def test_one_gradient_a_step_and_the_users_own_backward():
    """A step takes its gradient alone, and backward adds before it and after it."""
    net, loss_of, trainer = make(lock_random=False)
    batches = PROBLEM.batches(7)
    trainer.update_full_grads(loss_of, batches, store_grads=True)

    def backward():
        with autograd.record():
            losses = loss_of(batches[1])
        autograd.backward(losses)

    backward()
    own = gradients(net)
    trainer.correct_grads(lambda: loss_of(batches[0]), batch_index=0)
    estimate = [len(batches[0]) * mean for mean in kit.full_gradients(trainer, net)]
    assert distance(gradients(net), add(own, estimate)) < 1e-10
    backward()
    assert distance(gradients(net), add(add(own, own), estimate)) < 1e-10
