"""The base of methods that compare a minibatch with the previous step.

The reference is the weights before the last step, and m comes from the last estimate. There are
two copies of both: a step writes to the second, which becomes the first when the optimizer has
moved the weights. So a step that is skipped, or that raises an exception, changes nothing.
"""

from __future__ import annotations

from typing import Any, Iterator, Sequence

from mxnet.ndarray import NDArray

from .. import _mxnet
from .._mxnet import Arrays
from ..passes.arrays import buffers_like, copies, copy_all, dense, per_device
from ..passes.estimate import Estimate, Terms
from ..passes.full_pass import FullGradient
from ..passes.multiples import combine, times
from ..passes.network import Network
from ..passes.points import Point, descriptions, what_changed
from ..saving.values import ByParameter
from . import checks
from .interface import Method
from .svrg import assign_array
from .table import Table


class Kept:
    """The state that a step leaves for the next one.

    Frozen values are not kept: both passes of a step compute with the current ones.

    Parameters
    ----------
    network : Network
        The network.
    keeps_weights, keeps_mean : bool
        Whether it has the weights, and m.

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
            self.mean = buffers_like(network.live_grads)
        self.in_objective = [False] * len(network.trainable)
        self.were = descriptions(network)


class Recursive(Method):
    """A method whose reference is the previous step.

    Attributes
    ----------
    keeps_weights, keeps_mean : bool
        Whether it needs the reference, and m.
    """

    needs_reduced = True
    keeps_weights = True
    keeps_mean = True

    def __init__(self) -> None:
        # The current state, and the one that the next step writes to.
        self._pair: tuple[Kept | None, Kept | None] = None, None
        # During a step.
        self._is_moving = False  # the second one will become the first
        self._just_reached: list[bool] = []

    @property
    def kept(self) -> Kept | None:
        """The current state; None before the first step."""
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
        return [] if self.kept is None else copies(self.kept.mean)

    def points(self) -> Iterator[Point]:
        """The reference, and the next reference."""
        for kept in self._pair if self.has_reference else ():
            if kept is not None and kept.reference is not None:
                yield kept.reference

    def difference(self, network: Network) -> str:
        """Describe how the parameters differ from those at the reference; empty if they do not."""
        return "" if self.kept is None else what_changed(self.kept.were, network)

    def discard(self) -> None:
        """Start over at the next step."""
        self._pair, self._is_moving, self._just_reached = (None, None), False, []

    def refresh(self, network: Network, full: FullGradient, table: Table | None) -> None:
        """Start over at the current weights: m is the full gradient."""
        kept = self._pair[0] or Kept(network, self.keeps_weights, self.keeps_mean)
        if kept.reference is not None:
            kept.reference.move()
        if self.keeps_mean:
            copy_all(self.treated(network, full.mean), self.treated(network, kept.mean))
        kept.in_objective = list(full.in_objective)
        self._pair, self._is_moving = (kept, self._pair[1]), False

    def treated(self, network: Network, rows: Sequence[Any]) -> list[Any]:
        """The rows of the parameters that the method treats: all of them."""
        return list(rows)

    # --- the state that changes with a step ----------------------------------------------------

    def estimated(self, batch_index: int | None, terms: Terms, found: Estimate) -> None:
        """Note which parameters the loss of a minibatch depends on."""
        before = self._just_reached or found.reached
        self._just_reached = [a or b for a, b in zip(before, found.reached)]

    def reduced(self, network: Network, scale: float, entries: float | NDArray) -> None:
        """Compute m for the next step: ``m = V / C``."""
        following = self._following(network)
        if isinstance(entries, NDArray):  # the losses of other workers may depend on any parameter
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
        """Compute ``m = V / C`` for the next step."""
        divide(network.live_grads, scale, entries, target)

    def _following(self, network: Network) -> Kept:
        """The state for the next step."""
        now, following = self._pair
        if following is None:
            following = Kept(network, self.keeps_weights, self.keeps_mean)
            self._pair = now, following
        return following

    def before_update(self, network: Network) -> None:
        """Copy the weights, which are about to move, to the next reference."""
        if self._is_moving and self.keeps_weights:
            reference = self._following(network).reference
            assert reference is not None
            reference.move()

    def updated(self) -> None:
        """Let the next state take effect."""
        if self._is_moving:
            self._pair = self._pair[::-1]
        self._is_moving, self._just_reached = False, []

    def not_updated(self) -> None:
        """Keep the current state."""
        if self.kept is None:
            self._pair = None, None
        self._is_moving, self._just_reached = False, []

    # --- its state, to be saved with the trainer -----------------------------------------------

    def state(self) -> Any:
        """The current state, which is the same on all devices."""
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
        """Describe why a state cannot be assigned."""
        if state is None:
            return
        if not isinstance(state, dict) or set(state) != {"weights", "mean", "in_objective"}:
            yield "its state of the last step has another form"
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
    """Assign ``sums / (scale entries) + factor addends`` to targets; does not wait for the device.

    Parameters
    ----------
    sums, targets, addends : list of list of NDArray
        Per parameter and device.
    scale : float
        The factor that the sums contain.
    entries : float or NDArray
        C; an array of one number if it is a sum over several workers.
    factor : float
        The factor of the addends.
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
            times(1 / (on_device(entries, mean) * scale), wide).reshape(mean.shape).copyto(mean)
        if more:
            combine([1.0, *more], [means, *terms], means)


def on_device(number: NDArray, array: NDArray) -> NDArray:
    """A number as float64, on the device of an array."""
    return _mxnet.classic(number).as_in_context(_mxnet.device_of(array)).astype("float64")
