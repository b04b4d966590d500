"""What `gluon.Trainer` does with its store, made ready before the first pass."""

from __future__ import annotations

from typing import Any

import mxnet as mx
from mxnet.gluon import Trainer

from .. import _mxnet, checks
from ..operations import divide
from ..snapshot import per_device
from . import workers as distributed
from .server import ServerOptimizer
from .workers import Workers


class StoreTrainer(Trainer):
    """A `gluon.Trainer` whose store can be made ready early, and whose servers can be told things.

    The parameters are those of `gluon.Trainer`.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Any,
        kvstore: Any,
        compression_params: Any,
        update_on_kvstore: Any,
    ) -> None:
        checks.check_store(params, kvstore, update_on_kvstore)
        checks.check_compression(compression_params, kvstore)
        checks.check_sparse(params, kvstore)
        if update_on_kvstore is None and distributed.is_synchronous(kvstore):
            update_on_kvstore = False  # on the servers, MXNet would ignore set_learning_rate
        super().__init__(
            params, optimizer, optimizer_params, kvstore, compression_params, update_on_kvstore
        )
        self._workers: Workers | None = None  # of a distributed store, once it is created

    def _is_unconnected(self) -> bool:
        """Whether the weights of a distributed store have not been shared yet."""
        return not self._kv_initialized and distributed.is_distributed(
            self._kvstore_params["kvstore"]
        )

    def _connect(self) -> Workers | None:
        """Create a distributed store, if that is what is wanted."""
        store = self._kvstore_params["kvstore"]
        if self._workers is None and distributed.is_distributed(store):
            store = mx.kv.create(store) if isinstance(store, str) else store
            self._kvstore_params["kvstore"] = store
            self._workers = Workers(store, parameters=len(self._params))
            if not distributed.is_synchronous(store):  # its servers add up nothing without one
                store.set_optimizer(self._server_optimizer(self._workers))
                self._workers.wait()
        return self._workers

    def _initialize_store(self) -> None:
        """Create the store and give it the weights, as `gluon.Trainer` does in its first step.

        On a distributed store, wait until all workers have those of rank 0: otherwise gradients
        could overtake weights.
        """
        workers = self._connect()
        if self._kv_initialized and not self._params_to_init:
            return
        if not self._kv_initialized:
            self._init_kvstore()
        if self._params_to_init:
            self._init_params()
        if workers is not None:
            workers.wait()
            if self._update_on_kvstore:
                workers.check_servers()

    def _init_kvstore(self) -> None:
        """Create the store, and give its servers an optimizer if they shall update."""
        optimizer = self.optimizer
        workers = self._connect()
        if workers is not None and self._kvstore_params["update_on_kvstore"] is not False:
            self._optimizer = self._server_optimizer(workers)
        try:
            super()._init_kvstore()
        finally:
            self._optimizer = optimizer

    def _server_optimizer(self, workers: Workers) -> ServerOptimizer:
        """Wrap the optimizer for the servers, which update parameters and assign the rest."""
        checks.check_server_optimizer(self.optimizer, self._params)
        self.optimizer.rescale_grad = self._scale
        return workers.server_optimizer(self.optimizer)

    def _share_weights(self) -> None:
        """Let all workers of an asynchronous store have the same weights, for a snapshot."""
        workers = self._workers
        if workers is None or distributed.is_synchronous(workers.store):
            return
        workers.wait()
        for index, parameter in enumerate(self._params):
            if _mxnet.is_trainable(parameter):
                workers.store.pull(index, out=_mxnet.data(parameter))
        workers.wait()

    def _prepare_push(self, batch_size: int) -> int:
        """Where servers update: divide the gradients here, and tell them of new settings.

        Returns
        -------
        int
            The batch size that is left to divide by.
        """
        workers = self._workers
        if workers is None or not self._update_on_kvstore:
            return batch_size
        multipliers = {
            "lr_mult": {i: p.lr_mult for i, p in enumerate(self._params)},
            "wd_mult": {i: p.wd_mult for i, p in enumerate(self._params)},
        }
        workers.send_settings(self._optimizer, multipliers)
        trainable = [p for p in self._params if _mxnet.is_trainable(p)]
        for column in per_device([_mxnet.gradients(p) for p in trainable]):
            divide(column, batch_size)
        return 1

    def _check_states_are_here(self, name: str) -> None:
        store = self._kvstore_params["kvstore"]
        if (
            distributed.is_distributed(store)
            and self._kvstore_params["update_on_kvstore"] is not False
        ):
            raise RuntimeError(
                f"{name}() is not possible where the servers update: the states of the optimizer "
                "are there, and MXNet cannot fetch them. Use update_on_kvstore=False with a "
                "synchronous store."
            )
