"""What all methods train on: network, loss and data, looked at before the first training."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import isfinite
from time import perf_counter
from typing import Any, Callable, Sequence

import mxnet as mx
import numpy as np
from mxnet.base import MXNetError
from mxnet.gluon import Block

from .. import _mxnet
from ..passes.data import initialize
from ..prox import Prox, ProxArgument, ProximalOperators
from .data import Data

MINIBATCHES = 20  # by which the time of a gradient is measured
BESIDE_ZERO = 1e-3  # the scale of weights that would all be zero


@dataclass
class Problem:
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
        """A new network, initialized: equal for all methods of a seed."""
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
            # Some gradients of MXNet are wrong at an output of 0, as of the sigmoid cross entropy.
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
        """Look at two networks and their losses; raise unless they can be used."""
        if isinstance(self.new_net, Block) or not callable(self.new_net):
            raise TypeError(
                "new_net must be a function that returns a network, as lambda: Dense(1)."
            )
        try:
            net, other = self.network(seed), self.network(seed)
            batch = self.data.first()
            for one, two in zip(net.collect_params().values(), other.collect_params().values()):
                if one is two or not np.array_equal(one.data().asnumpy(), two.data().asnumpy()):
                    raise ValueError(
                        "new_net() must return a new network each time, with the same weights "
                        "after the same seeds."
                    )
            losses = [self._recorded(net, batch) for _ in range(2)]
        except MXNetError as error:
            shape = self.data.first()[-1].shape
            if len(shape) == 2 and shape[1] > 1:
                raise ValueError(
                    f"loss_of(net, ...) failed, and the last array has the shape {shape}. For "
                    "one-hot labels, pass y.argmax(axis=1), or use a loss with sparse_label=False."
                ) from error
            raise
        what = getattr(losses[0], "shape", type(losses[0]).__name__)
        if getattr(losses[0], "size", 0) != len(batch[0]):
            raise ValueError(
                f"loss_of(net, ...) returned {what} for a mini-batch of {len(batch[0])} samples, "
                "expected the loss of each, in one array: their mean would be divided once more."
            )
        one, two = (loss.asnumpy() for loss in losses)
        self.seconds_a_pass = self._seconds(net)
        self.weights = sum(p.data().size for p in trainable_of(net))
        if not self.first["loss"] or not isfinite(self.first["loss"]):
            raise ValueError(
                f"The loss of a new network is {self.first['loss']:g}: there is nothing to compare."
            )
        classes = self.data.classes_from_one()
        if classes:
            text = f"The labels are 1 to {classes}. If they are classes, number them from 0: pass "
            warnings.warn(f"{text}y - 1.", stacklevel=3)
        self.is_random = not np.allclose(one, two, rtol=1e-4, equal_nan=True)

    def _recorded(self, net: Any, batch: Sequence[Any]) -> Any:
        with mx.autograd.record():
            return self.loss_of(net, *batch)

    def _seconds(self, net: Any) -> float:
        """How long a data pass of gradients takes, with the measurements after it."""
        times, since = [], perf_counter()
        for batch in islice(self.data.batches(self.data.seed, 0), MINIBATCHES):
            self._recorded(net, batch).backward()
            mx.nd.waitall()
            times.append(perf_counter() - since)
            since = perf_counter()
        self.first = {name: self.measured(name, net) for name in self.measures}
        steps = float(np.median(times)) * self.data.n / self.data.size
        return steps + perf_counter() - since

    def measured(self, name: str, net: Any) -> float:
        """A measure of a network; raise a TypeError if it is no number."""
        found: Any = self.measures[name](net)
        try:
            return number(found)
        except (TypeError, ValueError) as error:
            what = f"an array of shape {found.shape}" if hasattr(found, "shape") else repr(found)
            raise TypeError(f"measure {name!r} returned {what}, expected a number.") from error

    def loss(self, net: Any) -> float:
        """The mean loss over the data when the network predicts, and all penalties."""
        with mx.autograd.pause(train_mode=False):
            losses = [self.loss_of(net, *batch).asnumpy() for batch in self.data.chunks()]
            penalties = self.penalty(net).asnumpy().item() if self.l2 else 0.0
        for p, operator in self.operators(net).items():
            penalties += number(operator.value(_mxnet.classic(p.data())))
        return sum(float(each.sum(dtype="float64")) for each in losses) / self.data.n + penalties

    def penalty(self, net: Any) -> Any:
        """Half of l2 times the squared norm of all that is trained, as MXNet decays weights."""
        parts = [p.wd_mult * (p.data() ** 2).sum() for p in trainable_of(net)]
        return 0.5 * self.l2 * sum(parts)


def number(found: Any) -> float:
    """A number, or that in an array of one."""
    return float(found.asnumpy() if isinstance(found, mx.nd.NDArray) else found)


def trainable_of(net: Any) -> list[Any]:
    """The parameters of a network that have gradients."""
    return list(filter(_mxnet.is_trainable, net.collect_params().values()))
