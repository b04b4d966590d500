"""The learning rate of SVRG from its last two snapshots, by Barzilai and Borwein [1]_.

::

    rate = |dw|^2 / (M (dw . dmu + wd |dw|^2))

``dw`` is the change of the snapshot, ``dmu`` the change of the full gradient, ``M`` the number of
steps between both, and ``wd`` the optimizer's weight decay, which is part of the objective but not
of the full gradient. ``(dw . dmu) / |dw|^2`` is the curvature along ``dw``.

References
----------
.. [1] C. Tan, S. Ma, Y.-H. Dai and Y. Qian, "Barzilai-Borwein Step Size for Stochastic Gradient
   Descent", NeurIPS 2016, arXiv:1605.04131.
"""

from __future__ import annotations

from typing import Iterable, Sequence

import numpy as np
from mxnet.ndarray import NDArray

from ..passes.entries import in_numpy


def learning_rate(
    before: tuple[Iterable[NDArray], Iterable[NDArray]],
    now: tuple[Iterable[NDArray], Iterable[NDArray]],
    multiples: tuple[int, int],
    weight_decays: Sequence[float],
    steps: int,
) -> float | None:
    """Compute the rate from two snapshots. Waits for the device.

    Parameters
    ----------
    before, now : pair of iterable of NDArray
        The snapshot and a multiple of its full gradient, an array for each parameter.
    multiples : pair of int
        Which multiples these are.
    weight_decays : sequence of float
        The weight decay of each parameter.
    steps : int
        M.

    Returns
    -------
    float or None
        None if the curvature is not positive, or nothing has moved.
    """
    squared = product = 0.0
    for wd, *arrays in zip(weight_decays, *before, *now):
        for w, mu, new_w, new_mu in zip(*map(in_numpy, arrays)):
            dw = new_w.astype("float64") - w
            dmu = new_mu.astype("float64") / multiples[1] - mu.astype("float64") / multiples[0]
            squared += float(np.dot(dw, dw))
            product += float(np.dot(dw, dmu)) + wd * float(np.dot(dw, dw))
    denominator = steps * product
    if denominator <= 0:
        return None
    rate = squared / denominator
    return rate if np.isfinite(rate) else None
