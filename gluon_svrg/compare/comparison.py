"""What a comparison has found: a table, a figure, all trainings, and sentences."""

from __future__ import annotations

from math import inf, isfinite, nan
from typing import TYPE_CHECKING, Any, Sequence

import numpy as np

from .methods import LBFGS
from .search import Search
from .training import Training

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

#: Smaller distances to the minimum, relative to the first objective, are rounding errors.
ROUNDING, OF_FLOAT32 = 1e-14, 1e-7
#: Colors of Okabe and Ito and some more, and markers.
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
    """

    def __init__(self, search: Search, minimum: float | None, gaps: Sequence[float]) -> None:
        self.trainings, self.chosen = search.trainings, search.chosen
        self.interrupted = search.interrupted
        self._search, self._minimum = search, minimum
        self._sign = search.sign if minimum is None else 1  # -1 where more is better
        self._gaps = gaps if minimum is not None else ()
        self._plain = {method.name for method in search.methods if method.is_plain}
        self._ends = {
            name: np.array([self._shown(search.end(each)) for each in trainings])
            for name, trainings in self.chosen.items()
        }

    def __str__(self) -> str:
        return f"{self.table().to_string(na_rep='-')}\n\n{self.verdict}"

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

        what = self._search.objective if self._minimum is None else "gap"
        rows = {}
        for name, trainings in self.chosen.items():
            rate, options = trainings[0].learning_rate, _text(trainings[0].options)
            row: dict[str, Any] = {"learning rate": rate, "options": options}
            for gap in self._gaps:
                first = self._curve(trainings[0])[0]
                row[f"passes to {gap:g}"] = self._reached(name, gap * first)[0]
            ends = self._ends[name]
            row.update({what: _median(ends), "lowest": ends.min(), "highest": ends.max()})
            for key in ("loss", *self._search.problem.measures, "seconds"):
                row.setdefault(key, _median([each.curve[-1][key] for each in trainings]))
            rows[name] = row
        return pd.DataFrame.from_dict(rows, orient="index")

    def _shown(self, values: Any) -> Any:
        """Objectives, or their distances to the known minimum."""
        if self._minimum is None:
            return values
        first = self.trainings[0].curve[0][self._search.objective]
        is_exact = self._search.objective != "loss" or self._search.problem.data.dtype == "float64"
        relative = ROUNDING if is_exact else OF_FLOAT32
        gaps = self._search.sign * (np.asarray(values, dtype=float) - self._minimum)
        return np.maximum(gaps, relative * max(1.0, abs(first)))

    def _curve(self, training: Training) -> np.ndarray:
        return self._shown(training.of(self._search.objective))

    def _reached(self, name: str, level: float) -> tuple[float, float]:
        """The median passes and seconds until the objective is as good as a level; or NaN."""
        found = []
        for each in self.chosen[name]:
            (places,) = np.nonzero(self._sign * self._curve(each) <= self._sign * level)
            row = each.curve[places[0]] if len(places) else {"data_passes": inf, "seconds": inf}
            found.append((row["data_passes"], row["seconds"]))
        passes, seconds = np.median(found, axis=0)
        return (passes, seconds) if isfinite(passes) else (nan, nan)

    # --- words ---------------------------------------------------------------------------------

    @property
    def verdict(self) -> str:
        """Which method is best, in sentences that follow from the numbers alone."""
        costs = {name: self._sign * ends for name, ends in self._ends.items()}
        order = sorted(costs, key=lambda name: (_median(costs[name]), costs[name].max()))
        order = [name for name in order if isfinite(_median(costs[name]))]
        said = ["An interrupt ended the comparison early."] if self.interrupted else []
        if not order:
            return " ".join([*said, "All methods diverged at all rates that were tried."])
        best, *rest = order
        good = [name for name in rest if costs[name].min() <= costs[best].max()]
        same = [name for name in good if np.array_equal(costs[name], costs[best])]
        close = [f"{name}, {self._range(name)}" for name in good if name not in same]
        worse = [name for name in rest if name not in good]
        what = "" if self._search.objective == "loss" else f" in {self._search.objective}"
        above = "" if self._minimum is None else " from the known minimum"
        way = "lowest" if self._sign > 0 else "highest"
        said.append(f"{best} ends {way}{what}: {self._range(best)}{above}.")
        if same:
            said.append(f"Equal to it: {', '.join(same)}.")
        if close:
            said.append(f"The seeds do not tell it from {'; '.join(close)}: their ranges overlap.")
        if worse:
            ranges = "; ".join(f"{name}, {self._range(name)}" for name in worse)
            said.append(f"Worse in each seed: {ranges}.")
        diverged = [name for name in costs if name not in order]
        if diverged:
            said.append(f"Diverged: {', '.join(diverged)}.")
        if rest and len(costs[best]) == 1:
            said.append("With one seed all this can be chance.")
        if rest:
            said.append(self._sooner(best, rest))
        plain = [name for name in (best, *good) if name in self._plain]
        if plain and not self._plain >= {*order}:
            how = "best" if plain[0] == best else "as good"
            said.append(f"Plain {plain[0]} is {how}: save the trouble.")
        return " ".join(said)

    def _range(self, name: str) -> str:
        ends = self._ends[name]
        text = f" ({ends.min():.4g} to {ends.max():.4g})" if len(ends) > 1 else ""
        return f"{_median(ends):.4g}{text}"

    def _sooner(self, best: str, others: Sequence[str]) -> str:
        """How soon the best is where others end."""
        texts = []
        for name in others:
            passes, seconds = self._reached(best, _median(self._ends[name]))
            ends = [each.curve[-1] for each in self.chosen[name]]
            all_, time = (_median([end[key] for end in ends]) for key in ("data_passes", "seconds"))
            text = f"of {name} ({all_:.3g} passes, {time:.2g} s) after {passes:.3g} passes"
            texts.append(f"{text} and {seconds:.2g} s")
        return f"{best} reaches the end {'; '.join(texts)}."

    # --- a figure ------------------------------------------------------------------------------

    def plot(self) -> Figure:
        """Draw the trainings at the best rates, and the end of all trainings by their rate.

        Returns
        -------
        matplotlib.figure.Figure
            Thin lines are seeds, the thick one is that in the middle. A training that has diverged
            ends at a cross.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 5), layout="constrained")
        left, right = figure.subplots(ncols=2, sharey=True, width_ratios=(3, 2))
        curves = [self._curve(each) for each in self.trainings]
        finite = np.concatenate([values[np.isfinite(values)] for values in curves])
        worst = self._sign * max(self._sign * finite)
        unknown = iter(OTHERS * len(self.chosen))
        for name, trainings in self.chosen.items():
            base = name.lower().partition("+")[0].replace("-decay", "")
            color, marker = STYLES[base] if base in STYLES else next(unknown)
            line = ":" if "-decay" in name else "--" if "+" in name else "-"
            look: Any = {"color": color, "marker": marker, "linestyle": line, "markersize": 5}
            cross: Any = {"color": color, "marker": "x", "markersize": 9}
            for each in trainings:
                x, y = each.of("data_passes"), _finite(self._curve(each))
                left.plot(x, y, color=color, alpha=0.4, lw=0.7)
                if each.diverged:
                    left.plot(x[-1], worst, **cross)
            middle = trainings[np.argsort(self._ends[name])[(len(trainings) - 1) // 2]]
            rate = middle.learning_rate
            label = name if rate != rate else f"{name}, rate {rate:g}"
            x, y = middle.of("data_passes"), _finite(self._curve(middle))
            left.plot(x, y, markevery=0.1, label=label, **look)
            if rate != rate:  # of L-BFGS
                right.axhline(_median(self._ends[name]), color=color, lw=1)
                continue
            groups: dict[float, list[float]] = {}
            for each in self.trainings:
                if (each.method, each.options) == (name, middle.options):
                    end = float(self._shown(self._search.end(each)))
                    groups.setdefault(each.learning_rate, []).append(end)
            rates = sorted(groups)
            ends = np.array([_median(groups[rate]) for rate in rates])
            right.plot(rates, _finite(ends), **{**look, "marker": ""})
            for rate, end in zip(rates, ends):
                face = color if len(groups[rate]) == len(trainings) else "none"
                style = {**look, "markerfacecolor": face} if isfinite(end) else cross
                right.plot(rate, end if isfinite(end) else worst, **style)
        label = self._search.objective + ("" if self._minimum is None else " - minimum")
        is_log = self._sign > 0 and min(finite) > 0
        left.set(xlabel="data passes (gradients / samples)", ylabel=label)
        left.set_yscale("log" if is_log else "linear")
        text = f"filled: median of {max(map(len, self.chosen.values()))} seeds; open: one seed"
        right.set(xscale="log", xlabel=f"learning rate\n{text}; x: diverged")
        for axes in (left, right):
            axes.grid(color="#dddddd")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
        return figure


def _median(values: Any) -> float:
    return float(np.median(values))


def _finite(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), values, nan)


def _text(options: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items())
