"""Timing by interleaved rounds: machines are noisy, ratios within a round less so."""

from __future__ import annotations

import time
from typing import Callable, Mapping

import mxnet as mx
import numpy as np
from tqdm import tqdm

WARM_UP = 3


def rounds(
    functions: Mapping[str, Callable[[], None]],
    count: int,
    *,
    before: Mapping[str, Callable[[], None]] | None = None,
    least: float = 0.01,
    description: str = "",
) -> dict[str, np.ndarray]:
    """Time functions one after another, again and again.

    Parameters
    ----------
    functions : dict of callable
        What is timed, each call with a wait for the device after it.
    count : int
        The number of rounds.
    before : dict of callable, optional
        What to call, untimed, before each call of the function of that name.
    least : float
        A fast function is called several times in a row until about so many seconds have passed;
        the mean per call counts.
    description : str
        Of the progress bar.

    Returns
    -------
    dict of ndarray
        Seconds per call, one entry per round.
    """
    before = before or {}
    repeats = {}
    for name, function in functions.items():
        seconds = [_once(function, before.get(name)) for _ in range(WARM_UP)]
        repeats[name] = int(np.clip(least / min(seconds), 1, 50))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in tqdm(range(count), desc=description, leave=False, disable=not description):
        for name, function in functions.items():
            samples = [_once(function, before.get(name)) for _ in range(repeats[name])]
            times[name].append(float(np.mean(samples)))
    return {name: np.array(seconds) for name, seconds in times.items()}


def _once(function: Callable[[], None], before: Callable[[], None] | None) -> float:
    if before is not None:
        before()
    mx.nd.waitall()
    start = time.perf_counter()
    function()
    mx.nd.waitall()
    return time.perf_counter() - start


def summary(ratios: np.ndarray) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = np.percentile(ratios, [25, 50, 75])
    return {"median": float(median), "quartile_1": float(low), "quartile_3": float(high)}
