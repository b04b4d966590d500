"""Linear convergence on a strongly convex problem with real data."""

import mxnet as mx
import numpy as np
import pytest
import scipy.optimize
from mxnet import gluon
from problems import array
from sklearn.datasets import load_digits

from gluon_svrg import SVRGTrainer

L2 = 1e-3  # 0.5e-3 * |w|^2, bias included


def objective(flat, X, y):
    """Softmax regression: mean loss and gradient, weight (10, features) and bias (10)."""
    weight, bias = flat[:-10].reshape(10, -1), flat[-10:]
    logits = X @ weight.T + bias
    logits -= logits.max(axis=1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    loss = -log_p[np.arange(len(y)), y].mean() + 0.5 * L2 * flat @ flat
    delta = np.exp(log_p)
    delta[np.arange(len(y)), y] -= 1
    delta /= len(y)
    return loss, np.concatenate([(delta.T @ X).ravel(), delta.sum(axis=0)]) + L2 * flat


def hessian(flat, X):
    weight, bias = flat[:-10].reshape(10, -1), flat[-10:]
    p = np.exp(X @ weight.T + bias)
    p /= p.sum(axis=1, keepdims=True)
    with_bias = np.hstack([X, np.ones((len(X), 1))])
    blocks = np.empty((10, 10, with_bias.shape[1], with_bias.shape[1]))
    for a in range(10):
        for b in range(10):
            curvature = p[:, a] * ((a == b) - p[:, b]) / len(X)
            blocks[a, b] = with_bias.T @ (curvature[:, None] * with_bias)
    inner = X.shape[1]
    order = [c * (inner + 1) + i for c in range(10) for i in range(inner)]
    order += [c * (inner + 1) + inner for c in range(10)]  # weights first, then biases
    full = blocks.transpose(0, 2, 1, 3).reshape(len(flat), len(flat))
    return full[np.ix_(order, order)] + L2 * np.eye(len(flat))


def minimum(X, y):
    """The lowest value, by Newton's method from a good start."""
    start = np.zeros(10 * X.shape[1] + 10)
    flat = scipy.optimize.minimize(objective, start, (X, y), jac=True, method="L-BFGS-B").x
    for _ in range(10):
        flat = flat - np.linalg.solve(hessian(flat, X), objective(flat, X, y)[1])
    value, gradient = objective(flat, X, y)
    assert np.abs(gradient).max() < 1e-13
    return value


@pytest.mark.slow
def test_softmax_regression_on_digits():
    X, y = load_digits(return_X_y=True)
    X = X / 16
    lowest = minimum(X, y)
    net = gluon.nn.Dense(10, in_units=X.shape[1], dtype="float64")
    net.initialize(mx.init.Zero())
    net.hybridize()
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 1.0, "wd": L2})
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    everything, labels = array(X), array(y)
    rng = np.random.RandomState(0)
    gaps = []
    epoch = 0
    while trainer.grad_evaluations + 5 * len(X) <= 150 * len(X):  # a refresh and two epochs cost 5
        if epoch % 2 == 0:
            data = [(everything, labels)]
            trainer.update_full_grads(lambda X, y: loss_function(net(X), y), data)
        order = rng.permutation(len(X))
        for start in range(0, len(X), 10):
            index = array(order[start : start + 10], "int64")
            inputs, targets = everything.take(index, axis=0), labels.take(index)
            trainer.step(
                len(index),
                closure=lambda: loss_function(net(inputs), targets),
            )
        weights = [net.weight.data().asnumpy().ravel(), net.bias.data().asnumpy()]
        gaps.append(objective(np.concatenate(weights), X, y)[0] - lowest)
        epoch += 1
    assert -1e-14 < gaps[-1] < 1e-10
