"""STORM: stochastic recursive momentum.

::

    v = g - (1 - mixing) (r - c m),      then m = V / C

``g`` and ``r`` are the gradients of one minibatch at the current weights and at the weights before
the last step, each the *sum* over its ``c`` loss entries. ``m`` is the last estimate, per entry:
``V`` is the sum of ``v`` over the ``C`` entries of all devices and workers. ``mixing`` is the ``a``
of the paper [1]_: the share of the fresh gradient. With 1 this is the plain gradient. The first
step has ``v = g``, so no refresh is needed; a refresh sets ``m`` to the full gradient.

Each step keeps ``1 - mixing`` of the earlier rounding errors: the drift of ``m`` stays below
``1 / mixing`` times the error of one step.

References
----------
.. [1] A. Cutkosky and F. Orabona, "Momentum-Based Variance Reduction in Non-Convex SGD",
   NeurIPS 2019.
"""

from __future__ import annotations

import numpy as np

from ..passes.estimate import Terms
from .interface import Live
from .recursive import NEEDS_CLOSURE, Recursive


class STORM(Recursive):
    """The weights before the last step, and the last estimate.

    Parameters
    ----------
    mixing : float
        The share of the fresh gradient; it is rounded to float32, as MXNet rounds the
        hyperparameters of its optimizers.
    """

    needs_closure = True
    not_corrected = NEEDS_CLOSURE

    def __init__(self, mixing: float) -> None:
        super().__init__()
        self.mixing = float(np.float32(mixing))
        self.settings = (f"mixing {self.mixing:g}",)

    def terms(self, batch_index: int | None = None, live: Live | None = None) -> Terms:
        """What to add to g: ``- (1 - mixing) r + (1 - mixing) c m``."""
        rest = 1 - self.mixing
        if self.now is None or not rest:
            return Terms()
        return Terms(b=-rest, k=rest, reference=self.now.reference, mean=self.now.mean)
