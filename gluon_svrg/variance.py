"""The exact variance of the estimates over a data set."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Callable, Iterable

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter

from .kvstore import job
from .passes.closure import Loss
from .passes.columns import Columns, DeviceArrays, split, vector
from .passes.data import arguments, check_data, one_pass
from .passes.estimate import PLAIN_GRADIENT, gradient_at
from .passes.points import ParameterValues
from .passes.random_lock import draw_seed
from .passes.rows import StoredGradient
from .trainer import VarianceReducedTrainer

__all__ = ["Variance", "variance"]


@dataclass(frozen=True, repr=False)
class Variance:
    """The variance of mini-batch gradients, each the *mean* over its loss entries.

    Variances are summed over all entries of all parameters: ``E |g - E g|^2``, where the weight of
    a mini-batch is its number of loss entries.

    Parameters
    ----------
    plain : float
        Variance of the plain gradient.
    estimate : float
        Variance of the estimate of the trainer's method, as the optimizer gets it, or with a
        preconditioner before that.
    ratio : float
        ``estimate / plain``; below 1 the method reduces the variance.
    bias : float
        Norm of the difference between the mean of the estimate and the mean gradient: zero up to
        rounding for SVRG, and for SAGA with a full table, on their own data without random numbers.
    cosine_distance_plain : float
        Mean of ``1 - cos`` over all pairs of plain gradients of different mini-batches, without
        those that are zero; nan if there is no pair.
    cosine_distance_estimate : float
        The same for the estimates.
    best_coefficient : float
        The factor of the subtracted term (for SVRG ``r - c mu``) that would minimize the variance,
        for all parameters together; nan if that term does not vary. Of MARS only where it does not
        clip, and never of SAG.
    best_coefficients : dict
        The same for each parameter separately.
    distance : float
        Distance from the weights to the snapshot, or to those before the last step; nan if none
        are kept.
    gradient_norm : float
        Norm of the mean gradient at the current weights.
    minibatches : int
        Number of mini-batches.
    """

    plain: float
    estimate: float
    ratio: float
    bias: float
    cosine_distance_plain: float
    cosine_distance_estimate: float
    best_coefficient: float
    best_coefficients: dict[Parameter, float]
    distance: float
    gradient_norm: float
    minibatches: int

    def __repr__(self) -> str:
        names = ("plain", "estimate", "ratio", "bias", "noise")
        return f"Variance({', '.join(f'{name}={getattr(self, name):.3g}' for name in names)})"

    @property
    def noise(self) -> float:
        """Noise relative to the signal, of a plain gradient: ``plain / gradient_norm ** 2``.

        Less variance permits a step size that is larger by a factor of at most ``1 + noise``. If
        that is below the cost of a method's gradients, the method loses even if `ratio` is small.
        """
        signal = self.gradient_norm**2
        return self.plain / signal if signal > 0 else float("inf")


def variance(
    trainer: VarianceReducedTrainer,
    closure: Callable[..., Loss],
    data: Iterable[Any],
    *,
    progress: bool = False,
) -> Variance:
    """Compute the variance of the plain gradient and of a method's estimate over a data set.

    This makes one pass over the data, with at most two gradients for each mini-batch, and needs
    ten times the memory of the parameters, in float64. It changes nothing in the trainer or the
    network. Under the random lock, later random numbers continue from a new seed.

    Parameters
    ----------
    trainer : SVRGTrainer, SAGATrainer, SAGTrainer, SARAHTrainer, STORMTrainer or MARSTrainer
        The trainer, with a snapshot, a table, or at least one step.
    closure : callable
        Returns the loss of one mini-batch, as for `SVRGTrainer.update_full_grads`.
    data : iterable
        The mini-batches, as for `SVRGTrainer.update_full_grads`; for a table, in the order of its
        rows, of which those that no step has visited are zero.
    progress : bool, default False
        Whether to show a progress bar (needs tqdm).

    Returns
    -------
    Variance
        The variances, their ratio, and the other measures.

    Raises
    ------
    TypeError, ValueError, IndexError, RuntimeError
        As `SVRGTrainer.correct_grads`; if there is no snapshot or table, no correction, or no data.
    ImportError
        With ``progress=True``, if tqdm is not installed.

    Examples
    --------
    >>> import mxnet as mx
    >>> from mxnet import gluon
    >>> from gluon_svrg import SVRGTrainer
    >>> from gluon_svrg.variance import variance
    >>> net = gluon.nn.Dense(1, in_units=2)
    >>> net.initialize()
    >>> ones = mx.np.ones if mx.util.is_np_array() else mx.nd.ones
    >>> data = [(k * ones((3, 2)), ones((3, 1))) for k in range(1, 5)]
    >>> def loss_of(X, y):
    ...     return gluon.loss.L2Loss()(net(X), y)
    >>> trainer = SVRGTrainer(net.collect_params(), 'sgd', {'learning_rate': 0.01})
    >>> mean_loss = trainer.update_full_grads(loss_of, data)
    >>> variance(trainer, loss_of, data).ratio < 1e-6  # at the snapshot
    True
    """
    check_data(data, closure)
    if not isinstance(trainer, VarianceReducedTrainer):
        name = type(trainer).__name__
        raise TypeError(f"variance() needs an SVRGTrainer, or another of this package, got {name}.")
    trainer._check_outside("variance")
    method, why = trainer._method, ""
    if not trainer._is_in_force() or not method.has_state:
        why = "the table is empty" if method.needs_table else "there is no snapshot"
    elif not method.needs_table and method.terms(None, {}) is PLAIN_GRADIENT:
        why = (
            f"as it is set up here, {method.name} corrects no gradients (coefficient, gamma or "
            "beta 0, mixing 1, or vectors alone without include_vectors)"
        )
    if why:
        raise RuntimeError(f"variance() needs gradients to compare with: {why}.")
    trainer._bind()
    network, locked, scale = method.network, trainer._lock.locked, trainer._loss_scale.value
    here, moments = ParameterValues.here(network), _Moments(network.grads[0])
    m: Any = 0.0 if method.mean is None else method.mean.vector()
    is_seeded = False
    with ExitStack() as stack:
        stack.enter_context(network.grads_kept())
        batches, _ = stack.enter_context(one_pass(data, progress=progress))
        for number, batch in enumerate(job.rearming(batches)):
            inputs, seed = arguments(batch), number + 1 if locked else None
            index = number if method.needs_table else None
            terms = method.terms(index, {})
            coefficient, reference = abs(terms.b or terms.k), terms.reference
            if isinstance(reference, StoredGradient) and reference.seed is not None:
                seed = reference.seed
            if seed is not None and not is_seeded:
                is_seeded = True
                stack.callback(mx.random.seed, draw_seed())
            with network.outside.protected(gradients=True, search=True):
                recorded, _ = gradient_at(here, closure, inputs, seed, scale)
                g = _mean(network.grads, recorded.entries * scale)
                v = terms.a * g + terms.k * m  # + b r, if there is a reference
                if isinstance(reference, ParameterValues):
                    there, _ = gradient_at(reference, closure, inputs, seed, scale)
                    v += terms.b * _mean(network.grads, there.entries * scale)
                elif reference is not None:
                    reference.check_counts(recorded.counts)
                    v += terms.b * _mean(reference.grads, recorded.entries)
                network.check_hidden()
            if terms.select is not None:
                v = np.where(np.repeat(terms.select, moments.sizes), v, g)
            moments.add(recorded.entries, g, method.optimizer_gradient(v, recorded.entries, index))
    if not moments.minibatches:
        raise ValueError("There was no data to compute a variance over.")
    distance = float("nan")
    if method.point is not None:
        now, then = ([row[0] for row in point.weights] for point in (here, method.point))
        distance = float(np.linalg.norm(vector(now) - vector(then)))
    return moments.result(network.trainable, coefficient, distance)


def _mean(sums: Columns, divisor: float) -> Any:
    """The sum over all devices, divided by a number: a vector of all parameters."""
    return sum(map(vector, sums)) / divisor


class _Moments:
    """Sums over mini-batches of plain gradients g, and of d = g - v, where v is the estimate."""

    def __init__(self, grads: DeviceArrays) -> None:
        self.sizes = [grad.size for grad in grads]
        self.minibatches = self._entries = 0
        self._plain, self._difference, *self._units = np.zeros((4, sum(self.sizes)))
        self._squares = np.zeros((len(grads), 3))
        self._with_direction = [0, 0]  # plain gradients and estimates that are not zero

    def add(self, count: int, g: np.ndarray, v: np.ndarray) -> None:
        """Add a mini-batch, weighted by its number of entries."""
        d = g - v
        self.minibatches += 1
        self._entries += count
        self._plain += count * g
        self._difference += count * d
        self._squares += count * self._products(g, d)
        for n, x in enumerate((g, v)):
            norm = np.linalg.norm(x)
            if norm > 0:
                self._units[n] += x / norm
                self._with_direction[n] += 1

    def result(self, parameters: list[Parameter], coefficient: float, distance: float) -> Variance:
        """Turn sums into variances. In ``d`` the coefficient is a factor, but for clips and SAG."""
        means = self._plain / self._entries, self._difference / self._entries
        central = self._squares / self._entries - self._products(*means)
        best = [coefficient * _ratio(row[2], row[1]) for row in central.tolist()]
        plain, difference, both = central.sum(axis=0).tolist()
        estimate, plain = max(plain - 2 * both + difference, 0.0), max(plain, 0.0)
        return Variance(
            plain=plain,
            estimate=estimate,
            ratio=_ratio(estimate, plain),
            bias=float(np.linalg.norm(means[1])),
            cosine_distance_plain=_cosine_distance(self._units[0], self._with_direction[0]),
            cosine_distance_estimate=_cosine_distance(self._units[1], self._with_direction[1]),
            best_coefficient=coefficient * _ratio(both, difference),
            best_coefficients=dict(zip(parameters, best)),
            distance=distance,
            gradient_norm=float(np.linalg.norm(means[0])),
            minibatches=self.minibatches,
        )

    def _products(self, g: np.ndarray, d: np.ndarray) -> np.ndarray:
        """For each parameter, the sums of g^2, d^2 and g d over its entries."""
        parts = zip(split(g, self.sizes), split(d, self.sizes))
        return np.array([[x @ x, y @ y, x @ y] for x, y in parts])


def _cosine_distance(unit_sum: np.ndarray, count: int) -> float:
    """Compute it from the sum of unit vectors, whose squared norm has all cosines in it."""
    return 1 - _ratio(float(unit_sum @ unit_sum - count), count * (count - 1))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else float("nan")
