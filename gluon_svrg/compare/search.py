"""The search for the learning rate of each method: the best is no edge, and all seeds agree."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isfinite, isnan, nan
from typing import Any, Sequence

import numpy as np

from .methods import Method
from .training import Problem, Training, train

LOWEST, HIGHEST = -16, 8  # the ends of the search, as `rate_at` numbers rates


def rate_at(number: int) -> float:
    """The learning rate of a number: 0.1, 0.3, 1, 3, 10 and so on; that of 0 is 1."""
    return float(f"{10 ** (number / 2):.0e}")


@dataclass
class Search:
    """All trainings of all methods."""

    problem: Problem
    methods: Sequence[Method]
    seeds: Sequence[int]
    rates: Sequence[float] | None
    objective: str
    sign: int  # -1 to maximize
    chosen: dict[str, list[Training]] = field(default_factory=dict)  # those of all seeds
    interrupted: bool = False
    done: dict[Any, Training] = field(default_factory=dict)
    _bar: Any = None

    def run(self, progress: bool) -> None:
        """Train; an interrupt ends it, and what is complete stays."""
        from tqdm.auto import tqdm

        form = "{desc}{percentage:.0f}%|{bar}| {n:.0f}/{total:.0f} passes, {remaining} left"
        count = len(self.rates or range(5)) + len(self.seeds) - 1  # trainings, as a guess
        plans = [self.problem.passes * count * len(method.options) for method in self.methods]
        settings = {"bar_format": form, "mininterval": 1, "disable": not progress}
        with tqdm(total=sum(plans), **settings) as self._bar:
            for place, method in enumerate(self.methods):
                self._bar.total = self._bar.n + sum(plans[place:])
                try:
                    self._search(method)
                except KeyboardInterrupt:
                    self.interrupted = True
                    self._choose(method)
                    break
            self._bar.total = self._bar.n
        if not self.chosen:
            raise KeyboardInterrupt

    def _merit(self, *trainings: Training) -> tuple[float, float]:
        """The median of what is minimized; among equal ones, the loss decides."""
        ends = [each.curve[-1] for each in trainings]
        found = np.array([(self.sign * end[self.objective], end["loss"]) for end in ends])
        objective, loss = np.median(np.where(np.isnan(found), inf, found), axis=0)
        return objective, loss

    def _search(self, method: Method) -> None:
        """Try rates, with all options of the optimizer: with the first seed, then with all."""
        number = method.first
        for place in range(len(method.options)):
            fixed = self.rates if method.make else [nan]
            if fixed:
                self._best(method, place, fixed, all_seeds=True)
                continue
            rates: dict[float, int] = {}
            for all_seeds in (False, True):
                beside = [number - 1, number, number + 1]
                while beside:
                    rates.update((rate_at(each), each) for each in beside)
                    number = rates[self._best(method, place, sorted(rates), all_seeds)]
                    near = (max(number - 1, LOWEST), min(number + 1, HIGHEST))
                    beside = [each for each in near if each not in rates.values()]
            number -= 1  # where the next options begin: a larger momentum wants a lower rate

    def _best(self, method: Method, place: int, rates: Sequence[float], all_seeds: bool) -> float:
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

    def _train(self, method: Method, rate: float, place: int, seed: int) -> Training:
        """A training; those that are done are kept."""
        key = (method.name, place, rate, seed)
        if key not in self.done:
            bar, before, passes = self._bar, self._bar.n, self.problem.passes
            bar.total = max(bar.total, before + passes)
            text = method.name + ("" if isnan(rate) else f", rate {rate:g}")
            bar.set_description(f"{text}, seed {seed}", refresh=False)

            def show(done: float) -> None:
                bar.update(before + done - bar.n)

            found = Training(method.name, rate, method.options[place], seed)
            train(self.problem, method, found, show)
            self.done[key] = found
            show(passes)  # one that diverges ends early
        return self.done[key]

    def _choose(self, method: Method) -> None:
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
