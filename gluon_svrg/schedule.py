"""Refresh schedules, samplers for refreshes over part of the data, and coefficient schedules.

``SVRGTrainer(coefficient=...)`` calls a coefficient schedule (`Linear`, `Cosine`, `Until`) with the
index of a snapshot, from 0. A refresh schedule says whether a full gradient is due. Its state is
saved with the trainer; that of a sampler after ``trainer.register(sampler)``::

    refresh = EverySteps(1000)
    for X, y in train_data:
        if refresh.due(trainer):
            trainer.update_full_grads(loss_of, train_data)
        trainer.step(len(X), closure=lambda: loss_of(X, y))

Arguments of a wrong type raise a TypeError, and those out of range a ValueError.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Iterator, Union

import numpy as np
from mxnet.gluon.data import Sampler

from . import _arguments, saving
from .passes.watch import warn

if TYPE_CHECKING:
    from .trainer import VarianceReducedTrainer

__all__ = ["Cosine", "EveryEpochs", "EverySteps", "Linear", "Loopless", "PartialSampler", "Until"]

#: Of the coefficient: a number, or a function from the snapshot's index to a number.
Schedule = Union[float, Callable[[int], float]]


@dataclass(eq=False)
class Linear:
    """A coefficient that falls linearly, constant between snapshots, as in alpha-SVRG [1]_.

    For snapshot ``s`` it is ``final + (initial - final) * (1 - s / num_snapshots)``, and ``final``
    from ``s = num_snapshots`` on. The paper recommends 0.5 to 1 for ``initial``.

    Parameters
    ----------
    initial : float
        The first coefficient, at least 0.
    num_snapshots : int
        The number of snapshots after which it reaches ``final``.
    final : float, default 0.0
        The last coefficient, at least 0.

    References
    ----------
    .. [1] Y. Yin, Z. Xu, Z. Li, T. Darrell and Z. Liu, "A Coefficient Makes SVRG Effective",
       ICLR 2025, arXiv:2311.05589.

    Examples
    --------
    >>> from gluon_svrg.schedule import Linear
    >>> falling = Linear(0.75, 3)
    >>> [falling(snapshot) for snapshot in range(5)]
    [0.75, 0.5, 0.25, 0.0, 0.0]
    """

    initial: float
    num_snapshots: int
    final: float = 0.0

    def __post_init__(self) -> None:
        self.initial = _arguments.number(self.initial, "initial")
        self.num_snapshots = _arguments.whole(self.num_snapshots, "num_snapshots")
        self.final = _arguments.number(self.final, "final")

    def __call__(self, index: int) -> float:
        left = max(0.0, 1 - index / self.num_snapshots)
        return self.final + (self.initial - self.final) * left


@dataclass(eq=False)
class Cosine(Linear):
    """A coefficient that falls as a half cosine, constant between snapshots.

    For snapshot ``s`` it is ``final + (initial - final) * (1 + cos(pi * s / num_snapshots)) / 2``,
    and ``final`` from ``s = num_snapshots`` on.

    Parameters
    ----------
    initial, num_snapshots, final : float, int, float
        As for `Linear`.

    Examples
    --------
    >>> from gluon_svrg.schedule import Cosine
    >>> falling = Cosine(1.0, 4)
    >>> [round(falling(snapshot), 3) for snapshot in range(6)]
    [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """

    def __call__(self, index: int) -> float:
        done = min(1.0, index / self.num_snapshots)
        return self.final + (self.initial - self.final) * (1 + math.cos(math.pi * done)) / 2


@dataclass(eq=False)
class Until:
    """Variance reduction for the first snapshots only, then the plain optimizer at its own cost.

    After that, `SVRGTrainer.update_full_grads` discards the snapshot, and returns nan without a
    pass over the data.

    Parameters
    ----------
    num_snapshots : int
        The number of snapshots with variance reduction.
    value : float, default 1.0
        Their coefficient, at least 0.

    Examples
    --------
    >>> from gluon_svrg.schedule import Until
    >>> first_two = Until(2, value=0.5)
    >>> [first_two(snapshot) for snapshot in range(4)]
    [0.5, 0.5, 0.0, 0.0]
    """

    num_snapshots: int
    value: float = 1.0

    def __post_init__(self) -> None:
        self.num_snapshots = _arguments.whole(self.num_snapshots, "num_snapshots")
        self.value = _arguments.number(self.value, "value")

    def __call__(self, index: int) -> float:
        return 0.0 if self.is_over(index) else self.value

    def is_over(self, index: int) -> bool:
        """Whether a snapshot comes after the last one.

        Parameters
        ----------
        index : int
            Its index, from 0.

        Returns
        -------
        bool
            Whether variance reduction is over.
        """
        return index >= self.num_snapshots


class _Refresh:
    _is_time: Any  # whether a refresh is due where there is a snapshot

    def due(self, trainer: VarianceReducedTrainer) -> bool:
        """Whether a refresh is due; it always is if the trainer wants a snapshot.

        Parameters
        ----------
        trainer : SVRGTrainer
            Call this once before each step, or, of `EveryEpochs`, before each epoch.

        Returns
        -------
        bool
            Whether to call ``update_full_grads``.
        """
        if not hasattr(type(trainer), "wants_snapshot"):
            raise TypeError(f"due needs a trainer with snapshots, got {type(trainer).__name__}.")
        is_time = self._is_time(trainer)  # first, because it counts
        return trainer.wants_snapshot or is_time


@dataclass(eq=False)
class EveryEpochs(_Refresh):
    """A refresh every few epochs, at the start of the epoch.

    Parameters
    ----------
    epochs : int
        The epochs between refreshes; the first of them is in the first epoch.

    Examples
    --------
    >>> from gluon_svrg.schedule import EveryEpochs
    >>> refresh = EveryEpochs(2)  # in epochs 0, 2, 4, ...
    """

    epochs: int
    epoch: int = field(default_factory=int, init=False, repr=False)

    def __post_init__(self) -> None:
        self.epochs = _arguments.whole(self.epochs, "epochs")

    def _is_time(self, trainer: VarianceReducedTrainer) -> bool:
        trainer.register(self)
        trainer._watch.epoch(trainer._progress.steps)
        epoch, self.epoch = self.epoch, self.epoch + 1
        return epoch % self.epochs == 0


@dataclass(eq=False)
class EverySteps(_Refresh):
    """A refresh after a number of steps, fixed or growing; SVRG++ [1]_ has factor 2.

    Parameters
    ----------
    steps : int
        The steps from the first snapshot to the second. SAGA and SAG have none before their first
        refresh, which comes after ``steps / factor`` steps.
    factor : int, default 1
        The factor by which that number grows with each snapshot.

    References
    ----------
    .. [1] Z. Allen-Zhu and Y. Yuan, "Improved SVRG for Non-Strongly-Convex or Sum-of-Non-Convex
       Objectives", ICML 2016, arXiv:1506.01972.

    Examples
    --------
    >>> from gluon_svrg.schedule import EverySteps
    >>> refresh = EverySteps(100, factor=2)  # after 100 steps, 200 more, 400 more, ...
    """

    steps: int
    factor: int = 1

    def __post_init__(self) -> None:
        self.steps = _arguments.whole(self.steps, "steps")
        self.factor = _arguments.whole(self.factor, "factor")

    def _is_time(self, trainer: VarianceReducedTrainer) -> bool:
        return trainer.inner_steps >= self.steps * self.factor ** (trainer.num_snapshots - 1)


@dataclass(eq=False)
class Loopless(_Refresh):
    """A refresh at each step with a given probability: L-SVRG [1]_.

    The decision depends only on the seed and how often it was asked for: all workers get the same.

    Parameters
    ----------
    probability : float
        The probability of a refresh, above 0 and up to 1.
    seed : int, default 0
        The seed of the decisions, at least 0.

    References
    ----------
    .. [1] D. Kovalev, S. Horvath and P. Richtarik, "Don't Jump Through Hoops and Remove Those
       Loops: SVRG and Katyusha are Better Without the Outer Loop", ALT 2020, arXiv:1901.08689.

    Examples
    --------
    >>> from gluon_svrg.schedule import Loopless
    >>> refresh = Loopless(0.01)  # after 100 steps on average
    """

    probability: float
    seed: int = 0
    asked: int = field(default_factory=int, init=False, repr=False)

    def __post_init__(self) -> None:
        _arguments.number(self.probability, "probability", high=1, open_low=True)
        self.seed = _arguments.whole(self.seed, "seed", 0)

    def _is_time(self, trainer: VarianceReducedTrainer) -> bool:
        trainer.register(self)
        coin = np.random.default_rng([self.seed, self.asked]).random()
        self.asked += 1
        return bool(coin < self.probability)


@dataclass(eq=False)
class PartialSampler(Sampler):
    """A sampler for full gradients over part of the data, as in SCSG [1]_.

    Pass `SVRGTrainer.update_full_grads` a `mxnet.gluon.data.DataLoader` with it. Each iteration
    draws new samples.

    Parameters
    ----------
    length : int
        The number of samples in the data.
    num_samples : int or callable
        The number of samples in a draw, or a function of the number of the draw, from 0, that
        returns it: for draws that grow [2]_.
    seed : int, default 0
        The seed of the draws, from 0: the same on all workers that draw from the same data.
    replacement : bool, default False
        Whether a sample can be drawn twice.

    References
    ----------
    .. [1] L. Lei and M. I. Jordan, "Less than a Single Pass: Stochastically Controlled Stochastic
       Gradient", AISTATS 2017, arXiv:1609.03261.
    .. [2] R. Babanezhad Harikandeh, M. O. Ahmed, A. Virani, M. Schmidt, J. Konecny and
       S. Sallinen, "Stop Wasting My Gradients: Practical SVRG", NeurIPS 2015.

    Examples
    --------
    >>> from gluon_svrg.schedule import PartialSampler
    >>> sampler = PartialSampler(100, lambda draw: 10 * 2**draw)
    >>> [len(list(sampler)) for _ in range(5)]
    [10, 20, 40, 80, 100]
    """

    length: int
    num_samples: int | Callable[[int], int]
    seed: int = 0
    replacement: bool = False
    draws: int = field(default_factory=int, init=False, repr=False)

    def __post_init__(self) -> None:
        self.length = _arguments.whole(self.length, "length")
        if not callable(self.num_samples):
            self.num_samples = _arguments.whole(self.num_samples, "num_samples")
        self.seed = _arguments.whole(self.seed, "seed", 0)
        self.replacement = _arguments.flag(self.replacement, "replacement")

    def __iter__(self) -> Iterator[int]:
        count = len(self)
        random = np.random.default_rng([self.seed, self.draws])
        self.draws += 1
        if self.replacement:
            return iter(random.integers(0, self.length, count).tolist())
        return iter(random.permutation(self.length)[:count].tolist())

    def __len__(self) -> int:
        wanted = self.num_samples
        count = int(wanted(self.draws) if callable(wanted) else wanted)
        return count if self.replacement else min(count, self.length)


class Coefficient:
    """The coefficient in force (`value`), and the schedule of the next: a part of a file."""

    def __init__(self, schedule: Schedule) -> None:
        self.change(schedule, 0)

    def change(self, schedule: Schedule, index: int) -> None:
        """Change to another schedule, in force for the snapshot of an index."""
        self.set(_at(schedule, index))
        self._schedule = schedule if callable(schedule) else self.value
        if self.value >= 2:
            warn(
                f"The coefficient is {self.value:g}. Above 2 the estimate has more variance than "
                "the plain gradient, and at 2 as much: 1 is SVRG, and 0 the plain optimizer."
            )

    def set(self, value: float) -> None:
        """Put a coefficient in force; in the formula it is rounded to float32."""
        self.value, self.rounded = value, float(np.float32(value))

    def at(self, index: int) -> float:
        """Ask the schedule for the coefficient of a snapshot."""
        return _at(self._schedule, index)

    def is_over(self, num_snapshots: int) -> bool:
        """Whether the schedule wants no more snapshots."""
        return isinstance(self._schedule, Until) and self._schedule.is_over(num_snapshots)

    def state(self) -> dict[str, Any]:
        """The coefficient, and its schedule: a number, an object, or the word "function"."""
        schedule: Any = self._schedule
        if callable(schedule):
            is_function = hasattr(schedule, "__name__")
            schedule = "function" if is_function else saving.by_attributes(schedule)
        return {"schedule": schedule, "coefficient": self.value}

    def problems(self, state: Any) -> Iterator[str]:
        saved, current = state["schedule"], self.state()["schedule"]
        if type(saved) is not type(current):
            yield "its coefficient was of another kind: pass a number, function or schedule as then"
        elif isinstance(saved, saving.SavedObject):
            yield from saving.object_problems(saved, self._schedule, "the coefficient")

    def assign(self, state: dict[str, Any]) -> None:
        schedule = state["schedule"]
        if isinstance(schedule, saving.SavedObject):
            saving.assign_object(schedule, self._schedule)
        elif isinstance(schedule, float):
            self._schedule = schedule
        self.set(state["coefficient"])


def _at(schedule: Schedule, index: int) -> float:
    value = schedule(index) if callable(schedule) else schedule
    return _arguments.number(value, "coefficient (1 is SVRG, 0 the plain optimizer)")
