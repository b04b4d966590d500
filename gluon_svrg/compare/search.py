"""The search for the learning rate of each method: the best is no edge, and all seeds agree."""

from __future__ import annotations

from contextlib import nullcontext
from math import inf, isnan, nan
from typing import Any, Sequence

import numpy as np

from .methods import HIGHEST, LOWEST, Method, rate_at
from .training import Problem, Training, train


class Search:
    """All trainings of all methods."""

    def __init__(
        self,
        problem: Problem,
        methods: Sequence[Method],
        seeds: Sequence[int],
        rates: Sequence[float] | None,
        objective: str,
        sign: int,
    ) -> None:
        self.problem, self.methods, self.seeds, self.rates = problem, methods, seeds, rates
        self.objective, self.sign = objective, sign
        self.trainings: list[Training] = []
        self.chosen: dict[str, list[Training]] = {}  # of each method, those of all seeds
        self.interrupted = False
        self._found: dict[Any, Training] = {}
        self._bar: Any = None

    def run(self, progress: bool) -> None:
        """Train; an interrupt ends it, and what is complete stays."""
        bar: Any = nullcontext()
        if progress:
            from tqdm.auto import tqdm

            form = "{desc}: {percentage:.0f}%|{bar}| {n:.0f}/{total:.0f} passes, {remaining} left"
            bar = tqdm(total=0, bar_format=form, mininterval=1)
        with bar as self._bar:
            self._expect(sum(map(self._first_guess, self.methods)))
            for method in self.methods:
                try:
                    self._search(method)
                except KeyboardInterrupt:
                    self.interrupted = True
                self._choose(method)
                if self.interrupted:
                    break
        if not self.chosen:
            raise KeyboardInterrupt

    def end(self, training: Training) -> float:
        """The last objective; inf, or -inf if it is maximized, after a divergence."""
        value = nan if training.diverged else training.curve[-1][self.objective]
        return self.sign * inf if isnan(value) else value

    def _merit(self, trainings: Sequence[Training]) -> tuple[float, float]:
        """The median of what is minimized; among equal ones, the loss decides."""
        ends = [self.sign * self.end(each) for each in trainings]
        losses = [inf if each.diverged else each.curve[-1]["loss"] for each in trainings]
        return _median(ends), _median(losses)

    def _search(self, method: Method) -> None:
        """Try rates, with all options of the optimizer."""
        one, all_seeds = self.seeds[:1], self.seeds
        if method.make is None:
            self._try(method, 0, None, all_seeds)
            return
        for place in range(len(method.options)):
            if self.rates is not None:
                tried = {k: self._try(method, place, k, one) for k in range(len(self.rates))}
                self._try(method, place, min(sorted(tried), key=tried.__getitem__), all_seeds)
                continue
            best = method.first
            for seeds in (one, all_seeds):
                numbers = {best - 1, best, best + 1}
                while True:
                    tried = {k: self._try(method, place, k, seeds) for k in sorted(numbers)}
                    best = min(sorted(tried), key=tried.__getitem__)  # the lowest of equal ones
                    beside = {max(best - 1, LOWEST), min(best + 1, HIGHEST)}
                    if beside <= numbers:
                        break
                    numbers |= beside

    def _try(
        self, method: Method, place: int, number: int | None, seeds: Sequence[int]
    ) -> tuple[float, float]:
        """Train with some seeds, unless that was done; tell how good the rate is."""
        rate = nan if number is None else rate_at(number)
        if number is not None and self.rates is not None:
            rate = self.rates[number]
        options, found = method.options[place], []
        for seed in seeds:
            key = (method.name, place, number, seed)
            if key not in self._found:
                before = self._bar.n if self._bar is not None else 0.0
                self._say(f"{method.name}, rate {rate:g}, seed {seed}")

                def show(passes: float, before: float = before) -> None:
                    if self._bar is not None:
                        self._bar.update(before + passes - self._bar.n)

                self._found[key] = train(self.problem, method, rate, options, seed, show)
                self.trainings.append(self._found[key])
                show(self.problem.passes)
            found.append(self._found[key])
        return self._merit(found)

    def _choose(self, method: Method) -> None:
        """The rate and options with the best median, of those with most seeds."""
        groups: dict[Any, list[Training]] = {}
        for (name, *which, _), training in self._found.items():
            if name == method.name:
                groups.setdefault(tuple(which), []).append(training)
        most = max(map(len, groups.values()), default=0)
        complete = [group for group in groups.values() if len(group) == most]
        if complete:
            best = min(complete, key=lambda group: (*self._merit(group), group[0].learning_rate))
            self.chosen[method.name] = sorted(best, key=lambda t: self.seeds.index(t.seed))

    # --- the bar -----------------------------------------------------------------------------

    def _first_guess(self, method: Method) -> int:
        """How many trainings a method takes if its first rate is no edge."""
        more = len(self.seeds) - 1
        if method.make is None:
            return more + 1
        each = 3 + 3 * more if self.rates is None else len(self.rates) + more
        return each * len(method.options)

    def _expect(self, trainings: int) -> None:
        if self._bar is not None:
            self._bar.total = trainings * self.problem.passes
            self._bar.refresh()

    def _say(self, what: str) -> None:
        if self._bar is not None:
            done, passes = len(self.trainings), self.problem.passes
            self._bar.total = max(self._bar.total, (done + 1) * passes)
            self._bar.set_description(what)


def _median(values: Any) -> float:
    """The median, also of infinite values."""
    ordered = sorted(values)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return low if low == high else float(np.mean([low, high]))
