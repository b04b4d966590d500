"""The search for a learning rate: one grid for all, and the best is never at its edge."""

from __future__ import annotations

from typing import Any, Callable, Sequence


def best(
    merits: Callable[[Sequence[int]], Sequence[Any]], exponents: Sequence[int]
) -> tuple[int, Any]:
    """The exponent with the lowest merit, and that merit.

    Parameters
    ----------
    merits : callable
        How good the rates of some exponents are, lower is better; inf after a divergence.
    exponents : sequence of int
        The grid; it grows until the best of it lies between two others.
    """
    found = dict(zip(exponents, merits(exponents)))
    while True:
        chosen = min(sorted(found), key=found.__getitem__)
        if min(found) < chosen < max(found):
            return chosen, found[chosen]
        beyond = chosen + (1 if chosen == max(found) else -1)
        found[beyond] = merits([beyond])[0]
