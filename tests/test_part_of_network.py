"""A trainer over part of a network, and two trainers on one: the rest is left as it is."""

import mxnet as mx
import numpy as np
import pytest
from kit import HYBRIDIZE, assert_unchanged
from loops import plain_step
from mxnet import autograd, gluon
from problems import Dense, array

from gluon_svrg import MARSTrainer, SAGATrainer, SVRGTrainer

PROBLEM = Dense("classification", hidden=(5,), seed=13, samples=30)


class Parts:
    """A body with BatchNorm, and a head."""

    def __init__(self, hybridize=None, grad_req="write"):
        mx.random.seed(1)
        self.body = gluon.nn.HybridSequential()
        self.body.add(
            gluon.nn.Dense(6, activation="tanh", in_units=4), gluon.nn.BatchNorm(in_channels=6)
        )
        self.head = gluon.nn.Dense(3, in_units=6)
        self.net = gluon.nn.HybridSequential()
        self.net.add(self.body, self.head)
        self.net.initialize(mx.init.Xavier())
        if hybridize is not None:
            self.net.hybridize(**hybridize)
        for p in self.body_parameters():
            p.grad_req = grad_req
        self.loss_of = PROBLEM.closure(self.net, "float32")

    def body_parameters(self):
        return [p for p in self.body.collect_params().values() if p.grad_req != "null"]

    def trainer(self, part="head", **kwargs):
        params = getattr(self, part).collect_params()
        return SVRGTrainer(params, "sgd", {"learning_rate": 0.1}, **kwargs)

    def statistics(self):
        mx.nd.waitall()
        norm = self.body[1]
        return [norm.running_mean.data().asnumpy(), norm.running_var.data().asnumpy()]

    def body_gradients(self):
        return [p.grad().asnumpy() for p in self.body_parameters()]


@pytest.mark.parametrize("hybridize", HYBRIDIZE)
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_a_refresh_leaves_the_rest_alone(hybridize, grad_req):
    parts = Parts(hybridize, grad_req)
    trainer = parts.trainer()
    with autograd.record():
        loss = parts.loss_of(np.arange(7))
    loss.backward()
    parts.body_parameters()[0].data()._fresh_grad = False  # as after a step of its trainer
    before, then = parts.body_gradients(), parts.statistics()
    marks = [p.data()._fresh_grad for p in parts.body_parameters()]
    for _ in range(2):
        trainer.update_full_grads(parts.loss_of, PROBLEM.batches(8))
        assert_unchanged(parts.body_gradients(), before)
        assert_unchanged(parts.statistics(), then)
        assert [p.data()._fresh_grad for p in parts.body_parameters()] == marks
    assert any(np.abs(g).max() for g in before)


@pytest.mark.parametrize("hybridize", HYBRIDIZE)
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_a_step_leaves_the_rest_as_after_one_backward(hybridize, grad_req):
    """Their gradients, accumulated or not, and running statistics."""
    parts, plain = Parts(hybridize, grad_req), Parts(hybridize, grad_req)
    trainer = parts.trainer()
    plain_trainer = gluon.Trainer(plain.head.collect_params(), "sgd", {"learning_rate": 0.1})
    trainer.update_full_grads(parts.loss_of, PROBLEM.batches(8))
    for index in PROBLEM.batches(8):
        for name in ("weight", "bias"):  # the same head, so that both bodies see the same
            getattr(plain.head, name).set_data(getattr(parts.head, name).data())
        trainer.step(len(index), closure=lambda: parts.loss_of(index))
        plain_step(plain_trainer, lambda: plain.loss_of(index), len(index))
        assert_unchanged(parts.statistics(), plain.statistics())
        assert_unchanged(parts.body_gradients(), plain.body_gradients())


def test_the_head_of_a_frozen_body_is_trained_as_if_it_were_alone():
    """Fine-tuning: the features are a data set."""
    parts = Parts()
    for p in parts.body.collect_params().values():
        p.grad_req = "null"
    X, y = array(PROBLEM.X, "float32"), array(PROBLEM.y, "float32")
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    features = parts.body(X)
    alone = gluon.nn.Dense(3, in_units=6)
    alone.initialize()
    for p in ("weight", "bias"):
        getattr(alone, p).set_data(getattr(parts.head, p).data())
    trainers = [
        SVRGTrainer(head.collect_params(), "sgd", {"learning_rate": 0.5})
        for head in (parts.head, alone)
    ]
    closures = [
        lambda i: loss_function(parts.head(parts.body(X[i : i + 10])), y[i : i + 10]),
        lambda i: loss_function(alone(features[i : i + 10]), y[i : i + 10]),
    ]
    # BatchNorm in training uses the minibatch, in a frozen body it must not
    parts.body[1]._kwargs["use_global_stats"] = True
    for _ in range(3):
        for trainer, closure in zip(trainers, closures):
            trainer.update_full_grads(closure, [0, 10, 20])
            for i in (0, 10, 20):
                trainer.step(10, closure=lambda: closure(i))
    for p in ("weight", "bias"):
        these, those = (getattr(head, p).data().asnumpy() for head in (parts.head, alone))
        np.testing.assert_allclose(these, those, rtol=1e-5, atol=1e-6)


