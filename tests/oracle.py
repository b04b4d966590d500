"""SVRG in NumPy, float64, straight from the formula: slow and obvious.

A gradient function takes the weights (a list of arrays) and a minibatch, and returns the *sum* of
the gradients over the loss entries, with their number.
"""

import numpy as np


class SVRG:
    def __init__(self, gradient, weights, coefficient=1.0):
        self.gradient = gradient
        self.weights = [np.array(w, dtype=np.float64) for w in weights]
        self.coefficient = np.float32(coefficient)
        self.snapshot = None

    def refresh(self, batches):
        results = [self.gradient(self.weights, batch) for batch in batches]
        entries = sum(count for _, count in results)
        self.full_grad = [sum(parts) / entries for parts in zip(*(grad for grad, _ in results))]
        self.snapshot = [w.copy() for w in self.weights]

    def estimate(self, batch):
        grad, count = self.gradient(self.weights, batch)
        if self.snapshot is None:
            return grad
        snapshot_grad, _ = self.gradient(self.snapshot, batch)
        return [
            g - self.coefficient * (g_snapshot - count * mu)
            for g, g_snapshot, mu in zip(grad, snapshot_grad, self.full_grad)
        ]


class SGD:
    """MXNet's SGD with momentum and weight decay: it takes its hyperparameters in float32."""

    def __init__(self, learning_rate, momentum=0.0, wd=0.0):
        self.learning_rate, self.momentum, self.wd = map(np.float32, (learning_rate, momentum, wd))
        self.velocity = None

    def step(self, weights, grads, batch_size):
        rescale = np.float64(np.float32(1.0 / batch_size))
        rate, momentum, wd = map(np.float64, (self.learning_rate, self.momentum, self.wd))
        if self.velocity is None:
            self.velocity = [np.zeros_like(w) for w in weights]
        for w, g, v in zip(weights, grads, self.velocity):
            v *= momentum
            v -= rate * (rescale * g + wd * w)
            w += v
