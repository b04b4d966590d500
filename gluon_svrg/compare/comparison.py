"""The results of a comparison: a table, a figure, all trainings, and a verdict."""

from __future__ import annotations

import re
from math import inf, isfinite, isnan, nan
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from .search import Search
from .training import Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Smaller distances to the minimum, relative to 1 or to a larger first objective, are rounding.
ROUNDING, OF_FLOAT32 = 1e-14, 1e-7
#: The colors of Okabe and Ito, with grey for yellow, and the markers; methods take them in turn.
COLORS = ["#777777", "#E69F00", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#56B4E9", "#000000"]
MARKERS = "o<^sDvPp"
#: The names in the table of two columns of a curve.
COSTS = {"passes": "data_passes", "seconds": "seconds"}
#: Names of columns, which no measure may have.
TAKEN = (
    "method|learning.rate|options|minibatch|seed|chosen|data_passes|seconds|loss|lowest|highest"
    "|search .*|(passes|seconds) to .*"
)


class Comparison:
    """The result of `compare`; printed, it is the table and the verdict.

    Parameters
    ----------
    search : Search
        All trainings.
    minimum, gaps, rivals : float, sequence of float, dict
        As for `compare`; the largest gap is first.
    left_out : dict
        Why methods could not train.

    Attributes
    ----------
    chosen : dict
        For each method its trainings at the best rate, one a seed.
    trainings : list
        All trainings: ``method``, ``learning_rate``, ``options``, ``seed``, ``diverged``, and
        ``curve``, a list of dicts.
    interrupted : bool
        Whether an interrupt, or the end of the time, ended it early.
    """

    def __init__(self, search: Search, minimum: Any, gaps: Any, rivals: Any, left_out: Any) -> None:
        self.trainings = [each for group in search.done.values() for each in group]
        self.chosen = search.chosen
        self.interrupted, self._search = search.ended is not None, search
        self._all = {**self.chosen}  # with one training of each rival
        for name, row in rivals.items():
            end = {**row, "data_passes": nan}
            self._all[name] = [Training(name, nan, {}, 0, 0, inf, curve=[end])]
        self._notes = [f"Left out: {name}. {why}" for name, why in left_out.items()]
        self._notes += ["It ended early, and not all was tried."] * self.interrupted
        start, sign = search.problem.first[search.objective], search.sign
        is_exact = search.objective != "loss" or search.problem.data.dtype == "float64"
        self._least = (ROUNDING if is_exact else OF_FLOAT32) * max(1.0, abs(start))
        self._minimum = minimum
        best = min(np.nanmin(sign * each.of(search.objective)) for each in self.trainings)
        gap = 0.0 if minimum is None else gaps[-1] * abs(start - minimum)
        if minimum is not None and sign * minimum - best > max(10 * self._least, gap):
            self._minimum, reached = None, f"{search.objective} is {sign * best:.6g} at best"
            self._notes.append(f"The minimum of {minimum:.6g} is none, and left out: {reached}.")
        self._what = search.objective if self._minimum is None else "gap"
        self._ends = {
            name: np.array([self._curve(each)[each.place] for each in trainings])
            for name, trainings in self._all.items()
        }
        ends = min((self._ends[n] for n in self.chosen), key=lambda e: (np.median(e), max(e)))
        lowest = max(ends[np.isfinite(ends)], default=inf)  # inf only where all seeds have diverged
        self._form = ".6g" if self._minimum is None else ".2g"
        first = self._curve(self.trainings[0])[0]
        self._levels = {f"{gap:g}": gap * first for gap in gaps if self._minimum is not None}
        if lowest < inf and not any(lowest <= level for level in self._levels.values()):
            self._levels[f"{self._what} {self._shown(lowest):{self._form}}"] = lowest

    @property
    def runs(self) -> pd.DataFrame:
        """All trainings, one row for each measurement; those not chosen were the search."""
        rows = []
        for each in self.trainings:
            who = {"method": each.method, "learning_rate": each.learning_rate}
            who.update({"options": _listed(each.options), "seed": each.seed})
            who["chosen"] = each in self.chosen.get(each.method, ())
            rows += [{**who, **row} for row in each.curve]
        return pd.DataFrame(rows)

    def table(self) -> pd.DataFrame:
        """A row for each method, at its best rate, and for each rival.

        Returns
        -------
        pandas.DataFrame
            Learning rate, options and mini-batch; the passes and seconds to each gap, or to what
            the best method reaches, NaN unless most seeds do; at equal passes the median, lowest
            and highest objective, or its distance to a known minimum, and medians of the loss, the
            measures and the seconds; what the search cost: the other trainings.
        """
        rows = {}
        for name, some in self._all.items():
            row: dict[str, Any] = {"learning rate": some[0].learning_rate}
            row["options"] = _listed(some[0].options)
            row["minibatch"] = some[0].batch_size or nan
            for text, level in self._levels.items():
                for what, key in COSTS.items():
                    costs = [self._cost(each, key, level) for each in some]
                    row[f"{what} to {text}"] = np.median(costs)
            ends = self._shown(self._ends[name])
            row.update({self._what: np.median(ends), "lowest": ends.min(), "highest": ends.max()})
            for key in (*self._search.problem.measures, "seconds"):
                row.setdefault(key, np.median([each.end.get(key, nan) for each in some]))
            others = [e.curve[-1] for e in self.trainings if e.method == name and e not in some]
            row["search trainings"] = len(others)
            for what, key in COSTS.items():
                row[f"search {what}"] = sum(end[key] for end in others)
            rows[name] = row
        return pd.DataFrame.from_dict(rows, orient="index").replace([inf, -inf], nan)

    def _curve(self, training: Training) -> np.ndarray:
        """What is minimized: the gap if the minimum is known; infinite if it diverged."""
        values = self._search.sign * training.of(self._search.objective)
        values = np.where(np.isnan(values), inf, values)
        if self._minimum is None:
            return values
        return np.maximum(values - self._search.sign * self._minimum, self._least)

    def _shown(self, values: Any) -> Any:
        """Values of `_curve` as they are shown: gaps, or objectives with their own sign."""
        return values if self._minimum is not None else self._search.sign * values

    def _cost(self, training: Training, key: str, level: float) -> float:
        """The passes or seconds until `_curve` is at a level; infinite if it never is."""
        (places,) = np.nonzero(self._curve(training) <= level)
        return training.curve[places[0]][key] if len(places) else inf

    def __str__(self) -> str:
        minus = "" if self._minimum is None else f" minus the minimum, {self._minimum:.6g}"
        level = next(iter(self._levels), "")
        said = [
            f"{self._what}: {self._search.objective}{minus}, after {self._search.problem.passes:g} "
            "data passes (gradients / samples); the median of all seeds",
            *([f"to {level}: until the gap is that part of the first one"] if minus else []),
            "learning rate: the best by that median, auto: its own; *: an end of those tried",
            "seconds: of one training; search: all other trainings of a method",
        ]
        table = self.table().drop(columns="loss" if minus else [])
        forms = dict.fromkeys((self._what, "lowest", "highest"), self._form)
        for key, values in table.items():
            is_count = re.fullmatch("minibatch|passes to .*|search (passes|trainings)", str(key))
            form = forms.get(str(key), "" if key == "options" else ".0f" if is_count else ".3g")
            table[key] = [f"{each:{form}}" if each == each else "-" for each in values]
        for name, (first, *_) in self.chosen.items():
            rates = {each.learning_rate for each in self.trainings if each.method == name}
            is_end = first.learning_rate in (min(rates), max(rates))
            star = "*" * (is_end and (len(rates) > 1 or self.interrupted))
            own = "auto" if isnan(first.learning_rate) else f"{first.learning_rate:g}{star}"
            table.loc[name, "learning rate"] = own
        return "\n".join([*said, "", table.T.to_string(), "", self.verdict])

    @property
    def verdict(self) -> str:
        """The fastest methods in seconds and in passes, and the code of the first one."""
        methods = {method.name: method for method in self._search.methods}
        untrained = ", ".join(name for name in methods if name not in self.chosen)
        said = [*self._notes, *([f"Not trained: {untrained}."] if untrained else [])]
        if not any(isfinite(np.median(self._ends[name])) for name in self.chosen):
            said.append("All methods diverged at all rates, with half of the seeds or more.")
            return "\n".join(said)
        table = self.table()
        text = [each for each in self._levels if table[f"passes to {each}"].notna().any()][-1]
        goal = text if " " in text else f"a gap of {text} of the first one"
        seconds = table[f"seconds to {text}"].dropna().sort_values()
        passes = table[f"passes to {text}"].dropna().sort_values()
        said.append(f"First in seconds to {goal}: {_listed(seconds, '; ', '.3g', ' s')}.")
        said.append(f"First in passes: {_listed(passes, '; ', '.3g')}.")
        pick = next(name for name in seconds.index if name in methods)
        first = self.chosen[pick][0]
        code = methods[pick].code(first.learning_rate, first.options, first.batch_size)
        return "\n".join([*said, *([f"In your own program, {pick}:\n{code}"] if code else [])])

    def plot(self) -> Figure:
        """Draw the trainings at the best rates, by their passes and by their seconds.

        Returns
        -------
        matplotlib.figure.Figure
            Thin lines are seeds; the thick line is the median seed.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 5), layout="constrained")
        panels = figure.subplots(ncols=2, sharey=True)
        for place, (name, trainings) in enumerate(self._all.items()):
            color, marker = COLORS[place % len(COLORS)], MARKERS[place % len(MARKERS)]
            middle = np.argsort(self._ends[name])[(len(trainings) - 1) // 2]
            for number, each in enumerate(trainings):
                look: Any = {"color": color, "alpha": 0.4, "lw": 0.7}
                if number == middle:
                    rate = "" if isnan(each.learning_rate) else f", rate {each.learning_rate:g}"
                    look = {"color": color, "marker": marker, "label": f"{name}{rate}"}
                    look.update(markersize=5, markevery=max(1, len(each.curve) // 10))
                for axes, key in zip(panels, COSTS.values()):
                    axes.plot(each.of(key), self._shown(self._curve(each)), **look)
        minus = "" if self._minimum is None else f": {self._search.objective} - minimum"
        panels[0].set(xlabel="data passes (gradients / samples)", ylabel=f"{self._what}{minus}")
        panels[0].set(xlim=(0, 1.02 * self._search.problem.passes))
        panels[0].set(yscale="log" if panels[0].dataLim.ymin > 0 else "linear")
        panels[1].set(xlabel="seconds of one training, without its search")
        panels[1].set(xscale="log" if panels[1].dataLim.xmax > 0 else "linear")
        for axes in panels:
            axes.grid(color="#dddddd")
        figure.legend(*panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=5)
        return figure


def _listed(values: Any, between: str = ", ", form: str = "", unit: str = "") -> str:
    """Names and values in words."""
    return between.join(f"{name} {value:{form}}{unit}" for name, value in values.items())
