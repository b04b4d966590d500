"""The comparison: one model, trained by several methods.

All methods get the same learning rates, the same start, the same seeds for the order of samples,
and the same number of data passes, full gradients included. All rates are tried with one seed, and
the best one trains with further seeds.
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
    """Train by each method with every learning rate, and with the best one by further seeds.

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
        Plain data: settings, versions, all runs, the best known loss, and for each method the
        numbers of its runs with the best rate, by their last losses. The one in the middle, or the
        higher of two, is called the best run.
    """
    model = Model(dataset, settings)
    runs: list[Run] = []
    all_seeds: dict[str, list[Run]] = {}
    at_an_end = []
    first, *more = ((settings.seed + number) % 2**32 for number in range(settings.seeds))
    rates = settings.learning_rates or LEARNING_RATES
    planned = len(settings.methods) * (len(rates) + len(more))

    def train_by(name: str, rate: float, seed: int) -> Run:
        what = f"{METHODS[name].title}, rate {rate:g}" + (f", seed {seed}" if more else "")
        on_epoch = partial(_show, show, settings, what, len(runs), planned)
        runs.append(train(model, name, rate, seed, on_epoch))
        return runs[-1]

    for name in settings.methods:
        ahead, tried = list(rates), []
        while ahead:
            tried.append(train_by(name, ahead.pop(0), first))
            if not ahead and settings.learning_rates is None:
                ahead = next_rates(tried)
                planned += len(ahead)
        best = _best(tried)
        again = [train_by(name, best.learning_rate, seed) for seed in more]
        all_seeds[best.method] = sorted([best, *again], key=lambda run: run.losses[-1])
        if _is_at_an_end(tried):
            at_an_end.append(best.method)
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
        "seeds": {title: list(map(runs.index, those)) for title, those in all_seeds.items()},
        "best": {title: runs.index(those[len(those) // 2]) for title, those in all_seeds.items()},
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
