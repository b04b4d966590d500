"""What the live gradients hold, from `correct_grads` to the update.

::

    nothing --hold--> held --reduce--> reduced --end--> nothing
                      held --hold--> held                where gradients accumulate
                      held or reduced --drop--> nothing  where no update comes

No other file writes this state. It ends as a whole, together with the method's next state: by one
call into C, which no interrupt can split.

A method whose state moves with V takes what was computed, and the optimizer what the user has made
of it. So V is kept apart where both may differ: where the user can change the live gradients before
they are reduced, and where gradients accumulate, perhaps with others.
"""

from __future__ import annotations

from collections import deque
from itertools import starmap
from operator import is_
from typing import Any, Callable

import numpy as np
from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from .. import _mxnet
from .._mxnet import Arrays
from ..passes import sketch
from ..passes.arrays import (
    Buffers,
    buffers_like,
    copy_to_devices,
    dense,
    per_device,
    sum_over_devices,
)
from ..passes.entries import all_zero
from ..passes.estimate import Estimate, Terms
from ..passes.multiples import combine
from ..passes.network import Network
from .interface import Changes, Method

NOTHING, HELD, REDUCED = "nothing", "held", "reduced"

NOT_REDUCED = (
    "update() needs allreduce_grads() before, even on one device: {method} takes its mean gradient "
    "there, before gradients are clipped."
)
CHANGED = (
    "{name}() finds other gradients than correct_grads() has left, and {method} computes the "
    "gradient of the optimizer when gradients are reduced, so that the change would be lost. Clip "
    "or change gradients after the reduction: correct_grads(), allreduce_grads(), clip, update(). "
    "With grad_req='add', they must be zero before the first minibatch of an update."
)
NEW_ARRAYS = (
    "{name}() was to use what correct_grads() left, but the parameters have new gradients since, "
    "as after a cast or a change of grad_req. Set them to zero, and call correct_grads() again."
)
OVERWRITTEN = (
    "{name}() was to use what correct_grads() left in the gradient of {parameter}, but a backward "
    "has overwritten it: that of another trainer on the same loss, or your own. Give all "
    "parameters to one trainer (with lr_mult if their learning rates differ), call correct_grads() "
    "after your own backward, or set grad_req='add' to add a further gradient."
)


