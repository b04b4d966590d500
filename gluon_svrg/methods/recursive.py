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
from ..passes.full_pass import FullGradient
from ..passes.multiples import combine, times
from ..passes.network import Network
from ..passes.points import Point, descriptions, what_changed
from .fields import ArrayPerParameter, Fields, Flags, assign
from .interface import Changes, Live, Method
from .table import Table

NEEDS_CLOSURE = (
    "{name}() needs {method} gradients: pass step(batch_size, closure=...), or call "
    "correct_grads(closure) before. For the plain optimizer use gluon.Trainer."
)


class State:
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
    parameters : dict
        Descriptions of the parameters that it belongs to.
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
        self.parameters = descriptions(network)


class Recursive(Method):
    """A method whose reference is the previous step.

    Attributes
    ----------
    keeps_weights, keeps_mean : bool
        Whether it needs the reference, and m.
    """

    needs_reduced = True
    keeps_errors = True
    keeps_weights = True
    keeps_mean = True

    def __init__(self) -> None:
        super().__init__()
        # The state before the next step, and memory for the one after it.
        self._pair: tuple[State | None, State | None] = None, None

    @property
    def now(self) -> State | None:
        """The current state; None before the first step."""
        return self._pair[0]

    @property
    def has_reference(self) -> bool:
        """Whether there was a step, or a refresh, to compare the next minibatch with."""
        return self.now is not None

    @property
    def full_grads(self) -> Arrays:
        """The estimate of the mean gradient, per trainable parameter and device."""
        return [] if self.now is None else copies(self.now.mean)

    def points(self) -> Iterator[Point]:
        """The reference, and the next reference."""
        for state in self._pair if self.has_reference else ():
            if state is not None and state.reference is not None:
                yield state.reference

    def difference(self, network: Network) -> str:
        """Describe how the parameters differ from those at the reference; empty if they do not."""
        return "" if self.now is None else what_changed(self.now.parameters, network)

    def discard(self) -> None:
        """Start over at the next step."""
        self._pair, self.in_objective = (None, None), ()

    def refresh(self, network: Network, full: FullGradient, table: Table | None) -> None:
        """Start over at the current weights: m is the full gradient."""
        now = self.now or State(network, self.keeps_weights, self.keeps_mean)
        if now.reference is not None:
            now.reference.move()
        if self.keeps_mean:
            copy_all(self.treated(network, full.mean), self.treated(network, now.mean))
        now.in_objective = list(full.in_objective)
        self._pair = now, self._pair[1]
        self.in_objective = now.in_objective if self.keeps_mean else ()

    def treated(self, network: Network, rows: Sequence[Any]) -> list[Any]:
        """The rows of the parameters that the method treats: all of them."""
        return list(rows)

    # --- the state that changes with a step ----------------------------------------------------

    def reduced(
        self, network: Network, live: Live, scale: float, entries: float | NDArray
    ) -> State | None:
        """Compute m for the next step: ``m = V / C``."""
        now, following = self._pair
        if following is None:
            following = State(network, self.keeps_weights, self.keeps_mean)
            self._pair = now, following
        if isinstance(entries, NDArray):  # the losses of other workers may depend on any parameter
            following.in_objective = [True] * len(network.trainable)
        else:
            before = live.reached if now is None else now.in_objective
            following.in_objective = [a or b for a, b in zip(before, live.reached)]
        if self.keeps_mean:
            self.take_mean(network, live, live.total_scale or scale, entries, following.mean)
        return following

    def take_mean(
        self, network: Network, live: Live, scale: float, entries: float | NDArray, target: Arrays
    ) -> None:
        """Compute ``m = V / C`` for the next step, where V has a scale."""
        divide(live.total, scale, entries, target)

    def before_update(self, network: Network, following: State) -> None:
        """Copy the weights, which are about to move, to the next reference."""
        if following.reference is not None:
            following.reference.move()

    def changes(self, live: Live) -> Changes:
        """The next state becomes the current one, whose memory is used again."""
        following = live.following
        if following is None:
            return ()
        moved = following.in_objective if self.keeps_mean else ()
        return [(vars(self), {"_pair": (following, self.now), "in_objective": moved})]

    def dropped(self, live: Live) -> Changes:
        """Free the memory of a first step."""
        return [(vars(self), {"_pair": (None, None)})] if self.now is None else ()

    # --- files ---------------------------------------------------------------------------------

    @property
    def fields(self) -> Fields:
        """What of the state a file holds, as the method is set up."""
        return Fields(
            "its state of the last step has another form",
            weights=ArrayPerParameter(
                "weights before the last step", summed=False, is_kept=self.keeps_weights
            ),
            mean=ArrayPerParameter("mean gradient", summed=True, is_kept=self.keeps_mean),
            in_objective=Flags(),
        )

    def values(self) -> dict[str, Any] | None:
        """The current state, which is the same on all devices."""
        now = self.now
        if now is None:
            return None
        weights = None if now.reference is None else now.reference.weights
        return {"weights": weights, "mean": now.mean, "in_objective": now.in_objective}

    def take(self, values: dict[str, Any], network: Network) -> None:
        """Take over a state."""
        now = State(network, self.keeps_weights, self.keeps_mean)
        if now.reference is not None:
            assign(values["weights"], now.reference.weights)
        if self.keeps_mean:
            assign(values["mean"], now.mean)
        now.in_objective = values["in_objective"]
        self._pair = now, None
        self.in_objective = now.in_objective if self.keeps_mean else ()


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
