"""The step of every trainer, from the call of the closure to the optimizer."""

from __future__ import annotations

from typing import Any, Callable

import mxnet as mx
from mxnet.ndarray import NDArray

from . import checks
from .checking import CheckingTrainer
from .methods.interface import Method
from .passes.closure import Loss, check_closure
from .passes.estimate import Terms, plain
from .passes.random_lock import RandomLock


class VarianceReducedTrainer(CheckingTrainer):
    """A `gluon.Trainer` whose gradients a method corrects. Use one of its subclasses.

    It computes gradients where its method says, lets the method update its state, and passes the
    gradients to MXNet's kvstore and optimizer.

    Parameters
    ----------
    method : Method
        Decides what to add to a minibatch's gradient.
    lock_random : bool or 'auto'
        Whether both passes of a step draw the same random numbers.
    *args, **kwargs
        The arguments of `gluon.Trainer`.
    """

    def __init__(self, method: Method, lock_random: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(method, RandomLock(lock_random), *args, **kwargs)

    # --- a step --------------------------------------------------------------------------------

    def step(
        self,
        batch_size: int,
        ignore_stale_grad: bool = False,
        *,
        closure: Callable[[], Loss] | None = None,
        batch_index: int | None = None,
    ) -> Loss | None:
        """Make one step of parameter update.

        Parameters
        ----------
        batch_size : int
            The gradient, a sum over loss entries, is divided by it, as in `gluon.Trainer`.
        ignore_stale_grad : bool, default False
            Whether to continue if backward did not reach a parameter, as in `gluon.Trainer`. Such
            a parameter is still updated if its mean gradient, a part of the estimate, is not zero.
        closure : callable
            Returns the loss of this minibatch: an NDArray, or a list or tuple of them. It is
            called twice if there is a snapshot, otherwise once, and must compute the same loss each
            time. Its last call is at the current weights. Without a snapshot you may leave it out,
            after your own backward.
        batch_index : int, optional
            The position of this minibatch in the data of ``update_full_grads``, if gradients were
            stored. The closure is then called only once. Without a snapshot it has no effect.

        Returns
        -------
        NDArray, list or tuple of NDArray, or None
            What the closure returned at the current weights, before the update.

        Raises
        ------
        RuntimeError
            If there is a snapshot, but neither a closure nor an earlier call of `correct_grads`; if
            a backward has overwritten the result of `correct_grads`.
        TypeError, ValueError, IndexError, RuntimeError
            If the closure does not return a loss that depends on the parameters, or there is no
            stored gradient for it; see `correct_grads`.
        UserWarning
            If backward did not reach a parameter, as in `gluon.Trainer`.
        """
        checks.check_flag(ignore_stale_grad)
        if closure is None and batch_index is not None:
            raise TypeError("step(batch_index=...) needs the closure of that minibatch as well.")
        loss = None if closure is None else self.correct_grads(closure, batch_index=batch_index)
        if closure is None:
            self._check_intact("step")
        self._mark_reached(ignore_stale_grad)
        if self._must_start_kvstore():
            self._start_kvstore()
        if self._has_overflow_before_push():
            self._loss_scale.skip()
        else:
            try:
                super().step(self._prepare_push(batch_size), ignore_stale_grad)
            except BaseException:
                self.on_not_updated()
                raise
        self._finish_step()
        return loss

    def correct_grads(self, closure: Callable[[], Loss], *, batch_index: int | None = None) -> Loss:
        """Leave the estimate of a minibatch's gradient in `Parameter.grad`.

        This is the first half of `step`. The second half is `step` without a closure, or
        `allreduce_grads` and `update`. In between, you can clip or inspect the gradients.

        Parameters
        ----------
        closure : callable
            Returns the loss of this minibatch, as for `step`.
        batch_index : int, optional
            Its position among the stored gradients, as for `step`.

        Returns
        -------
        NDArray, or list or tuple of NDArray
            What the closure returned at the current weights.

        Raises
        ------
        TypeError
            If the closure is not callable or returns no loss; if the index is not an integer.
        IndexError
            If no gradient is stored at this index.
        ValueError
            If the loss is on a device without parameters, or depends on none of them; if its number
            of entries differs from that of the stored minibatch.
        RuntimeError
            If the closure called backward itself, assigned a parameter, or computed something else
            in its second call (see `lock_random`); inside `at_snapshot`; if parameters have changed
            in shape, dtype, device or ``grad_req`` since the snapshot; if no gradients are stored,
            or the stored one differs at the first step after a refresh.

        Warns
        -----
        UserWarning
            If both gradients differ at the first step after a refresh (``lock_random='auto'``).
        """
        check_closure(closure)
        checks.check_index(batch_index)
        self._check_outside("correct_grads")
        self._get_ready(closure)
        is_in_force = self._is_in_force()
        if self._method.needs_reduced and not any(p.grad_req == "add" for p in self.all_parameters):
            self.on_not_updated()  # an estimate that was not used is overwritten
        terms = self._method.terms(batch_index) if is_in_force else Terms()
        self._is_corrected = False
        scale = self._loss_scale.value
        if terms.is_plain:
            found = plain(self.all_parameters, closure, scale)
        else:
            found = self._estimate(closure, terms, scale)
            self._reached = [a or b for a, b in zip(found.reached, self._reached or found.reached)]
        self._loss_scale.let_optimizer_undo()
        self._entries += found.entries
        self._is_reduced = False
        self._method.estimated(batch_index, terms, found)
        self._counters.grad_evaluations += found.differentiated
        self._is_corrected = True
        return found.loss

    # --- what happens between gradients and weights --------------------------------------------

    def _mark_reached(self, ignore_stale_grad: bool) -> None:
        """Mark the live gradients as `gluon.Trainer` expects."""
        if self._reached is not None:
            self._network.show_marks(self._reached)
            self._network.show_marks(self._method.in_objective if ignore_stale_grad else ())

    def allreduce_grads(self) -> None:
        """Sum the gradients over devices and workers, as `gluon.Trainer.allreduce_grads`.

        Raises
        ------
        RuntimeError
            If `correct_grads` was not called before, or a backward has overwritten its result.
        """
        self._check_intact("allreduce_grads")
        super().allreduce_grads()

    def update(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Update the parameters, as `gluon.Trainer.update`, after `allreduce_grads`.

        Parameters
        ----------
        batch_size : int
            The divisor of the gradient.
        ignore_stale_grad : bool, default False
            As for `step`.

        Raises
        ------
        RuntimeError
            As `allreduce_grads`.
        """
        method = self._method
        is_moving = method.needs_reduced and (method.has_reference or method.needs_closure)
        if is_moving and self._is_corrected and not self._is_reduced:
            raise RuntimeError(checks.NOT_REDUCED.format(method=type(method).__name__))
        self._check_intact("update")
        self._mark_reached(ignore_stale_grad)
        super().update(batch_size, ignore_stale_grad)
        self._finish_step()

    def _finish_step(self) -> None:
        self._is_corrected, self._reached = False, None
        if self._method.has_reference:
            self._counters.inner_steps += 1

    def on_reduced(self) -> None:
        """Let the method compute its next state from V and its loss entries C."""
        if self._method.needs_reduced and self._is_corrected and not self._is_reduced:
            self._is_reduced = True
            self._check_unchanged()
            entries = self._total_entries()
            self._method.reduced(self._network, self._loss_scale.of_live_grads, entries)

    def _total_entries(self) -> float | NDArray:
        """The loss entries of the live gradients, over all workers; does not wait for them."""
        if self._workers.size == 1:
            return self._entries
        numbers = mx.nd.array([self._entries, *self._method.numbers])
        if self._total is None:
            self._total = mx.nd.zeros_like(numbers)
        # Use the same array each time, so that a worker sends no sum before the last one has
        # returned. Otherwise a server could add two pushes of one worker and none of another.
        numbers.copyto(self._total)
        self._workers.sum_arrays({len(self.all_parameters): self._total})
        return self._total.copy()

    def on_update(self) -> None:
        """Let the method see the weights before the optimizer moves them."""
        super().on_update()
        self._method.before_update(self._network)

    def on_updated(self) -> None:
        """Let the method's next state take effect."""
        self._method.updated()
        self._entries = 0
        super().on_updated()

    def on_not_updated(self) -> None:
        """Keep the method's old state."""
        self._method.not_updated()
        self._entries = 0
        self._is_corrected &= not self._method.needs_reduced  # the next state would not match them

    def holds_all_rows(self) -> bool:
        """Whether the network computes with sparse weights that have all their rows."""
        return self._network.is_elsewhere
