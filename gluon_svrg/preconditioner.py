"""Curvature from gradients: a preconditioner, and the rate and momentum that follow from it.

The estimate v of the gradient, weight decay included, is multiplied by an approximate inverse of
the Hessian H, whose products with random vectors Q are known (Nystrom's approximation)::

    H u ~ ( gradient(w + e z + e u) - gradient(w + e z) ) / e      of one minibatch; z is random
    Y = H Q,   Y (Q'Y)^-1 Y' = U S U',   P = U S U' + rho I,   P^-1 v = v / rho + U b U'v

In the metric of P, L is the largest curvature of minibatches, and N the noise of their Hessians.
Both are measured once, by products with two minibatches. Then each step tells them anew: d is the
difference of its gradients at w and at the snapshot s, and d_ that of the step before::

    L: of the secants d P^-1 d / d (w - s) of an epoch, nine in ten are below it
    N = sum |d - d_|^2 / 2 / sum d (w - s),            |x|^2 = x P^-1 x
    rate = min(0.5 / L, T / N),     momentum = 1 - max(0.02, rate N / T)

T, the trust, is how much noise an epoch may have. It rises where the full gradient still points
along the last way, and falls where it does not. Within an epoch the rate falls linearly, to a
tenth. A larger secant than L lowers it at once, by 4 at most, and its own step is shortened.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from math import inf, isfinite, prod, sqrt
from typing import Any, Callable, Iterator, NamedTuple

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from . import _arguments, _mxnet, saving
from .passes import states
from .passes.closure import Loss
from .passes.columns import vector
from .passes.direction import Direction
from .passes.estimate import differentiate
from .passes.full_pass import FullGradient
from .passes.network import Network
from .passes.points import Point

BUDGET = 0.25  # of a sketch, in data passes; but it takes a whole minibatch
LEAST_ROWS = 4  # samples of a sketch for each vector
STABLE = 0.5  # the largest product of the rate and the curvature
LEAST_RATE = 0.1  # at the end of an epoch, as a part of that at its beginning
LEAST_DAMPING, MOST_DAMPING = 0.02, 1 - 1e-6  # of 1 - momentum; without any, MXNet keeps no array
PRODUCTS = 3  # of a power iteration
FLAT = 6  # the most pairs of minibatches without any curvature, each looked at from farther away
MOST_SECANTS = 0.9  # of an epoch, that are below L
FIRST_TRUST, LEAST_TRUST, MOST_TRUST = 0.3, 0.1, 3.0
RISE, FALL = 3.0, 2.0  # of the trust
TURN = 0.05  # the trust rises where so much of the last slope is left
BACK = 4.0  # L rises and trust falls by it as weights go back
MOST_CHANGE = 4.0  # the largest factor of L, for a step upward, at a refresh downward
AGAIN = 2  # the refresh, from 0, of a second sketch where the first one was at the start
WINDOW = 8  # the steps whose mean rise tells that weights are lost
ROUNDING = 8  # of a mean loss, in units of its dtype
NEAR = 1e-12  # of squared norms: nearer to the snapshot, differences of gradients are rounding
TINY = 1e-300
VECTORS = ("U", "z", "Q", "Y", "first", "last_d")  # of all trainable weights, in rows

NOT_FINITE = (
    "The curvature of the loss cannot be measured: gradients beside the current weights are not "
    "finite (NaN or infinity). Are the data finite? Begin with smaller weights."
)
NOT_CURVED = (
    "No direction was found in which the loss curves upward, and so no learning rate. Begin at "
    "other weights, or leave the preconditioner out."
)


@dataclass(frozen=True)
class Nystrom:
    """A preconditioner that learns the curvature of the loss from gradients [1]_.

    An `SVRGTrainer` with one sets its learning rate and momentum itself. It measures products with
    the Hessian, as differences of gradients of the closure: in the first two steps, and in the
    first ones after the first refresh, with about a quarter of the data.

    Parameters
    ----------
    rank : int, default 50
        How many directions it knows, at most: fewer where there are few weights or loss entries. It
        keeps so many times the parameters' memory. With 0 it sets the rate and the momentum alone.

    Raises
    ------
    TypeError, ValueError
        If ``rank`` is no whole number, or is negative.

    References
    ----------
    .. [1] Z. Frangella, P. Rathore, S. Zhao and M. Udell, "PROMISE: Preconditioned Stochastic
       Optimization Methods by Incorporating Scalable Curvature Estimates", JMLR 25(346), 2024.

    Examples
    --------
    >>> from gluon_svrg import Nystrom
    >>> Nystrom(rank=20)
    Nystrom(rank=20)
    """

    rank: int = 50

    def __post_init__(self) -> None:
        _arguments.whole(self.rank, "rank", 0)


class Inverse(NamedTuple):
    """P, as the function that multiplies by a power of its inverse."""

    U: np.ndarray  # the directions of the sketch, in rows
    S: np.ndarray  # the curvatures there
    rho: float  # the curvature of all others

    def __call__(self, v: np.ndarray, power: float = 1.0) -> np.ndarray:
        """Multiply a vector."""
        return v * self.rho**-power + (self.factors(power) * (self.U @ v)) @ self.U

    def factors(self, power: float = 1.0) -> np.ndarray:
        """What the power has in the directions of the sketch, above all others."""
        return (self.S + self.rho) ** -power - self.rho**-power


def nystrom(Q: np.ndarray, Y: np.ndarray, entries: float, decay: float, eps: float) -> Inverse:
    """P from products Y of a Hessian with vectors Q, both in rows; S below zero is cut."""
    values, V = np.linalg.eigh((Q @ Y.T + Y @ Q.T) / 2)
    shift = max(10 * eps * float(np.linalg.norm(Y, 2)), -1.1 * values[0])
    root = (V / np.sqrt(values + shift)).T @ (Y + shift * Q)
    _, sizes, U = np.linalg.svd(root, full_matrices=False)
    S = np.maximum(sizes**2 - shift, 0)
    return Inverse(U, S, max(decay + max(S[-1], S.sum() / entries), shift))


class Measurement(NamedTuple):
    """What is being measured: products for P, where there is a Q, and after that L and N."""

    z: np.ndarray  # a unit vector: gradients are taken beside it, where no weight is 0
    # The sketch, by minibatches until they have entries enough
    Q: np.ndarray | None = None  # orthonormal vectors, in rows
    Y: np.ndarray | None = None  # the products with these, summed over all entries
    entries: float = 0.0
    wanted: float = 0.0
    # Power iterations with one minibatch and with another, which begin at z
    bound: float = 0.0  # what the curvature is at most, for all that is known; or 0
    largest: float = 0.0  # the largest curvature so far
    first: np.ndarray | None = None  # the first product with the first minibatch
    flat: int = 0  # how many pairs of minibatches had no curvature


#: What a `Curvature` has of these kinds.
TUPLES: dict[str, Any] = {"P": Inverse, "job": Measurement}


class Curvature:
    """What one trainer knows of the curvature, in NumPy: vectors have all trainable weights."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.P: Inverse | None = None  # None stands for the unit matrix
        self.job: Measurement | None = None  # what is being measured
        self.measurements = 0  # their random numbers follow from their count
        self.L = self.N = 0.0
        self.trust = FIRST_TRUST
        self.first_rate, self.momentum = 0.0, 1 - LEAST_DAMPING  # of an epoch
        self.largest_norm = 0.0  # of the measured gradients, before the first refresh
        # Since the last refresh
        self.steps = 0
        self.backs = 0  # how often the weights have gone back
        # Since that, or since the weights have gone back
        self.before = 0.0  # what L was then
        self.secants: list[float] = []
        self.noise = self.along = 0.0  # the sums whose ratio is N
        self.squared: float | None = None  # |d|^2 of the last step
        self.rises: list[float] = []  # of the loss above the snapshot's, in the last steps
        # Replaced at a refresh; losses have the weight decay
        self.refreshes = 0
        self.planned = 0  # the steps between the last two refreshes
        self.again = 0  # the refresh of the second sketch, if there is one
        self.first_loss = self.loss = inf  # at the start, and at the snapshot
        self.mean_loss = inf  # the same without the decay

    def begin(self, size: int, entries: float = 0.0) -> None:
        """Begin to measure L and N; where the entries of all data are given, P before that."""
        self.measurements += 1
        random = np.random.RandomState(self.measurements)
        z = random.randn(size)
        z /= np.linalg.norm(z)
        self.job = Measurement(z, bound=self.L)
        rank = min(self.rank, size, int(sqrt(BUDGET * entries / LEAST_ROWS)) or 1)
        if entries and rank:
            Q, wanted = np.linalg.qr(random.randn(size, rank))[0].T, BUDGET * entries / (rank + 1)
            self.job = Measurement(z, Q, np.zeros_like(Q), wanted=wanted)

    def measure(
        self,
        mean_gradient: Callable[[np.ndarray], tuple[np.ndarray, float]],
        weights: np.ndarray,
        decays: np.ndarray,
        eps: float,
    ) -> None:
        """Measure with a minibatch, by its mean gradient at any weights, and its loss entries."""
        job = self.job
        assert job is not None
        step = eps ** (1 / 3) * max(1.0, float(np.linalg.norm(weights)))
        at = weights + step * job.z
        if job.flat:  # from far away, on both sides
            step *= 10.0**job.flat
            at = weights - step / 2 * job.z

        def product(u: np.ndarray) -> np.ndarray:
            size = float(np.linalg.norm(u)) or 1.0
            return (mean_gradient(at + step / size * u)[0] - here) * (size / step)

        here, count = mean_gradient(at)
        if not count:
            return
        self.largest_norm = max(self.largest_norm, float(np.linalg.norm(here + decays * at)))
        if job.Q is None:
            self._iterate(job, lambda u: product(u) + decays * u)
            return
        Y = job.Y + count * np.stack([product(q) for q in job.Q])
        entries = job.entries + count
        self.job = job._replace(Y=Y, entries=entries)
        if entries >= job.wanted:
            bound = self.L
            if Y.any():  # else all is flat, and P stays
                P = nystrom(job.Q, Y / entries, entries, float(decays.max()), eps)
                bound *= float((1.0 if self.P is None else self.P.S[0] + self.P.rho) / P.rho)
                self.P, self.L = P, 0.0
                self._begin()
            self.job = Measurement(job.z, bound=bound)

    def _iterate(self, job: Measurement, product: Callable[[np.ndarray], np.ndarray]) -> None:
        """Measure the largest curvature, and with the second minibatch the noise."""
        v, largest, products = job.z, job.largest, []
        for _ in range(PRODUCTS):
            products.append(self.solve(product(self.solve(v, 0.5)), 0.5))
            largest = max(largest, float(v @ products[-1]))
            v = products[-1] / (float(np.linalg.norm(products[-1])) or 1.0)
        if job.first is None:
            self.job = job._replace(largest=largest, first=products[0])
            return
        if largest <= 0 and job.flat < FLAT:
            self.job = job._replace(first=None, flat=job.flat + 1)
            return
        if largest <= 0 and not job.bound:
            raise FloatingPointError(NOT_CURVED)
        along = max(float(job.z @ (job.first + products[0])), TINY)
        noise = float(np.linalg.norm(job.first - products[0])) ** 2 / along
        self.N = min(noise, 2 * largest)  # it is less wherever the loss is convex
        self.job, self.L = None, max(self.L, largest or job.bound)
        self._begin()

    def solve(self, v: np.ndarray, power: float = 1.0) -> np.ndarray:
        """Multiply a vector by a power of the inverse of P."""
        return v if self.P is None else self.P(v, power)

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        part = 1 - self.steps / self.planned if self.planned else 1.0
        return self.first_rate * max(part, LEAST_RATE)

    @property
    def most(self) -> float:
        """What shortens a step: a larger curvature, or before the first refresh a larger norm."""
        return self.L if self.refreshes else self.largest_norm

    def _begin(self) -> None:
        """Set the rate and the momentum, and look at steps from now on; without L, none moves."""
        most = self.trust / self.N if self.N else inf
        self.first_rate = min(STABLE / self.L, most) if self.L else 0.0
        damping = max(LEAST_DAMPING, self.first_rate * self.N / self.trust)
        self.momentum, self.before = 1 - min(damping, MOST_DAMPING), self.L
        self.secants, self.noise, self.along, self.rises = [], 0.0, 0.0, []

    def read(self, sums: np.ndarray, near: float) -> None:
        """Learn from the sums of a step, see `passes.direction`; nearer moves say nothing."""
        if sums.size == 1:  # |v|^2, without a snapshot
            self.rises = [float(sums[0, 0]) * 0.0]
            return
        (squared, _, _, cross), (along, moved, slope, _) = sums.tolist()
        self.rises = [*self.rises, slope + along / 2][-WINDOW:]  # the trapezoid rule
        if along > 0 and moved > near:
            secant = squared / along
            self.secants.append(secant)
            if secant > MOST_CHANGE * self.L > 0:  # of few rows; the step was shortened
                squared = None
            elif self.squared is not None:
                self.noise += (squared + self.squared) / 2 - cross
                self.along += along
            if secant > self.L > 0:
                self.L = min(secant, MOST_CHANGE * self.L)
                self.first_rate = min(self.first_rate, STABLE / self.L)
        self.squared = squared

    @property
    def is_lost(self) -> bool:
        """Whether the last steps have led above the first loss, or to what is not finite."""
        if not all(map(isfinite, self.rises)):
            return True
        rise = sum(self.rises) / WINDOW
        return len(self.rises) == WINDOW and rise > self.first_loss - self.loss

    def _learn_noise(self, least: float = 0.0) -> None:
        if self.along > 0:
            self.N = max(least, self.noise / self.along)

    def go_back(self) -> None:
        """Slow down, as the weights go back to those of the snapshot, or of the start."""
        self.backs += 1
        self.trust, self.L = max(self.trust / BACK, LEAST_TRUST), max(self.L, self.before * BACK)
        self._learn_noise(self.N)
        self._begin()

    def refresh(self, size: int, entries: int, turned: float | None) -> None:
        """Take a new snapshot; `turned` is the slope along the last way over that before it."""
        if turned is not None:
            rises = min(self.trust * RISE, MOST_TRUST)
            self.trust = rises if turned > TURN else max(self.trust / FALL, LEAST_TRUST)
        if self.secants:
            self.L = max(float(np.quantile(self.secants, MOST_SECANTS)), self.L / MOST_CHANGE)
            self._learn_noise()
        if self.refreshes in (0, self.again):
            self.begin(size, entries)
        self.refreshes += 1
        self._begin()


