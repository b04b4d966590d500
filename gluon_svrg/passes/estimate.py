"""The formula of all methods: the estimate from a minibatch's gradient.

::

    v = g + b r + k c m

``g`` is the gradient of the minibatch at the current weights, ``r`` its gradient at a reference
(other weights, or a row of a table), each the *sum* over the minibatch's ``c`` loss entries, and
``m`` a *mean* per loss entry. A method chooses ``b``, ``k``, the reference and ``m``, see `Terms`.
Each device has its own ``g``, ``r`` and ``c``.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Callable, NamedTuple, Sequence

import numpy as np
from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from .. import _mxnet
from .._mxnet import Arrays, Flags
from . import random_lock, sketch
from .arrays import copies, copy_all, put_back, zero
from .closure import Loss, Recorded, check_repeatable, record
from .multiples import Assignment
from .network import check_dependent
from .points import Point
from .random_lock import RandomLock
from .sums import LiveSum, new_sum


class Row(NamedTuple):
    """A reference that is a row of a table: an earlier gradient of the minibatch."""

    number: int  # among the minibatches
    grads: Arrays  # per parameter and device: sums over loss entries, of unscaled losses
    check_counts: Callable[[Sequence[int]], None]  # raises if they are not those of the row
    seed: int | None = None  # of its random numbers
    point: Point | None = None  # where to compute it again, if it must be checked


class Terms(NamedTuple):
    """What a method adds to the gradient g of a minibatch: ``v = g + b r + k c m``."""

    b: float = 0.0
    k: float | NDArray = 0.0  # an array only where no gradient is taken at a reference
    reference: Point | Row | None = None  # where r is taken; None if b is 0
    mean: Arrays | None = None  # m, per parameter and device; None if k is 0
    copy_to: Arrays | None = None  # where to copy g, for unscaled losses
    moved: Arrays | None = None  # with `copy_to`: memory for g + b r, for unscaled losses
    only: Sequence[bool] | None = None  # the parameters to which r at a point belongs; None: all
    then: Callable[[int], list[Assignment]] | None = None  # what to assign on a device after v

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
        recorded = record(closure, (), devices)
        recorded.backward(scale)
        reached = _mark_on_all_devices(parameters)
    finally:
        _mxnet.mark(weights, before, fresh=True)
    return Estimate(recorded.loss, recorded.entries, recorded.entries, reached)


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
            return _attempt(here, closure, terms, lock, scale, None)
        auxiliaries = [p for p in network.frozen if _mxnet.is_auxiliary(p)]
        states = [_mxnet.data(p) for p in auxiliaries + network.outside.auxiliaries]
        before = copies(states)
        spent = 0
        try:
            with lock.kept_on_error():
                while True:
                    sketches: list[np.ndarray] = []
                    found = _attempt(here, closure, terms, lock, scale, sketches)
                    spent += found.differentiated
                    difference = _difference(sketches, terms.b)
                    if not sketch.is_other(difference, network.live_grads):
                        is_known = not np.isnan(difference)  # an overflow proves nothing
                        return found._replace(differentiated=spent, compared=is_known)
                    lock.turn_on("gradient", difference)
                    copy_all(before, states)  # which the first attempt has changed
                    network.hide_marks()
        except BaseException:
            put_back(before, states)
            raise


def check_row(
    row: Row, point: Point, closure: Callable[[], Loss], lock: RandomLock, scale: float
) -> tuple[int, bool]:
    """Compute the gradient of a row again, and check that it is the same.

    Returns
    -------
    differentiated : int
        Loss entries.
    is_known : bool
        Whether the comparison was valid: an overflow proves nothing.

    Raises
    ------
    RuntimeError
        If it differs.
    """
    network = point.network
    with ExitStack() as stack:
        stack.enter_context(network.accumulating())
        if row.seed is not None:
            stack.callback(lock.move_on)  # what is drawn next is not the same each time
        network.hide_marks()
        v = new_sum(network, scale)

        def work() -> tuple[Recorded, Flags]:
            recorded = network.record(closure)
            row.check_counts(recorded.counts)
            v.put()
            return recorded, v.add(recorded, point)

        random_lock.start(row.seed)
        with network.outside.protected(gradients=False):
            recorded, touched = point.at(work)
        check_dependent(touched)
        again = sketch.sketch(v.arrays) / scale
        for row_of_devices in network.accumulated():
            for grad in row_of_devices:
                zero([grad])
    difference = sketch.difference(again, sketch.sketch(row.grads))
    if sketch.is_other(difference, network.live_grads):
        in_words = sketch.in_words(difference)
        raise RuntimeError(sketch.RESHUFFLED.format(index=row.number, difference=in_words))
    return recorded.entries, not np.isnan(difference)


def _attempt(
    here: Point,
    closure: Callable[[], Loss],
    terms: Terms,
    lock: RandomLock,
    scale: float,
    sketches: list[np.ndarray] | None,
) -> Estimate:
    """Compute the estimate once; if there is a list, append sketches of v as it grows."""
    network = here.network
    b, k, reference, m, copy_to, moved, only, then = terms
    make = new_sum if isinstance(reference, Point) else LiveSum
    v, seed = make(network, scale), lock.new_seed()

    def look() -> None:
        if sketches is not None:
            sketches.append(sketch.sketch(v.arrays))

    there: Recorded | None = None
    with ExitStack() as stack:
        if isinstance(reference, Point):

            def at_reference() -> tuple[Recorded, Flags]:
                recorded = network.record(closure)  # now c is known
                v.put(recorded.counts, k, m)  # v = k c m
                look()
                touched = v.add(recorded, reference, b)  # v += b r
                look()
                if only is not None:
                    v.clear([[kept] * len(network.devices) for kept in only])  # v = 0 for the rest
                    look()
                return recorded, touched

            random_lock.start(seed)
            with network.outside.protected(gradients=False):
                there, touched = reference.at(at_reference)
            check_dependent(touched)
            network.check_hidden()
        elif isinstance(reference, Row) and reference.seed is not None:
            seed = reference.seed
            stack.callback(lock.move_on)  # what is drawn next is not the same each time

        def at_weights() -> tuple[Recorded, Flags]:
            recorded = network.record(closure)
            if there is not None:
                check_repeatable(there.counts, recorded.counts)
                return recorded, v.end(recorded, here)  # v += g
            if isinstance(reference, Row):
                reference.check_counts(recorded.counts)
            return recorded, v.begin(recorded, here)  # v = g

        if there is None:
            here = here.writing
        random_lock.start(seed)
        recorded, touched = here.at(at_weights)
        reached = check_dependent(touched)
        look()
        if there is None:
            network.check_hidden()
            row = reference.grads if isinstance(reference, Row) else None
            if copy_to is None:
                v.complete(recorded.counts, k, m, b, row)  # v += b row + k c m
            else:  # the same, keeping g and g + b row
                assert m is not None and moved is not None
                v.complete_moving(recorded.counts, k, m, b, row, copy_to, moved, then)
    passes = 1 if there is None else 2
    return Estimate(
        recorded.loss,
        recorded.entries,
        passes * recorded.entries,
        reached,
        counts=recorded.counts,
        seed=seed,
    )


def _difference(sketches: Sequence[np.ndarray], b: float) -> float:
    """How much g and r differ, from sketches of v before and after each is added."""
    (before, with_r), (without_g, with_g) = sketches[:2], sketches[-2:]
    with np.errstate(invalid="ignore"):
        return sketch.difference((with_r - before) / b, with_g - without_g)
