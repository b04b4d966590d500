"""Writes the files of this folder: `python write.py FOLDER`, with gluon_svrg 0.3.0 and each MXNet.

``0.3.0-mxnet1.npz``: for each method and optimizer, the bytes of ``save_states`` in mid-training,
the weights at that moment and after some more steps. ``gluon-mxnet1.states``: a
`gluon.Trainer`; ``gluon-float16-mxnet1.states``: one of float16 weights with float32 master
copies. ``mxnet2`` likewise.
"""

import sys
import tempfile
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import gluon

import gluon_svrg

GENERATION = mx.__version__[0]
ARRAY = mx.np.array if mx.util.is_np_array() else mx.nd.array
METHODS = {
    "SVRG": ("SVRGTrainer", {"coefficient": 0.75}),
    "SVRG, stored": ("SVRGTrainer", {}),
    "SAGA": ("SAGATrainer", {}),
    "SAG": ("SAGTrainer", {}),
    "SARAH": ("SARAHTrainer", {}),
    "STORM": ("STORMTrainer", {"mixing": 0.3}),
    "MARS": ("MARSTrainer", {"gamma": 0.1, "clip": 0.1}),
    "MARS, approximate": ("MARSTrainer", {"gamma": 0.1, "exact": False}),
}
OPTIMIZERS = {"sgd": {"momentum": 0.9}, "adam": {"wd": 0.01}}
BATCHES = [range(0, 4), range(4, 8), range(8, 10)]
BEFORE, AFTER = (1, 0, 2, 1, 2), (0, 1, 2, 0)


class Training:
    """A small network in float64 and its trainer.

    Parameters
    ----------
    method, optimizer : str
        Keys of `METHODS` and `OPTIMIZERS`.
    """

    def __init__(self, method, optimizer):
        name, settings = METHODS[method]
        rng = np.random.RandomState(7)
        self.X, self.y = rng.randn(10, 3), rng.randn(10, 2)
        self.net = gluon.nn.HybridSequential()
        self.net.add(
            gluon.nn.Dense(4, in_units=3, activation="tanh"),
            gluon.nn.BatchNorm(in_channels=4),
            gluon.nn.Dense(2, in_units=4),
        )
        self.net.initialize(mx.init.Xavier())
        self.net.cast("float64")
        scheduler = mx.lr_scheduler.FactorScheduler(3, 0.5, base_lr=0.1)
        self.trainer = getattr(gluon_svrg, name)(
            self.net.collect_params(),
            optimizer,
            {**OPTIMIZERS[optimizer], "lr_scheduler": scheduler},
            lock_random=False,
            **settings,
        )
        self.is_stored = method == "SVRG, stored"
        self.is_indexed = self.is_stored or name in ("SAGATrainer", "SAGTrainer")
        self.loss = gluon.loss.L2Loss()

    def loss_of(self, index):
        X, y = (ARRAY(rows[list(index)], dtype="float64") for rows in (self.X, self.y))
        return self.loss(self.net(X), y)

    def refresh(self):
        data = [[index] for index in BATCHES]
        self.trainer.update_full_grads(self.loss_of, data, store_grads=self.is_stored)

    def steps(self, numbers):
        for number in numbers:
            index = BATCHES[number]
            row = {"batch_index": number} if self.is_indexed else {}
            self.trainer.step(len(index), closure=lambda: self.loss_of(index), **row)

    def parameters(self):
        return [p for layer in self.net for p in layer.collect_params().values()]

    def weights(self):
        """All weights and running statistics, one after another."""
        return np.concatenate([p.data().asnumpy().ravel() for p in self.parameters()])


def write(folder):
    """Write all files of this MXNet."""
    found = {}
    for method in METHODS:
        for optimizer in OPTIMIZERS:
            with mx.name.NameManager():
                run = Training(method, optimizer)
            run.refresh()
            run.steps(BEFORE)
            with tempfile.TemporaryDirectory() as temporary:
                run.trainer.save_states(f"{temporary}/states")
                states = Path(f"{temporary}/states").read_bytes()
            found[f"{method} {optimizer}"] = np.frombuffer(states, np.uint8)
            then = run.weights()
            run.steps(AFTER)
            found[f"{method} {optimizer} weights"] = np.stack([then, run.weights()])
    np.savez_compressed(f"{folder}/0.3.0-mxnet{GENERATION}.npz", **found)
    for dtype, name in (("float32", "gluon"), ("float16", "gluon-float16")):
        layer = gluon.nn.Dense(3, in_units=5, use_bias=False)
        layer.initialize(mx.init.One())
        layer.cast(dtype)
        settings = {"learning_rate": 0.5, "momentum": 0.5, "multi_precision": dtype == "float16"}
        plain = gluon.Trainer(layer.collect_params(), "sgd", settings)
        layer.weight.grad()[:] = 2
        layer.weight.data()._fresh_grad = True
        plain.step(1)
        plain.save_states(f"{folder}/{name}-mxnet{GENERATION}.states")


if __name__ == "__main__":
    assert gluon_svrg.__version__ == "0.3.0"
    mx.random.seed(1)
    write(sys.argv[1])
