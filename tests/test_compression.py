"""Gradient compression: of the step's gradient, not of the full gradient."""

from functools import partial

import kit
import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from problems import Dense, contexts, distance, parameters, values

from gluon_svrg import SVRGTrainer

PROBLEM = Dense("classification", hidden=(5,), seed=20)
TWO = contexts(2)
TWO_BITS = {"type": "2bit", "threshold": 0.5}
make = partial(kit.make, PROBLEM, "float32", TWO, compression_params=TWO_BITS)


def test_the_full_gradient_is_exact():
    net, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, PROBLEM.batches(5))
    mean = [trainer.full_grads[p][0].asnumpy() * len(PROBLEM.X) for p in parameters(net)]
    expected = PROBLEM.gradient(PROBLEM.initial, np.arange(len(PROBLEM.X)))[0]
    assert distance(mean, expected) < 1e-5


class Exact:
    """What 2bit compression makes of gradients on two devices, with what is left over."""

    def __init__(self, threshold=0.5):
        self.threshold, self.rest = threshold, {}

    def __call__(self, key, grad):
        rest = self.rest.get(key, 0) + grad
        sent = np.where(rest >= self.threshold, self.threshold, 0.0)
        sent = np.where(rest <= -self.threshold, -self.threshold, sent)
        self.rest[key] = rest - sent
        return sent


def test_the_gradient_of_the_step_is_compressed():
    """Against NumPy: each device's estimate is quantized, then summed."""
    net, loss_of, trainer = make()
    compress, weights = Exact(), [w.copy() for w in PROBLEM.initial]
    everything = np.arange(len(PROBLEM.X))
    mu = [g / len(everything) for g in PROBLEM.gradient(weights, everything)[0]]
    there = [w.copy() for w in weights]
    trainer.update_full_grads(loss_of, PROBLEM.batches(5))
    for index in PROBLEM.batches(6):
        trainer.step(len(index), closure=lambda: loss_of(index))
        total = [np.zeros_like(w) for w in weights]
        for device, part in enumerate(np.array_split(index, 2)):
            here, then = (PROBLEM.gradient(w, part)[0] for w in (weights, there))
            for k, (g, g_there, m) in enumerate(zip(here, then, mu)):
                total[k] += compress((device, k), g - (g_there - len(part) * m))
        weights = [w - 0.1 / len(index) * t for w, t in zip(weights, total)]
    assert distance(values(net, TWO[0]), weights) < 1e-5
    assert distance(weights, PROBLEM.initial) > 1e-3


@pytest.mark.parametrize("kvstore", ["local", "dist_sync"])
def test_stores_that_cannot_compress(kvstore):
    net = PROBLEM.network("float32", TWO)
    with pytest.raises(ValueError, match=f"cannot compress gradients in a kvstore '{kvstore}'"):
        SVRGTrainer(net.collect_params(), "sgd", kvstore=kvstore, compression_params=TWO_BITS)


def test_gluon_trainer_fails_with_a_local_store():
    """Later, at its first step."""
    net = PROBLEM.network("float32", TWO)
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", kvstore="local", compression_params=TWO_BITS
    )
    loss_of = PROBLEM.closure(net, "float32", TWO)
    with mx.autograd.record():
        losses = loss_of(np.arange(6))
    mx.autograd.backward(losses)
    with pytest.raises(Exception, match="compression is not supported"):
        trainer.step(6)
