"""The base class of trainers whose methods compare a minibatch with the previous step."""

from __future__ import annotations

from typing import Any, Callable, Iterable

from .passes.closure import Loss
from .trainer import VarianceReducedTrainer


class RecursiveTrainer(VarianceReducedTrainer):
    """A trainer that keeps no table of gradients. Use one of its subclasses.

    The parameters are those of `VarianceReducedTrainer`.
    """

    needs_reduced = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counters.compared = not self._method.needs_closure

    def update_full_grads(
        self,
        closure: Callable[..., Loss],
        data: Iterable[Any],
        *,
        store_grads: bool = False,
        progress: bool = False,
        store: bool = False,
    ) -> float:
        """Start over at the current weights, with the full gradient there.

        Parameters
        ----------
        closure : callable
            Called with the items of each batch; returns the loss, as for `step`.
        data : iterable
            The whole data, or a large part of it, in batches, as for
            `SVRGTrainer.update_full_grads`.
        store_grads, store : bool, default False
            Not for this trainer.
        progress : bool, default False
            Whether to show a progress bar (needs tqdm).

        Returns
        -------
        float
            The mean loss over all loss entries, at the current weights.

        Raises
        ------
        ValueError
            If ``store_grads`` or ``store`` is true.
        TypeError, ValueError, RuntimeError, FloatingPointError
            As `SVRGTrainer.update_full_grads`.
        """
        if store_grads or store:
            raise ValueError(
                f"store_grads=True: {type(self).__name__} compares each minibatch with the step "
                "before, and has no use for stored gradients. Leave it out."
            )
        return super().update_full_grads(closure, data, progress=progress)

    def correct_grads(self, closure: Callable[[], Loss], *, batch_index: int | None = None) -> Loss:
        """Leave the estimate of a minibatch's gradient in `Parameter.grad`.

        This is the first half of `step`. The second half is `step` without a closure, or
        `allreduce_grads` and `update`. The state that changes with a step is computed from the
        result of `allreduce_grads`, before you clip it, and takes effect in `update`.

        Parameters
        ----------
        closure : callable
            Returns the loss of this minibatch, as for `step`.
        batch_index : int, optional
            Not for this trainer.

        Returns
        -------
        NDArray, or list or tuple of NDArray
            What the closure returned at the current weights.

        Raises
        ------
        TypeError
            If the closure is not callable or does not return a loss; if there is an index.
        ValueError, RuntimeError
            As `SVRGTrainer.correct_grads`.
        """
        if batch_index is not None:
            raise TypeError(
                f"batch_index names a stored gradient, and {type(self).__name__} has none. Leave "
                "it out."
            )
        return super().correct_grads(closure)
