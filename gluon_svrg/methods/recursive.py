"""What methods share that compare a minibatch with the step before.

The reference is the weights before the last step, and m comes from the last estimate. Both are
there twice: a step writes to the second ones, which become the first when the optimizer has moved
the weights. So a step that is skipped, or that raises, moves nothing.
"""

from __future__ import annotations

from typing import Any, Iterator, Sequence

import mxnet as mx
from mxnet.ndarray import NDArray

from .. import _mxnet
from .._mxnet import Arrays
from ..passes.arrays import combine, copy_all, dense, per_device, zeros_to_sum
from ..passes.estimate import Estimate, Terms
from ..passes.network import Network
from ..passes.points import Point, descriptions, what_changed
from ..saving.values import ByParameter
from . import checks
from .interface import Method
from .svrg import assign_array
from .table import Table


class Kept:
    """What a step leaves for the next one.

    Frozen values are not kept: both passes of a step compute with those of the moment.

    Parameters
    ----------
    network : Network
        The network.
    keeps_weights, keeps_mean : bool
        What there is.

    Attributes
    ----------
    reference : Point or None
        The weights before the step.
    mean : list of list of NDArray
        m, per trainable parameter and device; the same on all devices.
    in_objective : list of bool
        Per trainable parameter: whether any loss so far depends on it.
    """

    def __init__(self, network: Network, keeps_weights: bool, keeps_mean: bool) -> None:
        self.network = network
        self.reference: Point | None = None
        if keeps_weights:
            copied = [list(map(_mxnet.guard, _mxnet.all_rows(p))) for p in network.trainable]
            self.reference = Point(network, copied)
        self.mean: Arrays = []
        if keeps_mean:
            self.mean = [[zeros_to_sum(grad) for grad in row] for row in network.live_grads]
        self.in_objective = [False] * len(network.trainable)
        self.were = descriptions(network)


