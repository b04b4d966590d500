"""Access to `gluon.Trainer` and kvstores where MXNet has no public names for it."""

from __future__ import annotations

import ctypes
from typing import Any

import mxnet as mx
from mxnet.base import _LIB, check_call
from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from .watched import WatchedTrainer

#: The command that makes a kvstore unpickle an optimizer from the text.
_SET_OPTIMIZER = 0


class OpenTrainer(WatchedTrainer):
    """A `gluon.Trainer` with names for what it does with its kvstore.

    The parameters are those of `gluon.Trainer`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # With shared parameters, MXNet 2.0 leaves gaps in the keys but not in the optimizer's
        # indices: multipliers and states would go to the wrong parameters.
        if hasattr(Parameter, "list_device"):
            self._param2idx = {p._uuid: key for key, p in enumerate(self._params)}

    # --- what a subclass may replace -----------------------------------------------------------

    def _optimizer_for_kvstore(self) -> Any:
        """The optimizer for the kvstore, if the kvstore updates."""
        return self.optimizer

    def _finish_sending_weights(self) -> None:
        """Finish after the weights were sent to the kvstore."""

    @property
    def _gradient_scale(self) -> float:
        """The factor by which `gluon.Trainer` scales gradients, apart from the batch size."""
        return self._scale

    # --- the kvstore ---------------------------------------------------------------------------

    @property
    def _wanted_kvstore(self) -> Any:
        """The kvstore, its name, or None, from which `gluon.Trainer` creates its kvstore."""
        return self._kvstore_params["kvstore"]

    @_wanted_kvstore.setter
    def _wanted_kvstore(self, kvstore: Any) -> None:
        self._kvstore_params["kvstore"] = kvstore

    @property
    def _wanted_update(self) -> bool | None:
        """Whether the kvstore should update; None leaves the choice to `gluon.Trainer`."""
        return self._kvstore_params["update_on_kvstore"]

    @property
    def _is_kvstore_ready(self) -> bool:
        """Whether the kvstore exists and has all weights."""
        return self._kv_initialized and not self._params_to_init

    @property
    def _has_kvstore(self) -> bool:
        """Whether `gluon.Trainer` has chosen its kvstore, or has chosen to use none."""
        return self._kv_initialized

    @property
    def _updates_on_kvstore(self) -> bool:
        """Whether the kvstore updates, once it exists."""
        return bool(self._update_on_kvstore)

    def _make_kvstore_ready(self) -> None:
        """Let `gluon.Trainer` choose its kvstore and give it the weights."""
        if not self._kv_initialized:
            self._init_kvstore()
        if self._params_to_init:
            self._init_params()

    def _init_kvstore(self) -> None:
        optimizer = self.optimizer
        self._optimizer = self._optimizer_for_kvstore()
        try:
            super()._init_kvstore()
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


def make_plain(arrays: list[NDArray]) -> None:
    """Give dense arrays MXNet's own layout. Waits for them.

    In a prediction, oneDNN reorders the weights of convolutions in place, and a kvstore cannot send
    that layout ("can't generate TBlob"). Reading the address of the values restores the order.
    """
    for array in arrays:
        if array.stype == "default":
            array.wait_to_read()
            check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(ctypes.c_void_p())))


# --- kvstores ----------------------------------------------------------------------------------


def is_native(kvstore: Any) -> bool:
    """Whether a kvstore is one of MXNet's C++ library, rather than a class in Python."""
    return isinstance(kvstore, mx.kvstore.KVStore)


def registered_kvstores() -> list[str]:
    """The names of the classes of kvstores that are registered with MXNet."""
    return sorted(mx.kvstore.KVStoreBase.kv_registry)


def barrier(kvstore: Any) -> None:
    """Wait until all workers are here."""
    kvstore._barrier()


def send_to_servers(kvstore: Any, pickled_optimizer: str) -> None:
    """Let all servers unpickle an optimizer and use it."""
    kvstore._send_command_to_servers(_SET_OPTIMIZER, pickled_optimizer)
