"""MARS: Make vAriance Reduction Shine.

::

    v = (1 + s) g - s r,      then V is clipped,      s = gamma beta / (1 - beta)

``g`` and ``r`` are the gradients of one minibatch at the current weights and at the weights before
the last step, each the *sum* over its loss entries. ``V`` is the sum of ``v`` over the ``C`` loss
entries of all devices and workers. The mean estimate ``V / C`` of each tensor is clipped to the
norm ``clip``, and the optimizer gets the result. ``beta`` is meant to be the optimizer's momentum.
The paper writes ``g + s (g - r)`` [1]_.

The approximate form takes one gradient per step. It replaces ``r`` by ``c m``, where ``m`` is the
mean gradient of the last step's minibatch at its own weights,

::

    v = (1 + s) g - s c m,      then m = (V + s C m) / ((1 + s) C)

The first step has ``v = g``, clipped too. Parameters of one dimension are left to the plain
optimizer, as in the paper, unless `include_vectors` is set.

Backward computes ``v / (1 + s)``: the factor of ``g`` stays 1, because some operators ignore any
other factor. For the treated parameters, clipping also multiplies the reduced sum by ``1 + s``.

References
----------
.. [1] H. Yuan, Y. Liu, S. Wu, X. Zhou and Q. Gu, "MARS: Unleashing the Power of Variance Reduction
   for Training Large Models", 2024, arXiv:2411.10438.
"""

from __future__ import annotations

from typing import Any, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from .. import _mxnet
from .._mxnet import Arrays
from ..passes.arrays import per_device
from ..passes.estimate import Terms
from ..passes.multiples import combine, scale_to_norm
from ..passes.network import Network
from .interface import Live
from .recursive import NEEDS_CLOSURE, Recursive, State, divide, on_device


class MARS(Recursive):
    """The weights before the last step, or the last gradient.

    Parameters
    ----------
    gamma, beta : float
        They are rounded to float32, as MXNet rounds the hyperparameters of its optimizers.
    clip : float or None
        The largest norm of a tensor's mean estimate; None for no limit.
    exact : bool
        Whether to compute the minibatch's gradient at the weights before the last step.
    include_vectors : bool
        Whether parameters of fewer than two dimensions are treated.
    """

    replaces_grads = True
    needs_closure = True
    not_corrected = NEEDS_CLOSURE

    def __init__(
        self, gamma: float, beta: float, clip: float | None, exact: bool, include_vectors: bool
    ) -> None:
        super().__init__()
        gamma, beta = float(np.float32(gamma)), float(np.float32(beta))
        self.settings = (
            f"gamma {gamma:g}",
            f"beta {beta:g}",
            "no clip" if clip is None else f"clip {float(clip):g}",
            "exact" if exact else "approximate",
            *(("vectors included",) if include_vectors else ()),
        )
        self.s = gamma * beta / (1 - beta)
        self.clip = clip
        self.include_vectors = include_vectors
        self.keeps_weights, self.keeps_mean = exact, not exact
        self.keeps_errors = self.keeps_mean

    def check_compression(self, compression_params: Any, trainer: str) -> None:
        """Raise if gradients must not be compressed."""
        super().check_compression(compression_params, f"{trainer}(exact=False)")

    def terms(self, batch_index: int | None = None, live: Live | None = None) -> Terms:
        """What to add to g, all divided by 1 + s: ``- s r``, or ``- s c m``."""
        share = self.s / (1 + self.s)
        if self.now is None or not share:
            return Terms()
        if not self.keeps_weights:
            return Terms(k=-share, mean=self.now.mean)
        flags = self._is_treated(self.now.network)
        if not any(flags):
            return Terms()
        return Terms(b=-share, reference=self.now.reference, only=None if all(flags) else flags)

    def reduced(
        self, network: Network, live: Live, scale: float, entries: float | NDArray
    ) -> State | None:
        """Compute m for the next step, multiply by 1 + s, and clip."""
        following = super().reduced(network, live, scale, entries)
        factor = 1.0 if self.now is None else 1 + self.s
        for arrays in per_device(self.treated(network, network.live_grads)):
            if self.clip is not None:
                scale_to_norm(arrays, factor, self._most(scale, entries, arrays[0]))
            elif factor != 1:
                combine([factor], [arrays], arrays)
        return following

    def handed_over(
        self, v: list[np.ndarray], entries: int, batch_index: int | None
    ) -> list[np.ndarray]:
        """Multiply by 1 + s, and clip."""
        assert self.now is not None
        found = []
        for part, is_treated in zip(v, self._is_treated(self.now.network)):
            factor = 1 + self.s if is_treated else 1.0
            norm = factor * float(np.linalg.norm(part))
            if is_treated and self.clip is not None and norm > self.clip:
                factor *= self.clip / norm
            found.append(factor * part)
        return found

    def _most(self, scale: float, entries: float | NDArray, array: NDArray) -> NDArray:
        """The largest norm of a tensor of V, on the device of an array."""
        assert self.clip is not None
        if isinstance(entries, NDArray):
            return on_device(entries, array) * (self.clip * scale)
        device = _mxnet.device_of(array)
        return mx.nd.full((1,), self.clip * scale * entries, ctx=device, dtype="float64")

    def take_mean(
        self, network: Network, live: Live, scale: float, entries: float | NDArray, target: Arrays
    ) -> None:
        """Compute m for the next step: the mean gradient of this one, which is part of V."""
        sums, target = (self.treated(network, rows) for rows in (live.total, target))
        if self.now is None or not self.s:
            divide(sums, scale, entries, target)
        else:
            before = self.treated(network, self.now.mean)
            divide(sums, scale, entries, target, self.s / (1 + self.s), before)

    def treated(self, network: Network, rows: Sequence[Any]) -> list[Any]:
        """The rows of the treated parameters. The mean of the other parameters is 0."""
        return [row for row, flag in zip(rows, self._is_treated(network)) if flag]

    def _is_treated(self, network: Network) -> list[bool]:
        return [self.include_vectors or len(p.shape) > 1 for p in network.trainable]
