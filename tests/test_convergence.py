"""Linear convergence on a strongly convex problem with real data, which plain SGD does not have."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from plays import WITH_STORED, Play
from problems import array, values

datasets = pytest.importorskip("sklearn.datasets", reason="needs scikit-learn")
RIDGE = 0.125  # exact in float32, as MXNet takes it


class BreastCancer:
    """Logistic regression on 32 samples of 569, each of norm 1."""

    def __init__(self):
        X, y = datasets.load_breast_cancer(return_X_y=True)
        X, self.y = ((X - X.mean(axis=0)) / X.std(axis=0))[::18], y[::18].astype("float64")
        self.X = X / np.linalg.norm(X, axis=1, keepdims=True)
        # Not at zero: there MXNet's loss has a kink: the gradient of label 0 is 0 instead of 1/2.
        self.initial = [np.full((1, X.shape[1]), 0.01), np.full(1, 0.01)]

    def batches(self, _):
        return [np.array([i]) for i in range(len(self.X))]

    def gradient(self, weights, index):
        (weight, bias), part, y = weights, self.X[index], self.y[index]
        p = 1 / (1 + np.exp(-(part @ weight[0] + bias)))
        return [((p - y)[None] @ part), (p - y).sum(keepdims=True)], len(index)

    def norm(self, weights):
        """Of the gradient, with a penalty on both: zero at the optimum."""
        grads, count = self.gradient(weights, np.arange(len(self.X)))
        return np.sqrt(sum(np.sum((g / count + RIDGE * w) ** 2) for g, w in zip(grads, weights)))

    def network(self, dtype, devices, hybridize):
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Dense(1, in_units=self.X.shape[1], dtype=dtype))
        net.initialize(mx.init.Constant(0.01))
        net[0].bias.set_data(array(self.initial[1]))
        net.hybridize(**hybridize)
        for p in net.collect_params().values():
            p.wd_mult = 1.0
        return net

    def closure(self, net, dtype, devices):
        loss_function = gluon.loss.SigmoidBinaryCrossEntropyLoss()
        inputs = [(array(self.X[[i]]), array(self.y[[i], None])) for i in range(len(self.X))]
        return lambda index: loss_function(net(inputs[index[0]][0]), inputs[index[0]][1])


@pytest.mark.parametrize("name", ["SVRG", "stored", "SAGA", "SAG"])
def test_passes_to_an_accuracy(name):
    """Batch size 1: the gradient shrinks to 1e-9 of what it was, as in NumPy."""
    problem, case = BreastCancer(), WITH_STORED[name]
    largest = 0.25 * (1 + 1) + RIDGE  # the curvature, with the bias
    settings = {"learning_rate": 1 / (3 * largest), "wd": RIDGE}
    own = {"coefficient": 1.0} if case.needs_refresh else {}
    play = Play(case, problem, settings=settings, hybridize={"static_alloc": True}, **own)
    play.twin = case.twin(problem.gradient, problem.initial, **own)
    rng, first = np.random.RandomState(0), problem.norm(problem.initial)
    for epoch in range(40):
        if case.needs_refresh and epoch % 2 == 0:
            play.refresh()
        play.epoch(rng.permutation(len(problem.X)))
        assert play.distance() < 1e-9
        if problem.norm(values(play.net)) < 1e-9 * first:
            break
    assert problem.norm(values(play.net)) < 1e-9 * first
