"""What a trainer is made of, and how it is saved and resumed."""

from __future__ import annotations

import os
from collections import deque
from typing import Any, Callable

from . import _mxnet
from .counters import Counters
from .methods.interface import Method
from .passes.batches import initialize
from .passes.network import Network
from .passes.points import Point
from .passes.random_lock import RandomLock
from .stores.kvstore_trainer import KVStoreTrainer


class ResumableTrainer(KVStoreTrainer):
    """A `gluon.Trainer` with a method, whose state is saved part by part.

    Parameters
    ----------
    method : Method
        What corrects gradients.
    lock : RandomLock
        Whether passes draw the same random numbers.
    *args
        The arguments of `gluon.Trainer`.
    """

    def __init__(self, method: Method, lock: RandomLock, *args: Any) -> None:
        super().__init__(*args)
        # Parts, that are saved.
        self._method = method
        self._lock = lock
        self._counters = Counters()
        # Replaced when the user replaces arrays of parameters.
        self._network = Network(self.all_parameters)
        self._here: Point | None = None  # the current weights
        # Of the moment.
        self._loaded: Any = None  # from a file, until parameters are initialized
        self._is_corrected = False  # Parameter.grad holds an estimate, or a plain gradient
        self._reached: list[bool] | None = None  # the parameters that the estimate is of
        self._entries = 0  # loss entries behind the live gradients
        self._at_snapshot = False  # inside that context manager

    @property
    def _loss_scale(self) -> _mxnet.LossScale:
        """The loss scale of AMP."""
        return _mxnet.LossScale(self)

    # --- ready for a pass ----------------------------------------------------------------------

    def _get_ready(self, closure: Callable[[], Any]) -> None:
        """Have all that a pass needs: parameters, kvstore, and a snapshot that belongs to them."""
        if self._loaded is not None or self._must_start_kvstore():
            deque(initialize(self.all_parameters, closure, iter([()])))
            self._start_kvstore()
        if self._is_in_force():
            self._check_unchanged()

    def _is_in_force(self) -> bool:
        """Whether the method corrects gradients now. What was loaded is applied, if it can be."""
        self._apply_loaded()
        if self._waits_for_parameters():
            raise RuntimeError(
                "The snapshot that was loaded waits for the parameters to be initialized. Load "
                "them (net.load_parameters), run a forward pass, or take a step with a closure."
            )
        return self._method.has_reference

    def _check_unchanged(self) -> None:
        """Raise if parameters are not what they were at the snapshot; get to know new arrays."""
        difference = self._bind()
        if difference:
            raise RuntimeError(
                f"The parameters have changed since the snapshot: {difference}. Take a new one "
                "with update_full_grads(), or call discard_snapshot()."
            )

    def _bind(self) -> str:
        """Get to know arrays that are new, as they are after a cast; tell what does not fit them."""
        network = self._network
        if self._here is not None and network.is_bound():
            return ""
        for point in self._method.points():
            difference = point.difference()
            if difference:
                return difference
        network.bind()
        self._here = Point.current(network)
        for point in self._method.points():
            point.bind()
        return ""

    def _mark_points(self) -> None:
        """Let backward at the points do what it does at the weights."""
        for point in self._method.points():
            self._network.mark(point.weights)

    def _check_outside(self, name: str) -> None:
        """Raise where the trainer must not be called."""
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

    def _apply_loaded(self): pass

    def _waits_for_parameters(self): return False
