"""`gluon.Trainer` with names for its private steps, and hooks into them."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from mxnet.gluon import Parameter, Trainer
from mxnet.gluon.parameter import DeferredInitializationError
from mxnet.ndarray import NDArray

from .arrays import address_of
from .parameters import not_initialized


class OpenTrainer(Trainer):
    """A `gluon.Trainer` that calls hooks, with names for what it does with its kvstore."""

    _amp_loss_scaler: Any = None  # set by ``amp.init_trainer``

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # With shared parameters, MXNet 2.0 leaves gaps in the keys but not in the optimizer's
        # indices: multipliers and states would go to the wrong parameters.
        if hasattr(Parameter, "list_device"):
            self._param2idx = {p._uuid: key for key, p in enumerate(self._params)}

    def __reduce__(self) -> Any:
        """Stay out of copies. On 1.9.1 a copy of a network copies its trainer, too."""
        return CopiedTrainer, (type(self).__name__,)

    def _on_update(self) -> None:
        """Called before the optimizer moves the weights; the update can still fail."""

    def _on_update_end(self) -> None:
        """Called after that, also where the update has failed or was skipped."""

    def _on_updated(self) -> None:
        """Called when the optimizer has moved the weights, not where AMP has skipped the update."""

    def _optimizer_for_kvstore(self) -> Any:
        """The optimizer for the kvstore, if the kvstore updates."""
        return self.optimizer

    def _finish_sending_weights(self) -> None:
        """Called when the weights were sent to the kvstore."""

    def _has_all_rows(self) -> bool:
        """Whether the network computes with sparse weights that have all their rows."""
        return False

    #: The scaler of AMP's losses; None where losses are not scaled.
    _loss_scaler = property(attrgetter("_amp_loss_scaler"))
    #: The parameters, with shared ones only once.
    _all_parameters = property(attrgetter("_params"))
    #: The factor by which `gluon.Trainer` scales gradients, apart from the batch size.
    _gradient_scale = property(attrgetter("_scale"))
    #: Whether the kvstore updates, once it exists.
    _updates_on_kvstore = property(attrgetter("_update_on_kvstore"))

    @property
    def _all_updaters(self) -> list[Any]:
        """The updaters, which hold the optimizer's states: one per device, or the kvstore's."""
        if self._kv_initialized and self._update_on_kvstore:
            return [self._kvstore._updater]
        return list(self._updaters)

    def _start_kvstore(self) -> None:
        """Let `gluon.Trainer` choose its kvstore and share the weights, as in its first step."""
        if not self._kv_initialized:
            self._init_kvstore()
        if self._params_to_init:
            self._init_params()

    def _update(self, ignore_stale_grad: bool = False) -> None:
        scaler, self._amp_loss_scaler = self._amp_loss_scaler, None
        try:
            if scaler is not None and scaler.has_overflow(self._params):
                return
            self._on_update()
            super()._update(ignore_stale_grad)  # raises if a gradient is stale
        finally:
            self._amp_loss_scaler = scaler
            self._on_update_end()
        self._on_updated()

    def _row_sparse_pull(self, p: Any, out: Any, row_id: Any, full_idx: bool = False) -> None:
        if full_idx or not self._has_all_rows():
            super()._row_sparse_pull(p, out, row_id, full_idx)

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
        for parameter in self._params_to_init:
            if parameter._data is not None:
                make_plain(parameter._data)
        waiting = len(self._params_to_init)
        super()._init_params()
        if len(self._params_to_init) < waiting:
            self._finish_sending_weights()


class CopiedTrainer:
    """What a copy has in the place of a trainer. It cannot train, and says so."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __bool__(self) -> bool:
        return False  # a copied parameter has no trainer

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # as Python asks of all objects
            raise AttributeError(attribute)
        raise RuntimeError(
            f"A copy of {self._name} cannot train: MXNet copies arrays without their gradients. "
            "Build the network and the trainer again, and load what save_parameters and "
            "save_states of the first ones have written."
        )


def barrier(kvstore: Any) -> None:
    """Wait until all workers of a distributed kvstore are here."""
    kvstore._barrier()


def make_plain(arrays: list[NDArray]) -> None:
    """Undo, by reading their address, what oneDNN does to weights: no kvstore can send that."""
    for array in arrays:
        if array.stype == "default":
            array.wait_to_read()
            address_of(array)
