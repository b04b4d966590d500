"""What is measured with mini-batches, by differences of their gradients.

::

    H u ~ ( gradient(s + e z + e u) - gradient(s + e z) ) / e      s: snapshot or start; z is random

First, where a sketch is wanted, the products of the Hessian with the vectors Q, over as many
mini-batches as it needs. Then three power iterations with each of two mini-batches: the largest
curvature in the metric of P, and the noise, the difference of the first products of the two.
"""

from __future__ import annotations

from math import sqrt
from typing import Any, Callable, NamedTuple

import numpy as np

from .nystrom import TINY, NystromApproximation, inverse_of

BUDGET = 0.25  # of a sketch, in data passes; but each vector takes a whole mini-batch
LEAST_ENTRIES = 4  # loss entries of a sketch for each vector, about
ITERATIONS = 3  # of the power method
MOST_FLAT = 6  # pairs of mini-batches without any curvature, each probed from farther away

NOT_MEASURABLE = (
    "The curvature of the loss cannot be measured: gradients beside the snapshot or the start are "
    "not finite (NaN or infinity). Are the data finite? Begin with smaller weights."
)
NOT_CURVED = (
    "No direction was found in which the loss curves upward, and so no learning rate. Begin at "
    "other weights, or leave the preconditioner out."
)

#: The mean gradient of a mini-batch at any weights, and its loss entries.
MeanGradient = Callable[[np.ndarray], "tuple[np.ndarray, float]"]


class Probe(NamedTuple):
    """A measurement in progress."""

    z: np.ndarray  # a unit vector: gradients are taken beside the weights, where none is 0
    # The sketch
    Q: np.ndarray | None = None  # orthonormal vectors, in rows; None after it, or without one
    Y: np.ndarray | None = None  # the products with these, summed over all entries
    entries: float = 0.0
    wanted: float = 0.0
    # The power iterations, which begin at z
    bound: float = 0.0  # a bound of L that is known from before, or 0
    largest: float = 0.0  # the largest curvature so far
    first: np.ndarray | None = None  # the first product with the first mini-batch
    flat: int = 0  # how many pairs of mini-batches had no curvature
    failed: int = 0  # 1 after a mini-batch whose gradient is not finite

    @classmethod
    def begin(cls, number: int, size: int, rank: int, entries: float, bound: float) -> Probe:
        """Begin a measurement, with a sketch where the entries of all data are given.

        All arrays are in C's memory layout, as they are in a file: BLAS sums differently otherwise.
        """
        random = np.random.RandomState(number)
        z = random.randn(size)
        z /= np.linalg.norm(z)
        rank = min(rank, size, int(sqrt(BUDGET * entries / LEAST_ENTRIES)) or 1)
        if not (entries and rank):
            return cls(z, bound=bound)
        Q = np.ascontiguousarray(np.linalg.qr(random.randn(size, rank))[0].T)
        return cls(z, Q, np.zeros_like(Q), wanted=BUDGET * entries / (rank + 1))

    def products(
        self, mean_gradient: MeanGradient, weights: np.ndarray, eps: float
    ) -> tuple[Any, np.ndarray, np.ndarray, float]:
        """The function u -> H u of a mini-batch; where, the gradient there, and the entries."""
        step = eps ** (1 / 3) * max(1.0, float(np.linalg.norm(weights)))
        at = weights + step * self.z
        if self.flat:  # from far away, on both sides
            step *= 10.0**self.flat
            at = weights - step / 2 * self.z
        here, entries = mean_gradient(at)

        def product(u: np.ndarray) -> np.ndarray:
            size = float(np.linalg.norm(u)) or 1.0
            Hu = (mean_gradient(at + step / size * u)[0] - here) * (size / step)
            if not np.isfinite(Hu).all():
                raise FloatingPointError(NOT_MEASURABLE)
            return Hu

        return product, at, here, entries

    def sketched(self, product: Any, entries: float) -> Probe:
        """Add a mini-batch to the sketch."""
        assert self.Q is not None
        Y = self.Y + entries * np.stack([product(q) for q in self.Q])
        return self._replace(Y=Y, entries=self.entries + entries, failed=0)

    def iterated(self, product: Any, P: NystromApproximation | None) -> tuple[Probe, float | None]:
        """Iterate with a mini-batch; with the second one, the noise as well."""
        half, v, largest, products = inverse_of(P, 0.5), self.z, self.largest, []
        for _ in range(ITERATIONS):
            products.append(half(product(half(v))))
            largest = max(largest, float(v @ products[-1]))
            v = products[-1] / (float(np.linalg.norm(products[-1])) or 1.0)
        if self.first is None:
            return self._replace(largest=largest, first=products[0], failed=0), None
        if largest <= 0 and self.flat < MOST_FLAT:
            return self._replace(first=None, flat=self.flat + 1, failed=0), None
        if largest <= 0 and not self.bound:
            raise FloatingPointError(NOT_CURVED)
        along = max(float(self.z @ (self.first + products[0])), TINY)
        noise = float(np.linalg.norm(self.first - products[0])) ** 2 / along
        return self._replace(largest=largest), min(noise, 2 * largest)
