"""What a comparison has found: a table, a figure, all trainings, and sentences."""

from __future__ import annotations

from math import inf, isfinite, isnan, nan
from typing import TYPE_CHECKING, Any, Sequence

import numpy as np

from .search import Search
from .training import Training

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

#: Smaller distances to the minimum, relative to the first objective, are rounding errors.
ROUNDING, OF_FLOAT32 = 1e-14, 1e-7
#: The colors of Okabe and Ito, and markers, for one method after the other.
COLORS = ["#777777", "#E69F00", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#56B4E9", "#000000"]
MARKERS = "o<^sDvPp"


class Comparison:
    """The result of `compare`; printed, it is the table and the verdict.

    Parameters
    ----------
    search : Search
        All trainings.
    minimum : float, optional
        The best possible objective.
    gaps : sequence of float
        Distances to it, as parts of the first one.

    Attributes
    ----------
    chosen : dict
        For each method its trainings at the best rate, one a seed.
    trainings : list
        All trainings: ``method``, ``learning_rate``, ``options``, ``seed``, ``diverged``, and
        ``curve``, a list of dicts.
    interrupted : bool
        Whether an interrupt ended it early.
    """

    def __init__(self, search: Search, minimum: float | None, gaps: Sequence[float]) -> None:
        self.trainings, self.chosen = [*search.done.values()], search.chosen
        self.interrupted = search.interrupted
        self._search, self._minimum = search, minimum
        self._sign = search.sign if minimum is None else 1  # -1 where more is better
        self._what = search.objective if minimum is None else "gap"
        self._gaps = () if minimum is None else gaps
        self._ends = {
            name: np.array([self._curve(each)[-1] for each in trainings])
            for name, trainings in self.chosen.items()
        }

    @property
    def runs(self) -> pd.DataFrame:
        """All trainings, a row each data pass."""
        import pandas as pd

        rows = []
        for each in self.trainings:
            who = {"method": each.method, "learning_rate": each.learning_rate}
            who.update({"options": _text(each.options), "seed": each.seed})
            rows += [{**who, **row} for row in each.curve]
        return pd.DataFrame(rows)

    def table(self) -> pd.DataFrame:
        """A row for each method, at its best rate.

        Returns
        -------
        pandas.DataFrame
            Learning rate and options; the passes to each gap, NaN where most seeds do not reach
            it; the median, lowest and highest objective, or its distance to a known minimum;
            medians of the loss, the measures and the seconds.
        """
        import pandas as pd

        rows = {}
        for name, (first, *_) in self.chosen.items():
            row: dict[str, Any] = {"learning rate": first.learning_rate}
            row["options"] = _text(first.options)
            for gap in self._gaps:
                row[f"passes to {gap:g}"] = self._reached(name, gap * self._curve(first)[0])[0]
            ends = self._ends[name]
            row.update({self._what: np.median(ends), "lowest": ends.min(), "highest": ends.max()})
            for key in (*self._search.problem.measures, "seconds"):
                row.setdefault(key, self._last(name, key))
            rows[name] = row
        return pd.DataFrame.from_dict(rows, orient="index")

    def _curve(self, training: Training) -> np.ndarray:
        """The objectives, or their distances to the known minimum; infinite if it diverged."""
        values, sign = training.of(self._search.objective), self._search.sign
        values = np.where(np.isnan(values), sign * inf, values)
        if self._minimum is None:
            return values
        is_exact = self._search.objective != "loss" or self._search.problem.data.dtype == "float64"
        least = (ROUNDING if is_exact else OF_FLOAT32) * max(1.0, abs(values[0]))
        return np.maximum(sign * (values - self._minimum), least)

    def _last(self, name: str, key: str) -> float:
        """The median of all seeds at the end."""
        return float(np.median([each.curve[-1][key] for each in self.chosen[name]]))

    def _reached(self, name: str, level: float) -> tuple[float, float]:
        """The median passes and seconds until the objective is as good as a level; or NaN."""
        found = []
        for each in self.chosen[name]:
            (places,) = np.nonzero(self._sign * self._curve(each) <= self._sign * level)
            row = each.curve[places[0]] if len(places) else {"data_passes": inf, "seconds": inf}
            found.append((row["data_passes"], row["seconds"]))
        passes, seconds = np.median(found, axis=0)
        return (passes, seconds) if isfinite(passes) else (nan, nan)

    def __str__(self) -> str:
        minus = "" if self._minimum is None else f" minus the minimum, {self._minimum:.6g}"
        said = [f"{self._what}: the last {self._search.objective}{minus}; the median of all seeds"]
        if self._gaps:
            gap = f"{self._gaps[0]:g}"
            text = f"passes to {gap}: gradients / samples until the gap is {gap} of the first one"
            said.append(f"{text}; -: not with most seeds")
        said.append("learning rate: the best by that median; seconds: of one training")
        table = self.table().drop(columns="loss" if minus else [])
        forms = {"options": "{}", "seconds": "{:.2g}"}
        forms.update({key: "{:.0f}" for key in table if key.startswith("passes to ")})
        forms.update({key: "{:.1e}" for key in ("gap", "lowest", "highest") if minus})
        for key, values in table.items():
            form = forms.get(key, "{:.4g}")
            table[key] = [form.format(each) if each == each else "-" for each in values]
        for name, (first, *_) in self.chosen.items():
            rates = {each.learning_rate for each in self.trainings if each.method == name}
            if len(rates) > 1 and first.learning_rate in (min(rates), max(rates)):
                table.loc[name, "learning rate"] += "*"
        text = table.to_string()
        if "*" in text:
            said.append("*: the lowest or highest rate that was tried; others may be better")
        return "\n".join([*said, "", text, "", self.verdict])

    @property
    def verdict(self) -> str:
        """Which method is best, in lines that follow from the numbers alone, and its code."""
        costs = {name: self._sign * ends for name, ends in self._ends.items()}
        order = sorted(costs, key=lambda name: (np.median(costs[name]), costs[name].max()))
        diverged = [name for name in order if not isfinite(np.median(costs[name]))]
        order = order[: len(order) - len(diverged)]
        said = ["An interrupt ended the comparison early."] if self.interrupted else []
        if not order:
            return "\n".join([*said, "All methods diverged at all rates that were tried."])
        best, *rest = order
        good = [name for name in rest if costs[name].min() <= costs[best].max()]
        same = [name for name in good if np.array_equal(costs[name], costs[best])]
        way, time = "lowest" if self._sign > 0 else "highest", self._last(best, "seconds")
        said.append(f"{best} ends {way}: its {self._what} is {self._range(best)} in {time:.2g} s.")
        for text, names in (
            ("Equal to it: {}.", same),
            ("The seeds do not tell it from {}: their ranges overlap.", {*good} - {*same}),
            ("Worse in each seed: {}.", {*rest} - {*good}),
        ):
            found = [f"{name}, {self._range(name)}" for name in rest if name in names]
            said += [text.format("; ".join(found))] if found else []
        if diverged:
            said.append(f"Diverged: {', '.join(diverged)}.")
        if rest and len(costs[best]) == 1:
            said.append("With one seed all this can be chance.")
        if rest:
            sooner = "; ".join(self._sooner(best, name) for name in rest)
            said.append(f"{best} reaches the end {sooner}.")
        methods = {method.name: method for method in self._search.methods}
        plain = [name for name in (best, *good) if methods[name].is_plain]
        if plain and not all(methods[name].is_plain for name in order):
            how = "best" if plain[0] == best else "as good"
            said.append(f"{plain[0]} is {how}, without variance reduction: save the trouble.")
        for name in [name for name in order if methods[name].code][:1]:
            first = self.chosen[name][0]
            settings = {"learning_rate": first.learning_rate, **first.options}
            code = methods[name].code.format(settings)
            said.append(f"In your own loop, {name}:\ntrainer = {code}")
        return "\n".join(said)

    def _range(self, name: str) -> str:
        ends = self._ends[name]
        text = f" ({ends.min():.3g} to {ends.max():.3g})" if len(ends) > 1 else ""
        return f"{np.median(ends):.3g}{text}"

    def _sooner(self, best: str, name: str) -> str:
        """How soon the best is where another one ends."""
        passes, seconds = self._reached(best, float(np.median(self._ends[name])))
        own = f"{self._last(name, 'data_passes'):.3g} passes, {self._last(name, 'seconds'):.2g} s"
        return f"of {name} ({own}) after {passes:.3g} passes and {seconds:.2g} s"

    def plot(self) -> Figure:
        """Draw the trainings at the best rates, and the end of all trainings by their rate.

        Returns
        -------
        matplotlib.figure.Figure
            Thin lines are seeds, the thick one is that in the middle. A training that has diverged
            is a cross at the top.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 5), layout="constrained")
        left, right = figure.subplots(ncols=2, sharey=True, width_ratios=(3, 2))
        for place, (name, trainings) in enumerate(self.chosen.items()):
            color, marker = COLORS[place % len(COLORS)], MARKERS[place % len(MARKERS)]
            for each in trainings:
                left.plot(each.of("data_passes"), self._curve(each), color=color, alpha=0.4, lw=0.7)
                if each.diverged:
                    _cross(left, each.curve[-1]["data_passes"], color)
            middle = trainings[np.argsort(self._ends[name])[(len(trainings) - 1) // 2]]
            rate, x = middle.learning_rate, middle.of("data_passes")
            look: Any = {"color": color, "marker": marker, "markersize": 5, "markevery": 0.1}
            look["label"] = name if isnan(rate) else f"{name}, rate {rate:g}"
            left.plot(x, self._curve(middle), **look)
            if isnan(rate):  # of L-BFGS
                right.axhline(np.median(self._ends[name]), color=color)
                continue
            groups: dict[float, list[float]] = {}
            for each in self.trainings:
                if (each.method, each.options) == (name, middle.options):
                    groups.setdefault(each.learning_rate, []).append(self._curve(each)[-1])
            ends = {rate: np.median(groups[rate]) for rate in sorted(groups)}
            right.plot([*ends], [*ends.values()], color=color)
            for rate, end in ends.items():
                face = color if len(groups[rate]) == len(trainings) else "white"
                if isfinite(end):
                    right.plot(rate, end, marker, color=color, markerfacecolor=face)
                else:
                    _cross(right, rate, color)
        values = np.concatenate([self._curve(each) for each in self.trainings])
        is_log = self._sign > 0 and values.min() > 0
        minus = "" if self._minimum is None else f": {self._search.objective} - minimum"
        left.set(xlabel="data passes (gradients / samples)", ylabel=f"{self._what}{minus}")
        left.set_yscale("log" if is_log else "linear")
        seeds = max(map(len, self.chosen.values()))
        text = "one seed" if seeds == 1 else f"filled: median of {seeds} seeds, open: one"
        right.set(xscale="log", xlabel=f"learning rate\n{text}, x: diverged")
        for axes in (left, right):
            axes.grid(color="#dddddd")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5)
        return figure


def _cross(axes: Any, x: float, color: str) -> None:
    """Mark a training that has diverged, at the top whatever the scale is."""
    axes.plot(x, 1, "x", color=color, transform=axes.get_xaxis_transform(), clip_on=False, zorder=3)


def _text(options: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items())
