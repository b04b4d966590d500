"""What MXNet's guide to the Gluon Trainer does, line by line, with SVRGTrainer."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from problems import array

from gluon_svrg import SVRGTrainer


def perceptron():
    net = gluon.nn.Dense(1)
    net.initialize(init=mx.init.Constant(0.5))
    return net


def data():
    rng = np.random.RandomState(0)
    X = rng.rand(8, 4).astype("float32")
    return array(X, "float32"), array(X.sum(axis=1, keepdims=True), "float32")


def test_the_guide():
    batch_size = 8
    net = perceptron()
    trainer = SVRGTrainer(
        params=net.collect_params(), optimizer="sgd", optimizer_params={"learning_rate": 1}
    )
    loss_fn = gluon.loss.L2Loss()
    inputs, labels = data()

    def get_batch_loss():
        return loss_fn(net(inputs), labels)

    with autograd.record():
        loss = get_batch_loss()
    loss.backward()
    curr_weight = net.weight.data().copy()  # the guide subtracts the gradient by hand
    trainer.step(batch_size)
    expected = (curr_weight - net.weight.grad() * 1 / batch_size).asnumpy()
    np.testing.assert_allclose(net.weight.data().asnumpy(), expected, rtol=1e-6)

    # the same with a snapshot
    trainer.update_full_grads(lambda X, y: loss_fn(net(X), y), [(inputs, labels)])
    curr_weight = net.weight.data().copy()
    trainer.step(batch_size, closure=get_batch_loss)
    expected = (curr_weight - net.weight.grad() * 1 / batch_size).asnumpy()
    np.testing.assert_allclose(net.weight.data().asnumpy(), expected, rtol=1e-6)

    # an optimizer as an instance
    trainer = SVRGTrainer(params=net.collect_params(), optimizer=mx.optimizer.Adam(learning_rate=1))
    before = get_batch_loss().mean().asnumpy()
    trainer.learning_rate = 0.01
    for _ in range(20):
        trainer.step(batch_size, closure=get_batch_loss)
    assert get_batch_loss().mean().asnumpy() < before

    # the learning rate
    assert trainer.learning_rate == 0.01
    trainer.set_learning_rate(0.1)
    assert trainer.learning_rate == 0.1
    assert isinstance(trainer.optimizer, mx.optimizer.Adam)


def test_an_instance_with_parameters_is_refused_as_by_gluon_trainer():
    for cls in (gluon.Trainer, SVRGTrainer):
        with pytest.raises(AssertionError, match="optimizer_params must be None"):
            cls(perceptron().collect_params(), mx.optimizer.Adam(), {"learning_rate": 1})
