"""When to refresh the snapshot, over how much data, and how much to trust it.

``SVRGTrainer(coefficient=...)`` calls a coefficient schedule with the index of a snapshot. A
refresh schedule says whether a full gradient is due: ``schedule.due(trainer)``. Its state is saved
with the trainer, and so are the draws of a sampler after ``trainer.register(sampler)``.
"""

from __future__ import annotations

import math
from functools import wraps
from inspect import signature
from typing import Any, Callable, ClassVar, Iterator, Protocol

import numpy as np
from mxnet.gluon.data import Sampler

from . import _arguments

__all__ = [
    "Constant",
    "Cosine",
    "Doubling",
    "EveryEpochs",
    "EverySteps",
    "Growing",
    "Linear",
    "Loopless",
    "PartialSampler",
    "Until",
]


def _also_named(**names: str) -> Callable[[Any], Any]:
    """Accept arguments under their names of version 0.1.0, too; ``names`` maps old ones to new."""

    def decorate(function: Any) -> Any:
        @wraps(function)
        def renamed(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **{names.get(name, name): kwargs[name] for name in kwargs})

        return renamed

    return decorate


class _Shown:
    """An object that is shown as the call that makes it, without arguments at their defaults."""

    #: The attributes of arguments that have another name: files know these.
    _ATTRIBUTES: ClassVar[dict[str, str]] = {"num_snapshots": "snapshots", "num_samples": "size"}

    def __repr__(self) -> str:
        shown: list[str] = []
        for number, (name, parameter) in enumerate(signature(type(self)).parameters.items()):
            value = getattr(self, self._ATTRIBUTES.get(name, name), parameter.default)
            if value != parameter.default:
                shown.append(f"{name}={value!r}" if number else repr(value))
        return f"{type(self).__name__}({', '.join(shown)})"


# --- coefficients ------------------------------------------------------------------------------


class Constant(_Shown):
    """The same coefficient for all snapshots.

    Parameters
    ----------
    value : float
        1 is SVRG, 0 the plain optimizer.

    Raises
    ------
    TypeError, ValueError
        If it is no number, negative or not finite.

    Examples
    --------
    >>> from gluon_svrg.schedule import Constant
    >>> half = Constant(0.5)
    >>> [half(snapshot) for snapshot in range(3)]
    [0.5, 0.5, 0.5]
    """

    def __init__(self, value: float) -> None:
        self.value = _arguments.number(value, "value")

    def __call__(self, index: int) -> float:
        """The coefficient of the snapshot of this index."""
        return self.value


class Linear(_Shown):
    """A coefficient that falls linearly, constant between snapshots: alpha-SVRG [1]_.

    For snapshot ``s`` it is ``final + (initial - final) * (1 - s / num_snapshots)``, and ``final``
    from ``s = num_snapshots`` on.

    Parameters
    ----------
    initial : float
        The first coefficient; the paper recommends 0.5 to 1.
    num_snapshots : int
        The number of snapshots after which it reaches ``final``.
    final : float, default 0.0
        The last coefficient.

    Raises
    ------
    TypeError, ValueError
        If a coefficient is no number, negative or not finite, or the number of snapshots is no
        positive whole number.

    References
    ----------
    .. [1] Y. Yin, Z. Xu, Z. Li, T. Darrell and Z. Liu, "A Coefficient Makes SVRG Effective",
       ICLR 2025, arXiv:2311.05589.

    Examples
    --------
    >>> from gluon_svrg.schedule import Linear
    >>> falling = Linear(0.75, 3)
    >>> falling
    Linear(0.75, num_snapshots=3)
    >>> [falling(snapshot) for snapshot in range(4)]
    [0.75, 0.5, 0.25, 0.0]
    """

    @_also_named(snapshots="num_snapshots")
    def __init__(self, initial: float, num_snapshots: int, final: float = 0.0) -> None:
        self.initial = _arguments.number(initial, "initial")
        self.snapshots = _arguments.whole(num_snapshots, "num_snapshots")
        self.final = _arguments.number(final, "final")

    def __call__(self, index: int) -> float:
        """The coefficient of the snapshot of this index."""
        left = max(0.0, 1 - index / self.snapshots)
        return self.final + (self.initial - self.final) * left


