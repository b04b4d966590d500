"""A `gluon.Trainer` whose kvstore is ready before the first pass."""

from __future__ import annotations

from typing import Any

import mxnet as mx

from .. import _mxnet
from . import calls, checks, kinds
from .alone import Alone
from .horovod import HorovodKVStore
from .interface import Workers
from .parameter_servers import SynchronousServers
from .server import ServerOptimizer


class KVStoreTrainer(_mxnet.OpenTrainer):
    """A `gluon.Trainer` whose workers have the same weights before the first pass.

    Parameters
    ----------
    params, optimizer, optimizer_params, kvstore, compression_params, update_on_kvstore
        As for `gluon.Trainer`.
    updates_here : str, optional
        The option that needs the update on the workers, for messages; empty if there is none.

    Attributes
    ----------
    needs_reduced : bool
        A class attribute: whether the reduced gradients must come back before the update. If so,
        the update never runs on the kvstore.

    Raises
    ------
    TypeError
        If `kvstore` is not a kvstore, a name or None.
    ValueError
        If MXNet does not know the kvstore, or the kvstore cannot update, compress gradients or
        exchange sparse ones as requested.
    ImportError, RuntimeError
        If Horovod is requested, but is not installed or does not see the other processes.
    """

    needs_reduced: bool = False

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Any,
        kvstore: Any,
        compression_params: Any,
        update_on_kvstore: Any,
        updates_here: str = "",
    ) -> None:
        parameters = checks.parameters_of(params)
        kvstore = kinds.recognized(kvstore)
        checks.check_devices(parameters, kvstore, update_on_kvstore)
        checks.check_compression(compression_params, kvstore)
        checks.check_sparse(parameters, kvstore)
        needs_reduced = type(self).__name__ if self.needs_reduced else updates_here
        update = checks.where_to_update(parameters, kvstore, update_on_kvstore, needs_reduced)
        if kvstore == "horovod":
            kvstore = HorovodKVStore()
        super().__init__(params, optimizer, optimizer_params, kvstore, compression_params, update)
        self._known_workers: Workers | None = None

    @property
    def _workers(self) -> Workers:
        """The processes that train together. The first use connects to parameter servers.

        This is collective: no worker continues until all have called it.
        """
        if self._known_workers is None:
            kvstore = self._wanted_kvstore
            if isinstance(kvstore, str) and kinds.is_distributed(kvstore):
                kvstore = self._wanted_kvstore = mx.kv.create(kvstore)
            updates = self._wanted_update is not False
            self._known_workers = workers = kinds.workers_of(
                kvstore, len(self.all_parameters), updates
            )
            if kinds.is_asynchronous(kvstore):  # its servers store nothing without an optimizer
                kvstore.set_optimizer(self._optimizer_for_kvstore())
                workers.wait()
            elif not isinstance(workers, Alone):
                calls.begin()
        return self._known_workers

    def _must_start_kvstore(self) -> bool:
        """Whether there may be other workers, and the weights have not been shared yet."""
        return not self._has_kvstore and not isinstance(self._workers, Alone)

    def _start_kvstore(self) -> None:
        """Create the kvstore and give it the weights, as `gluon.Trainer` does in its first step.

        Afterwards all workers have the weights of rank 0. A second call does nothing.
        """
        if not self._is_kvstore_ready:
            self._make_kvstore_ready()

    def _finish_sending_weights(self) -> None:
        """Wait until all workers have the weights of rank 0.

        The first gradients could overtake them: with `gluon.Trainer` and ``dist_sync``, weights
        became sums of gradients in up to 6 runs of 10.
        """
        workers = self._workers
        workers.updates = self._updates_on_kvstore
        if not isinstance(workers, Alone):
            workers.wait()
        if isinstance(workers, SynchronousServers) and workers.updates:
            workers.check_servers()

    def _allreduce_grads(self) -> None:
        calls.step()
        super()._allreduce_grads()

    def _share_weights(self) -> None:
        """Start the kvstore and give all workers the same weights, for a pass over the data."""
        self._start_kvstore()
        trainable = (
            (key, p) for key, p in enumerate(self.all_parameters) if _mxnet.is_trainable(p)
        )
        self._workers.share_weights(
            {key: _mxnet.data(p) for key, p in trainable if not _mxnet.has_sparse_values(p)}
        )

    def _optimizer_for_kvstore(self) -> Any:
        """Wrap the optimizer for servers, which update parameters and assign all other keys."""
        workers = self._workers if kinds.is_distributed(self._wanted_kvstore) else None
        if not isinstance(workers, SynchronousServers) or not workers.updates:
            return self.optimizer
        checks.check_server_optimizer(self.optimizer, self.all_parameters)
        self.optimizer.rescale_grad = self._gradient_scale
        optimizer: ServerOptimizer = workers.server_optimizer(self.optimizer)
        return optimizer

    def _prepare_push(self, batch_size: float) -> float:
        """If servers update: divide the gradients here, and send new settings to the servers.

        Returns
        -------
        float
            The divisor that remains.
        """
        if not self._workers.updates:
            return batch_size
        multipliers = {
            "lr_mult": {key: p.lr_mult for key, p in enumerate(self.all_parameters)},
            "wd_mult": {key: p.wd_mult for key, p in enumerate(self.all_parameters)},
        }
        trainable = filter(_mxnet.is_trainable, self.all_parameters)
        gradients = (gradient for p in trainable for gradient in _mxnet.gradients(p))
        return self._workers.prepare_push(self.optimizer, multipliers, gradients, batch_size)

    def _check_states_are_here(self, name: str) -> None:
        """Raise if the states of the optimizer are on servers."""
        checks.check_states_are_here(self._wanted_kvstore, self._wanted_update, name)
