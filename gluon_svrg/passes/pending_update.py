"""What the live gradients hold, from `correct_grads` to the update.

::

    nothing --stage_estimate--> held --reduce--> reduced
    held or reduced --stage_estimate--> held    where gradients accumulate
    held or reduced --drop--> nothing           where no update comes
    any --commit--> moved, then nothing         after the update; again after an interrupt

It ends as a whole, together with the method's next state.

A method whose state moves with V takes what was computed, and the optimizer what the user has made
of it. So V is kept apart where the user can change the live gradients before they are reduced, and
where gradients accumulate.
"""

from __future__ import annotations

from itertools import chain, compress, repeat
from operator import and_, is_, or_
from typing import Any, Callable

from mxnet.ndarray import NDArray

from .. import _mxnet
from .columns import Columns, Mean, dense, norm, zeros_like
from .combine import assign
from .estimate import PLAIN_GRADIENT, Estimate, EstimateCoefficients
from .method import Method
from .network import ParameterBuffers
from .rows import StoredGradient

NOTHING, HELD, REDUCED, MOVED = "nothing", "held", "reduced", "moved"

CHANGED = (
    "{name}() finds other gradients than correct_grads() has left, and {method} computes the "
    "optimizer's when it reduces them. Clip or change them after that: correct_grads(), "
    "allreduce_grads(), clip, update(). With grad_req='add', set them to zero after each update."
)
NEW_ARRAYS = (
    "{name}() was to use what correct_grads() left, but the parameters have new gradients since, "
    "as after a cast or a change of grad_req. Set them to zero, and call correct_grads() again."
)
OVERWRITTEN = (
    "{name}() was to use what correct_grads() left in the gradient of {parameter}, but a backward "
    "has overwritten it: another trainer's, or your own. Give all parameters to one trainer (with "
    "lr_mult), call correct_grads() after your own backward, or set grad_req='add' to add another."
)
SOME_ADD = (
    "Some parameters have grad_req='add' and others 'write', so that only some gradients would add "
    "up. Give all the same grad_req, or update after each mini-batch."
)
#: How far gradients may differ from what was computed, relative to the largest norm so far.
ROUNDING_OF_GRADIENTS = {"float16": 1e-2, "float32": 1e-4, "float64": 1e-6}