class Cosine(Linear):
    """A coefficient that falls as a half cosine, constant between snapshots.

    For snapshot ``s`` it is ``final + (initial - final) * (1 + cos(pi * s / num_snapshots)) / 2``,
    and ``final`` from ``s = num_snapshots`` on.

    Parameters
    ----------
    initial : float
        The first coefficient.
    num_snapshots : int
        The number of snapshots after which it reaches ``final``.
    final : float, default 0.0
        The last coefficient.

    Raises
    ------
    TypeError, ValueError
        If a coefficient is no number, negative or not finite, or the number of snapshots is no
        positive whole number.

    Examples
    --------
    >>> from gluon_svrg.schedule import Cosine
    >>> falling = Cosine(1.0, 4)
    >>> [round(falling(snapshot), 3) for snapshot in range(5)]
    [1.0, 0.854, 0.5, 0.146, 0.0]
    """

    def __call__(self, index: int) -> float:
        """The coefficient of the snapshot of this index."""
        done = min(1.0, index / self.snapshots)
        return self.final + (self.initial - self.final) * (1 + math.cos(math.pi * done)) / 2


class Until(_Shown):
    """Variance reduction for the first snapshots only, then the plain optimizer at its own cost.

    Once it is over, `SVRGTrainer.update_full_grads` makes no pass over the data: it discards the
    snapshot, and returns nan instead of a mean loss.

    Parameters
    ----------
    num_snapshots : int
        The number of snapshots with variance reduction.
    value : float, default 1.0
        Their coefficient.

    Raises
    ------
    TypeError, ValueError
        If the coefficient is no number, negative or not finite, or the number of snapshots is no
        positive whole number.

    Examples
    --------
    >>> from gluon_svrg.schedule import Until
    >>> first_two = Until(2)
    >>> [first_two.is_over(snapshot) for snapshot in range(4)]
    [False, False, True, True]
    """

    @_also_named(snapshots="num_snapshots")
    def __init__(self, num_snapshots: int, value: float = 1.0) -> None:
        self.snapshots = _arguments.whole(num_snapshots, "num_snapshots")
        self.value = _arguments.number(value, "value")

    def __call__(self, index: int) -> float:
        """The coefficient of the snapshot of this index."""
        return 0.0 if self.is_over(index) else self.value

    def is_over(self, index: int) -> bool:
        """Whether this snapshot comes after the last one.

        Parameters
        ----------
        index : int
            The index of the snapshot, from 0.

        Returns
        -------
        bool
            Whether variance reduction is over.
        """
        return index >= self.snapshots


class Refreshed(Protocol):
    """The attributes of a trainer that a refresh schedule uses."""

    @property
    def wants_snapshot(self) -> bool:
        """Whether there is no snapshot, and a refresh would take one."""

    @property
    def num_snapshots(self) -> int:
        """The number of snapshots taken."""

    @property
    def inner_steps(self) -> int:
        """The number of steps since the last snapshot."""

    def register(self, schedule: Any) -> None:
        """Save and load the state of a schedule together with the trainer's."""


# --- refreshes ---------------------------------------------------------------------------------


def _check_trainer(trainer: Any, schedule: Any) -> None:
    """Raise a TypeError if the argument of `due` is not a trainer with refreshes."""
    if hasattr(type(trainer), "wants_snapshot"):  # its value would call a coefficient's schedule
        return
    if isinstance(schedule, EveryEpochs):
        wanted = "the number of the epoch, or a trainer with snapshots"
    else:
        wanted = "a trainer with snapshots (EveryEpochs.due also takes the number of the epoch)"
    name, found = type(schedule).__name__, type(trainer).__name__
    raise TypeError(f"{name}.due must be called with {wanted}, got {found}.")


class EveryEpochs(_Shown):
    """A refresh every few epochs, at the start of the epoch.

    Parameters
    ----------
    epochs : int
        The epochs between refreshes: due when the epoch, from 0, is a multiple of it.

    Raises
    ------
    TypeError, ValueError
        If it is no positive whole number.

    Examples
    --------
    >>> from gluon_svrg.schedule import EveryEpochs
    >>> refresh = EveryEpochs(2)
    >>> [refresh.due(epoch) for epoch in range(4)]
    [True, False, True, False]
    """

    def __init__(self, epochs: int) -> None:
        self.epochs = _arguments.whole(epochs, "epochs")
        self.epoch = 0

    def due(self, trainer: Refreshed | int) -> bool:
        """Whether a refresh is due: in its epoch, and whenever there is no snapshot.

        Parameters
        ----------
        trainer : SVRGTrainer or int
            The trainer, before the first step of an epoch; call this once per epoch. Or the number
            of the epoch, from 0, if you count epochs yourself.

        Returns
        -------
        bool
            Whether to call ``update_full_grads``.

        Raises
        ------
        TypeError
            If it is neither.
        """
        if isinstance(trainer, (int, np.integer)):
            return bool(trainer % self.epochs == 0)
        _check_trainer(trainer, self)
        trainer.register(self)
        epoch, self.epoch = self.epoch, self.epoch + 1
        return trainer.wants_snapshot or epoch % self.epochs == 0


