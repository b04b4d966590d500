"""The networks and the methods whose costs are measured, with one minibatch of random data."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any, Callable

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from gluon_svrg import Nystrom

SETTINGS = {"learning_rate": 1e-6}
ROWS = 5  # minibatches of stored gradients, and of a table


def dense(*units: int) -> gluon.HybridBlock:
    """Dense layers with relu between them."""
    net = gluon.nn.HybridSequential()
    for count in units[:-1]:
        net.add(gluon.nn.Dense(count, activation="relu"))
    net.add(gluon.nn.Dense(units[-1]))
    return net


#: By name: the network, the shape of a minibatch, and the number of classes, 0 for a regression.
NETWORKS: dict[str, tuple[Callable[[], gluon.HybridBlock], tuple[int, ...], int]] = {
    "MLP 784-512-512-10": (lambda: dense(512, 512, 10), (128, 784), 10),
    "regression, 141 features": (lambda: dense(1), (1024, 141), 0),
    "Dense(1), 4 features": (lambda: dense(1), (8, 4), 0),
    "64 units": (lambda: dense(64, 10), (32, 64), 10),
    "80 layers, 162 arrays": (lambda: dense(*[16] * 80, 10), (128, 16), 10),
    "ResNet-18": (lambda: gluon.model_zoo.vision.resnet18_v1(classes=10), (32, 3, 32, 32), 10),
    "MLP 784-2048-2048-10": (lambda: dense(2048, 2048, 10), (128, 784), 10),
}

#: By method: the trainer, its own arguments, and what its refreshes and steps take.
METHODS: dict[str, tuple[str, dict[str, Any], str]] = {
    "SVRG": ("SVRGTrainer", {}, "refresh"),
    "stored": ("SVRGTrainer", {}, "refresh store index"),
    "SAGA": ("SAGATrainer", {}, "refresh index"),
    "SAG": ("SAGTrainer", {}, "refresh index"),
    "SARAH": ("SARAHTrainer", {}, "refresh"),
    "STORM": ("STORMTrainer", {}, ""),
    "MARS": ("MARSTrainer", {}, ""),
    "MARS, approximate": ("MARSTrainer", {"exact": False}, ""),
}
#: The same with momentum, of a preconditioner or without one.
WITH_MOMENTUM: dict[str, tuple[str, dict[str, Any], str]] = {
    "SVRG, P": ("SVRGTrainer", {"preconditioner": Nystrom()}, "refresh"),
    "SVRG, nag": ("SVRGTrainer", {}, "refresh"),
}


class Workload:
    """A network, a minibatch, and the loss that a closure computes from both."""

    def __init__(self, name: str, static_alloc: bool = False) -> None:
        make, shape, classes = NETWORKS[name]
        mx.random.seed(0)
        rng = np.random.RandomState(0)
        labels = rng.randint(0, classes, shape[0]) if classes else rng.standard_normal(shape[0])
        self.batch_size = shape[0]
        self.X, self.y = array(rng.standard_normal(shape)), array(labels)
        self.net = make()
        self.net.initialize(mx.init.Xavier())
        loss = gluon.loss.SoftmaxCrossEntropyLoss() if classes else gluon.loss.L2Loss()
        self.loss_function = loss
        for block in (self.net, loss):
            block.hybridize(static_alloc=static_alloc)
        self.differentiate()  # finishes the initialization

    def closure(self) -> Any:
        """The loss of each sample."""
        return self.loss_function(self.net(self.X), self.y)

    def differentiate(self) -> None:
        """One forward and backward, as everybody writes it."""
        with autograd.record():
            loss = self.closure()
        loss.backward()

    def plain(self) -> Callable[[], None]:
        """A step of `gluon.Trainer`."""
        trainer = gluon.Trainer(self.net.collect_params(), "sgd", SETTINGS)

        def step() -> None:
            self.differentiate()
            trainer.step(self.batch_size)

        return step

    def calls(
        self, package: ModuleType, method: str
    ) -> tuple[Callable[[], None], Callable[[int], None]]:
        """A step, and a refresh over so many minibatches, of a trainer of a package."""
        cls, own, takes = {**METHODS, **WITH_MOMENTUM}[method]
        optimizer, settings = "sgd", SETTINGS
        if method in WITH_MOMENTUM:
            optimizer, settings = "nag", {} if own else {**SETTINGS, "momentum": 0.9}
        trainer = getattr(package, cls)(self.net.collect_params(), optimizer, settings, **own)
        numbers = itertools.cycle(range(ROWS))

        def step() -> None:
            index = {"batch_index": next(numbers)} if "index" in takes else {}
            trainer.step(self.batch_size, closure=self.closure, **index)

        def refresh(length: int) -> None:
            if "refresh" in takes:
                data, is_stored = [()] * length, "store" in takes
                trainer.update_full_grads(self.closure, data, store_grads=is_stored)

        return step, refresh


def array(values: np.ndarray, dtype: str = "float32") -> Any:
    """An array of the interface that this MXNet's Gluon computes with."""
    make = mx.np.array if mx.util.is_np_array() else mx.nd.array
    return make(values, dtype=dtype)
