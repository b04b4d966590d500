"""SARAH: stochastic recursive gradient.

::

    v = g - r + c m,      then m = V / C

``g`` and ``r`` are the gradients of one mini-batch at the current weights and at the weights before
the last step, each the *sum* over its ``c`` loss entries. ``m`` is the last estimate, per entry:
``V`` is the sum of ``v`` over the ``C`` entries of all devices and workers. A refresh sets ``m`` to
the full gradient.

Each step adds its rounding error, of the size of that of ``r - c m``, to ``m``. A refresh ends that
drift.
"""

from __future__ import annotations

from typing import Any

from .passes.estimate import PLAIN_GRADIENT, EstimateCoefficients
from .passes.recursive import Recursive
from .trainer import VarianceReducedTrainer


class SARAH(Recursive):
    """The weights before the last step, and the last estimate. Plain until the first refresh."""

    needs_refresh = True

    def terms(self, batch_index: int | None, rows: dict[int, Any]) -> EstimateCoefficients:
        """``v = g - r + c m``."""
        if not self.has_reference:
            return PLAIN_GRADIENT
        return EstimateCoefficients(b=-1.0, k=1.0, reference=self.point, mean=self.mean)


class SARAHTrainer(VarianceReducedTrainer):
    """A `gluon.Trainer` whose gradients are variance-reduced by SARAH [1]_.

    `update_full_grads` computes the full gradient from time to time. In between, `step` replaces
    the gradient of each mini-batch by::

        v = g - g_before + count * mean_grad,        then mean_grad = the mean of v

    where ``g`` and ``g_before`` are its gradients at the current weights and at those before the
    last step, each the *sum* over its ``count`` loss entries. The optimizer gets ``v``. Before the
    first refresh, this is the plain optimizer.

    With a refresh every few steps (`gluon_svrg.schedule.EverySteps`) this is SPIDER [2]_. With
    random refreshes (`gluon_svrg.schedule.Loopless`) it is PAGE [3]_, whose refresh may use one
    large mini-batch.

    Notes
    -----
    `full_grads` is the mean gradient of the formula. Rounding errors accumulate until the next
    refresh. The trainer needs four times the memory of the parameters in addition, five
    times with `correct_grads`.

    References
    ----------
    .. [1] L. M. Nguyen, J. Liu, K. Scheinberg and M. Takac, "SARAH: A Novel Method for Machine
       Learning Problems Using Stochastic Recursive Gradient", ICML 2017.
    .. [2] C. Fang, C. J. Li, Z. Lin and T. Zhang, "SPIDER: Near-Optimal Non-Convex Optimization via
       Stochastic Path Integrated Differential Estimator", NeurIPS 2018.
    .. [3] Z. Li, H. Bao, X. Zhang and P. Richtarik, "PAGE: A Simple and Optimal Probabilistic
       Gradient Estimator for Nonconvex Optimization", ICML 2021.

    Examples
    --------
    A loop as for `SVRGTrainer`, with a refresh before a step where a schedule asks for it:

    >>> from mxnet import gluon
    >>> from gluon_svrg import SARAHTrainer
    >>> from gluon_svrg.schedule import Loopless
    >>> net = gluon.nn.Dense(1)
    >>> net.initialize()
    >>> trainer = SARAHTrainer(net.collect_params(), 'sgd', {'learning_rate': 0.1})
    >>> Loopless(0.2).due(trainer)  # there is no snapshot yet
    True
    """

    _method_class = SARAH
