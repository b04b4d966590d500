"""The comparison: one model, trained by several methods.

All methods get the same learning rates, the same start, the same seed for the order of samples, and
the same number of data passes, full gradients included.
"""

from __future__ import annotations

import math
import platform
from functools import partial
from typing import Any, Callable, Sequence

import mxnet as mx
import numpy as np

from .. import __version__
from .datasets import Dataset
from .model import Model, minimum_of
from .settings import LADDER, LEARNING_RATES, METHODS, Settings
from .training import Run, train


def compare(
    dataset: Dataset,
    settings: Settings,
    show: Callable[[str, float, int], None] = lambda what, done, planned: None,
) -> dict[str, Any]:
    """Train by each method with every learning rate.

    Parameters
    ----------
    dataset : Dataset
        The data.
    settings : Settings
        The methods and their settings.
    show : callable
        Called after each epoch with the name of the run, and the data passes done and planned.

    Returns
    -------
    dict
        Plain data: settings, versions, all runs, the best of each method, the best known loss.
    """
    model = Model(dataset, settings)
    runs: list[Run] = []
    best: dict[str, Run] = {}
    at_an_end = []
    planned = len(settings.methods) * len(settings.learning_rates or LEARNING_RATES)
    for name in settings.methods:
        title = METHODS[name].title
        ahead, tried = list(settings.learning_rates or LEARNING_RATES), []
        while ahead:
            rate = ahead.pop(0)
            place = f"{title}, rate {rate:g}", len(runs), planned
            tried.append(train(model, name, rate, partial(_show, show, settings, *place)))
            runs.append(tried[-1])
            if not ahead and settings.learning_rates is None:
                ahead = next_rates(tried)
                planned += len(ahead)
        best[title] = _best(tried)
        if _is_at_an_end(tried):
            at_an_end.append(title)
    minimum = minimum_of(model)
    known = [min(run.losses) for run in runs if not run.diverged]
    if minimum is not None:
        known.append(minimum)
    return {
        "data": dataset.name,
        "task": dataset.task,
        "samples": len(dataset.X),
        "features": dataset.X.shape[1],
        "notes": list(dataset.notes),
        "settings": settings._asdict(),
        "l2": settings.weight_decay,
        "dtype": model.dtype,
        "versions": {
            "gluon_svrg": __version__,
            "mxnet": mx.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "minimum": minimum,
        "best_known_loss": min(known, default=math.nan),
        "best": {title: runs.index(run) for title, run in best.items()},
        "best_rate_at_an_end": at_an_end,
        "runs": [{**run._asdict(), "diverged": run.diverged} for run in runs],
    }


def _show(
    show: Callable[[str, float, int], None],
    settings: Settings,
    what: str,
    runs_done: int,
    runs_planned: int,
    passes: float,
) -> None:
    each = settings.data_passes
    show(what, runs_done * each + passes, runs_planned * each)


def next_rates(tried: Sequence[Run]) -> list[float]:
    """The next rate to try if the best one is the lowest or highest so far.

    Returns
    -------
    list of float
        One rate of `LADDER`; empty if the best rate is between others, or `LADDER` ends.
    """
    place = LADDER.index(_best(tried).learning_rate)
    beside = {*LADDER[max(place - 1, 0) : place + 2]}
    return sorted(beside - {run.learning_rate for run in tried})


def _is_at_an_end(tried: Sequence[Run]) -> bool:
    """Whether a better rate may lie beyond those tried; false for a single rate."""
    rates = [run.learning_rate for run in tried]
    return len(rates) > 1 and _best(tried).learning_rate in (min(rates), max(rates))


def _best(runs: Sequence[Run]) -> Run:
    return min(runs, key=lambda run: run.losses[-1])