class EverySteps(_Shown):
    """A refresh after a fixed number of steps.

    Parameters
    ----------
    steps : int
        The steps between refreshes.

    Raises
    ------
    TypeError, ValueError
        If it is no positive whole number.

    Examples
    --------
    >>> from mxnet import gluon
    >>> from gluon_svrg import SVRGTrainer
    >>> from gluon_svrg.schedule import EverySteps
    >>> net = gluon.nn.Dense(1, in_units=2)
    >>> net.initialize()
    >>> trainer = SVRGTrainer(net.collect_params(), 'sgd')
    >>> refresh = EverySteps(100)
    >>> refresh.due(trainer)  # there is no snapshot yet
    True
    """

    def __init__(self, steps: int) -> None:
        self.steps = _arguments.whole(steps, "steps")

    def due(self, trainer: Refreshed) -> bool:
        """Whether a refresh is due: after so many steps, and whenever there is no snapshot.

        Parameters
        ----------
        trainer : SVRGTrainer
            The trainer, before its next step.

        Returns
        -------
        bool
            Whether to call ``update_full_grads``.

        Raises
        ------
        TypeError
            If it is not a trainer with snapshots.
        """
        _check_trainer(trainer, self)
        return trainer.wants_snapshot or trainer.inner_steps >= self.steps


class Loopless(_Shown):
    """A refresh at each step with a given probability: L-SVRG [1]_.

    The coin of a step depends only on the seed and the number of the step, so it is the same on all
    workers that call ``due`` once per step.

    Parameters
    ----------
    probability : float
        The probability of a refresh, above 0 and up to 1. The expected number of steps between
        refreshes is its inverse.
    seed : int, default 0
        The seed of the coins.

    Raises
    ------
    TypeError, ValueError
        If the probability is no number above 0 and at most 1, or the seed no whole number from 0.

    References
    ----------
    .. [1] D. Kovalev, S. Horvath and P. Richtarik, "Don't Jump Through Hoops and Remove Those
       Loops: SVRG and Katyusha are Better Without the Outer Loop", ALT 2020, arXiv:1901.08689.

    Examples
    --------
    >>> from mxnet import gluon
    >>> from gluon_svrg import SVRGTrainer
    >>> from gluon_svrg.schedule import Loopless
    >>> net = gluon.nn.Dense(1, in_units=2)
    >>> net.initialize()
    >>> trainer = SVRGTrainer(net.collect_params(), 'sgd')
    >>> refresh = Loopless(0.01)
    >>> refresh.due(trainer)  # there is no snapshot yet
    True
    """

    def __init__(self, probability: float, seed: int = 0) -> None:
        self.probability = _arguments.number(probability, "probability", high=1, open_low=True)
        self.seed = _arguments.whole(seed, "seed", 0)
        self.asked = 0

    def due(self, trainer: Refreshed) -> bool:
        """Toss the coin of this step. Without a snapshot, a refresh is due in any case.

        Parameters
        ----------
        trainer : SVRGTrainer
            The trainer, before its next step; call this once per step.

        Returns
        -------
        bool
            Whether to call ``update_full_grads``.

        Raises
        ------
        TypeError
            If it is not a trainer with snapshots.
        """
        _check_trainer(trainer, self)
        trainer.register(self)
        coin = np.random.default_rng([self.seed, self.asked]).random()
        self.asked += 1
        return trainer.wants_snapshot or bool(coin < self.probability)