class Preconditioner:
    """What the trainer asks of a `Nystrom`: its curvature, with the arrays on the device."""

    def __init__(self, method: Any, rank: int) -> None:
        self.curvature, self._method = Curvature(rank), method
        self._direction: Any = None  # known when it is bound
        self.start: Point | None = None  # the weights before the first step, until a refresh
        self._pending: list[NDArray] = []  # the sums of the last steps, not read yet
        self._snapshot: Any = None  # its weights, and the slope there with the decay
        self._near = 0.0  # moves with a smaller squared norm say nothing

    _network = property(lambda self: self._method.network)
    _optimizer = property(lambda self: self._method.optimizer)

    @property
    def _sizes(self) -> list[int]:
        """Of the trainable parameters."""
        return [prod(p.shape) for p in states.parameters(self._network).values()]

    def bind(self, method: Any) -> None:
        """Bind to new arrays of the parameters; raise if they cannot be one vector."""
        network, self._method = method.network, method
        self.decays = self._checked_decays()
        self._eps = float(np.finfo(_mxnet.dtype_of(network.trainable[0])).eps)
        if method.point is None:  # all that was learned belongs to other arrays
            self.curvature, self.start, self._pending = Curvature(self.curvature.rank), None, []
            self.curvature.begin(len(self.decays))
        self._direction = Direction(network, self.decays)
        self._show()

    def _checked_decays(self) -> np.ndarray:
        """The weight decay of each weight; raise if the parameters cannot be one vector."""
        _check_parameters(self._network)
        decays = [self._optimizer.wd * p.wd_mult for p in self._network.trainable]
        return np.repeat(np.asarray(decays, "float32").astype("float64"), self._sizes)

    def check_decays(self) -> None:
        """Raise a ValueError if the weight decay is another one than that of the last steps."""
        if (self._checked_decays() != self.decays).any():
            raise ValueError(
                "The weight decay has changed, and with it the loss whose curvature the "
                "preconditioner knows. Call discard_snapshot() after such a change."
            )

    def _show(self) -> None:
        """Give the device what was learned, and the snapshot."""
        give, P = self._direction.give, self.curvature.P
        if P is not None:
            give(U=P.U, b=P.factors(), per_rho=[1 / P.rho])
        self._snapshot, self.curvature.squared = None, None
        if self._method.point is not None:
            s = self._weights(self._method.point)
            slope = self._method.mean.vector() + self.decays * s
            give(s=s, slope=slope, solved_slope=self.curvature.solve(slope))
            self._snapshot, self._near = (s, slope), NEAR * float(s @ s)

    def _weights(self, there: Any) -> np.ndarray:
        """The weights of a network or of a point. Waits for them."""
        return vector(row[0] for row in there.weights)

    def _with_decay(self, mean_loss: float, there: Any) -> float:
        with np.errstate(over="ignore", invalid="ignore"):  # of weights far away
            return mean_loss + float(self.decays @ self._weights(there) ** 2) / 2

    # --- steps ---------------------------------------------------------------------------------

    def measure(self, closure: Callable[[], Loss], seed: int, workers: Any) -> int:
        """Measure with a minibatch, inside `Network.grads_kept`; the entries differentiated."""
        network, found, metric = self._network, self.curvature, self.curvature.P
        if self.start is None and not found.refreshes:
            self.start = Point.copied(network, frozen=True)
        point, ends = Point.copied(network, frozen=False), np.cumsum(self._sizes)[:-1]
        differentiated = 0

        def mean_gradient(weights: np.ndarray) -> tuple[np.ndarray, float]:
            nonlocal differentiated
            for row, piece in zip(point.weights, np.split(weights, ends)):
                for array in map(_mxnet.classic, row):
                    array[:] = piece.reshape(array.shape)
            recorded, _ = differentiate(point, closure, (), seed, 1.0)
            differentiated += recorded.entries
            (entries,) = workers.sum_numbers([recorded.entries])
            network.sum_everywhere(network.live, workers.sum_arrays)
            mean = vector(network.live[0]) / max(entries, 1.0)
            if not np.isfinite(mean).all():
                raise FloatingPointError(NOT_FINITE)
            return mean, entries

        found.measure(mean_gradient, self._weights(network), self.decays, self._eps)
        if found.P is not metric:
            self._pending = []
            self._show()
        return differentiated

    def hand_over(self, entries: float | NDArray, scale: float) -> NDArray:
        """Replace V by the direction, in the reduced gradients; the sums of the step."""
        return self._direction.hand_over(entries, scale, self.curvature.most)

    def set_pace(self) -> None:
        """Set the optimizer's rate and momentum; what it is handed over is a mean."""
        optimizer, found = self._optimizer, self.curvature
        optimizer.lr, optimizer.momentum, optimizer.rescale_grad = found.rate, found.momentum, 1.0

    def moved(self, sums: NDArray) -> None:
        """Keep the sums of a step, once: an interrupt can repeat this."""
        if not any(sums is each for each in self._pending):
            self._pending = [*self._pending, sums]
            self.curvature.steps += 1
            self._direction.keep()

    def read(self, lag: int) -> None:
        """Learn from all steps but the last ones."""
        while len(self._pending) > lag:
            sums, *self._pending = self._pending
            self.curvature.read(sums.asnumpy(), self._near)

    def go_back(self) -> None:
        """Slow down; the weights are those of the snapshot again, or of the start."""
        self._pending = []
        self.curvature.go_back()

    # --- refreshes -----------------------------------------------------------------------------

    def begin_at(self, mean_loss: float) -> None:
        """Take over the loss at the start, above which a training must not end."""
        self.curvature.first_loss = self._with_decay(mean_loss, self.start)

    def accepts(self, full: FullGradient) -> bool:
        """Whether a refresh may take a snapshot; False if the weights must go back."""
        found, loss = self.curvature, self._with_decay(full.mean_loss, self._network)
        if self._snapshot is None and self.start is None:
            return True  # there is no way back
        most = found.first_loss if self._snapshot is None else found.loss
        return loss <= most + ROUNDING * self._eps * abs(most)

    def refreshed(self, method: Any, full: FullGradient) -> Preconditioner:
        """What follows from a new snapshot of a method; this object stays as it is."""
        new = copy(self)
        new.curvature, new._direction = copy(self.curvature), copy(self._direction)
        new.start, new._pending, found, new._method = None, [], new.curvature, method
        new._show()
        loss, (s, slope) = self._with_decay(full.mean_loss, method.point), new._snapshot
        turned = None
        if self._snapshot is None:
            if self.start is None:  # this is the start
                found.again, found.first_loss = AGAIN, loss
        elif (s != self._snapshot[0]).any():  # without a step, nothing has been learned
            last, last_slope = self._snapshot
            turned = float(slope @ (s - last)) / min(float(last_slope @ (s - last)), -TINY)
        found.loss, found.mean_loss = min(loss, found.loss), full.mean_loss
        found.refresh(len(s), full.all_entries, turned)
        return new

    def end_epoch(self) -> dict[str, float]:
        """Count steps anew, after a refresh; a part of a line of `history`."""
        found = self.curvature
        backs, found.backs = found.backs, 0
        found.planned, found.steps = found.steps, 0
        told = {"learning_rate": found.rate, "momentum": found.momentum}
        return {**told, "curvature": found.L, "noise": found.N, "went_back": backs}

    # --- a part of a file ----------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """All that was learned, with vectors by parameter; None before the first step."""
        if self._direction is None:
            return None
        last_d = self._direction.last_d.asnumpy() if self._snapshot else None
        start = self.start
        return {
            **{name: self._saved(name, value) for name, value in vars(self.curvature).items()},
            "pending": [sums.asnumpy() for sums in self._pending],
            "last_d": self._saved("last_d", last_d),
            "start": start and states.point_state(self._network, start),
        }

    def _saved(self, name: str, value: Any) -> Any:
        """A value as plain data, with vectors in pieces by parameter."""
        if isinstance(value, (Inverse, Measurement)):
            return {key: self._saved(key, each) for key, each in value._asdict().items()}
        if name not in VECTORS or value is None:
            return value
        pieces = np.split(value, np.cumsum(self._sizes)[:-1], axis=-1)
        return states.by_number(self._network, pieces)

    def _restored(self, name: str, value: Any) -> Any:
        """The inverse of `_saved`; an exception where that cannot be."""
        if isinstance(value, saving.ByParameter):
            return np.concatenate(states.in_order(self._network, value), axis=-1)
        if isinstance(value, dict):
            return TUPLES[name](**{key: self._restored(key, each) for key, each in value.items()})
        return value

    def _learned(self, state: dict[str, Any]) -> Curvature:
        """The curvature of a state; an exception where that cannot be."""
        found = Curvature(self.curvature.rank)
        for name in vars(found):
            setattr(found, name, self._restored(name, state[name]))
        return found

    def problems(self, state: dict[str, Any]) -> Iterator[str]:
        """Tell why a state cannot be assigned; so does an exception, as where a part is missing."""
        if not all(map(_mxnet.has_data, self._network.parameters)):
            return  # it is asked again when they are initialized
        self._learned(state)
        _, _, start = (state[name] for name in ("pending", "last_d", "start"))
        if start is not None:
            parameters = states.parameters(self._network)
            yield from saving.array_problems(start["weights"], "start", parameters)

    def assign(self, state: dict[str, Any]) -> None:
        """Take over a state, after that of the method."""
        self.curvature, start = self._learned(state), state["start"]
        self.start = start and states.to_point(self._network, **start)
        self._show()
        self.curvature.squared = state["squared"]
        if state["last_d"] is not None:
            self._direction.last_d[:] = self._restored("last_d", state["last_d"])
        self._pending = [mx.nd.array(sums, dtype=sums.dtype) for sums in state["pending"]]


