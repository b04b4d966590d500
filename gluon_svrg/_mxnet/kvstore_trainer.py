"""A `gluon.Trainer` with workers, names for its private steps, and hooks into them."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Any, Callable, Sequence

import mxnet as mx
from mxnet.gluon import Trainer
from mxnet.gluon.parameter import DeferredInitializationError
from mxnet.ndarray import NDArray

from .arrays import HAS_DEVICES, address_of, classic
from .parameters import gradients, is_trainable, not_initialized

__all__ = ["KVStoreTrainer", "barrier"]


class KVStoreTrainer(Trainer):
    """A `gluon.Trainer` that knows its workers, and has hooks for a subclass.

    `kvstore.kinds` chooses the kvstore, where to update, and the class of the workers.
    """

    _amp_loss_scaler: Any = None  # set by ``amp.init_trainer``

    def __init__(
        self, *arguments: Any, kvstore: Any, update_on_kvstore: Any, workers: Any, **others: Any
    ) -> None:
        super().__init__(*arguments, kvstore=kvstore, update_on_kvstore=update_on_kvstore, **others)
        # With shared parameters, MXNet 2.0 leaves gaps in the keys but not in the optimizer's
        # indices: multipliers and states would go to the wrong parameters.
        if HAS_DEVICES:
            self._param2idx = {p._uuid: key for key, p in enumerate(self._params)}
        self._workers = workers(kvstore, len(self._params))
        update_there = self._workers.has_servers and update_on_kvstore is not False
        self._servers: Any = self._workers if update_there else None
        if not self._workers.reduces:  # such servers end at a push without an optimizer
            kvstore.set_optimizer(self._optimizer_for_kvstore())
            self._workers.wait()

    def __reduce__(self) -> Any:
        """Stay out of copies, which get None. On 1.9.1 a network's copy would have its trainer."""
        return type(None), ()

    #: The scaler of AMP's losses; None where losses are not scaled.
    _loss_scaler = property(attrgetter("_amp_loss_scaler"))
    #: The parameters; on MXNet 2.0, shared ones only once.
    _all_parameters = property(attrgetter("_params"))
    #: Whether the kvstore updates, once it exists.
    _updates_on_kvstore = property(attrgetter("_update_on_kvstore"))

    @property
    def _all_updaters(self) -> list[Any]:
        """The updaters, which hold the optimizer's states: one per device, or the kvstore's."""
        if self._kv_initialized and self._update_on_kvstore:
            return [self._kvstore._updater]
        return list(self._updaters)

    # --- hooks ---------------------------------------------------------------------------------

    def _run_update(self, update: Callable[[], None]) -> None:
        """Let the optimizer move the weights by `update`. Not called where AMP skips the update."""
        update()

    def _update(self, ignore_stale_grad: bool = False) -> None:
        scaler, self._amp_loss_scaler = self._amp_loss_scaler, None  # MXNet does not ask again
        try:
            if scaler is None or not scaler.has_overflow(self._params):
                self._run_update(partial(super()._update, ignore_stale_grad))
        finally:
            self._amp_loss_scaler = scaler

    # --- the kvstore ---------------------------------------------------------------------------

    def _start_kvstore(self) -> None:
        """Let `gluon.Trainer` choose its kvstore and share the weights, as in its first step."""
        if not self._kv_initialized:
            self._init_kvstore()
        if self._params_to_init:
            self._init_params()

    def _share_weights(self) -> None:
        """Start the kvstore and give all workers the same weights, for a pass over the data."""
        self._start_kvstore()
        self._workers.share_weights(self._params)

    def _init_kvstore(self) -> None:
        optimizer = self.optimizer
        self._optimizer = self._optimizer_for_kvstore()
        try:
            super()._init_kvstore()
        except DeferredInitializationError as error:
            raise DeferredInitializationError(not_initialized(self._params)) from error
        finally:
            self._optimizer = optimizer

    def _init_params(self) -> None:
        arrays = [array for p in self._params_to_init for array in p._data or ()]
        for array in arrays:
            if array.stype == "default":  # oneDNN may have changed the layout, and servers cannot
                array.wait_to_read()  # get that: reading the address undoes it
                address_of(array)
        waiting = len(self._params_to_init)
        super()._init_params()
        if len(self._params_to_init) == waiting:
            return
        self._workers.wait()  # otherwise the first gradients overtake the weights
        if self._servers is not None:
            self._servers.check()

    def _optimizer_for_kvstore(self) -> Any:
        """Wrap the optimizer for servers, which update parameters and assign sums."""
        if self._servers is None:
            return self.optimizer
        self.optimizer.rescale_grad = self._scale
        return self._servers.wrapped(self.optimizer)

    def _prepare_push(self, batch_size: float) -> float:
        """Where servers update: send new settings, and divide here. The divisor that remains."""
        self._servers.send_settings(self.optimizer, self._params)
        for parameter in filter(is_trainable, self._params):
            for gradient in map(classic, gradients(parameter)):
                gradient /= batch_size
        return 1

    def _sum_over_workers(self, numbers: Sequence[float]) -> float | NDArray:
        """Sum numbers of a step, without a wait; in one process, give the first one alone."""
        if self._workers.size == 1:
            return numbers[0]
        array = mx.nd.array(numbers)
        self._workers.sum_arrays({len(self._params): array})
        return array

    def _check_states_are_here(self, name: str) -> None:
        """Raise if the states of the optimizer are on servers, for the method of this name."""
        if self._servers is not None:
            raise RuntimeError(
                f"{name}() cannot fetch states from servers. Use the defaults of 'dist_sync'."
            )


def barrier(kvstore: Any) -> None:
    """Wait until all workers of a distributed kvstore are here."""
    kvstore._barrier()
