"""The networks that are measured, each with one minibatch of random data."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon


class Workload(NamedTuple):
    """A network, a minibatch, and the loss that a closure computes from both."""

    name: str
    net: gluon.HybridBlock
    batch: tuple[Any, Any]
    closure: Callable[[], Any]

    @property
    def batch_size(self) -> int:
        """Samples in the minibatch."""
        return len(self.batch[0])

    def differentiate(self) -> None:
        """One forward and backward, as everybody writes it."""
        with autograd.record():
            loss = self.closure()
        autograd.backward(loss)


def mlp() -> gluon.HybridBlock:
    """784-512-512-10: 670,000 parameters in 6 tensors."""
    return dense(512, 512, 10)


def small_mlp() -> gluon.HybridBlock:
    """784-512-10: 407,000 parameters in 4 tensors, where steps with one gradient are measured."""
    return dense(512, 10)


def big_mlp() -> gluon.HybridBlock:
    """784-2048-2048-10: 5.8 million parameters, where memory is measured."""
    return dense(2048, 2048, 10)


def narrow() -> gluon.HybridBlock:
    """80 hidden layers of 16 units: 22,000 parameters in 162 tensors."""
    return dense(*[16] * 80, 10)


def linear() -> gluon.HybridBlock:
    """Linear regression with 90 features."""
    return dense(1)


def resnet() -> gluon.HybridBlock:
    """ResNet-18: 11 million parameters in 62 tensors, with BatchNorm."""
    return gluon.model_zoo.vision.resnet18_v1(classes=10)


#: name: (network, shape of a minibatch, number of classes or 0 for a regression)
MODELS: dict[str, tuple[Callable[[], gluon.HybridBlock], tuple[int, ...], int]] = {
    "MLP 784-512-512-10": (mlp, (128, 784), 10),
    "MLP 784-512-10": (small_mlp, (128, 784), 10),
    "ResNet-18": (resnet, (32, 3, 32, 32), 10),
    "80 narrow layers": (narrow, (128, 16), 10),
    "linear regression": (linear, (100, 90), 0),
}


def workload(name: str, *, static_alloc: bool = False, seed: int = 0) -> Workload:
    """Build one of `MODELS`, initialized and hybridized."""
    make, shape, classes = MODELS[name]
    return of_network(name, make(), shape, classes, static_alloc=static_alloc, seed=seed)


def of_network(
    name: str,
    net: gluon.HybridBlock,
    shape: tuple[int, ...],
    classes: int,
    *,
    static_alloc: bool = False,
    seed: int = 0,
    devices: list[Any] | None = None,
) -> Workload:
    """Give a network random data; on several devices, an equal share to each."""
    rng = np.random.RandomState(seed)
    mx.random.seed(seed)
    devices = devices or [mx.cpu()]
    net.initialize(mx.init.Xavier(), ctx=devices)
    net.hybridize(static_alloc=static_alloc)
    inputs = rng.standard_normal(shape)
    if classes:
        loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
        labels = rng.randint(0, classes, shape[0])
    else:
        loss_function = gluon.loss.L2Loss()
        labels = rng.standard_normal(net(array(inputs, devices[0])).shape)
    loss_function.hybridize(static_alloc=static_alloc)
    X = [array(part, device) for part, device in zip(np.array_split(inputs, len(devices)), devices)]
    y = [array(part, device) for part, device in zip(np.array_split(labels, len(devices)), devices)]
    if len(devices) == 1:

        def closure() -> Any:
            return loss_function(net(X[0]), y[0])

    else:

        def closure() -> Any:
            return [loss_function(net(X_part), y_part) for X_part, y_part in zip(X, y)]

    built = Workload(name, net, (inputs, labels), closure)
    built.differentiate()  # finishes the initialization
    return built


def array(values: np.ndarray, device: Any = None) -> Any:
    """A float32 array of the interface that this MXNet's Gluon computes with."""
    make = mx.np.array if mx.util.is_np_array() else mx.nd.array
    return make(values.astype("float32"), ctx=device or mx.cpu())


def parameter_bytes(net: gluon.HybridBlock) -> int:
    """Bytes of all parameters with gradients, on one device."""
    return sum(
        4 * int(np.prod(p.shape)) for p in net.collect_params().values() if p.grad_req != "null"
    )


def dense(*units: int) -> gluon.HybridBlock:
    """Dense layers with relu between them."""
    net = gluon.nn.HybridSequential()
    for count in units[:-1]:
        net.add(gluon.nn.Dense(count, activation="relu"))
    net.add(gluon.nn.Dense(units[-1]))
    return net
