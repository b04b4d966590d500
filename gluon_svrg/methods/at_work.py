"""The method at work: where it computes, with which random numbers, and what it has counted."""

from __future__ import annotations

from contextlib import contextmanager
from math import inf
from typing import Any, Callable, Iterable, Iterator, Sequence

from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from .. import _mxnet
from ..passes import memory
from ..passes.batches import number_of
from ..passes.closure import Loss
from ..passes.estimate import Estimate, Row, Terms, check_row, estimate, plain
from ..passes.first_look import first_look
from ..passes.full_pass import Collective, FullGradient, full_gradient
from ..passes.network import Network
from ..passes.points import Point
from ..passes.random_lock import RandomLock
from ..passes.warnings import warn
from .counters import Counters
from .interface import Method
from .table import Table

OLD_SNAPSHOT = (
    "The snapshot is {passes} data passes old. Its full gradient helps less with each step. Call "
    "update_full_grads() every few epochs, or discard_snapshot() to go on with the plain optimizer."
)
RETURNS_OUTPUT = (
    "The closure returns losses of shapes {one} and {other}. Everything that it returns is "
    "differentiated: if one is the output of the network, return the loss alone, and keep the "
    "output by other means."
)
LOSS_IS_MEAN = (
    "The closure returns one loss entry, and batch_size is {batch_size}, by which its gradient is "
    "divided. If the loss is the mean over the minibatch, call step(1); otherwise return the loss "
    "of each sample."
)

IDLE_DEVICES = (
    "None of the first {count} minibatches had a loss on {devices}, so these compute nothing. "
    "Let the closure return one loss for each device, or initialize the network on fewer devices."
)
_LOOKED_AT = 10  # minibatches, before a device counts as idle


