"""MARS: Make vAriance Reduction Shine.

::

    v = (1 + s) g - s r,      then V is clipped,      s = gamma beta / (1 - beta)

``g`` and ``r`` are the gradients of one mini-batch at the current weights and at the weights before
the last step, each the *sum* over its loss entries. ``V`` is the sum of ``v`` over the ``C`` loss
entries of all devices and workers. The mean estimate ``V / C`` of each tensor is clipped to the
norm ``clip``. The paper writes ``g + s (g - r)``, and ``beta`` is the optimizer's momentum.

The approximate form takes one gradient per step. It replaces ``r`` by ``c m``, where ``m`` is the
mean gradient of the last step, and is subtracted after the reduction: with ``G`` the sum of ``g``,

::

    V = (1 + s) G - s C m,      then m = G / C

The first step has ``v = g``, clipped too. Parameters of at most one dimension are left to the plain
optimizer, as in the paper, unless `include_vectors` is set.
"""

from __future__ import annotations

from itertools import compress
from operator import not_
from typing import Any, Sequence

import numpy as np
from mxnet.ndarray import NDArray

from . import _arguments
from .passes.columns import Mean, split, zero
from .passes.combine import assign, scale_to_norm
from .passes.estimate import PLAIN_GRADIENT, EstimateCoefficients
from .passes.full_pass import FullGradient
from .passes.pending_update import PendingUpdate
from .passes.recursive import Recursive
from .trainer import VarianceReducedTrainer


class MARS(Recursive):
    """The weights before the last step, or the last gradient. gamma and beta are in float32."""

    replaces_grads = True
    needs_closure = True

    def __init__(
        self,
        gamma: float = 0.025,
        beta: float = 0.95,
        clip: float | None = 1.0,
        exact: bool = True,
        include_vectors: bool = False,
    ) -> None:
        super().__init__()
        gamma = float(np.float32(_arguments.number(gamma, "gamma")))
        if np.float32(_arguments.number(beta, "beta", high=1)) == 1:
            raise ValueError(f"beta must be below 1, in float32 too, got {beta}.")
        beta = float(np.float32(beta))
        if clip is not None:
            _arguments.number(clip, "clip", open_low=True)
        _arguments.flag(exact, "exact")
        _arguments.flag(include_vectors, "include_vectors")
        clips = "no clip" if clip is None else f"clip {float(clip):g}"
        kind = "exact" if exact else "approximate"
        self.settings = (f"gamma {gamma:g}", f"beta {beta:g}", clips, kind)
        self.settings += ("vectors included",) * include_vectors
        self.s = gamma * beta / (1 - beta)
        self.clip, self.include_vectors = clip, include_vectors
        self.keeps_weights, self.keeps_mean = exact, not exact

    def treated(self) -> Sequence[bool] | None:
        """Per trainable parameter, whether the method treats it; None if it treats all."""
        flags = [self.include_vectors or len(p.shape) > 1 for p in self.network.trainable]
        return None if all(flags) else flags

    def refresh(self, full: FullGradient) -> None:
        """Start over at the current weights; m, if it is kept, is the full gradient."""
        super().refresh(full)
        if self.mean is not None:
            self._leave_out(self.mean)

    def _leave_out(self, mean: Mean) -> None:
        """Set the mean gradient of parameters to zero that are not treated."""
        for column in mean.sums:
            zero(compress(column, map(not_, self.treated() or ())))

    def terms(self, batch_index: int | None, rows: dict[int, Any]) -> EstimateCoefficients:
        """``v = (1 + s) g - s r``, or ``v = (1 + s) g - s c m``; at the first step ``v = g``."""
        chosen, s = self.treated(), self.s
        if not self.has_reference or not s or (chosen is not None and not any(chosen)):
            return PLAIN_GRADIENT
        if self.keeps_weights:
            return EstimateCoefficients(a=1 + s, b=-s, reference=self.point, select=chosen)
        return EstimateCoefficients(a=1 + s, k=-s, mean=self.mean, select=chosen)

    def next_state(self, pending: PendingUpdate, scale: float, entries: float | NDArray) -> Mean:
        """Compute m for the next step, and V from G and the last m, and clip."""
        next_state, chosen = super().next_state(pending, scale, entries), self.treated()
        self._leave_out(next_state)
        if self.mean is not None and self.s:
            at_mean = -1.0 * (entries * (self.s * scale) / self.mean.entries), 1
            for pair in zip(self.network.grads, self.mean.sums):
                columns = [column.select(chosen) for column in pair]
                assign(columns, (0, ((1 + self.s, 0), at_mean)))
        if self.clip is not None:
            for column in (grads.select(chosen) for grads in self.network.grads):
                scale_to_norm(column, self.clip * scale, entries)
        return next_state

    def moved(self, pending: PendingUpdate) -> None:
        """If approximate, m is of the last mini-batches alone."""
        if self.keeps_mean:
            self.ever_reached = []
        super().moved(pending)

    def optimizer_gradient(self, v: np.ndarray, count: int, batch_index: int | None) -> np.ndarray:
        """Clip."""
        parts = split(v, [grad.size for grad in self.network.grads[0]])
        for part, is_treated in zip(parts, self.treated() or [True] * len(parts)):
            norm = np.linalg.norm(part)
            if is_treated and self.clip and norm > self.clip:
                part *= self.clip / norm
        return v


