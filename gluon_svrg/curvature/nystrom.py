"""P, an approximation of the Hessian H from its products with a few vectors: see `Nystrom`.

::

    Y = H Q,   Y (Q'Y)^-1 Y' = U S U',   P = U S U' + rho I
    P^-1 v = v / rest + U b U'v,   b = 1 / (S + rho) - 1 / rest,   see `rest`

Q has random orthonormal columns. rho stands for the curvature in all other directions.

Later P learns from single rows of the data that the sketch has not seen. The gradient difference
d of a step with such a row has a large secant, and P + f d d' / d'P^-1 d divides it by 1 + f.
"""

from __future__ import annotations

from typing import Callable, NamedTuple

import numpy as np

TINY = 1e-300  # in the place of a divisor of 0
ENTRIES_PER_DIRECTION = 10  # of a sketch, for each effective direction where P has all of them
UNSEEN = 1e-9  # relative curvature that stands for none; the rounding of float32 is above it
ROUNDING_OF_PRODUCTS = 10  # of the products Y, in units of their dtype's rounding


class NystromApproximation(NamedTuple):
    """P = U S U' + rho I. The vectors of U are in rows, here and in all of this package."""

    U: np.ndarray  # orthonormal directions
    S: np.ndarray  # the curvature along each, above rho
    rho: float  # the curvature in all other directions

    @property
    def least(self) -> float:
        """The smallest eigenvalue."""
        return self.rho + (float(self.S.min()) if self.has_all else 0.0)

    def root(self) -> np.ndarray:
        """The A for which P = least (I + A'A): with rho, which may be rounding, A would be huge."""
        return np.sqrt((self.S + self.rho - self.least) / self.least)[:, None] * self.U

    @property
    def has_all(self) -> bool:
        """Whether there is no other direction."""
        return len(self.S) == self.U.shape[1]

    @property
    def rest(self) -> float:
        """The eigenvalue in all other directions; where there are none, one that rounds little.

        The inverse is 1 / rest, and a sum over U for what differs from it. Where that subtracts, a
        rest far below the largest curvature leaves nothing but rounding.
        """
        return self.rho + (float(self.S.max()) if self.has_all else 0.0)

    def inverse_factors(self, power: float = 1.0) -> np.ndarray:
        """The eigenvalues of the power of the inverse along U, less that of `rest`."""
        return (self.S + self.rho) ** -power - self.rest**-power

    def inverse_root(self) -> tuple[float, np.ndarray]:
        """The sign and the T for which the inverse is 1 / rest + sign T'T."""
        sign = 1.0 if self.has_all else -1.0
        # Where a factor is 0, the powers of NumPy and Python may differ in their last bits
        factors = np.maximum(sign * self.inverse_factors(), 0.0)
        return sign, np.sqrt(factors)[:, None] * self.U

    def with_rows(self, rows: np.ndarray, eps: float) -> NystromApproximation:
        """P + rows' rows; each row that is no combination of the directions adds one.

        Unless P has all directions, a rho that the rounding of a dtype would hide is increased.
        """
        U, S = self.U, self.S
        for row in rows:
            inside = U @ row
            rest = row - inside @ U
            rest -= (U @ rest) @ U  # what rounding has left
            size = float(np.linalg.norm(rest))
            if size > 1e-8 * float(np.linalg.norm(row)):
                U, S = np.vstack([U, rest / size]), np.append(S, 0.0)
                inside = np.append(inside, size)
            S, V = np.linalg.eigh(np.diag(S) + np.outer(inside, inside))
            U = V.T @ U
        new = NystromApproximation(U, np.maximum(S, 0), self.rho)
        least = 0.0 if new.has_all else ROUNDING_OF_PRODUCTS * eps * float(new.S.max())
        return new._replace(rho=max(self.rho, least))


def inverse_of(
    P: NystromApproximation | None, power: float = 1.0
) -> Callable[[np.ndarray], np.ndarray]:
    """A function that multiplies a vector by a power of the inverse of P, if there is one."""
    if P is None:
        return lambda v: v
    U, rest, factors = P.U, P.rest**-power, P.inverse_factors(power)
    return lambda v: v * rest + (factors * (U @ v)) @ U


def nystrom(
    Q: np.ndarray, Y: np.ndarray, entries: float, decay: float, eps: float
) -> tuple[NystromApproximation, bool]:
    """P from the mean of the products over some loss entries; whether rounding hides some weights.

    Curvature below zero counts as zero. rho is the largest weight decay and a floor, which follows
    from how much so few entries can tell; or, if that is more, the rounding, or 1.1 times how far
    curvature is below zero. Where P has fewer directions than there are weights, the floor is the
    smallest curvature in S, or the mean curvature that an entry adds: it stands for what is
    unknown. Where P has all directions, it leaves as many effective ones, sum S / (S + floor), as
    the entries can tell. There, in float64, a direction without any curvature, as of a rare
    category that no entry has, gets that of its weights one by one, or for weights that no product
    moves the mean curvature that an entry adds.
    """
    values, V = np.linalg.eigh((Q @ Y.T + Y @ Q.T) / 2)
    rounding = ROUNDING_OF_PRODUCTS * eps * float(np.linalg.norm(Y, 2))
    shift = max(rounding, -1.1 * float(values[0]))
    root = (V / np.sqrt(values + shift)).T @ (Y + shift * Q)
    _, sizes, U = np.linalg.svd(root, full_matrices=False)
    S = np.maximum(sizes**2 - shift, 0)
    of_weights, is_seen = (S[:, None] * U**2).sum(axis=0), Y.any(axis=0)
    if len(S) < Q.shape[1]:
        floor = max(float(S[-1]), float(S.sum()) / entries)
    else:
        floor = _damping(S, entries / ENTRIES_PER_DIRECTION)
        usual = U**2 @ np.where(is_seen, of_weights, S.sum() / entries)
        is_unseen = (UNSEEN * usual > S) & (UNSEEN * S[0] > shift)
        S = np.where(is_unseen, usual, S)
    rho = float(max(decay + floor, shift, 1e-14 * S[0]))
    is_limited = rho == rounding and bool(((of_weights < rounding) & is_seen).any())
    return NystromApproximation(U, S, rho), is_limited


def _damping(S: np.ndarray, effective: float) -> float:
    """The rho, up to sum S, for which sum S / (S + rho) is a number of directions; or 0."""
    low, high = 1e-16 * float(S[0]), float(S.sum())
    if (S > 0).sum() <= effective:
        return 0.0
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if (S / (S + middle)).sum() > effective else (low, middle)
    return high
