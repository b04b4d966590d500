"""What the live gradients hold, from `correct_grads` to the update.

::

    nothing --hold--> held --reduce--> reduced --end--> nothing
                      held --hold--> held                where gradients accumulate
                      held or reduced --drop--> nothing  where no update comes

No other file writes this state. It ends as a whole, together with the method's next state: by one
call into C, which no interrupt can split.
"""

from __future__ import annotations

from collections import deque
from itertools import starmap
from typing import Any

from mxnet.ndarray import NDArray

from ..passes.estimate import Estimate, Terms
from ..passes.network import Network
from .interface import Changes, Method

NOTHING, HELD, REDUCED = "nothing", "held", "reduced"

NOT_REDUCED = (
    "update() needs allreduce_grads() before, even on one device: {method} takes its mean gradient "
    "there, before gradients are clipped."
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
        vars(self).update(_empty())

    # --- a minibatch ---------------------------------------------------------------------------

    def make_room(self) -> None:
        """Drop what the gradient of another minibatch will overwrite.

        Raises
        ------
        RuntimeError
            If it would overwrite only a part.
        """
        kinds = {p.grad_req for p in self._network.parameters} - {"null"}
        if "add" not in kinds:
            self.drop()
        elif len(kinds) > 1 and self._method.needs_reduced and self.stage != NOTHING:
            raise RuntimeError(
                "Some parameters have grad_req='add' and others 'write', so that only some "
                "gradients would be sums over this minibatch and the last ones. Give all the same "
                "grad_req, or update after each minibatch."
            )

    def hold(self, batch_index: int | None, terms: Terms, found: Estimate) -> None:
        """Hold the estimate, or the plain gradient, of another minibatch."""
        row = self._method.row(terms, found)
        if row is not None:
            assert batch_index is not None
            self.rows[batch_index] = row
        self.reached = [a or b for a, b in zip(found.reached, self.reached or found.reached)]
        self.entries += found.entries
        self._hides_marks = self._hides_marks or not terms.is_plain
        self.stage = HELD

    # --- the update ----------------------------------------------------------------------------

    def check_intact(self, name: str) -> None:
        """Raise if another backward has overwritten an estimate.

        Parameters
        ----------
        name : str
            The method of the trainer that was called, for the message.
        """
        overwritten = self._network.overwritten() if self._hides_marks else []
        if overwritten:
            raise RuntimeError(OVERWRITTEN.format(name=name, parameter=overwritten[0].name))

    def check_reduced(self) -> None:
        """Raise if the method needs the reduction, and there was none."""
        method = self._method
        is_moving = method.needs_reduced and (method.has_reference or method.needs_closure)
        if is_moving and self.stage == HELD:
            raise RuntimeError(NOT_REDUCED.format(method=type(method).__name__))

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
            self._network.show_marks(self._method.in_objective if ignore_stale_grad else ())

    @property
    def awaits_reduction(self) -> bool:
        """Whether the method needs the reduced gradients, and has not had them."""
        return self._method.needs_reduced and self.stage == HELD

    def reduce(self, scale: float, entries: float | NDArray) -> None:
        """Let the method compute its next state from V and C, see `Method.reduced`."""
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

    def drop_next_state(self) -> None:
        """Drop what an update that failed or was skipped has made useless."""
        if self._method.needs_reduced:
            self.drop()

    def _end(self, changes: Changes) -> None:
        deque(starmap(dict.update, [*changes, (vars(self), _empty())]), 0)


def _empty() -> dict[str, Any]:
    return {
        "stage": NOTHING,
        "entries": 0,
        "reached": [],
        "rows": {},
        "following": None,
        "_hides_marks": False,  # an estimate is held, so that marks show another backward
    }
