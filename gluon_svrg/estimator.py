"""Training with Gluon's `Estimator`: the counterpart of ``SVRGModule.fit``."""

from __future__ import annotations

from typing import Any, Callable, Iterable

from mxnet.gluon.contrib.estimator import BatchProcessor
from mxnet.gluon.contrib.estimator import event_handler as events
from mxnet.gluon.utils import split_and_load

from . import _arguments, _mxnet
from .passes.data import check_data
from .passes.method import Method
from .schedule import EveryEpochs
from .trainer import VarianceReducedTrainer

__all__ = ["FullGradHandler", "SVRGBatchProcessor"]


class SVRGBatchProcessor(BatchProcessor):
    """Computes the SVRG estimate of each mini-batch, so that the `Estimator` makes a step with it.

    Use it with a `FullGradHandler` and an `SVRGTrainer` or `SARAHTrainer`; a `STORMTrainer` or
    `MARSTrainer` needs no handler.

    Examples
    --------
    >>> import numpy as np
    >>> from mxnet import gluon
    >>> from mxnet.gluon.contrib.estimator import Estimator
    >>> from gluon_svrg import SVRGTrainer
    >>> from gluon_svrg.estimator import FullGradHandler, SVRGBatchProcessor
    >>> samples = np.random.rand(20, 3).astype('float32')
    >>> labels = samples.sum(axis=1, keepdims=True)
    >>> data = gluon.data.DataLoader(gluon.data.ArrayDataset(samples, labels), batch_size=4)
    >>> net = gluon.nn.Dense(1)
    >>> net.initialize()
    >>> trainer = SVRGTrainer(net.collect_params(), 'sgd', {'learning_rate': 0.1})
    >>> estimator = Estimator(
    ...     net, gluon.loss.L2Loss(), trainer=trainer, batch_processor=SVRGBatchProcessor())
    >>> estimator.logger.setLevel('ERROR')
    >>> estimator.fit(data, epochs=4, event_handlers=[FullGradHandler(data, update_freq=2)])
    >>> trainer.num_snapshots, trainer.inner_steps
    (2, 10)
    """

    _batch: Any = None  # the mini-batch that a `FullGradHandler` has seen last

    def fit_batch(self, estimator: Any, train_batch: Any, batch_axis: int = 0) -> Any:
        """Leave the estimate in `Parameter.grad`, for the step that MXNet's handler makes."""
        if _method_of(estimator).needs_refresh and train_batch is not self._batch:
            raise RuntimeError(
                "SVRGBatchProcessor needs fit(event_handlers=[FullGradHandler(data, 1)])."
            )
        self._batch = None
        devices = _mxnet.devices_of_estimator(estimator)
        data, label = self._get_data_and_label(train_batch, devices, batch_axis)
        predictions: list[Any] = []

        def closure() -> list[Any]:
            predictions[:] = [estimator.net(x) for x in data]  # the last call is at the weights
            return [estimator.loss(y_hat, y) for y_hat, y in zip(predictions, label)]

        loss = estimator.trainer.correct_grads(closure)
        return data, label, predictions, loss

    def loss_of(self, estimator: Any, batch_axis: int) -> Callable[..., list[Any]]:
        """Make the closure for a full gradient: it takes the items of a mini-batch."""
        devices = _mxnet.devices_of_estimator(estimator)

        def closure(*batch: Any) -> list[Any]:
            data, label = self._get_data_and_label(batch, devices, batch_axis)
            return [estimator.loss(estimator.net(x), y) for x, y in zip(data, label)]

        return closure

    def _get_data_and_label(self, batch: Any, devices: Any, batch_axis: int = 0) -> Any:
        # A last mini-batch may have fewer samples than there are devices.
        devices = devices[: batch[0].shape[batch_axis]]
        return tuple(split_and_load(x, devices, batch_axis, even_split=False) for x in batch[:2])


