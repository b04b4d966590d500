"""SARAH: stochastic recursive gradient.

::

    v = g - r + c m,      then m = V / C

``g`` and ``r`` are the gradients of one minibatch at the current weights and at the weights before
the last step, each the *sum* over its ``c`` loss entries. ``m`` is the last estimate, per entry:
``V`` is the sum of ``v`` over the ``C`` entries of all devices and workers. A refresh sets ``m`` to
the full gradient [1]_. With a refresh every few steps this is SPIDER [2]_; with a refresh by the
toss of a coin it is PAGE [3]_.

Each step adds its rounding error, of the size of ``g - r``, to ``m``. A refresh ends that drift.

References
----------
.. [1] L. M. Nguyen, J. Liu, K. Scheinberg and M. Takac, "SARAH: A Novel Method for Machine Learning
   Problems Using Stochastic Recursive Gradient", ICML 2017.
.. [2] C. Fang, C. J. Li, Z. Lin and T. Zhang, "SPIDER: Near-Optimal Non-Convex Optimization via
   Stochastic Path Integrated Differential Estimator", NeurIPS 2018.
.. [3] Z. Li, H. Bao, X. Zhang and P. Richtarik, "PAGE: A Simple and Optimal Probabilistic Gradient
   Estimator for Nonconvex Optimization", ICML 2021.
"""

from __future__ import annotations

from mxnet.ndarray import NDArray

from ..passes.estimate import Terms
from ..passes.network import Network
from .interface import Live
from .recursive import Recursive, State


class SARAH(Recursive):
    """The weights before the last step, and the last estimate. Plain until the first refresh."""

    def terms(self, batch_index: int | None = None, live: Live | None = None) -> Terms:
        """What to add to g: ``- r + c m``."""
        if self.now is None:
            return Terms()
        return Terms(b=-1.0, k=1.0, reference=self.now.reference, mean=self.now.mean)

    def reduced(
        self, network: Network, live: Live, scale: float, entries: float | NDArray
    ) -> State | None:
        """Compute m for the next step, after the first refresh."""
        return super().reduced(network, live, scale, entries) if self.has_reference else None