class MethodAtWork:
    """A method, the network whose gradients it corrects, and the checks of both.

    It computes estimates and full gradients, and binds to new arrays of the parameters.

    Parameters
    ----------
    method : Method
        Decides what to add to a minibatch's gradient.
    lock_random : bool or 'auto'
        Whether both passes of a step draw the same random numbers.
    parameters : sequence of Parameter
        The trainer's.

    Attributes
    ----------
    method, lock, counters : Method, RandomLock, Counters
        Parts of a file.
    network : Network
        The parameters, and their arrays.
    is_at_snapshot : bool
        Whether the user computes at the snapshot.
    """

    def __init__(self, method: Method, lock_random: Any, parameters: Sequence[Parameter]) -> None:
        self.method = method
        self.lock = RandomLock(lock_random)
        self.counters = Counters(compared=not method.needs_closure)
        # Bound to new arrays when the user replaces those of the parameters.
        self.network = Network(parameters)
        self._here: Any = None  # the point of the current weights
        self._is_copy = False  # of another one, with arrays that backward does not know
        self.is_at_snapshot = False
        self._warned: set[str] = set()
        self._counts: list[Sequence[int]] = []  # of the first minibatches, on several devices
        self._entries_of_data: float = inf  # of the last refresh, if the snapshot stays
        self._entries_since = 0  # that steps have differentiated since
        # Memory for stored gradients.
        otherwise = "" if method.needs_table else ", or leave store_grads out"
        self._budget = memory.Budget(otherwise)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy keeps: it binds to the arrays of its own parameters."""
        return {**vars(self), "_here": None, "_is_copy": True}

    # --- arrays --------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether all parameters are initialized."""
        return all(map(_mxnet.has_data, self.network.parameters))

    @property
    def is_bound(self) -> bool:
        """Whether it has been bound to arrays."""
        return self._here is not None

    def bind(self) -> str:
        """Bind to new arrays, as after a cast; return how they differ from the reference."""
        network = self.network
        if self._here is not None and network.is_bound():
            return ""
        if self._is_copy:
            self._attach_copies()
        difference = self.method.difference(network)
        if difference:
            return difference
        self._here = None  # until all is bound, whatever interrupts this
        network.bind(self.counters.adds, is_known=self.counters.probed)
        self.method.bind(network)
        self._here = Point.current(network)
        return ""

    def _attach_copies(self) -> None:
        """Let backward find the gradients of a copied network, which MXNet does not copy."""
        for p in filter(_mxnet.is_trainable, self.network.parameters):
            _mxnet.put_gradients_into([_mxnet.data(p)], [_mxnet.gradients(p)], p.grad_req)
        self._is_copy = False

    def bind_copy(self) -> None:
        """Bind a copy before it is looked at."""
        if self._is_copy and self.is_ready:
            self.bind()

    def check_unchanged(self) -> None:
        """Raise if parameters have changed since the snapshot; bind to new arrays."""
        difference = self.bind()
        if difference:
            raise RuntimeError(
                f"The parameters have changed since the snapshot: {difference}. Take a new one "
                "with update_full_grads(), or call discard_snapshot()."
            )

    def discard(self) -> None:
        """Forget the reference, and keep no arrays."""
        self.forget_reference()
        self.network.release()
        self._here = None
        self.counters.begin_anew()

    def forget_reference(self) -> None:
        """Forget the reference, as another comes from a file."""
        self.method.discard()
        self.network.combinations.clear()  # of its arrays
        self._entries_of_data = inf  # it is not known how old the next one is

    def _mark_points(self) -> None:
        """Let backward at the points write or add, as at the weights."""
        for weights in [self.network.aliases, *(p.weights for p in self.method.points())]:
            self.network.mark(weights)

    # --- a minibatch ---------------------------------------------------------------------------

    def estimate(self, closure: Callable[[], Loss], terms: Terms, scale: float) -> Estimate:
        """Leave the estimate of a minibatch in the live gradients, and count its entries.

        The first estimate after a refresh is checked.

        Parameters
        ----------
        closure : callable
            Returns the loss of the minibatch.
        terms : Terms
            What the method adds to the gradient.
        scale : float
            The factor of the losses (mixed precision).
        """
        if self._is_copy:
            self._attach_copies()
        if terms.is_plain:
            found = plain(self.network.parameters, closure, scale)
        elif isinstance(terms.reference, Row):
            found = self._estimate_with_row(closure, terms, scale, terms.reference)
        else:
            found = self._estimate(closure, terms, scale)
        self.counters.grad_evaluations += found.differentiated
        return found

    def count_step(self) -> None:
        """Count a step since the last refresh."""
        if self.method.has_reference:
            self.counters.inner_steps += 1

    def change_lock(self, mode: Any) -> None:
        """Replace the random lock; the next step is checked again."""
        self.lock = RandomLock(mode)
        self.counters.compared = False

    def look_at(self, found: Estimate, *, has_schedule: bool) -> None:
        """Warn of what trains, but probably not as it was meant to. Call it when all is done."""
        self._entries_since += found.entries
        if len(found.counts) > 1 and len(self._counts) < _LOOKED_AT:
            self._look_at_devices(found.counts)
        if self._entries_since > 10 * self._entries_of_data and not has_schedule:
            passes = int(self._entries_since // self._entries_of_data)
            self._entries_of_data = inf
            self._warn_once(OLD_SNAPSHOT.format(passes=passes), "old")
        if isinstance(found.loss, (list, tuple)):
            shapes = {(_mxnet.device_of(item), item.shape) for item in found.loss}
            for device, shape in shapes:
                if len(shape) > 1 and shape[1] > 1 and (device, shape[:1]) in shapes:
                    self._warn_once(RETURNS_OUTPUT.format(one=shape[:1], other=shape), "output")

    def _look_at_devices(self, counts: Sequence[int]) -> None:
        self._counts.append(counts)
        if len(self._counts) == _LOOKED_AT:
            loaded = map(any, zip(*self._counts))
            idle = [str(d) for d, has_any in zip(self.network.devices, loaded) if not has_any]
            if idle:
                text = IDLE_DEVICES.format(count=_LOOKED_AT, devices=", ".join(idle))
                self._warn_once(text, "idle")

    def check_batch_size(self, batch_size: float, workers: int) -> None:
        """Warn if a loss of one entry, probably a mean already, is divided once more."""
        if batch_size > workers:
            self._warn_once(LOSS_IS_MEAN.format(batch_size=batch_size), "mean")

    def _warn_once(self, text: str, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warn(text)

    def _estimate(self, closure: Callable[[], Loss], terms: Terms, scale: float) -> Estimate:
        """Compute the estimate; at the first step after a refresh, compare two gradients."""
        counters, reference = self.counters, terms.reference
        wanted = self.lock.mode == "auto" and not counters.compared
        compare = wanted and isinstance(reference, Point) and reference.is_current()
        began = isinstance(reference, Point) and not compare and self.method.needs_closure
        repeated = self._first_look(closure, scale, compare=wanted and began)
        found = estimate(self._here, closure, terms, self.lock, scale, compare=compare)
        counters.compared = found.compared if compare else True
        return found._replace(differentiated=found.differentiated + repeated)

    def _estimate_with_row(
        self, closure: Callable[[], Loss], terms: Terms, scale: float, row: Row
    ) -> Estimate:
        """Compute the estimate; at the first step after a refresh, compute the row again."""
        is_known = self.network.is_known_to_add
        repeated = 0 if is_known else self._first_look(closure, scale, compare=False)
        if row.point is not None and self.lock.mode is not False:
            again, is_valid = check_row(row, row.point, closure, self.lock, scale)
            repeated += 0 if row.is_checked_again or row.is_old else again
            if is_valid:
                self.method.confirm(row.number)
        found = estimate(self._here, closure, terms, self.lock, scale)
        if not repeated:
            return found
        return found._replace(differentiated=found.differentiated + repeated)

    def _first_look(self, closure: Callable[[], Loss], scale: float, *, compare: bool) -> int:
        """Make the checks of a refresh if there was none, and count their loss entries.

        A refresh by version 0.1.0 does not count: it did not make these checks.
        """
        network, counters = self.network, self.counters
        compare = compare and not self.lock.locked
        if network.is_known_to_add and not compare:
            return 0
        try:
            return first_look(network, closure, self.lock, scale, compare=compare)
        finally:
            counters.adds, counters.probed = network.adds, network.is_known_to_add
            self._mark_points()

    # --- a refresh -----------------------------------------------------------------------------

    @contextmanager
    def refreshing(self) -> Iterator[None]:
        """Bind to the current arrays, and put the live gradients back at the end of a block."""
        if self.bind():  # no memory of the old snapshot can be reused
            self.method.discard()
            self.bind()
        try:
            with self.network.grads_kept():
                yield
        finally:
            self._mark_points()

    def full_gradient(
        self,
        closure: Callable[..., Loss],
        batches: Iterable[Any],
        scale: float,
        workers: Collective,
        table: Table | None,
    ) -> FullGradient:
        """Compute the mean gradient at the current weights, inside `refreshing`.

        The parameters are those of `passes.full_pass.full_gradient`.
        """
        full = full_gradient(self.network, closure, batches, self.lock, scale, workers, table)
        return self.method.prepared(full, table)

    def with_memory(
        self, batches: Iterator[Any], data: Iterable[Any], show: Callable[[str], None]
    ) -> Iterator[Any]:
        """Iterate over minibatches while there is memory to store their gradients."""
        each, count = self._bytes_of_a_row(), number_of(data)
        total = memory.in_words(sum(each.values()) * (count or 1))
        show(f"storing {total}" + ("" if count else " each"))
        return self._budget.batches(batches, count, each, len(self.method.table or ()))

    def _bytes_of_a_row(self) -> dict[Any, int]:
        """The bytes that the gradients of one minibatch take, per device."""
        trainable = filter(_mxnet.is_trainable, self.network.parameters)
        return memory.bytes_of_sums([_mxnet.gradients(p) for p in trainable])

    def take_over(self, full: FullGradient, table: Table | None) -> None:
        """Make a full gradient, and the weights where it was taken, the reference."""
        self.method.refresh(self.network, full, table)
        if self.method.coefficient is not None:
            self.method.coefficient.advance()
        if table is not None:
            self._budget.took(self._bytes_of_a_row(), len(table))
        counters = self.counters
        counters.num_snapshots += 1
        counters.begin_anew()
        counters.grad_evaluations += full.differentiated
        stays = self.method.needs_refresh and not self.method.needs_reduced
        self._entries_of_data = full.differentiated if stays else inf
        self._entries_since = 0
        counters.compared = False
        counters.adds, counters.probed = self.network.adds, True

    # --- what can be looked at -----------------------------------------------------------------

    @property
    def point(self) -> Point | None:
        """The point of the snapshot."""
        return next(self.method.points(), None)

    @contextmanager
    def at_point(self, point: Point) -> Iterator[None]:
        """Let the network compute at a point, inside the user's block."""
        if self.is_at_snapshot:
            raise RuntimeError("at_snapshot() is in force already. Leave one of the blocks out.")
        self.is_at_snapshot = True
        try:
            with point.entered():
                try:
                    yield
                finally:
                    touched = map(any, point.take_touched())
                    self.network.note_overwritten(list(touched))
        finally:
            self.is_at_snapshot = False

    def snapshot(self) -> dict[Parameter, list[NDArray]] | None:
        """Copies of the snapshot's values, per parameter and device."""
        self.bind_copy()
        point = self.point
        if point is None:
            return None
        parameters = self.network.trainable + self.network.frozen
        values = zip(parameters, point.weights + (point.frozen or []))
        return {parameter: [_mxnet.unguarded(v.copy()) for v in row] for parameter, row in values}

    def full_grads(self) -> dict[Parameter, list[NDArray]] | None:
        """Copies of the mean gradient, per parameter and device."""
        self.bind_copy()
        rows = zip(self.network.trainable, self.method.full_grads)
        return {
            parameter: [_mxnet.like(grad, _mxnet.data(parameter)[0]) for grad in grads]
            for parameter, grads in rows
        } or None

    # --- a part of a file ----------------------------------------------------------------------

    def state(self) -> Any:
        """The state of the method."""
        self.bind_copy()
        return self.method.fields.encode(self.method.values(), self.network)

    def problems(self, state: Any) -> Iterator[str]:
        """Tell why a state cannot be assigned."""
        return self.method.fields.problems(state, self.network)

    def assign(self, state: Any) -> None:
        """Take over a state."""
        self.method.discard()
        if state is not None:
            self.method.take(self.method.fields.decode(state, self.network), self.network)