class FullGradHandler(events.TrainBegin, events.EpochBegin, events.EpochEnd, events.BatchBegin):
    """Refreshes the snapshot when it is due, and logs the mean loss and the gradient norm.

    Parameters
    ----------
    train_data : iterable
        The whole data, usually the loader that trains the network.
    update_freq : int or refresh schedule
        The number of epochs between refreshes, counted over all calls of ``fit`` with a handler, or
        a schedule of `gluon_svrg.schedule`. If the trainer wants a snapshot, a refresh is due, too.
    progress : bool, default False
        Whether to show a progress bar for the pass over the data (needs tqdm).
    priority : int, default -3000
        The order among handlers: lower numbers run earlier.

    Raises
    ------
    TypeError, ValueError
        If the data are no iterable, or ``update_freq`` is no positive whole number or schedule.

    Examples
    --------
    `SVRGBatchProcessor` shows a complete program. A refresh at the start of each fifth epoch:

    >>> from gluon_svrg.estimator import FullGradHandler
    >>> handler = FullGradHandler([], update_freq=5)
    """

    def __init__(
        self,
        train_data: Iterable[Any],
        update_freq: Any,
        *,
        progress: bool = False,
        priority: int = -3000,
    ) -> None:
        check_data(train_data, lambda *batch: None)  # the closure comes later
        if not hasattr(update_freq, "due"):
            name = "update_freq (epochs, or a refresh schedule)"
            update_freq = EveryEpochs(_arguments.whole(update_freq, name))
        self.train_data, self.schedule = train_data, update_freq
        self.progress, self.priority = progress, priority
        self._epoch = 0  # of this call of ``fit``, as MXNet's own handlers count

    def train_begin(self, estimator: Any, *args: Any, **kwargs: Any) -> None:
        """Check that all parts are there."""
        self._epoch = 0
        _method_of(estimator)
        if not isinstance(estimator.batch_processor, SVRGBatchProcessor):
            raise RuntimeError("FullGradHandler needs batch_processor=SVRGBatchProcessor().")

    def epoch_begin(self, estimator: Any, *args: Any, **kwargs: Any) -> None:
        """With a number of epochs: refresh if one is due, or the trainer wants a snapshot."""
        if isinstance(self.schedule, EveryEpochs):
            is_time = estimator.trainer.epoch_count.epochs % self.schedule.epochs == 0
            if is_time or estimator.trainer.wants_snapshot:
                self._refresh(estimator)

    def batch_begin(self, estimator: Any, *args: Any, batch: Any = None, **kwargs: Any) -> None:
        """Note the mini-batch; with another schedule, refresh if one is due at this step."""
        estimator.batch_processor._batch = batch
        if not isinstance(self.schedule, EveryEpochs) and self.schedule.due(estimator.trainer):
            self._refresh(estimator)

    def epoch_end(self, estimator: Any, *args: Any, **kwargs: Any) -> None:
        """Count the epoch."""
        estimator.trainer.epoch_count.epochs += 1
        self._epoch += 1

    def _refresh(self, estimator: Any) -> None:
        trainer = estimator.trainer
        closure = estimator.batch_processor.loss_of(estimator, estimator.batch_axis)
        trainer.update_full_grads(closure, self.train_data, progress=self.progress)
        if trainer.has_snapshot:
            loss, norm = (trainer.history[-1][key] for key in ("mean_loss", "gradient_norm"))
            text = f"full gradient: mean loss {loss:.6f}, gradient norm {norm:.6f}"
            estimator.logger.info(f"[Epoch {self._epoch}] {text}")


def _method_of(estimator: Any) -> Method:
    """The method of an `Estimator`'s trainer; raise if there is none that it can train with."""
    trainer = estimator.trainer
    name = type(trainer).__name__
    if not isinstance(trainer, VarianceReducedTrainer):
        raise TypeError(f"Estimator(trainer=...) needs an SVRGTrainer, got {name}.")
    if trainer._method.needs_table:
        raise TypeError(f"{name} needs batch_index, which an Estimator lacks. Use SVRGTrainer.")
    return trainer._method