class Recursive(Method):
    """A method whose reference is the step before.

    Attributes
    ----------
    keeps_weights, keeps_mean : bool
        Whether it needs the reference, and m.
    """

    needs_reduced = True
    keeps_weights = True
    keeps_mean = True

    def __init__(self) -> None:
        # What is in force, and what the next step writes to.
        self._pair: tuple[Kept | None, Kept | None] = None, None
        # Of the moment.
        self._is_moving = False  # the second one is to become the first
        self._just_reached: list[bool] = []

    @property
    def kept(self) -> Kept | None:
        """What is in force; None before the first step."""
        return self._pair[0]

    @property
    def has_reference(self) -> bool:
        """Whether there was a step, or a refresh, to compare the next minibatch with."""
        return self.kept is not None

    @property
    def in_objective(self) -> Sequence[bool]:
        """Per trainable parameter: whether m moves it."""
        return self.kept.in_objective if self.kept is not None and self.keeps_mean else ()

    @property
    def full_grads(self) -> Arrays:
        """The estimate of the mean gradient, per trainable parameter and device."""
        return [] if self.kept is None else self.kept.mean

    def points(self) -> Iterator[Point]:
        """The reference, and the point that is the next one."""
        for kept in self._pair if self.has_reference else ():
            if kept is not None and kept.reference is not None:
                yield kept.reference

    def difference(self, network: Network) -> str:
        """What about the parameters is not as it was, in words; empty if nothing."""
        return "" if self.kept is None else what_changed(self.kept.were, network)

    def discard(self) -> None:
        """Start anew at the next step."""
        self._pair, self._is_moving, self._just_reached = (None, None), False, []

    def refresh(
        self,
        network: Network,
        mean: Arrays,
        in_objective: list[bool],
        entries: int,
        table: Table | None,
    ) -> None:
        """Start anew here: m is the full gradient."""
        kept = self._pair[0] or Kept(network, self.keeps_weights, self.keeps_mean)
        if kept.reference is not None:
            kept.reference.move()
        if self.keeps_mean:
            copy_all(self.treated(network, mean), self.treated(network, kept.mean))
        kept.in_objective = list(in_objective)
        self._pair, self._is_moving = (kept, self._pair[1]), False

    def treated(self, network: Network, rows: Sequence[Any]) -> list[Any]:
        """Of rows by trainable parameter, those that the method treats: all."""
        return list(rows)

    # --- what moves with a step ----------------------------------------------------------------

    def estimated(self, batch_index: int | None, terms: Terms, found: Estimate) -> None:
        """Note which parameters the loss of a minibatch depends on."""
        before = self._just_reached or found.reached
        self._just_reached = [a or b for a, b in zip(before, found.reached)]

    def reduced(self, network: Network, scale: float, entries: float | NDArray) -> None:
        """Take m for the next step: ``m = V / C``."""
        following = self._following(network)
        if isinstance(entries, NDArray):  # nobody knows what other workers' losses depend on
            following.in_objective = [True] * len(network.trainable)
        else:
            before = self.kept.in_objective if self.kept is not None else self._just_reached
            following.in_objective = [a or b for a, b in zip(before, self._just_reached)]
        if self.keeps_mean:
            self.take_mean(network, scale, entries, following.mean)
        self._is_moving = True

    def take_mean(
        self, network: Network, scale: float, entries: float | NDArray, target: Arrays
    ) -> None:
        """Let m of the next step be ``V / C``."""
        divide(network.live_grads, scale, entries, target)

    def _following(self, network: Network) -> Kept:
        """What the next step will find."""
        now, following = self._pair
        if following is None:
            following = Kept(network, self.keeps_weights, self.keeps_mean)
            self._pair = now, following
        return following

    def before_update(self, network: Network) -> None:
        """Let the weights, that are about to move, be the next reference."""
        if self._is_moving and self.keeps_weights:
            reference = self._following(network).reference
            assert reference is not None
            reference.move()

    def updated(self) -> None:
        """Let what was taken take effect."""
        if self._is_moving:
            self._pair = self._pair[::-1]
        self._is_moving, self._just_reached = False, []

    def not_updated(self) -> None:
        """Leave all as it is."""
        if self.kept is None:
            self._pair = None, None
        self._is_moving, self._just_reached = False, []

    # --- its state, to be saved with the trainer -----------------------------------------------

    def state(self) -> Any:
        """What is in force. All devices hold the same."""
        kept = self.kept
        if kept is None:
            return None
        number = {p: n for n, p in enumerate(kept.network.parameters)}
        trainable = [number[p] for p in kept.network.trainable]

        def first(rows: Arrays) -> ByParameter:
            return ByParameter(zip(trainable, (row[0] for row in rows)))

        return {
            "weights": None if kept.reference is None else first(kept.reference.weights),
            "mean": first(kept.mean) if kept.mean else None,
            "in_objective": ByParameter(zip(trainable, kept.in_objective)),
        }

    def problems(self, state: Any, network: Network) -> Iterator[str]:
        """Tell why a state cannot be assigned, in words."""
        if state is None:
            return
        if not isinstance(state, dict) or set(state) != {"weights", "mean", "in_objective"}:
            yield "what it keeps of the last step is of another form"
            return
        parameters = network.parameters
        chosen = checks.numbers_of(parameters, trainable=True)
        expected = {
            "weights": ("weights before the last step", self.keeps_weights, False),
            "mean": ("mean gradient", self.keeps_mean, True),
        }
        for name, (what, is_kept, summed) in expected.items():
            if not is_kept and state[name] is not None:
                yield f"it has the {what}, which this method does not keep as it is set up here"
            if is_kept and state[name] is None:
                yield f"it lacks the {what}, which this method keeps as it is set up here"
            elif is_kept:
                yield from checks.by_parameter(state[name], what, parameters, chosen, summed=summed)
        yield from checks.flags(state["in_objective"], chosen)

    def assign(self, state: Any, network: Network) -> None:
        """Take over a state that has no problems."""
        self.discard()
        if state is None:
            return
        kept = Kept(network, self.keeps_weights, self.keeps_mean)
        number = {p: n for n, p in enumerate(network.parameters)}
        rows = kept.reference.weights if kept.reference is not None else []
        for p, weights in zip(network.trainable, rows):
            assign_array([state["weights"][number[p]]], weights)
        for p, means in zip(network.trainable, kept.mean):
            assign_array([state["mean"][number[p]]], means)
        kept.in_objective = [state["in_objective"][number[p]] for p in network.trainable]
        self._pair = kept, None


def divide(
    sums: Arrays,
    scale: float,
    entries: float | NDArray,
    targets: Arrays,
    factor: float = 0.0,
    addends: Arrays | None = None,
) -> None:
    """Assign ``sums / (scale entries) + factor addends`` to targets; nothing waits for the device.

    Parameters
    ----------
    sums, targets, addends : list of list of NDArray
        Per parameter and device.
    scale : float
        What the sums are multiplied by.
    entries : float or NDArray
        C; an array of one number where it is a sum over several workers.
    factor : float
        Of the addends.
    """
    more = [factor] if factor and addends is not None else []
    columns = per_device(addends) if more and addends is not None else []
    for n, (totals, means) in enumerate(zip(per_device(sums), per_device(targets))):
        terms = columns[n : n + 1]
        if not isinstance(entries, NDArray):
            combine([1 / (scale * entries), *more], [totals, *terms], means)
            continue
        for total, mean in zip(totals, means):
            wide = dense(_mxnet.classic(total)).astype(mean.dtype, copy=False)
            divisor = on_device(entries, mean) * scale
            quotient = mx.nd.broadcast_div(wide, divisor.astype(mean.dtype))
            quotient.reshape(mean.shape).copyto(mean)
        if more:
            combine([1.0, *more], [means, *terms], means)


def on_device(number: NDArray, array: NDArray) -> NDArray:
    """A number as float64 where an array is."""
    return _mxnet.classic(number).as_in_context(_mxnet.device_of(array)).astype("float64")
