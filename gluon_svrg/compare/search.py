"""The search for the learning rate of each method, and the time limit."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from math import inf, isfinite, isnan, nan
from time import perf_counter
from typing import Any, Sequence

import numpy as np
from tqdm.auto import tqdm

from .. import _mxnet
from .methods import Contender
from .task import Task
from .training import OutOfTimeError, Training, train

UPDATES = 1.5  # the seconds of a training, divided by those of its gradients, roughly
GRID = [float(f"{10 ** (number / 2):.0e}") for number in range(-16, 9)]  # ..., 0.3, 1, 3, ..., 1e4
FIRST_FOR_SGD, FIRST = GRID.index(0.1), GRID.index(0.003)  # the middle of the first three rates


@dataclass
class Search:
    """All trainings of all methods."""

    problem: Task
    methods: Sequence[Contender]
    seeds: Sequence[int]
    rates: list[float] | None  # the only ones to try
    objective: str
    sign: int  # -1 to maximize
    seconds: float  # for all of it
    chosen: dict[str, list[Training]] = field(default_factory=dict)  # those of all seeds
    ended: BaseException | None = None  # what ended it early
    #: The trainings by method, number of the options, and rate: one for each of the first seeds.
    done: dict[tuple[str, int, float], list[Training]] = field(default_factory=dict)
    _bar: Any = None
    _until: float = inf  # when the next training must end
    _share: float = inf  # when a method must end, except for its first training

    def run(self, progress: bool) -> None:
        """Train. An interrupt ends all, the end of its time a method; what is complete stays."""
        # L-BFGS is the last one, as it may train for as long as the slowest of the others.
        order = sorted(self.methods, key=lambda method: not method.steps)
        rates, more, problem = len(self.rates or range(5)), len(self.seeds) - 1, self.problem
        plans = [len(m.options) * ((1 if m.sets_rate else rates) + more) for m in order]
        form = "{desc}{percentage:.0f}%|{bar}| {n}/{total} trainings, {remaining} left"
        end = perf_counter() + self.seconds
        with tqdm(total=sum(plans), bar_format=form, disable=not progress) as self._bar:
            if progress:
                minutes = UPDATES * problem.seconds_a_pass * problem.passes * sum(plans) / 60
                text = f"{sum(plans)} trainings of {problem.passes:g} passes, about "
                tqdm.write(f"{text}{minutes:.2g} minutes", file=sys.stderr)
            for place, method in enumerate(order):
                self._bar.total = self._bar.n + sum(plans[place:])
                now = perf_counter()
                self._until, self._share = end, now + (end - now) / (len(order) - place)
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
        best = FIRST_FOR_SGD if _mxnet.steps_along_gradient(method.optimizer) else FIRST
        for place in range(len(method.options)):
            fixed = [nan] if method.sets_rate else self.rates
            if fixed:
                self._best(method, place, fixed, all_seeds=True)
                continue
            self._trained(method, place, GRID[best], 1)  # first, in case the time is over soon
            low, high = best - 1, best + 1
            for all_seeds in (False, True):
                tried = None
                while tried != (low, high):
                    tried = low, high
                    rate = self._best(method, place, GRID[low : high + 1], all_seeds)
                    best = GRID.index(rate)
                    low, high = max(0, min(low, best - 1)), min(max(high, best + 1), len(GRID) - 1)
            best = max(1, best - 1)  # for the next options: a larger momentum wants a lower rate

    def _best(self, method: Contender, place: int, rates: list[float], all_seeds: bool) -> float:
        """The best rate with the first seed, or with all seeds where the first one is promising."""
        firsts, is_above = {}, False
        for rate in rates:  # rates above one that diverges do not count
            first = self._merit(*self._trained(method, place, rate, 1)[:1])
            is_above = is_above or not isfinite(first[0])
            firsts[rate] = (inf, inf) if is_above else first
        order = sorted(rates, key=lambda rate: (firsts[rate], rate))
        if not all_seeds:
            return order[0]
        for rate in order:
            best = self.chosen.get(method.name, [])
            worst = max(map(self._merit, best), default=(inf, inf))
            if not best or (firsts[rate] <= worst and isfinite(firsts[rate][0])):
                self._trained(method, place, rate, len(self.seeds))
                self._choose(method)
        return self.chosen[method.name][0].learning_rate

    def _trained(self, method: Contender, place: int, rate: float, count: int) -> list[Training]:
        """Train with the first seeds, as far as that is not done yet; return the trainings."""
        trainings = self.done.setdefault((method.name, place, rate), [])
        for seed in self.seeds[len(trainings) : count]:
            text = method.name + ("" if isnan(rate) else f", rate {rate:g}")
            self._bar.set_description(f"{text}, seed {seed}", refresh=False)
            size = method.batch_size(self.problem.data)
            most = self.problem.passes + size / self.problem.data.n  # the last step may end beyond
            training = Training(method.name, rate, method.options[place], seed, size, most)
            others = [each for group in self.chosen.values() for each in group if each.batch_size]
            slowest = max((each.curve[-1]["seconds"] for each in others), default=0.0)
            train(self.problem, method, training, self._until, slowest)
            trainings.append(training)
            self._until = self._share
            self._bar.total = max(self._bar.total, self._bar.n + 1)
            self._bar.update()
        return trainings

    def _choose(self, method: Contender) -> None:
        """Choose the rate and options with the best median, of those with the most seeds."""
        groups = [group for (name, *_), group in self.done.items() if name == method.name]
        most = max(map(len, groups), default=0)
        if most:
            complete = [group for group in groups if len(group) == most]
            best = min(complete, key=lambda group: (self._merit(*group), group[0].learning_rate))
            self.chosen[method.name] = best
