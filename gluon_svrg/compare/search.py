"""The search for the learning rate of each method: the best is no edge, and all seeds agree."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from math import inf, isfinite, isnan, nan
from time import perf_counter
from typing import Any, Mapping, Sequence

import numpy as np
from tqdm.auto import tqdm

from .. import _mxnet
from .methods import Contender
from .problem import Problem
from .training import OutOfTimeError, Training, train

UPDATES = 1.5  # so many times as long as its gradients a training takes, roughly
LOWEST, HIGHEST = -16, 8  # the ends of the search, as `rate_at` numbers rates
FIRST_FOR_SGD, FIRST = -2, -5  # the middle one of the first three rates, for SGD and for others


def rate_at(number: int) -> float:
    """The learning rate of a number: 0.1, 0.3, 1, 3, 10 and so on; that of 0 is 1."""
    return float(f"{10 ** (number / 2):.0e}")


@dataclass
class Search:
    """All trainings of all methods."""

    problem: Problem
    methods: Sequence[Contender]
    seeds: Sequence[int]
    rates: Sequence[float] | None
    objective: str
    sign: int  # -1 to maximize
    seconds: float = inf  # for all of it
    left_out: Mapping[str, str] = field(default_factory=dict)  # methods, and why
    minimum: float | None = None  # of the objective
    gaps: Sequence[float] = ()  # parts of the first distance to it, the largest first
    rivals: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # solvers of elsewhere
    chosen: dict[str, list[Training]] = field(default_factory=dict)  # those of all seeds
    ended: BaseException | None = None  # what ended it early
    done: dict[Any, Training] = field(default_factory=dict)
    _bar: Any = None
    _until: tuple[float, float] = inf, inf  # the ends of the time, of a method and of all

    def run(self, progress: bool) -> None:
        """Train; an interrupt or the end of the time ends it, and what is complete stays."""
        # L-BFGS is the last one: it may train for as long as the slowest of the others.
        order = sorted(self.methods, key=lambda method: not method.steps)
        rates, more, problem = len(self.rates or range(5)), len(self.seeds) - 1, self.problem
        plans = [len(m.options) * ((1 if m.sets_rate else rates) + more) for m in order]
        seconds = UPDATES * problem.seconds_a_pass * problem.passes * sum(plans)
        form = "{desc}{percentage:.0f}%|{bar}| {n}/{total} trainings, {remaining} left"
        end = perf_counter() + self.seconds
        with tqdm(total=sum(plans), bar_format=form, disable=not progress) as self._bar:
            if progress:
                sizes = sorted({method.batch_size(problem.data) for method in order} - {0})
                text = f"{sum(plans)} trainings of {problem.passes:g} passes by mini-batches of "
                text += " and ".join(map(str, sizes or [problem.data.n]))
                time = f"{seconds / 60:.2g} minutes" if seconds > 60 else f"{seconds:.2g} seconds"
                most = f", but no more than {self.seconds:g} seconds" * (self.seconds < seconds)
                tqdm.write(f"{text}: about {time}{most}", file=sys.stderr)
            for place, method in enumerate(order):
                self._bar.total = self._bar.n + sum(plans[place:])
                now = perf_counter()
                self._until = now + (end - now) / (len(order) - place), end
                try:
                    self._search(method)
                except (KeyboardInterrupt, OutOfTimeError) as error:
                    self.ended = error
                    self._choose(method)
                    if isinstance(error, KeyboardInterrupt):
                        break
            self._bar.total = self._bar.n
        self.chosen = {m.name: self.chosen[m.name] for m in self.methods if m.name in self.chosen}
        if not self.chosen and self.ended is not None:
            raise self.ended

    def _merit(self, *trainings: Training) -> tuple[float, float]:
        """The median of what is minimized; among equal ones, the loss decides."""
        ends = [each.end for each in trainings]
        values = np.array([(self.sign * end[self.objective], end["loss"]) for end in ends])
        objective, loss = np.median(np.where(np.isnan(values), inf, values), axis=0)
        return objective, loss

    def _search(self, method: Contender) -> None:
        """Try rates, with all options of the optimizer: with the first seed, then with all."""
        number = FIRST_FOR_SGD if _mxnet.steps_along_gradient(method.optimizer) else FIRST
        for place in range(len(method.options)):
            fixed = [nan] if method.sets_rate else self.rates
            if fixed:
                self._best(method, place, fixed, all_seeds=True)
                continue
            rates: dict[float, int] = {}
            self._train(method, rate_at(number), place, self.seeds[0])  # if time is for one alone
            for all_seeds in (False, True):
                beside = [number - 1, number, number + 1]
                while beside:
                    rates.update((rate_at(each), each) for each in beside)
                    number = rates[self._best(method, place, sorted(rates), all_seeds)]
                    near = (max(number - 1, LOWEST), min(number + 1, HIGHEST))
                    beside = [each for each in near if each not in rates.values()]
            number -= 1  # where the next options begin: a larger momentum wants a lower rate

    def _best(
        self, method: Contender, place: int, rates: Sequence[float], all_seeds: bool
    ) -> float:
        """The best rate with the first seed, or with all where the first is in their range."""
        firsts, is_above = {}, False
        for rate in rates:  # that a rate above one that diverges does not is no merit of it
            first = self._merit(self._train(method, rate, place, self.seeds[0]))
            is_above = is_above or not isfinite(first[0])
            firsts[rate] = (inf, inf) if is_above else first
        order = sorted(rates, key=lambda rate: (firsts[rate], rate))
        if not all_seeds:
            return order[0]
        for rate in order:
            best = self.chosen.get(method.name, [])
            worst = max(map(self._merit, best), default=(inf, inf))
            if not best or (firsts[rate] <= worst and isfinite(firsts[rate][0])):
                for seed in self.seeds:
                    self._train(method, rate, place, seed)
                self._choose(method)
        return self.chosen[method.name][0].learning_rate

    def _train(self, method: Contender, rate: float, place: int, seed: int) -> Training:
        """A training; those that are done are kept."""
        key = (method.name, place, rate, seed)
        if key not in self.done:
            text = method.name + ("" if isnan(rate) else f", rate {rate:g}")
            self._bar.set_description(f"{text}, seed {seed}", refresh=False)
            size = method.batch_size(self.problem.data)
            most = self.problem.passes + size / self.problem.data.n  # the last step may end beyond
            training = Training(method.name, rate, method.options[place], seed, size, most)
            until = self._until[all(name != method.name for name, *_ in self.done)]
            steppers = (self.chosen.get(each.name, ()) for each in self.methods if each.steps)
            ends = (each.curve[-1] for trainings in steppers for each in trainings)
            slowest = max((end["seconds"] for end in ends), default=0.0)
            train(self.problem, method, training, until, slowest)
            self.done[key] = training
            self._bar.total = max(self._bar.total, self._bar.n + 1)
            self._bar.update()
        return self.done[key]

    def _choose(self, method: Contender) -> None:
        """The rate and options with the best median, of those with most seeds."""
        groups: dict[Any, list[Training]] = {}
        for (name, place, rate, _), training in self.done.items():
            if name == method.name:
                groups.setdefault((place, rate), []).append(training)
        most = max(map(len, groups.values()), default=0)
        complete = [group for group in groups.values() if len(group) == most]
        if complete:
            best = min(complete, key=lambda group: (self._merit(*group), group[0].learning_rate))
            self.chosen[method.name] = best
