"""What the notebooks share: how rates are tuned, how long they run, and how plots look."""

import os
from dataclasses import dataclass
from io import BytesIO

import mxnet as mx
import numpy as np
import pandas as pd
from IPython.display import Image
from matplotlib import pyplot as plt
from PIL import Image as Pillow

#: The kept outputs come from the full run; tests run a short one.
FULL = os.environ.get("GLUON_SVRG_FULL") == "1"

plt.rcParams["figure.dpi"] = 110


def silence_logs():
    """Leave out what MXNet writes to standard error without being asked.

    MXNet 1.9.1 logs each graph that oneDNN takes over, and 2.0 logs its first array.
    """
    os.environ.setdefault("MXNET_SUBGRAPH_VERBOSE", "0")
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        mx.nd.zeros(1).wait_to_read()
    finally:
        os.dup2(kept, 2)
        os.close(kept)


silence_logs()


def say_which_run():
    """Which of the two runs this is."""
    return "The full run." if FULL else "A short run: GLUON_SVRG_FULL=1 makes it the full one."


def rate_at(k):
    """The learning rates that are tried: 0.1, 0.3, 1, 3, 10 and so on; ``k=0`` is 1."""
    return float(f"{10 ** (k / 2):.0e}")


@dataclass
class Tuned:
    """A learning rate that is no edge of what was tried, and the runs that say so."""

    rate: float
    runs: dict  # of each rate with all seeds, the runs in the order of the seeds
    losses: dict  # of each rate that was tried, the last loss of the first seed

    @property
    def best(self):
        """The runs at the chosen rate."""
        return self.runs[self.rate]

    def last(self, rate=None):
        """The last losses of all seeds at a rate, by default the chosen one."""
        return np.array([run["loss"][-1] for run in self.runs[rate or self.rate]])


def tune(train, guess, seeds, full=FULL):
    """Tune the learning rate by the last training loss.

    First with one seed: from three rates around a guess on, the grid grows by factors of about 3
    until its best rate is no edge. Then with all seeds at that rate and its neighbours, which
    grow likewise until the lowest median is no edge. A short run has the guess alone.

    Parameters
    ----------
    train : callable
        ``train(rate, seed)`` returns a dict of curves; ``"loss"`` ends with inf after divergence.
    guess : float
        Where to begin; one of the rates that `rate_at` gives.
    seeds : sequence of int
        The first one tunes.
    full : bool
        Whether to tune at all.

    Returns
    -------
    Tuned
        The rate, and all runs at it and at its neighbours.
    """
    done = {}

    def run(k, seed):
        if (k, seed) not in done:
            done[k, seed] = train(rate_at(k), seed)
        return done[k, seed]

    def lowest(ks, those):
        # Of equal ones, such as inf, the lowest rate.
        return min(
            sorted(ks), key=lambda k: np.median([run(k, seed)["loss"][-1] for seed in those])
        )

    center = round(2 * np.log10(guess))
    assert rate_at(center) == guess, f"{guess} is no rate of the grid"
    if full:
        for those in (seeds[:1], seeds):
            ks = {center - 1, center, center + 1}
            while (center := lowest(ks, those)) in (min(ks), max(ks)):
                ks |= {center - 1, center + 1}
                assert len(ks) < 16, "no rate is best"
    complete = [k for k, seed in done if seed == seeds[-1]] or [center]
    return Tuned(
        rate=rate_at(center),
        runs={rate_at(k): [run(k, seed) for seed in seeds] for k in sorted(complete)},
        losses={rate_at(k): run(k, seeds[0])["loss"][-1] for k in sorted({k for k, _ in done})},
    )


def curves(found, name):
    """The trainings of a method at its best rate: a table for each seed."""
    return [pd.DataFrame(each.curve) for each in found.chosen[name]]


def last(found, name, key="loss"):
    """The last value of each seed at the best rate."""
    return np.array([each.curve[-1][key] for each in found.chosen[name]])


def ends(found, key="loss"):
    """The last value of the first seed at each rate: a row for each method; inf: diverged."""
    rows = [
        (each.method, each.learning_rate, np.inf if each.diverged else each.curve[-1][key])
        for each in found.trainings
        if each.seed == found.trainings[0].seed
    ]
    table = pd.DataFrame(rows, columns=["method", "learning rate", key])
    return table.pivot_table(key, "method", "learning rate", sort=False).sort_index(axis=1)


def tried(found, key="loss"):
    """The table of `ends` in words."""
    return ends(found, key).to_string(float_format="{:.1e}".format, na_rep="")


def band(axes, runs, x, y, color, label, marker="o", style="-", **options):
    """Plot the median of all runs over ``x``, and their range, as far as all of them go."""
    length = min(len(run[x]) for run in runs)
    across = np.median([run[x][:length] for run in runs], axis=0)
    values = np.array([run[y][:length] for run in runs])
    settings = {"color": color, "marker": marker, "linestyle": style, "markersize": 4, **options}
    axes.plot(across, np.median(values, axis=0), label=label, **settings)
    axes.fill_between(across, values.min(axis=0), values.max(axis=0), color=color, alpha=0.15, lw=0)


def legend_below(axes, **options):
    """A legend below the plot, where it hides no data."""
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "frameon": False}
    axes.legend(**{**place, "fontsize": 9, "ncol": 2, **options})


def show(figure):
    """The figure as a PNG of 64 colors, which is a quarter as large as one of all colors.

    An octree keeps the colors of thin lines. Pillow's default made those of SAG and STORM one.
    """
    full, small = BytesIO(), BytesIO()
    figure.savefig(full, format="png", bbox_inches="tight")
    plt.close(figure)
    few = Pillow.open(full).convert("RGB").quantize(64, method=Pillow.Quantize.FASTOCTREE)
    few.save(small, "png", optimize=True)
    return Image(data=small.getvalue())


def spread(values, form=".1e"):
    """Median and range in words."""
    values = np.asarray(values)
    if len(values) == 1:
        return f"{values[0]:{form}}"
    return f"{np.median(values):{form}} ({values.min():{form}} to {values.max():{form}})"