class PendingUpdate:
    """The mini-batches whose estimates are in the live gradients of a network."""

    def __init__(self, method: Method, network: ParameterBuffers) -> None:
        self._method, self._network = method, network
        self._apart: Columns = []  # memory for V
        self._apart_for: Columns = []  # the gradients for which that was made
        self.drop()

    def commit(self) -> None:
        """The weights have moved: let the method's next state take effect, and drop all.

        If an interrupt ends it, it is called again: all that it calls can be repeated.
        """
        self.stage = MOVED
        if self.next_state is not None:
            self._method.moved(self)
        self.drop()

    def drop(self) -> None:
        """Forget all, and the method's next state: the update is over, or does not come."""
        self.entries = 0  # C: the loss entries of these mini-batches, on this worker
        self.reached: list[bool] = []  # per parameter: whether any of their losses depends on it
        self.rows: dict[int, StoredGradient] = {}  # what the method keeps of each, by its index
        self._largest = 0.0  # the norm of the largest sum so far, which was rounded
        self.next_state: Any = None  # the method's state after the update, once it is reduced
        self.total_scale = 1.0  # of `total`
        self.is_scaled = False  # whether AMP's scale is not 1: a step left out is its own
        self._terms = PLAIN_GRADIENT  # of the last mini-batch
        self._is_apart = False  # V is kept apart
        self._grads: list[Any] = []  # where it is: the lists of the parameters' gradients
        self.stage = NOTHING

    def discard_stale(self) -> None:
        """Drop what a backward will overwrite; with 'add', what the user has zeroed; or raise."""
        if self.stage == NOTHING:
            return
        kinds = {p.grad_req for p in self._network.parameters} - {"null"}
        if "add" not in kinds:
            self.drop()
        elif self._is_moving:
            if len(kinds) > 1:
                raise RuntimeError(SOME_ADD)
            size = norm(chain(*self._network.grads))
            self._largest = max(self._largest, size)
            if not size and norm(chain(*self._apart)):
                self.drop()
            elif not self._has_its_arrays():
                raise RuntimeError(NEW_ARRAYS.format(name="correct_grads"))

    @property
    def _is_moving(self) -> bool:
        """Whether the method's state moves with the next step."""
        return self._method.updates_every_step and (
            self._method.has_reference or self._method.needs_closure
        )

    def stage_estimate(
        self,
        estimated: Estimate,
        terms: EstimateCoefficients,
        row: StoredGradient | None,
        scale: float,
        *,
        is_half: bool,
    ) -> None:
        """Hold an estimate in the live gradients; in half a step, the user may change it."""
        if (is_half or self._network.accumulating) and self._is_moving:
            if self._apart_for is not self._network.grads:  # the last memory was for other arrays
                self._apart_for = self._network.grads
                self._apart = zeros_like(self._apart_for)
            for kept, grads in zip(self._apart, self._apart_for):
                before = ((1.0, 0),) if self._is_apart else ()
                assign([kept, grads], (0, (*before, (1 / scale, 1))))
            self._is_apart = True
        rows = self.rows if row is None else {**self.rows, row.position: row}
        reached = list(map(or_, self.reached or estimated.reached, estimated.reached))
        arrays = list(map(_mxnet.gradients, self._network.parameters))
        new = rows, terms, self.entries + estimated.recorded.entries, reached, arrays, HELD
        self.is_scaled = scale != 1
        # In one line, as an interrupt comes between lines.
        self.rows, self._terms, self.entries, self.reached, self._grads, self.stage = new

    def check_intact(self, name: str) -> None:
        """Raise if there are other gradients, or another backward has overwritten an estimate."""
        if self.stage == NOTHING:
            return
        if not self._has_its_arrays():
            raise RuntimeError(NEW_ARRAYS.format(name=name))
        for parameter in self._network.overwritten():
            raise RuntimeError(OVERWRITTEN.format(name=name, parameter=_mxnet.name_of(parameter)))

    def _has_its_arrays(self) -> bool:
        """Whether the parameters have the gradients that were held."""
        now = map(_mxnet.gradients, self._network.parameters)
        return all(map(is_, now, self._grads))

    def check_unchanged(self, name: str, scale: float) -> None:
        """Raise if the user has changed gradients that the method will replace."""
        if not (self._is_apart and self.stage == HELD):
            return
        for then, now in zip(chain(*self._apart), chain(*self._network.grads)):
            distance = norm([dense(now).astype("float64") / scale - then.astype("float64")])
            size = max(norm([then]), self._largest / scale)
            if distance > ROUNDING_OF_GRADIENTS[_mxnet.dtype_of(now)] * size:
                raise RuntimeError(CHANGED.format(name=name, method=self._method.name))

    def show_marks(self, ignore_stale_grad: bool, workers: Any) -> None:
        """Set MXNet's marks of fresh gradients of all parameters that the update moves.

        Workers that are given set the same marks. With `ignore_stale_grad`, a parameter that
        backward has not reached moves where the estimate has a part of the mean gradient.
        """
        weights, terms = self._network.weights, self._terms
        if self.stage == NOTHING:  # the user's own backward has set the marks on this worker
            if workers is None:
                return
            # The parameters may have other arrays than those that are known.
            weights = [_mxnet.data(p) for p in self._network.parameters if _mxnet.is_trainable(p)]
            self.reached = list(map(any, _mxnet.fresh(weights)))
        if workers is not None:
            counts = workers.sum_numbers([*map(float, self.reached)])
            self.reached = [count > 0 for count in counts]
        shown = self.reached
        if ignore_stale_grad and terms is not PLAIN_GRADIENT and self._method.mean is not None:
            leans = map(and_, self._method.ever_reached, terms.select or repeat(True))
            shown = list(map(or_, shown, leans))
        _mxnet.mark(compress(weights, shown), repeat([True] * len(weights[0])))

    @property
    def total(self) -> Columns:
        """V as it was computed, or the sum of g."""
        return self._apart if self._is_apart else self._network.grads

    @property
    def awaits_reduction(self) -> bool:
        """Whether the method needs the reduced gradients, and has not had them."""
        return self.stage == HELD and self._is_moving

    def reduce(
        self, scale: float, entries: float | NDArray, sum_arrays: Callable[[Any], None]
    ) -> None:
        """Let the method compute its next state from V and C; without losses it stays."""
        self.stage = REDUCED
        if not self.entries and not Mean([], entries).divisor():
            return
        if self._is_apart:
            self._network.sum_everywhere(self._apart, sum_arrays)
        if isinstance(entries, NDArray):
            entries = entries.astype("float64")
        self.total_scale = 1.0 if self._is_apart else scale
        try:
            self.next_state = self._method.next_state(self, scale, entries)
        except BaseException:
            self.drop()  # or `update` would take these gradients
            raise
