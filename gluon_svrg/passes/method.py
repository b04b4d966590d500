"""What a method is: its formula, and its state.

A trainer calls, in this order::

    refresh(network, full)          at update_full_grads, when the full gradient is known
    bind(network)                   when parameters have new arrays
    terms(batch_index, live)        before each minibatch: v = a g + b r + k c m
    row(...)                        when v is computed: what to keep of the minibatch
    next_state(network, live, ...)  when v is summed over devices and workers
    before_update(...)              just before the optimizer moves the weights
    moved(live)                     after it has moved them: the next state takes effect
    dropped(live)                   instead, if there was no update

Only `moved`, `refresh`, `assign` and `discard` change what a file holds. What is known of a step
before its update is in the `LiveGradients`, which are dropped as a whole.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any, Iterator, Sequence, Sized

import numpy as np
from mxnet.ndarray import NDArray

from .arrays import Columns
from .estimate import Estimate, Terms
from .full_pass import FullGradient
from .network import Network
from .points import Point

NOT_CORRECTED = (
    "{name}() needs {method} gradients while a snapshot is held: pass "
    "step(batch_size, closure=...), or call correct_grads(closure) before. To go on with the "
    "plain optimizer, call discard_snapshot()."
)


class Method:
    """A method without variance reduction: v = g. Other methods override what they need.

    Attributes
    ----------
    moves : bool
        Whether the method has a state that changes with a step, so that the kvstore must return
        the reduced gradient.
    keeps_errors : bool
        Whether an error of the reduction, as of compression, would stay in that state.
    replaces_grads : bool
        Whether `next_state` computes the gradient of the optimizer.
    needs_table : bool
        Whether a refresh keeps the gradient of each minibatch, and each minibatch has an index.
    needs_refresh : bool
        Whether the method is the plain optimizer until the first refresh.
    can_store_grads : bool
        Whether gradients of minibatches can be stored.
    needs_closure : bool
        Whether the method needs a closure for every step, even without a reference.
    not_corrected : str
        The message if a step begins without an estimate.
    settings : tuple of str
        The hyperparameters, as ``repr`` shows them.
    coefficient : Coefficient or None
        How much of the correction is used, where a method has a choice.
    table : sized or None
        The gradients of minibatches that are stored.
    in_objective : sequence of bool
        Per trainable parameter: whether the mean gradient moves it; empty without a mean.
    mean : list of Column
        m; empty without one.
    """

    moves = False
    keeps_errors = False
    replaces_grads = False
    needs_table = False
    needs_refresh = False
    can_store_grads = False
    needs_closure = False
    not_corrected = NOT_CORRECTED

    def __init__(self) -> None:
        self.settings: tuple[str, ...] = ()
        self.coefficient: Any = None
        self.table: Sized | None = None
        self.in_objective: Sequence[bool] = ()
        self.mean: Columns = []

    # --- the arguments of its trainer ----------------------------------------------------------

    def check_arguments(
        self, trainer: str, optimizer: Any, settings: Any, kvstore: Any, compression_params: Any
    ) -> None:
        """Raise if the method does not work with the arguments of its trainer."""
        if compression_params and self.keeps_errors:
            raise ValueError(
                f"{trainer} cannot compress gradients: its mean gradient moves by each reduced "
                "gradient, so an error would stay forever. Leave compression_params out."
            )

    def checked_index(self, index: Any, name: str, trainer: str) -> int | None:
        """The index of a minibatch as Python's own integer; raise if it cannot be one."""
        if index is None and self.needs_table:
            raise TypeError(
                f"{name}() needs batch_index=..., the position of the minibatch, with the closure: "
                "it names the row of the table that holds the last gradient of this minibatch, and "
                "that this step replaces. Keep the minibatches in a list, and shuffle their "
                "positions."
            )
        if index is None:
            return None
        if not self.can_store_grads:
            raise TypeError(
                f"batch_index names a stored gradient, and {trainer} has none. Leave it out."
            )
        if isinstance(index, bool) or not isinstance(index, Integral):
            raise TypeError(
                f"batch_index must be the position of a minibatch, an integer, got "
                f"{type(index).__name__}."
            )
        return int(index)

    def check_store_grads(self, store_grads: bool, trainer: str) -> None:
        """Raise if gradients are to be stored, and the method has no use for them."""
        if store_grads and not self.can_store_grads:
            raise ValueError(
                f"store_grads=True: {trainer} compares each minibatch with the step before, and "
                "has no use for stored gradients. Leave it out."
            )

    # --- the reference -------------------------------------------------------------------------

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference to compare a minibatch's gradient with."""
        return False

    @property
    def has_state(self) -> bool:
        """Whether the method keeps anything that belongs to the parameters' arrays."""
        return self.has_reference

    @property
    def point(self) -> Point | None:
        """The weights of the reference, if the method keeps any."""
        return None

    def refresh(self, network: Network, full: FullGradient) -> None:
        """Make the current weights the reference, with the full gradient there."""

    def learning_rate(
        self, network: Network, full: FullGradient, optimizer: Any, steps: int
    ) -> float | None:
        """The learning rate that a refresh sets, some steps after the last one; None to keep it."""
        return None

    def discard(self) -> None:
        """Forget the reference and free its memory."""

    def bind(self, network: Network) -> None:
        """Bind to new arrays of the parameters."""
        if self.point is not None:
            self.point.bind()

    # --- a minibatch ---------------------------------------------------------------------------

    def terms(self, network: Network, batch_index: int | None, rows: dict[int, Any]) -> Terms | None:
        """The formula for the next minibatch; None if its gradient is left as it is.

        Parameters
        ----------
        network : Network
            The network.
        batch_index : int or None
            The position of the minibatch in the data.
        rows : dict
            What `row` has returned for the minibatches since the last update, by their index.
        """
        return None

    def check(self, network: Network, terms: Terms, closure: Any) -> None:
        """Check once whether a minibatch is the one whose gradient is stored."""

    def row(self, network: Network, terms: Terms, found: Estimate, index: int | None) -> Any:
        """What to keep of a minibatch with an index until the update."""
        return None

    # --- the state that changes with a step ----------------------------------------------------

    def numbers(self, rows: dict[int, Any]) -> Sequence[float]:
        """More numbers to sum over the workers."""
        return ()

    def next_state(
        self, network: Network, live: Any, scale: float, entries: float | NDArray
    ) -> Any:
        """Compute the state after the step from the reduced estimate V.

        Parameters
        ----------
        network : Network
            The network, whose live gradients hold V times the scale, on every device, or what the
            user has made of it. The method may change them.
        live : LiveGradients
            The minibatches of V, and V as it was computed.
        scale : float
            The scale of the live gradients.
        entries : float or NDArray
            C: the loss entries over all devices, workers and micro-batches since the last update.
            With several workers an array of C and the sums of `numbers`.

        Returns
        -------
        object
            The next state, for `moved`; None if the state stays.
        """
        return None

    def before_update(self, network: Network, following: Any) -> None:
        """Complete the next state with the weights, just before the optimizer moves them."""

    def moved(self, network: Network, live: Any) -> None:
        """Let the next state take effect."""

    def dropped(self, network: Network, live: Any) -> None:
        """Take back the memory of a step whose update has not come."""

    def handed_over(
        self, network: Network, v: list[np.ndarray], entries: int, batch_index: int | None
    ) -> list[np.ndarray]:
        """What the optimizer would get for the estimate v of one minibatch; nothing changes.

        Parameters
        ----------
        network : Network
            The network.
        v : list of ndarray
            Per trainable parameter, flat, the mean over the minibatch's loss entries.
        entries : int
            The number of loss entries.
        batch_index : int or None
            The minibatch, as for `terms`.
        """
        return v

    # --- files ---------------------------------------------------------------------------------

    def state(self, network: Network) -> dict[str, Any] | None:
        """The state as plain data; None if there is no reference."""
        return None

    def problems(self, network: Network, state: Any) -> Iterator[str]:
        """Tell why a state from a file cannot be assigned."""
        yield "it holds a state of another method"

    def assign(self, network: Network, state: dict[str, Any]) -> None:
        """Take over a state."""


class MethodPart:
    """The state of a method, as a part of a file."""

    def __init__(self, method: Method, network: Network) -> None:
        self._method, self._network = method, network

    def state(self) -> Any:
        """The state; None if there is no reference."""
        return self._method.state(self._network)

    def problems(self, state: Any) -> Iterator[str]:
        """Tell why a state cannot be assigned."""
        if state is not None:
            yield from self._method.problems(self._network, state)

    def assign(self, state: Any) -> None:
        """Take over a state."""
        self._method.discard()
        if state is not None:
            self._method.assign(self._network, state)
