"""The exchange: a `gluon.Trainer` whose kvstore is ready before the first pass."""

from __future__ import annotations

import warnings
from typing import Any, Sequence

import mxnet as mx
from mxnet.ndarray import NDArray

from .. import _mxnet
from . import calls, checks, kinds
from .interface import Workers
from .launcher import number_of_workers

ALONE = (
    "This process is one of {workers} workers, and kvstore={kvstore!r} exchanges nothing with the "
    "others: each trains a model of its own. Pass kvstore='dist_sync', or 'horovod' in a job of "
    "Horovod."
)


class KVStoreTrainer(_mxnet.OpenTrainer):
    """A `gluon.Trainer` whose workers have the same weights before the first pass.

    Parameters
    ----------
    params, optimizer, optimizer_params, kvstore, compression_params, update_on_kvstore
        As for `gluon.Trainer`.
    updates_here : str, optional
        What needs the reduced gradients before the update, so that the update never runs on the
        kvstore, for messages; empty if nothing does.

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
        update = checks.where_to_update(parameters, kvstore, update_on_kvstore, updates_here)
        if not kinds.kind_of(kvstore).has_servers:  # these are created at the first use
            kvstore = kinds.created(kvstore)
        super().__init__(params, optimizer, optimizer_params, kvstore, compression_params, update)
        if kinds.kind_of(kvstore).is_alone and number_of_workers() > 1:
            text = ALONE.format(workers=number_of_workers(), kvstore=kvstore)
            warnings.warn(text, stacklevel=4)
        self._known_workers: Workers | None = None
        self._sums: NDArray | None = None  # of a few numbers over the workers

    @property
    def _workers(self) -> Workers:
        """The processes that train together. The first use connects to parameter servers.

        This is collective: no worker continues until all have called it.
        """
        if self._known_workers is None:
            self._wanted_kvstore = kvstore = kinds.created(self._wanted_kvstore)
            updates = self._wanted_update is not False
            self._known_workers = kinds.kind_of(kvstore)(
                kvstore, len(self._all_parameters), updates
            )
            self._known_workers.prepare_servers(self._optimizer_for_kvstore)
            if self._known_workers.reduces and not self._known_workers.is_alone:
                calls.begin()
        return self._known_workers

    @property
    def _num_workers(self) -> int:
        """The number of workers, 1 before the kvstore is created."""
        return 1 if self._known_workers is None else self._known_workers.size

    def _must_start_kvstore(self) -> bool:
        """Whether there may be other workers, and the weights have not been shared yet."""
        return not self._has_kvstore and not self._workers.is_alone

    def _start_shared_kvstore(self) -> None:
        """Start the kvstore before a step, if there may be other workers."""
        if self._must_start_kvstore():
            self._start_kvstore()

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
        if not self._workers.is_alone:
            self._workers.wait()
        self._workers.check_servers()

    def _allreduce_grads(self) -> None:
        calls.step()
        super()._allreduce_grads()

    def _share_weights(self) -> None:
        """Start the kvstore and give all workers the same weights, for a pass over the data."""
        self._start_kvstore()
        trainable = (
            (key, p) for key, p in enumerate(self._all_parameters) if _mxnet.is_trainable(p)
        )
        self._workers.share_weights(
            {key: _mxnet.data(p) for key, p in trainable if not _mxnet.has_sparse_values(p)}
        )

    def _optimizer_for_kvstore(self) -> Any:
        """Wrap the optimizer for servers, which update parameters and assign all other keys."""
        if not self._workers.updates:
            return self.optimizer
        checks.check_server_optimizer(self.optimizer, self._all_parameters)
        self.optimizer.rescale_grad = self._gradient_scale
        return self._workers.server_optimizer(self.optimizer)

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
            "lr_mult": {key: p.lr_mult for key, p in enumerate(self._all_parameters)},
            "wd_mult": {key: p.wd_mult for key, p in enumerate(self._all_parameters)},
        }
        trainable = filter(_mxnet.is_trainable, self._all_parameters)
        gradients = (gradient for p in trainable for gradient in _mxnet.gradients(p))
        return self._workers.prepare_push(self.optimizer, multipliers, gradients, batch_size)

    def _sum_over_workers(self, numbers: Sequence[float]) -> float | NDArray:
        """Sum a few numbers of each step over the workers; does not wait for the sums.

        Returns
        -------
        float or NDArray
            All sums, or the first number alone if there is one worker.
        """
        if self._workers.size == 1:
            return numbers[0]
        array = mx.nd.array(numbers)
        if self._sums is None:
            self._sums = mx.nd.zeros_like(array)
        # Use the same array each time, so that a worker sends no sum before the last one has
        # returned. Otherwise a server could add two pushes of one worker and none of another.
        array.copyto(self._sums)
        self._workers.sum_arrays({len(self._all_parameters): self._sums})
        return self._sums.copy()

    def _check_states_are_here(self, name: str) -> None:
        """Raise if the states of the optimizer are on servers."""
        checks.check_states_are_here(self._wanted_kvstore, self._wanted_update, name)
