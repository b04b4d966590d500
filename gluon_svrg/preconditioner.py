"""Curvature from gradients: a preconditioner, and the rate and momentum that follow from it.

The trainer's estimate, weight decay included, is multiplied by an approximate inverse of the
Hessian H, which a sketch of products with random vectors Q tells (Nystrom's approximation)::

    H u ~ ( gradient(w + e u) - gradient(w) ) / e        of the same minibatch, at w + e z for w
    Y = H Q,   Y (Q'Y)^-1 Y' = U S U'                    Q orthonormal, z random
    P = U S U' + rho I,    P^-1 v = v / rho + U b U'v,   b = 1 / (S + rho) - 1 / rho

In the metric of P, L is the largest curvature of minibatches, and N the noise of their Hessians.
Both are measured once, by products with two minibatches; then each step tells them anew, by the
difference d of its gradients at w and at the snapshot s, and d' that of the step before::

    L >= d P^-1 d / d (w - s),     N = sum |d - d'|^2 / 2 / sum d (w - s),     |x|^2 = x P^-1 x
    rate = min(1/2 / L, T / N),    momentum = 1 - max(0.02, rate N / T)

T, the trust, is how much noise an epoch may have. It rises where the full gradient still points
along the last way, and falls where it points back.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from . import _arguments, _mxnet, saving
from ._mxnet import Arrays
from .passes import states
from .passes.beside import Beside
from .passes.closure import Loss
from .passes.columns import vector
from .passes.direction import Direction
from .passes.full_pass import FullGradient
from .passes.network import Network
from .passes.points import Point

BUDGET = 0.25  # of a sketch, in data passes; where minibatches are large, it takes one
LEAST_ROWS = 4  # samples of a sketch for each vector
STABLE = 0.5  # the largest product of the rate and the curvature
LEAST_DAMPING, MOST_DAMPING = 0.02, 1 - 1e-6  # 1 - momentum; at 1, MXNet would keep none
PRODUCTS = 3  # of a power iteration
FIRST_TRUST, LEAST_TRUST, MOST_TRUST = 0.1, 0.05, 1.0
RISE, FALL = 3.0, 2.0  # of the trust
TURN = 0.05  # the part of the last slope from which on the trust rises
BACK = 4.0  # after going back, trust falls and the curvature rises by it; else curvature can fall
WINDOW = 8  # the steps whose mean rise tells that weights are lost
AGAIN = 2  # the refresh, from 0, of a second sketch, if the first one was at the start
ROUNDING = 1e-6  # of a loss in float32, relative to it; in float64 the square of it
NEAR = 1e-12  # of squared norms: nearer to the snapshot, differences of gradients are rounding
TINY = 1e-300

NOT_FINITE = (
    "The curvature of the loss cannot be measured: gradients beside the current weights are not "
    "finite (NaN or infinity). Are the data finite? Begin with smaller weights."
)
NOT_CURVED = (
    "The loss has no curvature at the current weights, from which Nystrom could choose a learning "
    "rate: all changes of the gradient are zero or negative. Begin at other weights, or train "
    "without a preconditioner."
)


@dataclass(frozen=True)
class Nystrom:
    """A preconditioner that learns curvature from gradients [1]_, for `SVRGTrainer`.

    With it the trainer sets the learning rate and the momentum itself. It measures products with
    the Hessian of the loss, as differences of gradients of the closure: before the first refresh
    with the first two minibatches, and after it with the first ones, of a quarter of the data.

    Parameters
    ----------
    rank : int, default 50
        How many directions of large curvature the preconditioner knows, at most: one for each
        weight, and fewer where there are few samples. It keeps as many times the parameters'
        memory. With 0 it knows none, and sets the rate and the momentum alone.

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
    >>> import numpy as np
    >>> from mxnet import gluon
    >>> from gluon_svrg import Nystrom, SVRGTrainer
    >>> samples = np.random.rand(64, 3).astype('float32')
    >>> labels = samples.sum(axis=1, keepdims=True)
    >>> data = gluon.data.DataLoader(gluon.data.ArrayDataset(samples, labels), batch_size=8)
    >>> net = gluon.nn.Dense(1)
    >>> net.initialize()
    >>> loss_fn = gluon.loss.L2Loss()
    >>> def loss_of(X, y):
    ...     return loss_fn(net(X), y)
    >>> trainer = SVRGTrainer(net.collect_params(), 'nag', {'wd': 1e-6}, preconditioner=Nystrom())
    >>> for epoch in range(5):
    ...     if epoch > 0:
    ...         mean_loss = trainer.update_full_grads(loss_of, data)
    ...     for X, y in data:
    ...         loss = trainer.step(len(X), closure=lambda: loss_of(X, y))
    >>> mean_loss < 0.01
    True
    """

    rank: int = 50

    def __post_init__(self) -> None:
        _arguments.whole(self.rank, "rank", 0)


class Inverse(NamedTuple):
    """P, as the function that multiplies by a power of its inverse."""

    U: np.ndarray  # the directions, in rows
    S: np.ndarray  # the curvatures of the sketch there
    rho: float  # that of all others

    @property
    def b(self) -> np.ndarray:
        """What a direction adds to ``1 / rho``."""
        return 1 / (self.S + self.rho) - 1 / self.rho

    def __call__(self, v: np.ndarray, power: float = 1.0) -> np.ndarray:
        """Multiply a vector by ``P^-power``."""
        factors = (self.S + self.rho) ** -power - self.rho**-power
        return v * self.rho**-power + (factors * (self.U @ v)) @ self.U


def nystrom(Q: np.ndarray, Y: np.ndarray, entries: float, decay: float, eps: float) -> Inverse:
    """P from products Y of a Hessian with vectors Q, both in rows; S below zero is cut."""
    values, V = np.linalg.eigh((Q @ Y.T + Y @ Q.T) / 2)
    shift = max(10 * eps * float(np.linalg.norm(Y, 2)), -1.1 * values[0])
    root = (V / np.sqrt(values + shift)).T @ (Y + shift * Q)
    _, sizes, U = np.linalg.svd(root, full_matrices=False)
    S = np.maximum(sizes**2 - shift, 0)
    return Inverse(U, S, max(decay + max(S[-1], S.sum() / entries), shift, 1e-10 * S[0]))


class Sketch(NamedTuple):
    """Products with the Hessian of some minibatches, until they have entries enough."""

    z: np.ndarray  # beside the weights, a unit vector: gradients are compared with those there
    Q: np.ndarray  # orthonormal vectors, in rows
    Y: np.ndarray  # the products, summed over all entries
    entries: float  # of the minibatches so far
    wanted: float


class Powers(NamedTuple):
    """Power iterations with two minibatches, one after the other, for L and N."""

    z: np.ndarray  # as above, and where the iterations begin
    largest: float  # the largest curvature so far
    first: np.ndarray | None  # the first product with the first minibatch


class Curvature:
    """What one trainer knows of the curvature: a part of a file. Vectors are of all weights."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.P: Inverse | None = None  # None stands for the unit matrix
        self.job: Sketch | Powers | None = None  # what is being measured
        self.measurements = 0  # their random numbers follow from their count
        self.L = self.N = 0.0
        self.trust = FIRST_TRUST
        self.rate, self.momentum = 0.0, 1 - LEAST_DAMPING
        # Since the last refresh
        self.largest = 0.0  # of the secants of all steps
        self.noise = self.along = 0.0  # the sums whose ratio is N
        self.squared: float | None = None  # |d|^2 of the last step
        self.rises: list[float] = []  # of the loss, over that of the snapshot, at the last steps
        self.backs = 0  # how often the weights have gone back
        # Replaced at a refresh; losses are means, with the weight decay
        self.refreshes = 0
        self.again = 0  # the refresh of another sketch
        self.first_loss = self.loss = inf  # at the start, at the snapshot
        self.weights: np.ndarray | None = None  # of the snapshot
        self.slope: np.ndarray | None = None  # the gradient there, with the decay

    def begin(self, size: int, entries: float = 0.0) -> None:
        """Begin to measure L and N; where the entries of all data are given, P before that."""
        self.measurements += 1
        random = np.random.RandomState(self.measurements)
        z = random.randn(size)
        z /= np.linalg.norm(z)
        self.job = Powers(z, 0.0, None)
        rank = min(self.rank, size, int(sqrt(BUDGET * entries / LEAST_ROWS)) or 1)
        if entries and rank:
            Q = np.linalg.qr(random.randn(size, rank))[0].T
            self.job = Sketch(z, Q, np.zeros_like(Q), 0.0, BUDGET * entries / (rank + 1))

    def measure(self, minibatch: Beside, weights: np.ndarray, decays: np.ndarray) -> bool:
        """Measure with a minibatch, beside the current weights. Tell if P is another one now."""
        job = self.job
        assert job is not None
        step = minibatch.eps ** (1 / 3) * max(1.0, float(np.linalg.norm(weights)))
        at = weights + step * job.z
        here = minibatch.gradient(at)
        if not minibatch.entries:
            return False

        def product(u: np.ndarray) -> np.ndarray:
            size = float(np.linalg.norm(u))
            found = (minibatch.gradient(at + step / size * u) - here) * (size / step)
            if not np.isfinite(found).all():
                raise FloatingPointError(NOT_FINITE)
            return found

        if isinstance(job, Powers):
            self._iterate(job, lambda u: product(u) + decays * u)
            return False
        Y = job.Y + minibatch.entries * np.stack([product(q) for q in job.Q])
        entries = job.entries + minibatch.entries
        self.job = job._replace(Y=Y, entries=entries)
        if entries < job.wanted:
            return False
        self.P = nystrom(job.Q, Y / entries, entries, float(decays.max()), minibatch.eps)
        self.job = Powers(job.z, 0.0, None)
        self.L = self.N = 0.0
        self._forget_steps()
        self._set_pace()
        return True

    def _iterate(self, job: Powers, product: Callable[[np.ndarray], np.ndarray]) -> None:
        """Measure the largest curvature, and with the second minibatch the noise."""
        v, largest, products = job.z, job.largest, []
        for _ in range(PRODUCTS):
            products.append(self.solve(product(self.solve(v, 0.5)), 0.5))
            largest = max(largest, float(v @ products[-1]))
            v = products[-1] / (float(np.linalg.norm(products[-1])) or 1.0)
        if job.first is None:
            self.job = job._replace(largest=largest, first=products[0])
            return
        if largest <= 0:
            raise RuntimeError(NOT_CURVED)
        along = float(job.z @ (job.first + products[0]))
        self.job, self.L = None, max(self.L, largest)
        self.N = float(np.linalg.norm(job.first - products[0])) ** 2 / max(along, TINY)
        self._set_pace()

    def solve(self, v: np.ndarray, power: float = 1.0) -> np.ndarray:
        """Multiply a vector by a power of the inverse of P."""
        return v if self.P is None else self.P(v, power)

    def _set_pace(self) -> None:
        """Set the rate and the momentum; while L is not known, nothing moves."""
        most = self.trust / self.N if self.N else inf
        self.rate = min(STABLE / self.L, most) if self.L else 0.0
        damping = max(LEAST_DAMPING, self.rate * self.N / self.trust)
        self.momentum = 1 - min(damping, MOST_DAMPING)

    def _forget_steps(self) -> None:
        self.largest = self.noise = self.along = 0.0
        self.squared, self.rises = None, []

    def read(self, sums: np.ndarray) -> None:
        """Learn from the sums of a step, as `passes.direction` has them."""
        if self.weights is None or self.slope is None:  # the sum is |v|^2
            self.rises = [float(sums.sum()) * 0.0]
            return
        (squared, _, _, cross), (along, moved, slope, _) = sums.tolist()
        self.rises = [*self.rises, slope + along / 2][-WINDOW:]  # by the trapezoid rule
        if 0 < along < inf and moved > NEAR * float(self.weights @ self.weights):
            secant = squared / along
            self.largest = max(self.largest, secant)
            if secant > self.L > 0:
                self.L, self.rate = secant, min(self.rate, STABLE / secant)
            if self.squared is not None:
                self.noise += (squared + self.squared) / 2 - cross
                self.along += along
        self.squared = squared

    @property
    def is_lost(self) -> bool:
        """Whether the last steps have led above the first loss, or to what is not finite."""
        if not all(map(isfinite, self.rises)):
            return True
        most = max(0.0, self.first_loss - self.loss)
        return len(self.rises) == WINDOW and sum(self.rises) / WINDOW > most

    def accepts(self, loss: float, eps: float) -> bool:
        """Whether the loss at a refresh is no higher than at the snapshot, but for rounding."""
        return loss <= self.loss + (ROUNDING if eps > 1e-10 else ROUNDING**2) * abs(self.loss)

    def go_back(self) -> None:
        """Slow down, as the weights go back to those of the snapshot, or of the start."""
        self.backs += 1
        self.trust, self.L = max(self.trust / BACK, LEAST_TRUST), self.L * BACK
        self._forget_steps()
        self._set_pace()

    def refresh(
        self, loss: float, weights: np.ndarray, slope: np.ndarray, entries: int, at_start: bool
    ) -> None:
        """Take a new snapshot, with the entries of all data."""
        if self.weights is None or self.slope is None:
            self.again = AGAIN if at_start else 0
            self.first_loss = min(self.first_loss, loss)
        else:
            move = weights - self.weights
            turned = float(slope @ move) / min(float(self.slope @ move), -TINY)
            rises = min(self.trust * RISE, MOST_TRUST)
            self.trust = rises if turned > TURN else max(self.trust / FALL, LEAST_TRUST)
            if self.job is None:
                self.L = max(self.largest, self.L / BACK)
                self.N = self.noise / self.along if self.along > 0 else self.N
        self.loss, self.weights, self.slope = min(loss, self.loss), weights, slope
        if self.refreshes in (0, self.again):
            self.begin(weights.size, entries)
        self.refreshes += 1
        self._forget_steps()
        self._set_pace()


