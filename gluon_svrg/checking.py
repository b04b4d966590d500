"""The checks of a trainer during a step."""

from __future__ import annotations

from typing import Callable

from . import _mxnet, checks
from .passes.closure import Loss
from .passes.entries import all_finite
from .passes.estimate import Estimate, Row, Terms, check_row, estimate
from .passes.first_look import first_look
from .passes.points import Point
from .refreshing import RefreshingTrainer


class CheckingTrainer(RefreshingTrainer):
    """A trainer that compares gradients where they must be equal.

    The parameters are those of `RefreshingTrainer`.
    """

    def _estimate(self, closure: Callable[[], Loss], terms: Terms, scale: float) -> Estimate:
        """Compute the estimate; at the first step after a refresh, check it too."""
        counters, reference = self._counters, terms.reference
        wanted = self._lock.mode == "auto" and not counters.compared
        if isinstance(reference, Row):
            repeated = self._first_look(closure, scale, compare=False)
            if reference.point is not None and self._lock.mode is not False:
                again, known = check_row(reference, reference.point, closure, self._lock, scale)
                repeated += again
                if known:
                    self._method.confirm(reference.number)
            found = estimate(self._here, closure, terms, self._lock, scale)
            return found._replace(differentiated=found.differentiated + repeated)
        compare = wanted and isinstance(reference, Point) and reference.is_current()
        began = isinstance(reference, Point) and not compare and self._method.needs_closure
        repeated = self._first_look(closure, scale, compare=wanted and began)
        found = estimate(self._here, closure, terms, self._lock, scale, compare=compare)
        counters.compared = found.compared if compare else True
        return found._replace(differentiated=found.differentiated + repeated)

    def _first_look(self, closure: Callable[[], Loss], scale: float, *, compare: bool) -> int:
        """Make the checks of a refresh if there was none, and count their loss entries.

        A refresh by version 0.1.0 does not count: it did not make these checks.
        """
        network, lock, counters = self._network, self._lock, self._counters
        compare = compare and not lock.locked
        if network.is_known_to_add and not compare:
            return 0
        try:
            return first_look(network, closure, lock, scale, compare=compare)
        finally:
            counters.adds, counters.probed = network.adds, network.is_known_to_add
            self._mark_points()

    _not_corrected = checks.NOT_CORRECTED

    def _check_intact(self, name: str) -> None:
        """Raise unless the live gradients hold what `correct_grads` left."""
        self._check_outside(name)
        if not self._is_corrected and (self._is_in_force() or self._method.needs_closure):
            method = type(self._method).__name__
            raise RuntimeError(self._not_corrected.format(name=name, method=method))
        overwritten = self._network.overwritten() if self._reached is not None else []
        if overwritten:
            parameter = overwritten[0].name
            raise RuntimeError(checks.OVERWRITTEN.format(name=name, parameter=parameter))

    def _has_overflow_before_push(self) -> bool:
        """Whether gradients must not reach a kvstore that would update with them."""
        if not self._loss_scale.is_on:
            return False
        self._start_kvstore()
        if not self._updates_on_kvstore:
            return False  # MXNet looks at them itself, after they are reduced
        trainable = filter(_mxnet.is_trainable, self.all_parameters)
        return not all_finite(grad for p in trainable for grad in _mxnet.gradients(p))
