"""What all methods train on: network, loss and data, checked before the first training."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import isfinite
from time import perf_counter
from typing import Any, Callable

import mxnet as mx
import numpy as np
from mxnet.gluon import Block

from .. import _mxnet
from ..passes.data import initialize
from ..prox import Prox, ProxArgument, ProximalOperators
from .data import Data

MINIBATCHES = 20  # that measure the time of a gradient
BESIDE_ZERO = 1e-3  # the scale of random weights in place of zeros


@dataclass
class Task:
    """What all methods train on: network, loss, data, and how many gradients."""

    new_net: Callable[[], Any]
    loss_of: Callable[..., Any]
    data: Data
    passes: float
    measures: dict[str, Callable[[Any], float]]
    plain_epochs: int
    refresh_every: int
    l2: float
    prox: ProxArgument = None
    # Of a new network, before all trainings:
    seconds_a_pass: float = 0.0  # of gradients, and the measurements after them
    first: dict[str, float] = field(default_factory=dict)  # what is measured
    weights: int = 0  # how many are trained
    is_random: bool = False  # whether losses are

    def __post_init__(self) -> None:
        self.measures = {"loss": self.loss, **self.measures}

    def network(self, seed: int) -> Any:
        """A new network with initial weights, the same for all methods of a seed."""
        for seed_all in (mx.random.seed, np.random.seed, random.seed):
            seed_all(seed)
        net = self.new_net()
        parameters, trainable = list(net.collect_params().values()), trainable_of(net)
        if not trainable:
            raise ValueError("The network has no parameters to train: it has none, or all frozen.")
        if not any(_mxnet.has_data(p) or _mxnet.is_deferred(p) for p in parameters):
            net.initialize()
        self.data.put_on(net)
        initialize(parameters, partial(self.loss_of, net), self.data.batches(self.data.seed, 0))
        for p in trainable:
            p.grad_req = "write"  # with 'add', each trainer would have to zero it
        if not any(p.data().asnumpy().any() for p in trainable):
            # MXNet computes some gradients wrongly at an output of 0: SigmoidBCELoss is one.
            rng = np.random.RandomState(seed)
            for p in trainable:
                p.data()[:] = (BESIDE_ZERO * rng.normal(size=p.shape)).astype(_mxnet.dtype_of(p))
        for p, operator in self.operators(net).items():
            if operator.is_projection:
                weight = _mxnet.classic(p.data())
                operator(weight, 0.0).copyto(weight)
        mx.random.seed(seed)
        return net

    def operators(self, net: Any) -> dict[Any, Prox]:
        """The proximal operators of the parameters that have one."""
        return ProximalOperators(self.prox, net.collect_params(), "sgd", {}).operators

    def check(self, seed: int) -> None:
        """Compute weights and losses twice; raise unless they can be compared."""
        if isinstance(self.new_net, Block) or not callable(self.new_net):
            raise TypeError("new_net must be a function that returns a new network each time.")
        net, other = self.network(seed), self.network(seed)
        for one, two in zip(net.collect_params().values(), other.collect_params().values()):
            if one is two or not np.array_equal(one.data().asnumpy(), two.data().asnumpy()):
                raise ValueError("new_net must return new networks, with equal weights for a seed.")
        batch = next(self.data.batches(self.data.seed, 0))
        losses = [recorded(self.loss_of, net, *batch) for _ in range(2)]
        what = getattr(losses[0], "shape", type(losses[0]).__name__)
        if getattr(losses[0], "size", 0) != len(batch[0]):
            raise ValueError(
                f"loss_of(net, ...) returned {what} for a mini-batch of {len(batch[0])} samples, "
                "expected the loss of each, in one array: their mean would be divided once more."
            )
        one, two = (loss.asnumpy() for loss in losses)
        self.seconds_a_pass = self._seconds(net)
        self.weights = sum(p.data().size for p in trainable_of(net))
        first = self.first["loss"]
        if not first or not isfinite(first):
            raise ValueError(f"The loss of a new network is {first:g}: nothing can be compared.")
        self.is_random = not np.allclose(one, two, rtol=1e-4, equal_nan=True)

    def _seconds(self, net: Any) -> float:
        """The seconds of a data pass of gradients, and of the measurements after it."""
        times, since = [], perf_counter()
        for batch in islice(self.data.batches(self.data.seed, 0), MINIBATCHES):
            recorded(self.loss_of, net, *batch).backward()
            mx.nd.waitall()
            times.append(perf_counter() - since)
            since = perf_counter()
        self.first = {name: number(measure(net)) for name, measure in self.measures.items()}
        steps = float(np.median(times)) * self.data.n / self.data.size
        return steps + perf_counter() - since

    def loss(self, net: Any) -> float:
        """The mean loss over the data in predict mode, plus all penalties."""
        with mx.autograd.pause(train_mode=False):
            losses = [self.loss_of(net, *batch).asnumpy() for batch in self.data.chunks()]
            penalties = number(self.penalty(net)) if self.l2 else 0.0
        for p, operator in self.operators(net).items():
            penalties += number(operator.value(_mxnet.classic(p.data())))
        return sum(float(each.sum(dtype="float64")) for each in losses) / self.data.n + penalties

    def penalty(self, net: Any) -> Any:
        """Half of l2 times the squared norm of all that is trained, as MXNet decays weights."""
        parts = [p.wd_mult * (p.data() ** 2).sum() for p in trainable_of(net)]
        return 0.5 * self.l2 * sum(parts)


def recorded(loss_of: Callable[..., Any], *arguments: Any) -> Any:
    """Losses whose gradients can be computed."""
    with mx.autograd.record():
        return loss_of(*arguments)


def number(value: Any) -> float:
    """A number, or the only entry of an array."""
    return float(value.asnumpy() if isinstance(value, mx.nd.NDArray) else value)


def trainable_of(net: Any) -> list[Any]:
    """The parameters of a network that have gradients."""
    return list(filter(_mxnet.is_trainable, net.collect_params().values()))
