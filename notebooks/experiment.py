"""What the notebooks share: how long they run, what a comparison has found, and how plots look."""

import os
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


def curves(found, name):
    """The trainings of a method at its best rate, of equal passes: a table for each seed."""
    return [pd.DataFrame(each.curve[: each.place + 1]) for each in found.chosen[name]]


def last(found, name, key="loss"):
    """The last value of each seed at the best rate."""
    return np.array([each.end[key] for each in found.chosen[name]])


def ends(found, key="loss"):
    """The last value of the first seed at each rate: a row for each method; inf: diverged."""
    rows = [
        (each.method, each.learning_rate, np.inf if each.diverged else each.end[key])
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
