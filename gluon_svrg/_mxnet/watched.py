"""Hooks into the private steps of `gluon.Trainer`."""

from __future__ import annotations

from typing import Any

from mxnet.gluon import Parameter, Trainer


class WatchedTrainer(Trainer):
    """A `gluon.Trainer` that calls hooks when gradients are reduced and when weights move.

    The parameters are those of `gluon.Trainer`.
    """

    @property
    def all_parameters(self) -> list[Parameter]:
        """The parameters, with shared ones only once."""
        return self._params

    @property
    def all_updaters(self) -> list[Any]:
        """The updaters, which hold the optimizer's states: one per device, or the kvstore's."""
        if self._kv_initialized and self._update_on_kvstore:
            return [self._kvstore._updater]
        return list(self._updaters)

    # --- what subclasses override --------------------------------------------------------------

    def on_reduced(self) -> None:
        """Called when gradients are summed over devices and workers."""

    def on_update(self) -> None:
        """Called before the optimizer moves the weights; the update can still fail."""

    def on_updated(self) -> None:
        """Called when the optimizer has moved the weights."""

    def on_not_updated(self) -> None:
        """Called when the update was skipped (mixed precision), or has raised an exception."""

    def holds_all_rows(self) -> bool:
        """Whether the network computes with sparse weights that have all their rows."""
        return False

    # --- what gluon.Trainer does ---------------------------------------------------------------

    def _allreduce_grads(self) -> None:
        super()._allreduce_grads()
        self.on_reduced()

    def _update(self, ignore_stale_grad: bool = False) -> None:
        scaler = self.__dict__.pop("_amp_loss_scaler", None)
        moves = False
        try:
            if scaler is not None and scaler.has_overflow(self._params):
                return
            self.on_update()
            super()._update(ignore_stale_grad)  # raises if a gradient is stale
            moves = True
        finally:
            if scaler is not None:
                self._amp_loss_scaler = scaler
            (self.on_updated if moves else self.on_not_updated)()

    def _row_sparse_pull(
        self, parameter: Parameter, out: Any, row_id: Any, full_idx: bool = False
    ) -> None:
        if full_idx or not self.holds_all_rows():
            super()._row_sparse_pull(parameter, out, row_id, full_idx)
