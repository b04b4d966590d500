"""The learning rate and the momentum that follow from curvature and noise.

In the metric of P, L is the largest curvature of mini-batches, and N the noise of their Hessians.
A probe measures both where P is new. Then each step tells them anew: d is the difference of its
gradients at the weights w and at the snapshot s, and d_ that of the step before::

    L: of the secants d P^-1 d / d (w - s) of an epoch, nine in ten are below it
    N = sum |d - d_|^2 / 2 / sum d (w - s),            |x|^2 = x P^-1 x
    rate = min(0.5 / L, T / N),     momentum = 1 - max(0.02, rate N / T)

T is the noise budget, the noise that an epoch may have. At a refresh it rises if a part of the last
epoch's slope remains in the new full gradient, and falls otherwise. Where most of it remains, P
does not fit, and a new sketch begins, of more data later on. Within an epoch the rate falls
linearly, but not below a tenth, where the last epoch tells its length. A secant above L lowers the
rate when it is read, by 4 at most; P learns instead from one above 2 L, if it has room. Its own
step is shortened. Weights roll back to the snapshot, or to the start, on divergence.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple

import numpy as np

from .nystrom import NystromApproximation, nystrom
from .probe import NOT_MEASURABLE, MeanGradient, Probe

MOST = float(np.finfo("float32").max)  # a direction with a larger d P^-1 d is left out


@dataclass(frozen=True)
class Settings:
    """The constants of the controller, chosen by measurements on many problems."""

    stable: float = 0.5  # the largest product of the rate and the curvature
    least_rate: float = 0.1  # at the end of an epoch, relative to its start
    least_damping: float = 0.02  # of 1 - momentum
    most_damping: float = 1 - 1e-6  # without any momentum, MXNet allocates no buffer for it
    quantile: float = 0.9  # of an epoch's secants that are below L
    first_budget: float = 0.3  # T at the start
    least_budget: float = 0.1
    most_budget: float = 3.0
    rise: float = 3.0  # T is multiplied by it where a part of the slope remains
    fall: float = 2.0  # and divided by this where none does
    slope_remains: float = 0.05  # that part
    change: float = 4.0  # the most by which a step raises L or a refresh lowers it; f of an outlier
    outlier: float = 2.0  # a secant so many times L teaches P
    window: int = 8  # steps whose mean rise of the loss shows divergence
    resketch_at: int = 2  # the refresh, from 0, with a second sketch after one at the start
    slow: float = 0.75  # a new sketch begins where a larger part of the slope remains
    rounding: float = 16.0  # of a mean loss and of weights, in units of their dtype's rounding
    drawn_rise: float = 0.1  # of the loss, relative to its fall, where closures draw masks
    same_data: float = 1e-5  # a loss on the same data, computed again, differs by less


DEFAULT = Settings()
TINY_RATE = float(np.finfo("float32").tiny)  # MXNet refuses a smaller one but 0


class Sums(NamedTuple):
    """The products of one step; without a snapshot only ``squared``, that of v itself."""

    squared: float  # d P^-1 d
    along: float = 0.0  # d (w - s)
    moved: float = 0.0  # |w - s|^2, without P
    slope: float = 0.0  # the slope of the objective at s, times w - s, and the penalty's rise
    cross: float = 0.0  # d P^-1 d_


class StepSizeController:
    """What is known of the curvature, and what follows: vectors have all trainable weights.

    Its attributes are saved in files, `P` and `probe` as their own attributes.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.P: NystromApproximation | None = None  # None stands for the identity
        self.probe: Probe | None = None  # the measurement in progress
        self.probes = 0  # their random numbers follow from their count
        self.rows: np.ndarray | None = None  # what P has learned from outliers, the last ones
        self.L = self.N = 0.0
        self.noise_budget = DEFAULT.first_budget
        self.first_rate, self.momentum = 0.0, 1 - DEFAULT.least_damping  # of an epoch
        self.largest_norm = 0.0  # of the measured gradients; it bounds steps before a refresh
        # Since the last refresh
        self.steps = 0
        self.rollbacks = 0
        self.failures = 0  # steps in a row that were left out
        # Since that, a rollback, or a measurement
        self.L_at_reset = 0.0
        self.secants: list[float] = []
        self.noise = self.secant_sum = 0.0  # the sums whose ratio is N
        self.loss_increases: list[float] = []  # above the snapshot's, in the last steps
        # Since P or the snapshot changed
        self.squared: float | None = None  # |d|^2 of the last step in this metric
        # Replaced at a refresh; losses are objectives: with weight decay and penalties
        self.refreshes = 0
        self.epoch_length = 0  # the steps between the last two refreshes
        self.resketch_at = 0  # the refresh of the second sketch, or the first that may have another
        self.first_loss = self.loss = inf  # at the start, or first on new data; the lowest since
        self.mean_loss = inf  # at the last snapshot or the start, without decay and penalties
        self.entries = 0  # loss entries of all data
        self.is_refused = False  # whether the last refresh was
        self.data_changed = False  # whether the last refresh that compared has found other data

    # --- probes --------------------------------------------------------------------------------

    def begin(self, size: int, entries: float = 0.0) -> None:
        """Begin to measure L and N; where the entries of all data are given, P before that."""
        self.probes += 1
        self.probe = Probe.begin(self.probes, size, self.rank, entries, self.L)

    def start_over(self, size: int) -> None:
        """Measure again from the beginning, as the objective is another one; the rate is 0."""
        self.P, self.L = None, 0.0
        self._reset()
        self.begin(size, self.entries)  # without any before a refresh

    def measure(
        self, mean_gradient: MeanGradient, weights: np.ndarray, decays: np.ndarray, eps: float
    ) -> bool:
        """Measure with a mini-batch; whether rounding limits what P can tell."""
        probe, is_limited = self.probe, False
        assert probe is not None
        product, at, here, entries = probe.products(mean_gradient, weights, eps)
        if not entries:
            return False
        if not np.isfinite(here).all():
            if probe.failed and self.refreshes < 2:  # later ones are left out, as in other steps
                raise FloatingPointError(NOT_MEASURABLE)
            self.probe = probe._replace(failed=1)
            return False
        self.largest_norm = max(self.largest_norm, float(np.linalg.norm(here + decays * at)))
        if probe.Q is None:
            probe, noise = probe.iterated(lambda u: product(u) + decays * u, self.P)
            self.probe = probe
            if noise is not None:
                self.N, self.L = noise, max(self.L, probe.largest or probe.bound)
                self._reset()
                self.probe = None  # last: after an interrupt the mini-batch is measured again
            return False
        self.probe = probe = probe.sketched(product, entries)
        assert probe.Q is not None and probe.Y is not None
        if probe.entries >= probe.wanted:
            bound = self.L
            if probe.Y.any():  # otherwise all is flat, and P stays
                Y, decay = probe.Y / probe.entries, float(decays.max())
                P, is_limited = nystrom(probe.Q, Y, probe.entries, decay, eps)
                bound *= float((1.0 if self.P is None else self.P.S.max() + self.P.rho) / P.rho)
                self.P, self.L = P if self.rows is None else P.with_rows(self.rows, eps), 0.0
                self._reset()
            self.probe = Probe(probe.z, bound=bound)
        return is_limited

    # --- the rate ------------------------------------------------------------------------------

    @property
    def rate(self) -> float:
        """The learning rate of the next step; without a refresh, it rises again after an epoch."""
        if not (self.epoch_length and self.first_rate):
            return self.first_rate
        part = abs(1 - self.steps / self.epoch_length % 2)
        return max(self.first_rate * max(part, DEFAULT.least_rate), TINY_RATE)

    @property
    def step_bound(self) -> float:
        """The secant above which a step is shortened, or before a refresh the gradient's norm."""
        return self.L if self.refreshes else self.largest_norm

    def _reset(self) -> None:
        """Set rate and momentum, and look at steps from now on; without L, weights do not move."""
        most = self.noise_budget / self.N if self.N else inf
        self.first_rate = max(min(DEFAULT.stable / self.L, most), TINY_RATE) if self.L else 0.0
        damping = max(DEFAULT.least_damping, self.first_rate * self.N / self.noise_budget)
        self.momentum, self.L_at_reset = 1 - min(damping, DEFAULT.most_damping), self.L
        self.secants, self.noise, self.secant_sum, self.loss_increases = [], 0.0, 0.0, []

    # --- steps ---------------------------------------------------------------------------------

    def is_outlier(self, sums: Sums) -> bool:
        """Whether P is to learn the gradient difference d of a step, if it has room."""
        if self.P is None or not self.refreshes or not (sums.along > 0 and self.L):
            return False
        known, size = self.P.U.shape
        if 2 * self.rank <= known < size:
            return False
        return DEFAULT.outlier * self.L < sums.squared / sums.along and sums.squared < MOST

    def learn(self, d: np.ndarray, sums: Sums, eps: float) -> None:
        """Let P learn an outlier. The step says nothing else: L stays, and N leaves it out.

        Its secant r L becomes less than L, or is divided by 5: it may be curvature of far away.
        """
        assert self.P is not None
        factor = min(sums.squared / (sums.along * self.L), DEFAULT.change)
        row = (d * (factor / sums.squared) ** 0.5)[None]
        rows = row if self.rows is None else np.concatenate([self.rows, row])
        self.P, self.rows = self.P.with_rows(row, eps), rows[-self.rank :]
        self.squared, self.failures = None, 0

    def read(self, sums: Sums, rounding: float) -> None:
        """Learn from the products of a step; of a move below the rounding, no curvature."""
        if not (sums.squared < MOST and isfinite(sums.along + sums.slope)):  # it says nothing
            self.failures, self.squared = self.failures + 1, None
            return
        self.failures = 0
        if not self.refreshes:
            return
        squared: float | None = sums.squared
        increase = sums.slope + sums.along / 2  # of the objective, by the trapezoid rule
        self.loss_increases = [*self.loss_increases, increase][-DEFAULT.window :]
        if sums.along > 0 and sums.moved > rounding:
            secant = sums.squared / sums.along
            self.secants.append(secant)
            if secant > DEFAULT.change * self.L > 0:  # of few rows; the step was shortened
                squared = None
            elif self.squared is not None:
                self.noise += (sums.squared + self.squared) / 2 - sums.cross
                self.secant_sum += sums.along
            if secant > self.L > 0:
                self.L = min(secant, DEFAULT.change * self.L)
                self.first_rate = min(self.first_rate, DEFAULT.stable / self.L)
        self.squared = squared

    @property
    def has_diverged(self) -> bool:
        """Whether the last steps lead above the first loss, or were left out."""
        rise = sum(self.loss_increases) / DEFAULT.window
        return self.failures >= DEFAULT.window // 2 or rise > self.first_loss - self.loss > -inf

    def _learn_noise(self, least: float = 0.0) -> None:
        """N from the steps: it is at most 2 L where the loss is convex."""
        if self.secant_sum > 0:
            self.N = min(max(least, self.noise / self.secant_sum), 2 * self.L)

    # --- refreshes -----------------------------------------------------------------------------

    def roll_back(self) -> None:
        """Slow down, as the weights go back to those of the snapshot, or of the start."""
        self.rollbacks += 1
        self.failures = 0
        self.noise_budget = max(self.noise_budget / DEFAULT.change, DEFAULT.least_budget)
        self.L = max(self.L, self.L_at_reset * DEFAULT.change)
        self._learn_noise(self.N)
        self._reset()

    def refresh(self, size: int, slope_ratio: float | None) -> None:
        """Take a new snapshot; the ratio is how much of an epoch's slope remains, if known."""
        if slope_ratio is not None:
            risen = min(self.noise_budget * DEFAULT.rise, DEFAULT.most_budget)
            fallen = max(self.noise_budget / DEFAULT.fall, DEFAULT.least_budget)
            self.noise_budget = risen if slope_ratio > DEFAULT.slope_remains else fallen
        if self.secants:
            largest = float(np.quantile(self.secants, DEFAULT.quantile))
            self.L = max(largest, self.L / DEFAULT.change)
            self._learn_noise()
        now, is_slow = self.refreshes, slope_ratio is not None and slope_ratio > DEFAULT.slow
        is_second = now == self.resketch_at == DEFAULT.resketch_at
        if now == 0 or is_second or (is_slow and now >= self.resketch_at):
            self.begin(size, self.entries * max(now, 1))
            self.resketch_at = 2 * now + 1 if now else self.resketch_at
        self.refreshes += 1
        self.failures = 0
        self._reset()
