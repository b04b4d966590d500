"""STORM: stochastic recursive momentum.

::

    v = g - (1 - mixing) (r - c m),      then m = V / C

``g`` and ``r`` are the gradients of one mini-batch at the current weights and at the weights before
the last step, each the *sum* over its ``c`` loss entries. ``m`` is the last estimate, per entry:
``V`` is the sum of ``v`` over the ``C`` entries of all devices and workers. ``mixing`` is the ``a``
of the paper, the share of the fresh gradient. The first step has ``v = g``, so no refresh is
needed; a refresh sets ``m`` to the full gradient.

Each step keeps ``1 - mixing`` of the earlier rounding errors: the drift of ``m`` stays below
``1 / mixing`` times the error of one step.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _arguments
from .passes.estimate import PLAIN_GRADIENT, EstimateCoefficients
from .passes.recursive import Recursive
from .trainer import VarianceReducedTrainer


class STORM(Recursive):
    """The weights before the last step, and the last estimate. Mixing is rounded to float32."""

    needs_closure = True

    def __init__(self, mixing: float = 0.1) -> None:
        super().__init__()
        self.mixing = float(np.float32(_arguments.number(mixing, "mixing", high=1)))
        self.settings = (f"mixing {self.mixing:g}",)

    def terms(self, batch_index: int | None, rows: dict[int, Any]) -> EstimateCoefficients:
        """``v = g - (1 - mixing) r + (1 - mixing) c m``; at the first step ``v = g``."""
        rest = 1 - self.mixing
        if not self.has_reference or not rest:
            return PLAIN_GRADIENT
        return EstimateCoefficients(b=-rest, k=rest, reference=self.point, mean=self.mean)


class STORMTrainer(VarianceReducedTrainer):
    """A `gluon.Trainer` whose gradients are variance-reduced by STORM [1]_.

    The first step uses the gradient ``g`` of its mini-batch. All later steps replace it by::

        v = g - (1 - mixing) * (g_before - count * mean_grad),  then mean_grad = the mean of v

    where ``g_before`` is its gradient at the weights before the last step; both are *sums* over the
    ``count`` loss entries of the mini-batch. The optimizer gets ``v``. STORM needs no refresh.

    Parameters
    ----------
    mixing : float, default 0.1
        The share of the fresh gradient, 0 to 1: the ``a`` of the paper. 1 is the plain optimizer,
        0 is SARAH that starts with one mini-batch.

    Notes
    -----
    Every step needs a closure, even the first. `full_grads` is the mean gradient of the formula.
    `update_full_grads` starts over with the full gradient, and `discard_snapshot` with that of the
    next mini-batch. The trainer needs four times the memory of the parameters in addition, five
    times with `correct_grads`.

    References
    ----------
    .. [1] A. Cutkosky and F. Orabona, "Momentum-Based Variance Reduction in Non-Convex SGD",
       NeurIPS 2019.

    Examples
    --------
    A loop as for `MARSTrainer`, with:

    >>> from mxnet import gluon
    >>> from gluon_svrg import STORMTrainer
    >>> net = gluon.nn.Dense(1)
    >>> net.initialize()
    >>> STORMTrainer(net.collect_params(), 'sgd', {'learning_rate': 0.1}, mixing=0.3)
    STORMTrainer(sgd, mixing 0.3)
    """

    _method_class = STORM
