"""Writes the files of this folder. It ran once on each MXNet, with gluon_svrg 0.1.0.

``0.1.0-mxnet1.states``: an SVRG trainer in mid-epoch, with stored gradients and a scheduler.
``0.1.0-mxnet1.npz``: what must be found in it, from MXNet's own arrays and gradients.
``gluon-mxnet1.states``: a `gluon.Trainer`; ``gluon-float16-mxnet1.states``: one of float16
weights with float32 master copies. ``mxnet2`` likewise.
"""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from gluon_svrg import SVRGTrainer, __version__

GENERATION = mx.__version__[0]
FOLDER = sys.argv[1]
ARRAY = mx.np.array if mx.util.is_np_array() else mx.nd.array

assert __version__ == "0.1.0"
rng = np.random.RandomState(7)
X, y = rng.randn(10, 3).astype("float32"), rng.randn(10, 2).astype("float32")
batches = [range(0, 4), range(4, 8), range(8, 10)]

mx.random.seed(1)
net = gluon.nn.HybridSequential()
net.add(gluon.nn.Dense(4, in_units=3, activation="tanh"))
net.add(gluon.nn.BatchNorm(in_channels=4))
net.add(gluon.nn.Dense(2, in_units=4))
net.initialize(mx.init.Xavier())
loss_fn = gluon.loss.L2Loss()


def loss_of(index):
    return loss_fn(net(ARRAY(X[list(index)])), ARRAY(y[list(index)]))


scheduler = mx.lr_scheduler.FactorScheduler(3, 0.5, base_lr=0.2)
settings = {"learning_rate": 0.2, "momentum": 0.9, "lr_scheduler": scheduler}
trainer = SVRGTrainer(net.collect_params(), "sgd", settings, coefficient=0.75)
trainer.update_full_grads(loss_of, [[index] for index in batches], store=True)
params = trainer._params
trainable = [p for p in params if p.grad_req != "null"]
expected = {"names": np.array([p.name for p in params])}
with trainer.at_snapshot():
    for number, index in enumerate(batches):
        with autograd.record():
            loss = loss_of(index)
        loss.backward()
        for p in trainable:
            expected[f"row {number} {params.index(p)}"] = p.grad().asnumpy()
for p, values in trainer.full_grads.items():
    expected[f"mean {params.index(p)}"] = values[0].asnumpy()
for p, values in trainer.snapshot.items():
    expected[f"snapshot {params.index(p)}"] = values[0].asnumpy()
for number, index in enumerate(batches[:2] * 2):
    trainer.step(len(index), closure=lambda: loss_of(index), batch_index=number % 2)
for position, state in trainer._updaters[0].states.items():
    expected[f"state {position}"] = state.asnumpy()
trainer.save_states(f"{FOLDER}/0.1.0-mxnet{GENERATION}.states")
np.savez(f"{FOLDER}/0.1.0-mxnet{GENERATION}.npz", **expected)

for dtype, name in (("float32", "gluon"), ("float16", "gluon-float16")):
    layer = gluon.nn.Dense(3, in_units=5, use_bias=False)
    layer.initialize(mx.init.One())
    layer.cast(dtype)
    plain = gluon.Trainer(
        layer.collect_params(),
        "sgd",
        {"learning_rate": 0.5, "momentum": 0.5, "multi_precision": dtype == "float16"},
    )
    layer.weight.grad()[:] = 2
    layer.weight.data()._fresh_grad = True
    plain.step(1)
    plain.save_states(f"{FOLDER}/{name}-mxnet{GENERATION}.states")