class MARSTrainer(VarianceReducedTrainer):
    """A `gluon.Trainer` whose gradients are corrected and clipped by MARS [1]_.

    The first step uses the gradient ``g`` of its mini-batch. All later steps replace it by::

        v = g + s * (g - g_before),        s = gamma * beta / (1 - beta)

    where ``g_before`` is its gradient at the weights before the last step; both are *sums* over the
    loss entries of the mini-batch. The mean of ``v`` over all devices and workers is clipped, each
    parameter by itself, and passed to the optimizer. The paper uses Adam, Lion and Shampoo; any
    optimizer works. MARS needs no refresh.

    Parameters
    ----------
    gamma : float, default 0.025
        How much of the correction to use; 0 is the plain optimizer, with clipping.
    beta : float, default 0.95
        The momentum of the optimizer, such as the ``beta1`` of Adam; below 1.
    clip : float, optional
        The largest norm of the mean estimate of a parameter's gradient, 1.0 by default; None for
        no clipping. Clipping does not wait for the device.
    exact : bool, default True
        Whether ``g_before`` is the gradient of the same mini-batch, which takes two gradients per
        step. Otherwise it is the gradient of the previous mini-batch, as computed in its step.
    include_vectors : bool, default False
        Whether parameters of at most one dimension, as biases, are corrected and clipped as well.

    Notes
    -----
    Every step needs a closure, even the first. With ``exact=True`` there is a `snapshot`, and no
    `full_grads`; otherwise these are the mean gradient of the last mini-batch, zero for parameters
    that are left alone. `update_full_grads` starts over with the current weights, or with the full
    gradient, and `discard_snapshot` with the gradient of the next mini-batch. The trainer needs
    twice the memory of the parameters in addition, three times with ``exact=True``, and once more
    with `correct_grads`.

    References
    ----------
    .. [1] H. Yuan, Y. Liu, S. Wu, X. Zhou and Q. Gu, "MARS: Unleashing the Power of Variance
       Reduction for Training Large Models", 2024, arXiv:2411.10438.

    Examples
    --------
    >>> import mxnet as mx
    >>> from mxnet import gluon
    >>> from gluon_svrg import MARSTrainer
    >>> net = gluon.nn.Dense(1)
    >>> net.initialize()
    >>> ones = mx.np.ones if mx.util.is_np_array() else mx.nd.ones
    >>> trainer = MARSTrainer(net.collect_params(), 'adam', {'learning_rate': 0.01}, beta=0.9)
    >>> for X in [k * ones((3, 2)) for k in range(1, 5)]:
    ...     loss = trainer.step(len(X), closure=lambda: net(X) ** 2)
    >>> trainer.has_snapshot
    True
    """

    _method_class = MARS