def _check_parameters(network: Network) -> None:
    """Raise if the gradients of all parameters cannot be one vector with one rate."""
    dtypes = sorted({_mxnet.dtype_of(p) for p in network.trainable})
    if dtypes not in (["float32"], ["float64"]):
        raise TypeError(
            "A preconditioner needs parameters of one dtype, float32 or float64, got "
            f"{' and '.join(dtypes)}. Cast the network, or leave the preconditioner out."
        )
    for parameter in network.trainable:
        if parameter.lr_mult != 1 or _mxnet.is_sparse(parameter):
            raise ValueError(
                f"{parameter.name} is sparse or has an lr_mult, and a preconditioner moves all "
                "parameters together. Change that, or leave the preconditioner out."
            )


def check_arguments(optimizer: Any, settings: Any, compression_params: Any) -> None:
    """Raise unless a preconditioner can set the pace of an optimizer."""
    cls, given = _mxnet.class_of(optimizer), dict(settings or {})
    if cls not in _mxnet.PLAIN_OPTIMIZERS:
        name = optimizer if cls is None else cls.__name__
        raise ValueError(
            f"A preconditioner needs the optimizer 'nag' or 'sgd', got {name}: others scale the "
            "direction once more."
        )
    for name in ("learning_rate", "momentum"):
        if name in given:
            raise ValueError(f"A preconditioner sets the {name} itself. Leave {name} out.")
    given.update(compression_params=compression_params)
    for name in ("lr_scheduler", "clip_gradient", "compression_params"):
        if given.get(name) or getattr(optimizer, name, None):
            raise ValueError(f"A preconditioner does not work with {name}. Leave one of them out.")
