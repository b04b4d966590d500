"""The formula of all methods: the estimate from a minibatch's gradient.

::

    v = g + b r + k c m

``g`` is the gradient of the minibatch at the current weights, ``r`` its gradient at a reference
(other weights, or a row of a table), each the *sum* over the minibatch's ``c`` loss entries, and
``m`` a *mean* per loss entry. A method chooses ``b``, ``k``, the reference and ``m``, see `Terms`.
Each device has its own ``g``, ``r`` and ``c``.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Callable, Iterator, NamedTuple, Sequence

import numpy as np
from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from .. import _mxnet
from .._mxnet import Arrays, Flags
from . import random_lock, sketch
from .arrays import copies, copy_all, put_back, zero
from .closure import Loss, Recorded, check_repeatable, record
from .network import check_dependent
from .points import Point
from .random_lock import RandomLock
from .repeats import Repeated, Verdict, is_rounding, once
from .repeats import compare as compare_gradients
from .sums import LiveSum, Observed, new_sum
from .warnings import warn

#: What a row that is not the gradient itself has rounded, in units of its dtype.
_ROW_ROUNDING = 16


class Row(NamedTuple):
    """A reference that is a row of a table: an earlier gradient of the minibatch."""

    number: int  # among the minibatches
    grads: Arrays  # per parameter and device: sums over loss entries, of unscaled losses
    check_counts: Callable[[Sequence[int]], None]  # raises if they are not those of the row
    seed: int | None = None  # of its random numbers
    point: Point | None = None  # where to compute it again, if it must be checked
    is_checked_again: bool = False  # and whether it was checked before, by the trainer of a file
    stored: Callable[[], Arrays] | None = None  # the gradient, if the row is something else
    is_old: bool = False  # whether the point is that of an earlier step, not of a refresh


class Terms(NamedTuple):
    """What a method adds to the gradient g of a minibatch: ``v = g + b r + k c m``."""

    b: float = 0.0
    k: float | NDArray = 0.0  # an array only where no gradient is taken at a reference
    reference: Point | Row | None = None  # where r is taken; None if b is 0
    mean: Arrays | None = None  # m, per parameter and device; None if k is 0
    copy_to: Arrays | None = None  # where to copy g, for unscaled losses
    moved: Arrays | None = None  # with `copy_to`: memory for g + b r, for unscaled losses
    only: Sequence[bool] | None = None  # the parameters to which r at a point belongs; None: all
    mean_moves: bool = False  # whether to add m to `moved` at the end

    @property
    def is_plain(self) -> bool:
        """Whether v is g."""
        return self.copy_to is None and self.b == 0 and self.k == 0


class Estimate(NamedTuple):
    """The results of a minibatch, apart from v, which is in the live gradients."""

    loss: Loss
    entries: int  # of this minibatch
    differentiated: int  # loss entries, over all passes
    reached: list[bool]  # per parameter: whether its loss depends on it
    compared: bool = False  # whether g and r were found to be equal where they must be
    counts: Sequence[int] = ()  # entries per device
    seed: int | None = None  # of the random numbers, if they are locked


def plain(parameters: Sequence[Parameter], closure: Callable[[], Loss], scale: float) -> Estimate:
    """Compute the gradient of a minibatch as for `gluon.Trainer`, in the parameters' own arrays.

    A device without data contributes zero, not its previous gradient. The closure initializes
    parameters whose initialization is deferred.
    """
    devices = _mxnet.devices(parameters[0]) if parameters else []
    weights = [_mxnet.data(p) for p in parameters if _mxnet.gradients(p) is not None]
    before = _mxnet.take_fresh(weights)
    try:
        recorded = record(closure, (), devices).count()
        recorded.backward(scale)
        reached = _mark_on_all_devices(parameters)
    finally:
        _mxnet.mark(weights, before, fresh=True)
    entries, counts = recorded.entries, recorded.counts
    return Estimate(recorded.loss, entries, entries, reached, counts=counts)


def _mark_on_all_devices(parameters: Sequence[Parameter]) -> list[bool]:
    trainable = [p for p in parameters if _mxnet.gradients(p) is not None]
    weights = [_mxnet.data(p) for p in trainable]
    touched = _mxnet.fresh(weights)
    reached = check_dependent(touched)
    for parameter, is_reached, flags, row in zip(trainable, reached, touched, weights):
        if is_reached and all(flags):
            continue
        for grad, flag in zip(_mxnet.gradients(parameter), flags):
            if not flag and parameter.grad_req == "write":
                zero([grad])
        _mxnet.mark([row], [[is_reached] * len(row)], fresh=True)
    return reached


def estimate(
    here: Point,
    closure: Callable[[], Loss],
    terms: Terms,
    lock: RandomLock,
    scale: float = 1.0,
    *,
    compare: bool = False,
) -> Estimate:
    """Leave ``v = g + b r + k c m`` in the live gradients.

    Parameters
    ----------
    here : Point
        The current weights.
    closure : callable
        Returns the loss of the minibatch.
    terms : Terms
        The terms that the method adds to g.
    lock : RandomLock
        Whether both passes draw the same random numbers.
    scale : float
        The factor of the losses (mixed precision), and so of v.
    compare : bool
        Whether the weights are those of the reference, so that g and r must be equal. If they
        differ, random numbers are locked, with a warning, and the estimate is computed again.

    Raises
    ------
    RuntimeError
        If g and r must be equal, but differ although random numbers are locked; if the closure's
        number of loss entries changes, or it computes with values that it took before the call.
    """
    network = here.network
    with network.accumulating():
        network.hide_marks()
        if not compare:
            return _attempt(here, closure, terms, lock, scale)
        auxiliaries = [p for p in network.frozen if _mxnet.is_auxiliary(p)]
        states = [_mxnet.data(p) for p in auxiliaries + network.outside.auxiliaries]
        before = copies(states)
        differentiated = 0
        try:
            with lock.kept_on_error():
                while True:
                    found, verdict = _compared(here, closure, terms, lock, scale)
                    differentiated += found.differentiated + verdict.differentiated
                    if verdict.is_same and verdict.is_intact:
                        break
                    copy_all(before, states)  # which the first attempt has changed
                    network.hide_marks()
                    if verdict.is_same:
                        found = _attempt(here, closure, terms, lock, scale)
                        differentiated += found.differentiated
                        break
        except BaseException:
            put_back(before, states)
            raise
        return found._replace(differentiated=differentiated, compared=verdict.is_known)


def check_row(
    row: Row, point: Point, closure: Callable[[], Loss], lock: RandomLock, scale: float
) -> tuple[int, bool]:
    """Compute the gradient of a row again, and check that it is the same.

    Compute the estimate with this row afterwards: it moves on from the seed of the row.

    Returns
    -------
    differentiated : int
        Loss entries.
    is_known : bool
        Whether the comparison was valid: an overflow proves nothing.

    Raises
    ------
    RuntimeError
        If it differs, and was taken by a refresh.
    """
    network = point.network
    with _moved_on_after_an_error(row, lock), network.accumulating():
        network.hide_marks()
        v = new_sum(network, scale)
        v.observed = []

        def work() -> tuple[Recorded, Flags]:
            recorded = network.record(closure)
            row.check_counts(recorded.counts)
            v.start()
            return recorded, v.add(recorded, point)

        random_lock.start(row.seed)
        with network.outside.protected(gradients=False):
            recorded, touched = point.at(work)
        check_dependent(touched)
        kept = sketch.sketch(row.grads)
        stored = Observed(kept, 0.0)
        if row.stored is not None:
            whole = sketch.sketch(row.stored())
            size = float(np.linalg.norm(kept) + np.linalg.norm(whole))
            stored = Observed(whole, _ROW_ROUNDING * network.live_grads.epsilon * size)
        found = Repeated((*v.observed, stored), (recorded,), point, closure, (), row.seed, scale)
        difference, differentiated = found.difference(), recorded.entries
        if sketch.is_other(difference, network.live_grads):
            is_same, again = is_rounding(found)
            differentiated += again
            if not is_same:
                text = sketch.OTHER_DATA if row.is_old else sketch.RESHUFFLED
                text = text.format(index=row.number, difference=sketch.in_words(difference))
                if not row.is_old:
                    raise RuntimeError(text)
                warn(text)
        network.clear_accumulated()
    return differentiated, not np.isnan(difference)


@contextmanager
def _moved_on_after_an_error(row: Row, lock: RandomLock) -> Iterator[None]:
    """Draw other random numbers after an error than those of a row."""
    try:
        yield
    except BaseException:
        if row.seed is not None:
            lock.move_on()
        raise


def _attempt(
    here: Point, closure: Callable[[], Loss], terms: Terms, lock: RandomLock, scale: float
) -> Estimate:
    """Compute the estimate, from one gradient or two."""
    if isinstance(terms.reference, Point):
        seed = lock.new_seed()
        return _from_two(here, terms.reference, closure, terms, scale, seed, None)[0]
    return _from_one(here, closure, terms, lock, scale)


def _compared(
    here: Point, closure: Callable[[], Loss], terms: Terms, lock: RandomLock, scale: float
) -> tuple[Estimate, Verdict]:
    """Compute the estimate, and compare g and r.

    Where backward rounds r times b in another way than g, r is taken once more.
    """
    network, reference, seed = here.network, terms.reference, lock.new_seed()
    assert isinstance(reference, Point)
    total, differentiated = new_sum(network, scale), 0
    seen: list[Observed] = []
    total.observed = []
    is_alone = not total.rounds_alike(terms.b)
    if is_alone:
        total.start()
        with network.outside.protected(gradients=False):
            alone, _ = once(reference, closure, (), total, seed)
        differentiated = alone.entries
    found, (there, recorded) = _from_two(here, reference, closure, terms, scale, seed, seen)
    gradients = seen[1], (total.observed if is_alone else seen)[0]
    pair = Repeated(gradients, (recorded, there), reference, closure, (), seed, scale)
    verdict = compare_gradients(pair, lock)
    return found._replace(differentiated=found.differentiated + differentiated), verdict


def _from_two(
    here: Point,
    reference: Point,
    closure: Callable[[], Loss],
    terms: Terms,
    scale: float,
    seed: int | None,
    seen: list[Observed] | None,
) -> tuple[Estimate, tuple[Recorded, Recorded]]:
    """Compute the estimate from gradients at two points; append both to a list, if there is one."""
    network = here.network
    v = new_sum(network, scale)
    v.observed = seen
    is_early = bool(network.frozen)  # what is refused must not move running statistics

    def at_reference() -> tuple[Recorded, Flags]:
        recorded = network.record(closure)  # now c is known
        v.start(recorded.counts, terms.k, terms.mean)  # v = k c m
        touched = v.add(recorded, reference, terms.b)  # v += b r
        if terms.only is not None:
            v.clear([[kept] * len(network.devices) for kept in terms.only])  # v = 0 for the rest
        return recorded, touched

    def at_weights() -> tuple[Recorded, Flags]:
        recorded = network.record(closure, count=is_early)
        if is_early:
            check_repeatable(there.counts, recorded.counts)
        touched = v.add_last(recorded, here)  # v += g
        if not is_early:
            check_repeatable(there.counts, recorded.count().counts)
        return recorded, touched

    random_lock.start(seed)
    with network.outside.protected(gradients=False):
        there, touched = reference.at(at_reference)
    check_dependent(touched)
    network.check_hidden()
    random_lock.start(seed)
    recorded, touched = here.at(at_weights)
    found = Estimate(
        recorded.loss,
        recorded.entries,
        2 * recorded.entries,
        check_dependent(touched),
        counts=recorded.counts,
        seed=seed,
    )
    return found, (there, recorded)


def _from_one(
    here: Point, closure: Callable[[], Loss], terms: Terms, lock: RandomLock, scale: float
) -> Estimate:
    """Compute the estimate from the gradient at the weights, and a row of a table.

    It is taken at the weights' own arrays: to swap them for others takes time.
    """
    network = here.network
    b, k, m, row = terms.b, terms.k, terms.mean, terms.reference
    assert not isinstance(row, Point)
    v, seed, row_grads = LiveSum(network, scale), lock.new_seed(), None
    is_early = bool(network.frozen)  # what is refused must not move running statistics
    is_fixed = row is not None and row.seed is not None
    try:
        if row is not None:
            row_grads, seed = row.grads, row.seed if is_fixed else seed
        random_lock.start(seed)
        recorded = network.record(closure, count=is_early)
        if row is not None and is_early:
            row.check_counts(recorded.counts)
        touched = v.set_to(recorded, network.weights)  # v = g
        if not is_early:
            recorded.count()
        if row is not None and not is_early:
            row.check_counts(recorded.counts)
        reached = check_dependent(touched)
        if terms.copy_to is None:
            v.add_terms(recorded.counts, k, m, b, row_grads)  # v += b row + k c m
        else:  # the same, keeping g and g + b row
            assert m is not None and terms.moved is not None
            keep = terms.copy_to, terms.moved, terms.mean_moves
            v.add_terms_keeping(recorded.counts, k, m, b, row_grads, *keep)
    finally:
        if is_fixed:
            lock.move_on()  # what is drawn next is not the same each time
    return Estimate(
        recorded.loss,
        recorded.entries,
        recorded.entries,
        reached,
        counts=recorded.counts,
        seed=seed,
    )
