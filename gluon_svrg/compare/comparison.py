"""What a comparison has found: a table, a figure, all trainings, and sentences."""

from __future__ import annotations

from math import inf, isfinite, nan
from typing import TYPE_CHECKING, Any, Sequence

import numpy as np

from .methods import LBFGS
from .search import Search, _median
from .training import Training

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

#: Differences below it, relative to the first objective, are rounding errors.
ROUNDING = 1e-14
#: Colors of Okabe and Ito, and markers.
STYLES = {
    "sgd": ("#777777", "o"),
    "nag": ("#8C6D31", "<"),
    "adam": ("#882255", ">"),
    "svrg": ("#0072B2", "s"),
    "alpha-svrg": ("#56B4E9", "D"),
    "svrg-stored": ("#004D80", "d"),
    "saga": ("#009E73", "^"),
    "sag": ("#E69F00", "v"),
    "sarah": ("#CC79A7", "P"),
    "storm": ("#D55E00", "h"),
    "mars": ("#000000", "*"),
    LBFGS: ("#B8A000", "X"),
}
OTHERS = [("#332288", "p"), ("#44AA99", "H"), ("#AA4499", "8"), ("#999933", "d")]


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

    Examples
    --------
    >>> from gluon_svrg.compare import Comparison  # see `compare`
    """

    def __init__(self, search: Search, minimum: float | None, gaps: Sequence[float]) -> None:
        self.trainings, self.chosen = search.trainings, search.chosen
        self.interrupted = search.interrupted
        self._objective, self._sign, self._end = search.objective, search.sign, search.end
        self._passes, self._measures = search.problem.passes, list(search.problem.measures)
        self._plain = {method.name for method in search.methods if method.is_plain}
        self._minimum, self._gaps = minimum, list(gaps) if minimum is not None else []

    def __str__(self) -> str:
        return f"{self.table().to_string(na_rep='-')}\n\n{self.verdict}"

    # --- numbers -------------------------------------------------------------------------------

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
            Learning rate and options; the passes to each gap, if the minimum is known; median,
            lowest and highest objective, its distance to the minimum if that is known; medians of
            the loss, the measures and the seconds. NaN stands for gaps that most seeds do not
            reach.
        """
        import pandas as pd

        what = self._objective if self._minimum is None else "gap"
        rows = {}
        for name, trainings in self.chosen.items():
            ends = self._ends(name)
            row: dict[str, Any] = {"learning rate": trainings[0].learning_rate}
            row["options"] = _text(trainings[0].options)
            for gap in self._gaps:
                row[f"passes to {gap:g}"] = self._reached(name, relative=gap)[0]
            row.update({what: _median(ends), "lowest": min(ends), "highest": max(ends)})
            for key in ("loss", *self._measures, "seconds"):
                row.setdefault(key, _median([float(t.curve[-1][key]) for t in trainings]))
            rows[name] = row
        return pd.DataFrame.from_dict(rows, orient="index")

    def _height(self, values: Any) -> Any:
        """Objectives, or their distances to the known minimum."""
        if self._minimum is None:
            return values
        first = self.trainings[0].curve[0][self._objective]
        gap = self._sign * (np.asarray(values, dtype=float) - self._minimum)
        return np.maximum(gap, ROUNDING * max(1.0, abs(first)))

    def _ends(self, name: str) -> list[float]:
        return [float(self._height(self._end(each))) for each in self.chosen[name]]

    def _costs(self, ends: Any) -> np.ndarray:
        """Lower is better."""
        return np.array(ends) * (self._sign if self._minimum is None else 1)

    def _curve(self, training: Training) -> np.ndarray:
        values = self._height(training.of(self._objective))
        return np.where(np.isnan(values), self._sign * inf, values)

    def _reached(
        self, name: str, level: float = nan, relative: float | None = None
    ) -> tuple[float, float]:
        """The median passes and seconds until the objective is as good as a level."""
        found = []
        for training in self.chosen[name]:
            costs = self._costs(self._curve(training))
            limit = level if relative is None else relative * costs[0]
            (places,) = np.nonzero(costs <= limit)
            row = training.curve[places[0]] if len(places) else None
            found.append((row["data_passes"], row["seconds"]) if row else (inf, inf))
        passes, seconds = (_median(column) for column in zip(*found))
        return (passes, seconds) if isfinite(passes) else (nan, nan)

    # --- words ---------------------------------------------------------------------------------

    @property
    def verdict(self) -> str:
        """Which method is best, in sentences that follow from the numbers alone."""
        costs = {name: self._costs(self._ends(name)) for name in self.chosen}
        order = sorted(costs, key=lambda name: (_median(costs[name]), costs[name].max()))
        best, seeds = order[0], len(self.chosen[order[0]])
        finite = [name for name in order if np.isfinite(_median(costs[name]))]
        said = ["An interrupt ended the comparison: some is missing."] if self.interrupted else []
        if not finite:
            return " ".join([*said, "All methods diverged at all rates that were tried."])
        lowest = "highest" if self._sign < 0 and self._minimum is None else "lowest"
        what = "" if self._objective == "loss" else f" in {self._objective}"
        above = "" if self._minimum is None else " from the known minimum"
        said.append(f"{best} ends {lowest}{what}: {self._range(best)}{above}.")
        good = [name for name in finite[1:] if costs[name].min() <= costs[best].max()]
        worse = [name for name in finite[1:] if name not in good]
        same = [name for name in good if np.array_equal(costs[name], costs[best])]
        overlap = [f"{name}, {self._range(name)}" for name in good if name not in same]
        if same:
            said.append(f"{_list(same)} {_verb(same, 'is', 'are')} equal to it.")
        if overlap:
            said.append(f"The seeds do not tell it from {_list(overlap)}: their ranges overlap.")
        if worse:
            each = "with the one seed" if seeds == 1 else "in each seed"
            ranges = [f"{name}, {self._range(name)}" for name in worse]
            said.append(f"Worse {each}: {'; '.join(ranges)}.")
        diverged = [name for name in order if name not in finite]
        if diverged:
            said.append(f"{_list(diverged)} diverged.")
        if seeds == 1 and len(finite) > 1:
            said.append("One seed cannot tell such a difference from chance.")
        for name in worse:
            said += self._sooner(best, name, _median(costs[name]))
        said += self._fastest([best, *good], costs)
        plain = [name for name in (best, *good) if name in self._plain]
        if plain and len(self._plain & {*finite}) < len(finite):
            is_best = "is best" if plain[0] == best else "is as good"
            said.append(f"Plain {plain[0]} {is_best}: save the trouble.")
        return " ".join(said)

    def _range(self, name: str) -> str:
        ends = self._ends(name)
        if len(ends) == 1:
            return f"{ends[0]:.4g}"
        return f"{_median(ends):.4g} ({min(ends):.4g} to {max(ends):.4g})"

    def _sooner(self, best: str, name: str, level: float) -> list[str]:
        """How soon the best is where another one ends."""
        (passes, seconds), last = self._reached(best, level), self.chosen[name][0].curve[-1]
        if not isfinite(passes):
            return []
        total = _median([each.curve[-1]["seconds"] for each in self.chosen[name]])
        return [
            f"{best} is where {name} ends after {passes:.3g} of its {last['data_passes']:.3g} "
            f"passes, in {seconds:.2g} s of its {total:.2g}."
        ]

    def _fastest(self, good: Sequence[str], costs: dict[str, np.ndarray]) -> list[str]:
        """Which of equally good methods is there first."""
        if len(good) < 2:
            return []
        level = max(_median(costs[name]) for name in good)
        reached = {name: self._reached(name, level) for name in good}
        reached = {name: found for name, found in reached.items() if isfinite(found[0])}
        if len(reached) < 2 or len({*reached.values()}) < 2:
            return []
        texts = [f"{n} after {p:.3g} passes and {s:.2g} s" for n, (p, s) in reached.items()]
        return [f"All of these come to {level * self._shown:.4g}: {_list(texts)}."]

    @property
    def _shown(self) -> int:
        return self._sign if self._minimum is None else 1

    # --- a figure ------------------------------------------------------------------------------

    def plot(self) -> Figure:
        """Draw the trainings at the best rates, and the end of all trainings by their rate.

        Returns
        -------
        matplotlib.figure.Figure
            Thin lines are seeds, the thick one is their median. A training that has diverged ends
            at a cross.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 5), layout="constrained")
        left, right = figure.subplots(ncols=2, sharey=True, width_ratios=(3, 2))
        shown = self._height(
            [row[self._objective] for t in self.trainings for row in t.curve if not t.diverged]
            or [1.0]
        )
        worst = np.max(shown) if self._shown > 0 else np.min(shown)
        unknown = iter(OTHERS * 9)
        for name, trainings in self.chosen.items():
            base = name.lower().partition("+")[0].replace("-decay", "")
            color, marker = STYLES[base] if base in STYLES else next(unknown)
            line = ":" if "-decay" in name else "--" if "+" in name else "-"
            look = {"color": color, "marker": marker, "linestyle": line, "markersize": 5}
            for each in trainings:
                self._draw(left, each, color, worst)
            ordered = sorted(trainings, key=lambda t: self._costs([self._end(t)])[0])
            middle = ordered[(len(ordered) - 1) // 2]
            rate = trainings[0].learning_rate
            label = name if rate != rate else f"{name}, rate {rate:g}"
            x, y = middle.of("data_passes"), self._curve(middle)
            left.plot(x, np.where(np.isfinite(y), y, nan), markevery=0.1, label=label, **look)
            self._draw_rates(right, name, look, worst)
        is_log = np.all(np.asarray(shown) > 0) and self._sign > 0
        label = self._objective + ("" if self._minimum is None else " - minimum")
        left.set(xlabel="data passes (gradients / samples)", ylabel=label)
        left.set_yscale("log" if is_log else "linear")
        seeds = max(map(len, self.chosen.values()))
        text = f"learning rate\nfilled: median of {seeds} seeds; open: one seed; x: diverged"
        right.set(xscale="log", xlabel=text)
        for axes in (left, right):
            axes.grid(color="#dddddd")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
        return figure

    def _draw(self, axes: Any, training: Training, color: str, worst: float) -> None:
        x, y = training.of("data_passes"), self._curve(training)
        axes.plot(x, np.where(np.isfinite(y), y, nan), color=color, alpha=0.4, lw=0.7)
        if training.diverged:
            axes.plot(x[-1], worst, "x", color=color, markersize=9)

    def _draw_rates(self, axes: Any, name: str, look: dict[str, Any], worst: float) -> None:
        """The end of each rate, with the options that were chosen."""
        chosen, groups = self.chosen[name][0], {}  # type: Any, dict[float, list[float]]
        for each in self.trainings:
            if each.method == name and each.options == chosen.options:
                groups.setdefault(each.learning_rate, []).append(
                    float(self._height(self._end(each)))
                )
        if chosen.learning_rate != chosen.learning_rate:  # of L-BFGS
            axes.axhline(_median(self._ends(name)), color=look["color"], lw=1)
            return
        rates = sorted(groups)
        ends = np.array([_median(groups[rate]) for rate in rates])
        axes.plot(rates, np.where(np.isfinite(ends), ends, nan), **{**look, "marker": ""})
        for rate, end in zip(rates, ends):
            is_full = len(groups[rate]) == len(self.chosen[name])
            face = look["color"] if is_full else "none"
            if isfinite(end):
                style = {"marker": look["marker"], "markerfacecolor": face}
                axes.plot(rate, end, color=look["color"], **style)
            else:
                axes.plot(rate, worst, "x", color=look["color"], markersize=9)


def _text(options: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items())


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _verb(names: Sequence[str], one: str, more: str) -> str:
    return one if len(names) == 1 else more
