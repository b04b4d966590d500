"""What the variance of the estimates is, exactly, over a data set."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Sequence

import numpy as np
from mxnet.gluon import Parameter

from .passes import random_lock
from .passes.batches import arguments, one_pass
from .passes.closure import Loss, check_closure
from .passes.network import check_dependent
from .passes.points import Point
from .passes.sums import new_sum
from .svrg import SVRGTrainer

__all__ = ["Variance", "variance"]


@dataclass(frozen=True)
class Variance:
    """The variance of minibatch gradients, each the *mean* over its loss entries.

    Variances are summed over all entries of all parameters: ``E |g - E g|^2``, where a minibatch
    weighs as many as it has loss entries.

    Parameters
    ----------
    plain : float
        Variance of the plain gradient.
    svrg : float
        Variance of the SVRG estimate, with the coefficient in force.
    ratio : float
        ``svrg / plain``; below 1 the control variate helps.
    cosine_distance_plain, cosine_distance_svrg : float
        Mean of ``1 - cos`` over all pairs of different minibatches.
    best_coefficient : float
        The one that would minimise the variance, for all parameters together; nan where the
        control variate does not vary.
    best_coefficients : dict
        The same for each parameter by itself.
    distance : float
        Norm of the difference between the weights and the snapshot.
    gradient_norm : float
        Norm of the mean gradient at the current weights.
    minibatches : int
        How many there were.
    """

    plain: float
    svrg: float
    ratio: float
    cosine_distance_plain: float
    cosine_distance_svrg: float
    best_coefficient: float
    best_coefficients: dict[Parameter, float]
    distance: float
    gradient_norm: float
    minibatches: int


def variance(
    trainer: SVRGTrainer,
    closure: Callable[..., Loss],
    data: Iterable[Any],
    *,
    progress: bool = False,
) -> Variance:
    """Compute the variance of the plain gradient and of the SVRG estimate over a data set.

    One pass over the data, with two gradients for each minibatch. Nothing in the trainer or the
    network is changed. MXNet cannot save its random numbers: under the random lock they go on from
    a seed that is drawn first.

    Parameters
    ----------
    trainer : SVRGTrainer
        With a snapshot.
    closure : callable
        Returns the loss of one minibatch, as for `SVRGTrainer.update_full_grads`.
    data : iterable
        The minibatches, as for `SVRGTrainer.update_full_grads`.
    progress : bool, default False
        Whether to show a progress bar (needs tqdm).

    Returns
    -------
    Variance
        What was found.

    Raises
    ------
    RuntimeError
        Without a snapshot.
    ValueError
        If there is no data.
    TypeError, ValueError, RuntimeError
        As `SVRGTrainer.correct_grads`.

    Notes
    -----
    Needs ten times the memory of the parameters, whatever the number of minibatches.
    """
    check_closure(closure)
    terms, network, locked = trainer.ready_to_compare("variance")
    there: Any = terms.reference
    here = Point.untouched(network)
    mean = [row[0].asnumpy().astype("float64").ravel() for row in terms.mean or ()]
    moments = _Moments([part.size for part in mean], -terms.b)
    scale = trainer.loss_scale
    with ExitStack() as stack:
        if locked:  # what is drawn afterwards does not depend on the data
            stack.callback(random_lock.start, random_lock.draw_seed())
        stack.enter_context(network.grads_kept())
        batches, _ = stack.enter_context(one_pass(data, progress=progress))
        for number, batch in enumerate(batches):
            inputs, seed = arguments(batch), number + 1 if locked else None
            with network.outside.protected(search=True):
                plain, count = _mean_grad(here, closure, inputs, scale, seed)
                then, _ = _mean_grad(there, closure, inputs, scale, seed)
            moments.add(count, plain, [r - m for r, m in zip(then, mean)])
    if not moments.minibatches:
        raise ValueError("There was no data to compute a variance over.")
    squares = [
        float(np.sum((now[0].asnumpy().astype("float64") - then[0].asnumpy()) ** 2))
        for now, then in zip(here.weights, there.weights)
    ]
    return moments.result(network.trainable, float(np.sqrt(sum(squares))))


def _mean_grad(
    point: Point,
    closure: Callable[..., Loss],
    inputs: Sequence[Any],
    scale: float,
    seed: int | None,
) -> tuple[list[np.ndarray], int]:
    """The mean gradient of a minibatch over all devices, per parameter, and its loss entries."""
    total = new_sum(point.network, scale)
    total.put()

    def work() -> int:
        recorded = point.network.record(closure, inputs)
        total.add(recorded)
        return recorded.entries

    random_lock.start(seed)
    count = point.at(work)
    check_dependent(point.take_touched())
    point.network.check_hidden()
    divisor = count * scale
    return [
        sum(grad.asnumpy().astype("float64") for grad in row).ravel() / divisor
        for row in total.arrays
    ], count


class _Moments:
    """Weighted first and second moments of the gradient and of the control variate."""

    def __init__(self, sizes: list[int], coefficient: float) -> None:
        self._coefficient = coefficient
        self._entries = 0.0
        self.minibatches = 0
        # Per parameter: sums of vectors, and of squares and products.
        self._plain, self._control, self._plain_unit, self._svrg_unit = (
            [np.zeros(size) for size in sizes] for _ in range(4)
        )
        self._squares = np.zeros((len(sizes), 3))  # plain^2, control^2, plain * control

    def add(self, count: int, plain: list[np.ndarray], control: list[np.ndarray]) -> None:
        """Add a minibatch, that weighs as many as it has entries."""
        self.minibatches += 1
        self._entries += count
        svrg = [g - self._coefficient * c for g, c in zip(plain, control)]
        norms = [np.sqrt(sum(np.dot(x, x) for x in vector)) or 1.0 for vector in (plain, svrg)]
        for k, (g, c, v) in enumerate(zip(plain, control, svrg)):
            self._plain[k] += count * g
            self._control[k] += count * c
            self._plain_unit[k] += g / norms[0]
            self._svrg_unit[k] += v / norms[1]
            self._squares[k] += count * np.array([np.dot(g, g), np.dot(c, c), np.dot(g, c)])

    def result(self, parameters: list[Parameter], distance: float) -> Variance:
        """Turn sums into variances."""
        means = [[x / self._entries for x in sums] for sums in (self._plain, self._control)]
        central = self._squares / self._entries
        for k, (g, c) in enumerate(zip(*means)):
            central[k] -= [np.dot(g, g), np.dot(c, c), np.dot(g, c)]
        plain, control, both = np.maximum(central.sum(axis=0), [0, 0, -np.inf])
        svrg = max(plain - 2 * self._coefficient * both + self._coefficient**2 * control, 0.0)
        return Variance(
            plain=float(plain),
            svrg=float(svrg),
            ratio=_ratio(svrg, plain),
            cosine_distance_plain=self._cosine_distance(self._plain_unit),
            cosine_distance_svrg=self._cosine_distance(self._svrg_unit),
            best_coefficient=_ratio(both, control),
            best_coefficients={
                parameter: _ratio(row[2], row[1]) for parameter, row in zip(parameters, central)
            },
            distance=distance,
            gradient_norm=float(np.sqrt(sum(np.dot(g, g) for g in means[0]))),
            minibatches=self.minibatches,
        )

    def _cosine_distance(self, units: list[np.ndarray]) -> float:
        """From the norm of the sum of all unit vectors: cosines of all pairs are in it."""
        count = self.minibatches
        if count < 2:
            return float("nan")
        cosines = sum(np.dot(u, u) for u in units) - count
        return float(1 - cosines / (count * (count - 1)))


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole > 0 else float("nan")
