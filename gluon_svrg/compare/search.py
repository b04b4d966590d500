"""The search for the learning rate of each method: the best is no edge, and all seeds agree."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from math import inf, isnan, nan
from typing import Any, Sequence

import numpy as np

from .methods import HIGHEST, LOWEST, Method, rate_at
from .training import Problem, Training, train


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
    _done: dict[Any, Training] = field(default_factory=dict)
    _bar: Any = None

    def run(self, progress: bool) -> None:
        """Train; an interrupt ends it, and what is complete stays."""
        bar: Any = nullcontext()
        if progress:
            from tqdm.auto import tqdm

            count = len(self.rates) - 1 + len(self.seeds) if self.rates else 3 * len(self.seeds)
            total = self.problem.passes * count * sum(len(m.options) for m in self.methods)
            form = "{desc}: {percentage:.0f}%|{bar}| {n:.0f}/{total:.0f} passes, {remaining} left"
            bar = tqdm(total=total, bar_format=form, mininterval=1)
        with bar as self._bar:
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

    @property
    def trainings(self) -> list[Training]:
        """All that are complete."""
        return list(self._done.values())

    def end(self, training: Training) -> float:
        """The last objective; inf, or -inf if it is maximized, after a divergence."""
        value = nan if training.diverged else training.curve[-1][self.objective]
        return self.sign * inf if isnan(value) else value

    def _merit(self, trainings: Sequence[Training]) -> tuple[float, float]:
        """The median of what is minimized; among equal ones, the loss decides."""
        losses = [inf if each.diverged else each.curve[-1]["loss"] for each in trainings]
        ends = [self.sign * self.end(each) for each in trainings]
        return float(np.median(ends)), float(np.median(losses))

    def _search(self, method: Method) -> None:
        """Try rates, with all options of the optimizer: with the first seed, then with all."""
        if method.make is None:
            self._best(method, 0, [nan], self.seeds)
            return
        for place in range(len(method.options)):
            if self.rates is not None:
                best = self._best(method, place, self.rates, self.seeds[:1])
                self._best(method, place, [best], self.seeds)
                continue
            number = method.first
            for seeds in (self.seeds[:1], self.seeds):
                tried: set[int] = set()
                beside = {number - 1, number, number + 1}
                while not beside <= tried:
                    tried |= beside
                    rates = {rate_at(each): each for each in sorted(tried)}
                    number = rates[self._best(method, place, [*rates], seeds)]
                    beside = {max(number - 1, LOWEST), min(number + 1, HIGHEST)}

    def _best(
        self, method: Method, place: int, rates: Sequence[float], seeds: Sequence[int]
    ) -> float:
        """The best rate, the lowest of equal ones, with all seeds."""
        merits = {}
        for rate in rates:
            found = []
            for seed in seeds:
                key = (method.name, place, rate, seed)
                if key not in self._done:
                    self._done[key] = self._train(method, rate, place, seed)
                found.append(self._done[key])
            merits[rate] = self._merit(found)
        return min(merits, key=merits.__getitem__)

    def _train(self, method: Method, rate: float, place: int, seed: int) -> Training:
        bar, passes = self._bar, self.problem.passes
        before = bar.n if bar is not None else 0.0

        def show(done: float) -> None:
            if bar is not None:
                bar.total = max(bar.total, before + passes)
                bar.update(before + done - bar.n)

        if bar is not None:
            bar.set_description(f"{method.name}, rate {rate:g}, seed {seed}", refresh=False)
        found = train(self.problem, method, rate, method.options[place], seed, show)
        show(passes)  # one that diverges ends early
        return found

    def _choose(self, method: Method) -> None:
        """The rate and options with the best median, of those with most seeds."""
        groups: dict[Any, list[Training]] = {}
        for (name, place, rate, _), training in self._done.items():
            if name == method.name:
                groups.setdefault((place, rate), []).append(training)
        most = max(map(len, groups.values()), default=0)
        complete = [group for group in groups.values() if len(group) == most]
        if complete:
            best = min(complete, key=lambda group: (*self._merit(group), group[0].learning_rate))
            self.chosen[method.name] = best