class LiveGradients:
    """The minibatches whose estimates are in the live gradients.

    Parameters
    ----------
    method : Method
        What has corrected them.
    network : Network
        Whose gradients they are.

    Attributes
    ----------
    stage : {'nothing', 'held', 'reduced'}
        Whether there is an estimate or a plain gradient, and whether it is summed over devices and
        workers.
    entries : int
        C: the loss entries of these minibatches, on this worker.
    reached : list of bool
        Per trainable parameter: whether the loss of any of these minibatches depends on it.
    rows : dict of int
        What the method keeps of each minibatch, by its index.
    following : object
        The method's state after the update; None before the reduction.
    total : list of list of NDArray
        V as it was computed, per trainable parameter and device.
    total_scale : float or None
        Its scale; None if it is that of the live gradients, which are the total.
    """

    def __init__(self, method: Method, network: Network) -> None:
        self._method, self._network = method, network
        # Since the last update, see `_empty`.
        self.stage: str
        self.entries: int
        self.reached: list[bool]
        self.rows: dict[int, Any]
        self.following: Any
        self._hides_marks: bool
        self._is_apart: bool
        self._arrays: list[Any]
        self._largest: list[list[float]]
        vars(self).update(_empty())
        # Kept from update to update.
        self._apart = Buffers()  # memory for V
        self._kinds: list[Any] = []  # shape, dtype and device of each array of it

    # --- a minibatch ---------------------------------------------------------------------------

    def make_room(self, *, is_half: bool) -> Arrays | None:
        """Drop what the gradient of another minibatch will overwrite, or the user has set to zero.

        Where gradients accumulate and the method's state moves, this waits for the device.

        Parameters
        ----------
        is_half : bool
            Whether the user can change the gradients before the update.

        Returns
        -------
        list of list of NDArray or None
            If V must be kept apart: copies of the gradients to which the next one will be added,
            none where it is written. For `hold`.

        Raises
        ------
        RuntimeError
            If it would overwrite only a part.
        """
        if self.stage == NOTHING and not self._is_moving:
            return None
        kinds = {p.grad_req for p in self._network.parameters} - {"null"}
        accumulates = "add" in kinds
        if not accumulates:
            self.drop()
        if not self._is_moving:
            return None
        if accumulates and self.stage != NOTHING:
            if len(kinds) > 1:
                raise RuntimeError(
                    "Some parameters have grad_req='add' and others 'write', so that only some "
                    "gradients would be sums over this minibatch and the last ones. Give all the "
                    "same grad_req, or update after each minibatch."
                )
            grads = (grad for _, row in self._gradients() for grad in row)
            if all_zero(grads) and not all_zero(grad for row in self._apart for grad in row):
                self.drop()
            elif not self._has_its_arrays():
                raise RuntimeError(NEW_ARRAYS.format(name="correct_grads"))
        if accumulates:
            rows = self._gradients()
            return [[g.copy() for g in row] if p.grad_req == "add" else [] for p, row in rows]
        return [] if is_half else None

    @property
    def _is_moving(self) -> bool:
        """Whether the method's state moves with the next step."""
        method = self._method
        return method.needs_reduced and (method.has_reference or method.needs_closure)

    def _gradients(self) -> list[tuple[Parameter, list[NDArray]]]:
        """The trainable parameters and their gradients, none where they are not initialized."""
        trainable = filter(_mxnet.is_trainable, self._network.parameters)
        return [(p, _mxnet.gradients(p) or []) for p in trainable]

    def hold(
        self,
        batch_index: int | None,
        terms: Terms,
        found: Estimate,
        before: Arrays | None,
        scale: float,
    ) -> None:
        """Hold the estimate, or the plain gradient, of another minibatch.

        Parameters
        ----------
        batch_index : int or None
            The position of the minibatch in the data.
        terms : Terms
            What was added to its gradient.
        found : Estimate
            The other results.
        before : list of list of NDArray or None
            What `make_room` has returned.
        scale : float
            The factor of the losses (mixed precision).
        """
        row, reached = self._method.row(terms, found), found.reached
        if self.reached:
            reached = [a or b for a, b in zip(reached, self.reached)]
        held: dict[str, Any] = {
            "entries": self.entries + found.entries,
            "reached": reached,
            "rows": self.rows if row is None else {**self.rows, batch_index: row},
            "_hides_marks": self._hides_marks or not terms.is_plain,
            "_arrays": list(map(_mxnet.gradients, self._network.parameters)),
            "stage": HELD,
        }
        if before is not None:
            held.update(self._kept_apart(before, scale), _is_apart=True)
        vars(self).update(held)

    def _kept_apart(self, before: Arrays, scale: float) -> dict[str, Any]:
        """Add what was just computed to V: the gradients, less those that were there before."""
        grads = [row for _, row in self._gradients()]
        kinds = [[(g.shape, g.dtype, _mxnet.device_of(g)) for g in row] for row in grads]
        apart = self._apart if kinds == self._kinds else buffers_like(grads)
        known = [number for number, row in enumerate(before) if row]
        subtrahends = per_device([before[number] for number in known])
        for device, (kept, computed) in enumerate(zip(per_device(apart), per_device(grads))):
            if self._is_apart:
                combine([1.0, 1 / scale], [kept, computed], kept)
            else:
                combine([1 / scale], [computed], kept)
            if known:
                rest = [kept[number] for number in known]
                combine([1.0, -1 / scale], [rest, subtrahends[device]], rest)
        largest = self._largest
        if self._method.replaces_grads and known:  # whose rounding V has
            norms = [[norm(grad) / scale for grad in row] or [0.0] * len(grads[n])
                     for n, row in enumerate(before)]  # fmt: skip
            largest = [list(map(max, a, b)) for a, b in zip(norms, largest or norms)]
        return {"_apart": apart, "_kinds": kinds, "_largest": largest}

    def check_unchanged(self, name: str, scale: float) -> None:
        """Raise if the user has changed gradients that the method will replace.

        Parameters
        ----------
        name : str
            The method of the trainer that was called, for the message.
        scale : float
            The scale of the live gradients.
        """
        if not (self._method.replaces_grads and self._is_apart and self.stage == HELD):
            return
        for n, ((_, row), apart) in enumerate(zip(self._gradients(), self._apart)):
            for device, (grad, kept) in enumerate(zip(row, apart)):
                now, then = (dense(a).asnumpy().astype("float64") for a in (grad, kept))
                size = max(norm(kept), self._largest[n][device] if self._largest else 0.0)
                difference = float(np.linalg.norm(now / scale - then))
                if difference > sketch.TOLERANCE[_mxnet.dtype_name(grad)] * size:
                    method = type(self._method).__name__
                    raise RuntimeError(CHANGED.format(name=name, method=method))

    @property
    def total(self) -> Arrays:
        """V as it was computed."""
        return self._apart if self._is_apart else self._network.live_grads

    @property
    def total_scale(self) -> float | None:
        """The scale of the total; None if it is that of the live gradients."""
        return 1.0 if self._is_apart else None

    # --- the update ----------------------------------------------------------------------------

    def check_intact(self, name: str) -> None:
        """Raise if there are other gradients, or another backward has overwritten an estimate.

        Parameters
        ----------
        name : str
            The method of the trainer that was called, for the message.
        """
        if self.stage != NOTHING and not self._has_its_arrays():
            raise RuntimeError(NEW_ARRAYS.format(name=name))
        overwritten = self._network.overwritten() if self._hides_marks else []
        if overwritten:
            raise RuntimeError(OVERWRITTEN.format(name=name, parameter=overwritten[0].name))

    def _has_its_arrays(self) -> bool:
        """Whether the parameters have the gradients that were held."""
        now = [_mxnet.gradients(p) for p in self._network.parameters]
        return all(map(is_, now, self._arrays))

    def check_reduced(self) -> None:
        """Raise if the method needs the reduction, and there was none."""
        if self._is_moving and self.stage == HELD:
            raise RuntimeError(NOT_REDUCED.format(method=type(self._method).__name__))

    def show_marks(self, ignore_stale_grad: bool) -> None:
        """Mark the gradients as `gluon.Trainer` expects.

        Parameters
        ----------
        ignore_stale_grad : bool
            Whether parameters that no minibatch reached are updated if the mean gradient moves
            them.
        """
        if self._hides_marks:
            self._network.show_marks(self.reached)
            if ignore_stale_grad:
                self._network.show_marks(self._method.in_objective)

    @property
    def awaits_reduction(self) -> bool:
        """Whether the method needs the reduced gradients, and has not had them."""
        return self._method.needs_reduced and self.stage == HELD

    def reduce(
        self,
        scale: float,
        entries: float | NDArray,
        sum_arrays: Callable[[dict[int, NDArray]], None],
    ) -> None:
        """Let the method compute its next state from V and C, see `Method.reduced`.

        Parameters
        ----------
        scale : float
            The scale of the live gradients.
        entries : float or NDArray
            C.
        sum_arrays : callable
            Sums arrays over the workers, by the numbers of their parameters.
        """
        if self._is_apart:
            sum_over_devices(self._apart)
            numbers = map(self._network.parameters.index, self._network.trainable)
            sum_arrays({n: first for n, (first, *_) in zip(numbers, self._apart)})
            copy_to_devices(self._apart)
        self.following = self._method.reduced(self._network, self, scale, entries)
        self.stage = REDUCED

    def prepare_update(self) -> None:
        """Complete the next state with the weights that are about to move."""
        if self.following is not None:
            self._method.before_update(self._network, self.following)

    def end(self) -> None:
        """Put the method's next state in place: the weights have moved."""
        self._end(self._method.changes(self))

    def drop(self) -> None:
        """Forget all, and the method's next state: no update has come."""
        if self.stage != NOTHING:
            self._end(self._method.dropped(self))

    def release(self) -> None:
        """Forget all, and keep no memory."""
        self.drop()
        self._apart, self._kinds = Buffers(), []

    def drop_next_state(self) -> None:
        """Drop what an update that failed or was skipped has made useless."""
        if self._method.needs_reduced:
            self.drop()

    def _end(self, changes: Changes) -> None:
        deque(starmap(dict.update, [*changes, (vars(self), _empty())]), 0)


def norm(array: NDArray) -> float:
    """The norm of an array. Waits for the device."""
    return float(np.linalg.norm(dense(array).asnumpy().astype("float64")))


def _empty() -> dict[str, Any]:
    return {
        "stage": NOTHING,
        "entries": 0,
        "reached": [],
        "rows": {},
        "following": None,
        "_hides_marks": False,  # an estimate is held, so that marks show another backward
        "_is_apart": False,  # V is kept apart
        "_arrays": [],  # where it is: the lists of the parameters' gradients
        "_largest": [],  # the norms of what V was added to, which tell its rounding
    }
