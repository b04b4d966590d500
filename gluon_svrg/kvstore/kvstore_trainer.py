"""The exchange: a `gluon.Trainer` whose kvstore is ready before the first pass."""

from __future__ import annotations

from typing import Any, Sequence

import mxnet as mx
from mxnet.ndarray import NDArray

from .. import _mxnet
from ..passes.watch import warn
from . import job, kinds


class KVStoreTrainer(_mxnet.OpenTrainer):
    """A `gluon.Trainer` whose workers have the same weights; `updates_here` names who updates."""

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
        job.rearm_timeout()
        parameters = kinds.parameters_of(params)
        kvstore = kinds.recognized(kvstore)
        kinds.check(parameters, kvstore, compression_params)
        update = kinds.where_to_update(parameters, kvstore, update_on_kvstore, updates_here)
        kvstore = kinds.created(kvstore)
        super().__init__(params, optimizer, optimizer_params, kvstore, compression_params, update)
        self._workers = kinds.kind_of(kvstore)(kvstore, len(self._all_parameters))
        update_there = self._workers.has_servers and update is not False
        self._servers: Any = self._workers if update_there else None
        if not self._workers.reduces:  # such servers store nothing before they have an optimizer
            kvstore.set_optimizer(self._optimizer_for_kvstore())
            self._workers.wait()
        if self._workers.is_alone and job.number_of_workers() > 1:
            warn(
                f"This is one of {job.number_of_workers()} workers, and kvstore={kvstore!r} "
                "exchanges nothing with the others. Pass 'dist_sync', or with Horovod 'horovod'."
            )

    def _finish_sending_weights(self) -> None:
        """Wait for the weights, which the first gradients overtake otherwise."""
        if not self._workers.is_alone:
            self._workers.wait()
        if self._servers is not None:
            self._servers.check()

    def _share_weights(self) -> None:
        """Start the kvstore and give all workers the same weights, for a pass over the data."""
        self._start_kvstore()
        self._workers.share_weights(self._all_parameters)

    def _optimizer_for_kvstore(self) -> Any:
        """Wrap the optimizer for servers, which update parameters and assign all other keys."""
        if self._servers is None:
            return self.optimizer
        self.optimizer.rescale_grad = self._gradient_scale
        return self._servers.wrapped(self.optimizer)

    def _prepare_push(self, batch_size: float) -> float:
        """If servers update: send them new settings, and divide here. The divisor that remains."""
        if self._servers is None:
            return batch_size
        self._servers.send_settings(self.optimizer, self._all_parameters)
        for parameter in filter(_mxnet.is_trainable, self._all_parameters):
            for gradient in map(_mxnet.classic, _mxnet.gradients(parameter)):
                gradient /= batch_size
        return 1

    def _sum_over_workers(self, numbers: Sequence[float]) -> float | NDArray:
        """Sum numbers of a step, without a wait; in one process, give the first one alone."""
        if self._workers.size == 1:
            return numbers[0]
        array = mx.nd.array(numbers)
        self._workers.sum_arrays({len(self._all_parameters): array})
        return array

    def _check_states_are_here(self, name: str) -> None:
        """Raise if the states of the optimizer are on servers, for the method of this name."""
        if self._servers is not None:
            raise RuntimeError(
                f"{name}() cannot fetch the states of the optimizer from servers. Use "
                "update_on_kvstore=False with a synchronous kvstore."
            )