class Preconditioner:
    """What the trainer asks of a `Nystrom`: its curvature, and the arrays of it on the device."""

    def __init__(self, rank: int) -> None:
        self.curvature = Curvature(rank)
        self.start: Point | None = None  # the weights before the first step, until a refresh
        self.mean_loss = inf  # at the snapshot
        self._pending: list[NDArray] = []  # the sums of the last steps, not read yet

    def bind(self, network: Network, optimizer: Any) -> None:
        """Bind to new arrays of the parameters; raise if they cannot be one vector."""
        self._network, self._optimizer = network, optimizer
        indices = list(map(network.parameters.index, network.trainable))
        _check_parameters(network.trainable, optimizer, indices)
        self._sizes = [row[0].size for row in network.weights]
        self.decays = np.repeat(_mxnet.weight_decays(optimizer, indices), self._sizes)
        self._eps = float(np.finfo(_mxnet.dtype_of(network.trainable[0])).eps)
        self._direction = Direction(network, self.decays)
        self._show()
        if not self.curvature.measurements:
            self.curvature.begin(len(self.decays))

    def _show(self) -> None:
        """Give the device what was learned."""
        found = self.curvature
        self._direction.set_bound(found.L)
        if found.P is not None:
            self._direction.set_metric(found.P)
        if found.weights is not None and found.slope is not None:
            self._direction.set_snapshot(found.weights, found.slope, found.solve(found.slope))

    def _with_decay(self, mean_loss: float, weights: Arrays) -> float:
        """The mean loss with the weight decay. Waits for the weights."""
        values = vector(row[0] for row in weights)
        return mean_loss + float(self.decays @ values**2) / 2

    def measure(self, closure: Callable[[], Loss], seed: int | None, workers: Any) -> int:
        """Measure with a minibatch, inside `Network.grads_kept`; the entries differentiated."""
        network = self._network
        if self.start is None and not self.curvature.refreshes:
            self.start = Point.copied(network, frozen=True)
        minibatch = Beside(network, closure, seed, workers)
        before = self.curvature.P
        self.curvature.measure(minibatch, vector(row[0] for row in network.weights), self.decays)
        if self.curvature.P is not before:
            self._pending = []
            self._show()
        self._direction.set_bound(self.curvature.L)
        return minibatch.differentiated

    def hand_over(self, entries: float | NDArray, scale: float) -> tuple[NDArray, NDArray | None]:
        """Replace V by the direction, in the reduced gradients; what to keep of the step."""
        return self._direction.hand_over(entries, scale)

    def set_pace(self) -> None:
        """Set the optimizer's rate and momentum; what it is handed over is a mean."""
        optimizer, found = self._optimizer, self.curvature
        optimizer.lr, optimizer.momentum, optimizer.rescale_grad = found.rate, found.momentum, 1.0

    def moved(self, sums: NDArray, d: NDArray | None) -> None:
        """Keep what a step that was made has found."""
        if not (self._pending and self._pending[-1] is sums):  # or an interrupt repeats this
            self._pending = [*self._pending, sums]
        if d is not None:
            self._direction.keep(d)

    def read(self, lag: int) -> None:
        """Learn from all steps but the last ones."""
        L = self.curvature.L
        while len(self._pending) > lag:
            sums, *self._pending = self._pending
            self.curvature.read(sums.asnumpy())
        if self.curvature.L != L:
            self._direction.set_bound(self.curvature.L)

    def go_back(self) -> None:
        """Slow down; the weights are those of the snapshot again, or of the start."""
        self._pending = []
        self.curvature.go_back()
        self._show()

    def begin_at(self, mean_loss: float) -> None:
        """Take over the loss at the start, above which training must not end."""
        assert self.start is not None
        self.curvature.first_loss = self._with_decay(mean_loss, self.start.weights)

    def accepts(self, full: FullGradient) -> bool:
        """Whether a refresh may take a snapshot; False if the weights must go back."""
        loss, found = self._with_decay(full.mean_loss, self._network.weights), self.curvature
        if found.weights is None:
            return self.start is None or (isfinite(full.norm) and loss < found.first_loss)
        return isfinite(full.norm) and found.accepts(loss, self._eps)

    def refreshed(self, full: FullGradient) -> Preconditioner:
        """What follows from a refresh that takes a snapshot; this object does not change."""
        new = copy(self)
        new.curvature, new._direction = copy(self.curvature), copy(self._direction)
        new.start, new.mean_loss, new._pending = None, full.mean_loss, []
        weights = vector(row[0] for row in self._network.weights)
        slope = full.mean.vector() + self.decays * weights
        loss = self._with_decay(full.mean_loss, self._network.weights)
        new.curvature.refresh(loss, weights, slope, full.all_entries, self.start is None)
        new._show()
        return new

    def told(self) -> dict[str, float]:
        """A part of a line of `history`."""
        found = self.curvature
        backs, found.backs = found.backs, 0
        told = {"learning_rate": found.rate, "momentum": found.momentum}
        return {**told, "curvature": found.L, "noise": found.N, "went_back": backs}

    # --- a part of a file ----------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that was learned, with vectors by parameter."""
        found, start = dict(vars(self.curvature)), self.start
        found.update(weights=self._by_parameter(found["weights"]))
        found.update(slope=self._by_parameter(found["slope"]))
        for name in ("P", "job"):
            value = found[name]
            fields: dict[str, Any] = {"kind": None}
            if value is not None:
                fields = {"kind": type(value).__name__, **value._asdict()}
            found[name] = {key: self._by_parameter(each) for key, each in fields.items()}
        found["mean_loss"] = self.mean_loss
        found["pending"] = [sums.asnumpy() for sums in self._pending]
        found["last_d"] = self._by_parameter(self._direction.last_d)
        found["start"] = start and states.point_state(self._network, start)
        return found

    def _by_parameter(self, value: Any) -> Any:
        """A vector, or several as rows, in pieces by parameter; other values as they are."""
        if not isinstance(value, np.ndarray) or value.shape[-1] != len(self.decays):
            return value
        pieces = np.split(value, np.cumsum(self._sizes)[:-1], axis=-1)
        return states.by_number(self._network, pieces)

    def _together(self, value: Any) -> Any:
        """The inverse of `_by_parameter`."""
        if not isinstance(value, saving.ByParameter):
            return value
        found = np.concatenate(states.in_order(self._network, value), axis=-1)
        if found.shape[-1] != len(self.decays) or not np.isfinite(found).all():
            raise ValueError("a vector is not finite, or of another size")
        return found

    def problems(self, state: Any) -> Iterator[str]:
        """Tell why a state cannot be assigned."""
        if state["rank"] != self.curvature.rank:
            yield f"its preconditioner has rank {state['rank']}, here it is {self.curvature.rank}"
        else:
            self._restored(state)

    def _restored(self, state: dict[str, Any]) -> Curvature:
        """The curvature of a state; an exception if it is malformed."""
        found = Curvature(self.curvature.rank)
        kinds: Any = {kind.__name__: kind for kind in (Inverse, Sketch, Powers)}
        for name in vars(found):
            value = state[name]
            if name in ("P", "job"):
                fields = {key: self._together(each) for key, each in value.items()}
                kind = fields.pop("kind")
                value = None if kind is None else kinds[kind](**fields)
            setattr(found, name, self._together(value))
        return found

    def assign(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        self.curvature, start = self._restored(state), state["start"]
        self.start = start and states.to_point(self._network, **start)
        self.mean_loss = state["mean_loss"]
        self._direction.clear()
        self._show()
        if state["last_d"] is not None:
            self._direction.set_last(self._together(state["last_d"]))
        self._pending = [mx.nd.array(sums, dtype=sums.dtype) for sums in state["pending"]]


def _check_parameters(parameters: Sequence[Parameter], optimizer: Any, indices: list[int]) -> None:
    """Raise if the gradients of all parameters cannot be one vector with one rate."""
    dtypes = sorted({_mxnet.dtype_of(p) for p in parameters})
    if dtypes not in (["float32"], ["float64"]):
        raise TypeError(
            f"A preconditioner needs parameters of one dtype, float32 or float64, got "
            f"{', '.join(dtypes)}. Cast the network, or leave the preconditioner out."
        )
    for parameter, rate in zip(parameters, _mxnet.rate_multipliers(optimizer, indices)):
        if rate != 1 or _mxnet.is_sparse(parameter):
            what = (
                "is sparse" if rate == 1 else f"has a learning rate of its own (lr_mult {rate:g})"
            )
            raise ValueError(
                f"{parameter.name} {what}, and a preconditioner moves all parameters together. "
                "Leave that out, or the preconditioner."
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
            raise ValueError(
                f"A preconditioner sets the {name} itself. Leave {name}={given[name]!r} out."
            )
    for name in ("lr_scheduler", "clip_gradient"):
        if (given.get(name) or getattr(optimizer, name, None)) is not None:
            raise ValueError(f"A preconditioner does not work with {name}. Leave one of them out.")
    if compression_params:
        raise ValueError(
            "A preconditioner does not work with compressed gradients, whose errors it would take "
            "for curvature. Leave compression_params out."
        )
