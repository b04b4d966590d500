"""The parts of a trainer, and how they are saved and resumed."""

from __future__ import annotations

import os
from collections import deque
from typing import Any, Callable, Iterator

from mxnet.ndarray import NDArray

from . import _mxnet, saving
from .counters import Counters, EpochCount, Registered
from .methods.interface import Method
from .passes.batches import initialize
from .passes.network import Network
from .passes.points import Point
from .passes.random_lock import RandomLock
from .proximal import ProximalTrainer


class ResumableTrainer(ProximalTrainer):
    """A `gluon.Trainer` with a method, whose state is saved part by part.

    Parameters
    ----------
    method : Method
        Corrects gradients.
    lock : RandomLock
        Makes passes draw the same random numbers.
    *args
        The arguments of `gluon.Trainer`, and ``prox``.
    """

    def __init__(self, method: Method, lock: RandomLock, params: Any, *args: Any) -> None:
        super().__init__(params, *args)
        keys = getattr(params, "keys", None)
        self._given = {} if keys is None else {key: params[key] for key in keys()}
        # Parts, which are saved.
        self._method = method
        self._lock = lock
        self._counters = Counters()
        self._registered = Registered()
        # Replaced when the user replaces arrays of parameters.
        self._network = Network(self.all_parameters)
        self._here: Any = None  # the point of the current weights
        # Between two calls.
        self._loaded: saving.Saved | None = None  # from a file, until parameters are initialized
        self._is_corrected = False  # Parameter.grad holds an estimate, or a plain gradient
        self._reached: list[bool] | None = None  # the parameters that have an estimate
        self._entries = 0  # loss entries of the live gradients
        self._is_reduced = False  # the live gradients are summed over devices and workers
        self._total: NDArray | None = None  # loss entries over all workers
        self._at_snapshot = False  # inside that context manager

    @property
    def _loss_scale(self) -> _mxnet.LossScale:
        """The loss scale of AMP."""
        return _mxnet.LossScale(self)

    # --- ready for a pass ----------------------------------------------------------------------

    def _get_ready(self, closure: Callable[[], Any]) -> None:
        """Prepare a pass: parameters, kvstore, and a snapshot that fits the parameters."""
        is_new = self._method.has_reference and self._here is None
        if is_new or self._loaded is not None or self._must_start_kvstore():
            deque(initialize(self.all_parameters, closure, iter([()])))
            self._start_kvstore()
        if self._is_in_force():
            self._check_unchanged()

    def _is_in_force(self) -> bool:
        """Whether the method corrects gradients now. Applies a loaded state if it can."""
        self._apply_loaded()
        if self._waits_for_parameters():
            raise RuntimeError(
                "The snapshot that was loaded waits for the parameters to be initialized. Load "
                "them (net.load_parameters), run a forward pass, or take a step with a closure."
            )
        return self._method.has_reference

    def _check_unchanged(self) -> None:
        """Raise if parameters have changed since the snapshot; bind to new arrays."""
        difference = self._bind()
        if difference:
            raise RuntimeError(
                f"The parameters have changed since the snapshot: {difference}. Take a new one "
                "with update_full_grads(), or call discard_snapshot()."
            )

    def _bind(self) -> str:
        """Bind to new arrays, as after a cast; return how they differ from the snapshot."""
        network = self._network
        if self._here is not None and network.is_bound():
            return ""
        difference = self._method.difference(network)
        if difference:
            return difference
        self._here = None  # until all is bound, whatever interrupts this
        network.bind(self._counters.adds, is_known=self._counters.probed)
        self._method.bind(network)
        self._here = Point.current(network)
        return ""

    def _mark_points(self) -> None:
        """Let backward at the points write or add, as at the weights."""
        for weights in [self._network.aliases, *(p.weights for p in self._method.points())]:
            self._network.mark(weights)

    def _check_outside(self, name: str) -> None:
        """Raise if the trainer must not be called here."""
        if _mxnet.is_recording():
            raise RuntimeError(
                f"{name}() was called inside `with autograd.record()`. Take it out of the block: "
                "the trainer records what the closure computes by itself."
            )
        if self._at_snapshot:
            raise RuntimeError(
                f"{name}() was called inside `with trainer.at_snapshot()`, where the network "
                "computes with other weights. Call it after the block."
            )

    # --- files ---------------------------------------------------------------------------------

    def _at_once(self) -> dict[str, Any]:
        """The parts that can be assigned before the parameters are initialized."""
        return {
            "optimizer": saving.OptimizerSettings(self.optimizer, self.all_parameters),
            "counters": self._counters,
            "lock": self._lock,
            "coefficient_schedule": self._coefficient_part(),
            "schedules": self._registered,
            "scaler": self._loss_scale,
        }

    def _parts(self) -> dict[str, Any]:
        """All parts."""
        parameters = self.all_parameters
        states = saving.OptimizerStates(self.optimizer, self.all_updaters, parameters)
        method = MethodPart(self._method, self._network)
        return {**self._at_once(), "optimizer_states": states, "method": method}

    def _header(self) -> dict[str, Any]:
        name, count = type(self._method).__name__, len(self._network.devices)
        return saving.header(name, self.all_parameters, self._given or None, count)

    def save_states(self, fname: str | os.PathLike[str]) -> None:
        """Save the complete state of training, except the weights, to a file.

        The file holds the states and counters of the optimizer and its scheduler, the snapshot with
        its frozen values and auxiliary states, the full gradient, stored gradients, all counters,
        the coefficient with the state of its schedule, registered schedules, the random lock, and
        AMP's loss scaler. With the weights (``net.save_parameters``), training resumes to the last
        bit, even in the middle of an epoch.

        Parameters
        ----------
        fname : str or path
            The file; a link is followed. If saving is interrupted, the old file or the new one is
            complete. This does not hold where the file can be written but not its folder.

        Raises
        ------
        TypeError
            If an optimizer or schedule has an attribute that is no plain data.
        OSError
            If the file cannot be written.

        See Also
        --------
        export_optimizer_states : The part that `gluon.Trainer` can load.
        """
        self._check_outside("save_states")
        self._check_states_are_here("save_states")
        self._apply_loaded()
        parts = self._parts()
        if self._loaded is not None:
            parts.update({name: self._loaded.part(name) for name in DEFERRED})
        saving.write(fname, self._header(), parts)

    def load_states(self, fname: str | os.PathLike[str]) -> None:
        """Load a file of `save_states` or of `gluon.Trainer.save_states`.

        This works before the first step and with deferred parameters: the file is checked at once,
        and applied when it is needed and the parameters are initialized. Load the weights before or
        after it. A file of `gluon.Trainer` has no snapshot, so there is none afterwards.

        Parameters
        ----------
        fname : str or path
            The file. It is read and checked completely before anything changes. It cannot run
            code: it holds arrays and plain data for the trainer's own optimizer and schedules.
            Parameters are matched by name.

        Raises
        ------
        ValueError
            If the file is damaged or of another kind, or does not fit the parameters, the
            optimizer or the schedules of this trainer; nothing changes then.
        OSError
            If the file cannot be read.
        """
        self._check_outside("load_states")
        self._check_states_are_here("load_states")
        header, parts = self._header(), self._parts()
        limit = saving.most_bytes(parts["optimizer_states"].expected_bytes(), self.all_parameters)
        loaded = saving.read(fname, header, limit)
        loaded.check(parts, header)
        loaded.assign(self._at_once())
        if loaded.is_empty("counters"):
            self._counters.inner_steps = 0
        self._method.discard()
        self._loaded = loaded  # applied late: weights may be loaded after this, or before
        self._is_corrected, self._reached, self._entries = False, None, 0

    def export_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Save the part of the state that `gluon.Trainer.load_states` can load.

        Parameters
        ----------
        fname : str or path
            The file, as for `save_states`.

        Raises
        ------
        RuntimeError
            If parameters are not initialized yet.
        OSError
            If the file cannot be written.
        """
        self._check_outside("export_optimizer_states")
        self._check_states_are_here("export_optimizer_states")
        if not all(map(_mxnet.has_data, self.all_parameters)):
            raise RuntimeError(
                "There are no optimizer states to export before the parameters are initialized. "
                "Run a forward pass first."
            )
        self._start_kvstore()
        self._apply_loaded()
        saving.write_bytes(fname, self.all_updaters[0].get_states(dump_optimizer=True))

    def register(self, schedule: Any) -> None:
        """Save and load the state of a schedule, or of a sampler, together with this trainer's.

        Refresh schedules of `gluon_svrg.schedule` register themselves at the first call of ``due``.
        If a file was loaded before, the schedule takes over its saved state.

        Parameters
        ----------
        schedule : object
            Its attributes are saved, and must be plain data. Several objects of one class are
            distinguished by their settings, or else by the order in which they were registered.

        Raises
        ------
        ValueError
            If its saved state does not fit.
        """
        self._registered.add(schedule)

    @property
    def epoch_count(self) -> EpochCount:
        """The epochs that an `Estimator` has trained, over all calls of ``fit``; saved."""
        return self._registered.shared(EpochCount)

    def _apply_loaded(self) -> None:
        """Apply a loaded state, once the parameters are initialized."""
        if self._loaded is None or not all(map(_mxnet.has_data, self.all_parameters)):
            return
        self._start_kvstore()
        self._bind()
        parts = self._parts()
        self._loaded.check({name: parts[name] for name in parts}, self._header())
        self._loaded.assign({name: parts[name] for name in DEFERRED})
        self._loaded = None

    def _waits_for_parameters(self) -> bool:
        """Whether a loaded snapshot has not been applied yet."""
        return self._loaded is not None and not self._loaded.is_empty("method")

    def _coefficient_part(self) -> Any:
        """The part that saves the coefficient and its schedule."""
        return NoPart()


DEFERRED = ("optimizer_states", "method")


class MethodPart:
    """A method as a part of a file.

    Parameters
    ----------
    method : Method
        The method.
    network : Network
        The network whose arrays are in its state.
    """

    def __init__(self, method: Method, network: Network) -> None:
        self._method, self._network = method, network

    def state(self) -> Any:
        """The state that a file holds."""
        return self._method.state()

    def problems(self, state: Any) -> Iterator[str]:
        """Tell why a state cannot be assigned."""
        return self._method.problems(state, self._network)

    def assign(self, state: Any) -> None:
        """Take over a state."""
        self._method.assign(state, self._network)


class NoPart:
    """A part that a trainer does not have."""

    def state(self) -> None:
        """Nothing."""

    def problems(self, state: Any) -> Iterator[str]:
        """Report any state as a problem."""
        if state is not None:
            yield "it holds what this trainer does not have"

    def assign(self, state: Any) -> None:
        """Do nothing."""