def test_two_trainers_on_one_network():
    """Each with its own optimizer; both snapshots at the same weights: v = mu for both."""
    parts = Parts()
    trainers = [parts.trainer("body"), parts.trainer("head")]
    for trainer in trainers:
        trainer.update_full_grads(parts.loss_of, PROBLEM.batches(10))
    for trainer in trainers:
        trainer.correct_grads(lambda: parts.loss_of(np.arange(10)))
        for p, (mean, *_) in trainer.full_grads.items():
            np.testing.assert_allclose(p.grad().asnumpy(), 10 * mean.asnumpy(), atol=1e-5)


def test_what_only_some_minibatches_read_is_found_at_the_next_refresh():
    parts, other = Parts(), gluon.nn.BatchNorm(in_channels=4)
    other.initialize()
    trainer = parts.trainer("net")
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()

    def loss_of(index):
        X = array(PROBLEM.X[index], "float32")
        return loss_function(parts.net(other(X)), array(PROBLEM.y[index], "float32"))

    before = other.running_mean.data().asnumpy()
    trainer.update_full_grads(loss_of, PROBLEM.batches(8))
    mx.nd.waitall()
    np.testing.assert_array_equal(other.running_mean.data().asnumpy(), before)
    trainer.step(8, closure=lambda: loss_of(np.arange(8)))
    mx.nd.waitall()
    batch_mean = PROBLEM.X[:8].mean(axis=0)
    np.testing.assert_allclose(other.running_mean.data().asnumpy(), 0.1 * batch_mean, rtol=1e-4)


def test_after_a_refresh_parameters_are_read_as_before():
    read = gluon.Parameter._check_and_get
    parts = Parts()
    trainer = parts.trainer()
    trainer.update_full_grads(parts.loss_of, PROBLEM.batches(8))
    assert gluon.Parameter._check_and_get is read
    with pytest.raises(ZeroDivisionError):
        trainer.update_full_grads(lambda index: 1 / 0, PROBLEM.batches(8))
    assert gluon.Parameter._check_and_get is read


def taken_before_the_call(cls, **options):
    """A trainer that steps, arguments of `step`, and a loss with weights from outside or inside."""
    net = PROBLEM.network()
    trainer = cls(net.collect_params(), "sgd", {"learning_rate": 0.1}, **options)
    loss_of, batches = PROBLEM.closure(net), PROBLEM.batches(10)
    parameter = next(iter(net.collect_params().values()))

    def loss_with(weight):
        weight = parameter.data() if weight is None else weight
        return loss_of(batches[0]) + (weight * weight).sum()

    inside = [lambda: loss_with(None)] * len(batches)
    stored = {"store_grads": True} if cls is SVRGTrainer else {}
    trainer.update_full_grads(lambda closure: closure(), inside, **stored)
    outside = parameter.data()
    return net, trainer, lambda: loss_with(None), lambda: loss_with(outside)


def test_weights_that_were_taken_before_the_call():
    """At the snapshot they are still those of now, and backward writes their gradients too."""
    _, trainer, inside, outside = taken_before_the_call(SVRGTrainer)
    for _ in range(2):
        trainer.step(10, closure=inside)
    with pytest.raises(RuntimeError, match="took before it was called"):
        trainer.step(10, closure=outside)
    trainer.step(10, closure=inside)


@pytest.mark.parametrize(
    ("cls", "options"),
    [(SVRGTrainer, {}), (SAGATrainer, {}), (MARSTrainer, {"exact": False})],
)
def test_weights_that_were_taken_before_the_only_call(cls, options):
    """One gradient is that of the weights themselves."""
    ends = []
    for taken in (False, True):
        net, trainer, inside, outside = taken_before_the_call(cls, **options)
        index = {} if cls is MARSTrainer else {"batch_index": 0}
        trainer.step(10, closure=inside, **index)  # its row is computed again elsewhere
        for _ in range(5):
            trainer.step(10, closure=outside if taken else inside, **index)
        ends.append([p.data().asnumpy() for p in net.collect_params().values()])
    for one, other in zip(*ends):
        np.testing.assert_array_equal(one, other)


def test_a_refresh_that_fails_leaves_no_marks():
    """Not of weights that the closure took before the call, and data that fail afterwards."""
    net = PROBLEM.network()
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    loss_of, batches = PROBLEM.closure(net), PROBLEM.batches(10)
    trainer.update_full_grads(loss_of, batches)
    trainer.correct_grads(lambda: loss_of(batches[0]))
    weight = next(iter(net.collect_params().values())).data()

    def closure(index):
        loss = loss_of(index)
        return loss if index is batches[0] else loss + (weight * weight).sum()

    def data():
        yield from batches[:2]
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        trainer.update_full_grads(closure, data())
    trainer.step(10)
