"""Many refreshes of one network, to see whether rounding is taken for a closure that changes.

Each image comes with several labels: its gradients cancel out when the network is trained, so that
rounding is a large part of what is left.

``python refreshes.py NETWORK DTYPE COUNT`` prints how many of its refreshes were followed by a
warning or an error of the trainer. Each refresh has the next of the coefficients.
"""

import sys
import warnings

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn
from problems import array

from gluon_svrg import SVRGTrainer

IMAGES, LABELS, SIZE = 4, 32, 28


def stacked(*blocks):
    net = nn.HybridSequential()
    net.add(*blocks)
    return net


def convolutions(norm, size=12, channels=(8, 16), **kwargs):
    """Convolution, normalization, ReLU and pooling, for each number of channels."""
    blocks = []
    for count in channels:
        blocks += [nn.Conv2D(count, 3, padding=1, **kwargs), norm()]
        blocks += [nn.Activation("relu"), nn.MaxPool2D()]
    return stacked(*blocks, nn.Dense(5)), (1, size, size)


def dense(norm):
    return stacked(nn.Dense(24), norm(), nn.Activation("relu"), nn.Dense(5)), (30,)


def without_products(size=8):
    """Of operators that float16 has on a CPU."""
    blocks = [nn.LayerNorm(), nn.Activation("tanh"), nn.GroupNorm(1), nn.Activation("relu")]
    return stacked(*blocks, nn.LayerNorm(), nn.GlobalAvgPool2D(), nn.Flatten()), (5, size, size)


NETWORKS = {
    "images": lambda: convolutions(nn.BatchNorm, SIZE),
    "batch norm": lambda: convolutions(nn.BatchNorm),
    "batch norm after no bias": lambda: convolutions(nn.BatchNorm, use_bias=False),
    "group norm": lambda: convolutions(lambda: nn.GroupNorm(4)),
    "instance norm": lambda: convolutions(nn.InstanceNorm),
    "layer norm": lambda: convolutions(nn.LayerNorm),
    "no norm": lambda: convolutions(lambda: nn.Activation("tanh")),
    "dense batch norm": lambda: dense(nn.BatchNorm),
    "dense layer norm": lambda: dense(nn.LayerNorm),
    "three convolutions": lambda: convolutions(nn.BatchNorm, 16, (8, 8, 8)),
    "no products": without_products,
}


#: In odd values, 1 included.
COEFFICIENTS = (0.1, 0.3, 0.45, 0.55, 0.7, 0.75, 0.85, 0.9, 0.97, 1.0)
#: Networks of operators that float16 has on a CPU.
FLOAT16 = ("no products",)


def images(shape):
    """Images and labels, each image with many labels."""
    rng = np.random.RandomState(1)
    X = np.repeat(rng.rand(IMAGES, *shape), LABELS, axis=0)
    return X, rng.randint(0, 5, len(X))


def alarms(name, dtype, count, coefficients=COEFFICIENTS, warm_up=60):
    """The warnings and errors of the first steps after refreshes."""
    mx.random.seed(1)
    net, shape = NETWORKS[name]()
    net.initialize(mx.init.Xavier())
    net.cast(dtype)
    net.hybridize()
    X, y = (array(values, dtype) for values in images(shape))
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    settings = {"learning_rate": 0.003, "multi_precision": dtype == "float16"}
    trainer = SVRGTrainer(net.collect_params(), "adam", settings)

    def loss_of(X, y):
        return loss_function(net(X), y)

    found = []
    for number in range(warm_up + count):
        if number >= warm_up:
            trainer.coefficient = coefficients[number % len(coefficients)]
            trainer.update_full_grads(loss_of, [(X, y)])
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*taken twice", UserWarning)
            try:
                trainer.step(len(X), closure=lambda: loss_of(X, y))
            except (RuntimeError, UserWarning) as error:
                found.append(str(error))
    return found


if __name__ == "__main__":
    name, dtype, count = sys.argv[1:]
    found = alarms(name, dtype, int(count))
    print(*(message[:110] for message in found[:3]), sep="\n")
    print(len(found), "alarms")
