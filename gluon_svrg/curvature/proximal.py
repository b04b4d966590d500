"""Penalties in the metric of P: the proximal gradient is the direction [1]_.

The objective is F(w) + h(w), and h has a proximal operator. With the weights w, the direction
u = P^-1 v and the step t, the rate times f, the optimizer gets (w - z) / rate in place of f u::

    x = w - t u,    z = argmin  (z - x)'P(z - x) / 2 + t h(z)

With NAG this is FISTA's step, z its iterate and w the point beside it. As P = l (I + A'A),
with l its smallest eigenvalue, z is the Euclidean operator of t h / l at x - A'c, where
c = A (z - x): as many equations as A has rows. A semismooth Newton method solves them, in one or
two iterations from the shift x - z of the step before.

.. [1] S. Becker, J. Fadili and P. Ochs, "On Quasi-Newton Forward-Backward Splitting: Proximal
   Calculus and Convergence", SIAM Journal on Optimization 29(4), 2019.
"""

from __future__ import annotations

from math import prod, sqrt
from typing import Any, NamedTuple, Sequence

import mxnet as mx
import numpy as np

from .. import _mxnet, prox
from .nystrom import TINY

TOLERANCE = 1e-3  # of c, relative to its norm, or to that of the first one: it may become 0
MOST_ITERATIONS = 30


class Part(NamedTuple):
    """The weights of one parameter, and their operator."""

    parameter: Any
    operator: Any
    place: slice  # in vectors of all weights
    shape: tuple[int, ...]
    dtype: str
    is_ours: bool  # the operator takes arrays of NumPy, and has a derivative

    def __call__(self, weights: np.ndarray, step: float) -> np.ndarray:
        """The operator, of an array in the parameter's shape."""
        if self.is_ours:
            return self.operator(weights, step)
        return self.operator(self._on_device(weights), step).asnumpy().astype("float64")

    def derivative(
        self, weights: np.ndarray, result: np.ndarray, step: float, directions: np.ndarray
    ) -> np.ndarray:
        """Directions, along the first axis, times the derivative of the operator."""
        if self.is_ours:
            return self.operator._derivative(weights, result, step, directions)
        h = float(np.finfo(self.dtype).eps) ** 0.5 * (1 + np.abs(weights).max())
        return np.stack([(self(weights + h * each, step) - result) / h for each in directions])

    def value(self, weights: np.ndarray) -> float:
        """The penalty."""
        if self.is_ours:
            return float(self.operator.value(weights))
        penalty = self.operator.value(self._on_device(weights))
        return float(penalty.asnumpy().item() if hasattr(penalty, "asnumpy") else penalty)

    def _on_device(self, weights: np.ndarray) -> Any:
        return mx.nd.array(weights, ctx=_mxnet.devices(self.parameter)[0], dtype=self.dtype)


class Penalty:
    """The sum of the penalties of all parameters that have an operator, times a factor."""

    def __init__(self, operators: Any, parameters: Sequence[Any]) -> None:
        self.factor = 1.0
        ends = np.cumsum([0, *(prod(p.shape) for p in parameters)]).tolist()
        self.parts = []
        for p, start, end in zip(parameters, ends, ends[1:]):
            if p in operators:
                is_ours = type(operators[p]).__module__ == prox.__name__
                about = operators[p], slice(start, end), p.shape, _mxnet.dtype_of(p), is_ours
                self.parts.append(Part(p, *about))
        #: Whether the derivative follows from which results are 0, and which are as before.
        self.is_simple = {type(part.operator) for part in self.parts} <= {prox.L1, prox.Box}

    def __bool__(self) -> bool:
        return bool(self.parts)

    def value(self, weights: np.ndarray) -> float:
        """h, without the projections."""
        total = 0.0
        for part in self.parts:
            if not part.operator.is_projection:
                total += part.value(weights[part.place].reshape(part.shape))
        return self.factor * total

    def apply(self, weights: np.ndarray, step: float) -> np.ndarray:
        """The Euclidean operator: the minimum of (z - w)'(z - w) / 2 + step h(z)."""
        result = weights.copy()
        for part in self.parts:
            piece = weights[part.place].reshape(part.shape)
            result[part.place] = part(piece, self.factor * step).ravel()
        return result

    def derivative(
        self, weights: np.ndarray, result: np.ndarray, step: float, directions: np.ndarray
    ) -> np.ndarray:
        """The operator's derivative at weights, with a known result, times directions in rows."""
        products = directions.copy()
        for part in self.parts:
            w, z = (each[part.place].reshape(part.shape) for each in (weights, result))
            rows = directions[:, part.place].reshape(-1, *part.shape)
            given = w, z, self.factor * step, rows
            products[:, part.place] = part.derivative(*given).reshape(len(rows), -1)
        return products

    def least_subgradient(self, weights: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        """The shortest sum of the gradient of F and a subgradient of h: by a small step."""
        eps = max((np.finfo(part.dtype).eps for part in self.parts), default=1e-16)
        step = eps**0.5 * (1 + np.abs(weights).max()) / max(np.abs(gradient).max(), TINY)
        return (weights - self.apply(weights - step * gradient, step)) / step


class ProximalPoint:
    """The z that minimizes (z - x)'(I + A'A)(z - x) / 2 + step h(z), from a guess on."""

    def __init__(self, A: np.ndarray | None, penalty: Penalty) -> None:
        self._A, self._penalty = A, penalty
        self._last: tuple[Any, Any] = None, None  # what D follows from, and the inverse

    def __call__(self, x: np.ndarray, step: float, guess: np.ndarray) -> np.ndarray:
        A, penalty = self._A, self._penalty
        if A is None:
            return penalty.apply(x, step)

        def residual(c: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
            v = x - c @ A
            z = penalty.apply(v, step)
            left = A @ (z - x) - c
            return v, z, left, sqrt(left @ left)

        c = A @ (guess - x)
        v, z, left, size = residual(c)
        least = TOLERANCE * sqrt(c @ c) + TINY
        for _ in range(MOST_ITERATIONS):  # one at least: what is left of a good guess would stay
            change, part, before = self._newton_step(v, z, step, left), 1.0, size
            while True:
                v, z, left, size = residual(c + part * change)
                if size < (1 - 0.1 * part) * before or part < 1e-3:
                    break
                part /= 2
            c = c + part * change
            if size <= max(TOLERANCE * sqrt(c @ c), least):
                break
        return z

    def _newton_step(
        self, v: np.ndarray, z: np.ndarray, step: float, left: np.ndarray
    ) -> np.ndarray:
        """The change of c: solve (I + A D A') change = left, D is the operator's derivative.

        Where D does not depend on the step, the inverse is kept until D changes.
        """
        A, is_simple = self._A, self._penalty.is_simple
        kind = ((z != 0).tobytes(), (z == v).tobytes()) if is_simple else None
        if kind is None or kind != self._last[0]:
            assert A is not None
            jacobian = np.eye(len(A)) + self._penalty.derivative(v, z, step, A) @ A.T
            if kind is None:
                return np.linalg.solve(jacobian, left)
            self._last = kind, np.linalg.inv(jacobian)
        return self._last[1] @ left