class Doubling(_Shown):
    """Refreshes after twice as many steps each time: SVRG++ [1]_.

    Parameters
    ----------
    first : int
        The steps after the first snapshot; twice as many after the second, and so on.

    Raises
    ------
    TypeError, ValueError
        If it is no positive whole number.

    References
    ----------
    .. [1] Z. Allen-Zhu and Y. Yuan, "Improved SVRG for Non-Strongly-Convex or Sum-of-Non-Convex
       Objectives", ICML 2016, arXiv:1506.01972.

    Examples
    --------
    >>> from mxnet import gluon
    >>> from gluon_svrg import SVRGTrainer
    >>> from gluon_svrg.schedule import Doubling
    >>> net = gluon.nn.Dense(1, in_units=2)
    >>> net.initialize()
    >>> trainer = SVRGTrainer(net.collect_params(), 'sgd')
    >>> refresh = Doubling(100)
    >>> refresh.due(trainer)  # there is no snapshot yet
    True
    """

    def __init__(self, first: int) -> None:
        self.first = _arguments.whole(first, "first")

    def due(self, trainer: Refreshed) -> bool:
        """Whether a refresh is due: after so many steps, and whenever there is no snapshot.

        Parameters
        ----------
        trainer : SVRGTrainer
            The trainer, before its next step.

        Returns
        -------
        bool
            Whether to call ``update_full_grads``.

        Raises
        ------
        TypeError
            If it is not a trainer with snapshots.
        """
        _check_trainer(trainer, self)
        taken = trainer.num_snapshots
        return trainer.wants_snapshot or trainer.inner_steps >= self.first * 2 ** (taken - 1)


# --- full gradients over part of the data ------------------------------------------------------


_MOST = 2**62  # samples, more than any data has


class Growing(_Shown):
    """A number of samples that grows from draw to draw [1]_.

    Parameters
    ----------
    first : int
        The samples of the first draw.
    factor : float, default 2.0
        The factor by which the number grows.

    Raises
    ------
    TypeError, ValueError
        If ``first`` is no positive whole number, or the factor is no number from 1 on.

    References
    ----------
    .. [1] R. Babanezhad Harikandeh, M. O. Ahmed, A. Virani, M. Schmidt, J. Konecny and
       S. Sallinen, "Stop Wasting My Gradients: Practical SVRG", NeurIPS 2015.

    Examples
    --------
    >>> from gluon_svrg.schedule import Growing
    >>> samples = Growing(10)
    >>> [samples(draw) for draw in range(4)]
    [10, 20, 40, 80]
    """

    def __init__(self, first: int, factor: float = 2.0) -> None:
        self.first = _arguments.whole(first, "first")
        self.factor = _arguments.number(factor, "factor", 1)

    def __call__(self, draw: int) -> int:
        """The number of samples of the draw of this index."""
        try:
            return min(round(self.first * self.factor**draw), _MOST)
        except OverflowError:
            return _MOST


class PartialSampler(_Shown, Sampler):
    """Samples for a full gradient over part of the data: as in SCSG [1]_, or a mega-batch.

    Pass it to a `mxnet.gluon.data.DataLoader`, and pass that to `SVRGTrainer.update_full_grads`.
    Each iteration draws new samples.

    Parameters
    ----------
    length : int
        The number of samples in the data.
    num_samples : int or callable
        The number of samples in a draw, at most the length without replacement; or a function of
        the number of the draw, such as `Growing`.
    seed : int, default 0
        The seed of the draws. Use the same on all workers that draw from the same data.
    replacement : bool, default False
        Whether a sample can be drawn twice.

    Raises
    ------
    TypeError, ValueError
        If the length or the number of samples is no positive whole number, the seed no whole number
        from 0, or ``replacement`` neither True nor False.

    References
    ----------
    .. [1] L. Lei and M. I. Jordan, "Less than a Single Pass: Stochastically Controlled Stochastic
       Gradient", AISTATS 2017, arXiv:1609.03261.

    Examples
    --------
    >>> from gluon_svrg.schedule import Growing, PartialSampler
    >>> sampler = PartialSampler(100, Growing(10))
    >>> [len(list(sampler)) for _ in range(5)]
    [10, 20, 40, 80, 100]
    """

    @_also_named(size="num_samples")
    def __init__(
        self,
        length: int,
        num_samples: int | Callable[[int], int],
        seed: int = 0,
        replacement: bool = False,
    ) -> None:
        self.length = _arguments.whole(length, "length")
        is_fixed = not callable(num_samples)
        self.size = _arguments.whole(num_samples, "num_samples") if is_fixed else num_samples
        self.seed = _arguments.whole(seed, "seed", 0)
        self.replacement = _arguments.flag(replacement, "replacement")
        self.draws = 0

    def __iter__(self) -> Iterator[int]:
        count = len(self)
        random = np.random.default_rng([self.seed, self.draws])
        self.draws += 1
        if self.replacement:
            return iter(random.integers(0, self.length, count).tolist())
        return iter(random.permutation(self.length)[:count].tolist())

    def __len__(self) -> int:
        size = self.size(self.draws) if callable(self.size) else self.size
        return size if self.replacement else min(size, self.length)
