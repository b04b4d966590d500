"""The trainer of all methods: what happens in a step and in a refresh, in which order."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from inspect import signature
from operator import attrgetter
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple, Sequence
from weakref import proxy

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter, Trainer
from mxnet.ndarray import NDArray

from . import _arguments, _mxnet, saving
from .kvstore import job, kinds
from .kvstore.workers import Agreement
from .passes.closure import Loss, check_closure
from .passes.columns import Columns, copy_rows, norm
from .passes.data import check_data, initialize, one_pass
from .passes.estimate import PLAIN_GRADIENT, Estimate, EstimateCoefficients, estimate
from .passes.full_pass import FullGradient, full_gradient
from .passes.method import Method
from .passes.network import ParameterBuffers, check_gradients
from .passes.pending_update import HELD, MOVED, NOTHING, REDUCED, PendingUpdate
from .passes.points import ParameterValues
from .passes.random_lock import RandomLock, losses_at
from .passes.rows import StoredGradient
from .passes.watch import MisuseWarnings
from .prox import ProxArgument, ProximalOperators

NOT_CORRECTED = (
    "{name}() needs {method} gradients: pass step(batch_size, {given}), or call "
    "correct_grads({given}) before. For the plain optimizer use gluon.Trainer, or with SARAH, and "
    "with SVRG without a preconditioner, discard_snapshot()."
)
SERVERS_SKIP_NO_STEP = (
    "AMP scales losses, and servers that update cannot skip a step that overflows. Use "
    "the defaults of 'dist_sync', or leave amp.init_trainer out."
)
#: What to do instead of passing these arguments to a trainer.
OTHER_PLACES = {
    "update_freq": " Call update_full_grads() where a refresh is due, or use FullGradHandler.",
    "store_grads": " Only a refresh takes it: update_full_grads(..., store_grads=True).",
}


class Progress:
    """The counters of a trainer, and its history: a part of a file."""

    def __init__(self) -> None:
        self.num_snapshots = 0  # over the whole training
        self.inner_steps = 0  # since the last refresh, those after which there is a reference
        self.steps = 0  # steps over the whole training
        self.grad_evaluations = 0  # loss entries that this trainer has differentiated
        self.compared = False  # whether losses need not be compared until the next refresh
        self.history: list[dict[str, Any]] = []  # what was measured at each refresh

    def state(self) -> dict[str, Any]:
        """All counters, and the history."""
        return dict(vars(self))

    def assign(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        vars(self).update(state)


class _OverflowError(Exception):
    """The full gradient is not finite, but losses are: perhaps AMP scales them too much."""


class _Held(NamedTuple):
    """What a refresh or `discard_snapshot` replaces, as a whole."""

    method: Method
    pending: PendingUpdate
    progress: Progress


class VarianceReducedTrainer(_mxnet.KVStoreTrainer):
    """A `gluon.Trainer` whose gradients a method corrects. Use one of its subclasses.

    Parameters
    ----------
    params : ParameterDict, dict, list or tuple of Parameter
        The parameters to optimize, as for `gluon.Trainer`.
    optimizer : str or Optimizer
        Any optimizer of MXNet, or registered with it.
    optimizer_params : dict, optional
        Keyword arguments of the optimizer when it is given by name.
    kvstore : str or KVStore, default 'device'
        The kvstore, as for `gluon.Trainer`. Several devices need one. An asynchronous one, and
        ``update_on_kvstore=True``, are only for `SVRGTrainer` without a preconditioner or a prox:
        others need the reduced gradient before the update.
    compression_params : dict, optional
        Gradient compression, as for `gluon.Trainer`. Only for `SVRGTrainer` without a
        preconditioner, and exact MARS.
    update_on_kvstore : bool, optional
        Where to update, as for `gluon.Trainer`; by default on the workers with ``dist_sync``,
        unless weights are row_sparse, and wherever the reduced gradient is needed before.
    lock_random : bool or 'auto', default 'auto'
        Whether both passes of a step, or all passes of a mini-batch with a row in a table, draw
        the same random numbers (dropout masks). ``'auto'`` computes the losses of the first three
        mini-batches of each refresh twice, and those of the first step that compares after it. If
        they differ, it warns, and locks from then on; under the lock, or from a gradient that a
        refresh has stored, it raises an error.
    prox : Prox or dict, optional
        A penalty or bounds of `gluon_svrg.prox`, applied on the workers after each update (with a
        preconditioner it is a part of the direction); or one for each parameter or pattern of
        names: ``{'.*weight': L1(0.01)}``.
    **own
        Arguments of the method.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type or is out of range, or does not work with the method; if
        there are several devices and no kvstore.
    RuntimeError
        If a parameter is not initialized, or the kvstore has no job of several processes.

    See Also
    --------
    mxnet.gluon.Trainer : Its attributes and methods work here.
    SVRGTrainer : Describes a refresh, and has a whole loop as its example.
    """

    _method_class: type[Method]

    def __init_subclass__(cls, **others: Any) -> None:
        super().__init_subclass__(**others)
        if "_method_class" in vars(cls) and cls.__doc__:  # and no subclass of a user
            _arguments.describe(cls)

    def __init__(
        self,
        params: Mapping[str, Parameter] | Sequence[Parameter],
        optimizer: Any,
        optimizer_params: dict[str, Any] | None = None,
        kvstore: Any = "device",
        compression_params: dict[str, Any] | None = None,
        update_on_kvstore: bool | None = None,
        *,
        lock_random: bool | str = "auto",
        prox: ProxArgument = None,
        **own: Any,
    ) -> None:
        name = type(self).__name__
        for each in own.keys() - signature(type(self)).parameters.keys():
            hint = _arguments.near(each, signature(type(self)).parameters)
            raise TypeError(f"{name} takes no argument {each!r}.{OTHER_PLACES.get(each, hint)}")
        method = self._method_class(**own)
        _mxnet.check_optimizer(optimizer, optimizer_params)
        method.check_arguments(name, optimizer, optimizer_params, compression_params)
        self._prox = ProximalOperators(prox, params, optimizer, optimizer_params)
        self._lock = RandomLock(lock_random)
        why = name if method.updates_every_step else "A prox" if prox is not None else ""
        chosen = kinds.chosen(params, kvstore, compression_params, update_on_kvstore, why)
        about = {**chosen, "compression_params": compression_params}
        super().__init__(params, optimizer, optimizer_params, **about)
        method.network = self._network = ParameterBuffers(self._all_parameters)
        method.optimizer = self.optimizer
        self._prox.operators = method.take_operators(self._prox.operators)
        self._held = _Held(method, PendingUpdate(method, self._network), Progress())
        self._registered, self._epoch_count = saving.Registered(), saving.EpochCount()
        kind = " with ".join((method.name, *method.file_signature))
        self._files = saving.StateFiles(kind, self._network.parameters, params)
        # The current weights; replaced with the network's arrays
        self._here: ParameterValues | None = None
        self._block: Any = None  # of `at_snapshot`
        self._watch = MisuseWarnings(self._workers.size, not method.sets_rate)
        self._loss_scale = _mxnet.LossScale(proxy(self))  # of AMP; keeps no trainer alive

    def __repr__(self) -> str:
        method = self._method
        about = [type(self.optimizer).__name__.lower(), *method.settings]
        if method.needs_table:
            about.append(f"{len(method.table or ())} gradients stored")
        elif method.needs_refresh and self.has_snapshot:
            about.append(f"snapshot {self.num_snapshots}, {self.inner_steps} steps since")
        elif method.needs_refresh:
            about.append("no snapshot")
        if method.coefficient is not None:
            about.append(f"coefficient {method.coefficient.value:g}")
        return f"{type(self).__name__}({', '.join(about)})"

    _method = property(attrgetter("_held.method"))
    _pending = property(attrgetter("_held.pending"))
    _progress = property(attrgetter("_held.progress"))

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
            The divisor of the gradient, which is a sum over loss entries, as in `gluon.Trainer`. A
            preconditioner learns from the first one what a sample is.
        ignore_stale_grad : bool, default False
            Whether to continue if backward did not reach a parameter, as in `gluon.Trainer`. Such
            a parameter still moves where a mean gradient is a part of the estimate.
        closure : callable
            Returns the loss of this mini-batch: an NDArray of shape ``(batch,)`` or any other, or a
            list or tuple of them, such as one for each device. It must compute the same loss each
            time: it is called twice if the method compares with other weights, last at the current
            ones, and more often where parameters are deferred, in a first step that compares, as a
            check, and in steps in which a preconditioner measures. Leave it out after
            `correct_grads`, or after your own backward where the optimizer is a plain one.
        batch_index : int, optional
            The position of this mini-batch in the data, from 0, on each worker. `SAGATrainer` and
            `SAGTrainer` always need it; `SVRGTrainer` accepts it if gradients were stored, and
            ignores it where it corrects nothing.

        Returns
        -------
        NDArray, list or tuple of NDArray, or None
            What the closure returned at the current weights, before the update.

        Raises
        ------
        TypeError, ValueError, IndexError, FloatingPointError, RuntimeError
            As `correct_grads`; if ``batch_size`` is not positive; if there is no closure although
            the method needs one; if a backward has overwritten the estimate, or, as for
            `allreduce_grads`, it was changed.
        UserWarning
            If backward did not reach a parameter, as in `gluon.Trainer`.

        Notes
        -----
        A step that raises an exception moves no weight, unless the kvstore updates and a gradient
        is stale, or an operator or optimizer of yours raises it; a preconditioner may have learned,
        rolled back or put weights inside bounds before. A step that AMP skips only counts. An
        interrupt during the update can leave some weights moved, as in `gluon.Trainer`. A gradient
        that is NaN or infinite stays in the mean gradient of SARAH, STORM, SAGA and SAG until
        `discard_snapshot` or `update_full_grads`.
        """
        if callable(ignore_stale_grad):
            raise TypeError(
                "The second argument of step() is ignore_stale_grad, as in gluon.Trainer. Pass the "
                "closure by its name: step(batch_size, closure=...)."
            )
        if type(batch_size) is not int or batch_size <= 0:  # the rest takes Python longer to tell
            _arguments.number(batch_size, "batch_size", open_low=True)
        loss = None
        if closure is not None:
            loss = self._correct(closure, batch_index, "step")
        elif batch_index is not None:
            raise TypeError("step(batch_index=...) needs the closure of that mini-batch as well.")
        else:
            self._check_intact("step")
            self._start_kvstore()
        if self._method.replaces_grads:
            self._pending.check_unchanged("step", self._loss_scale.of_grads)
        self._watch.step(self._pending.entries, batch_size)
        if self._loss_scaler is not None and self._overflows_on_kvstore():
            self._move(self._loss_scale.skip, batch_size, ignore_stale_grad)
        else:
            left = batch_size if self._servers is None else self._prepare_push(batch_size)
            self._move(super().step, left, ignore_stale_grad)
        return loss

    def correct_grads(self, closure: Callable[[], Loss], *, batch_index: int | None = None) -> Loss:
        """Leave the estimate of a mini-batch's gradient in `Parameter.grad`, to clip or inspect it.

        Then call `step` without a closure, or `allreduce_grads` and `update`. The state of a method
        follows from the estimate as it was computed. With SAG, MARS and a preconditioner,
        `allreduce_grads` replaces it by the optimizer's gradient.

        Parameters
        ----------
        closure : callable
            Returns the loss of this mini-batch, as for `step`.
        batch_index : int, optional
            The position of this mini-batch, as for `step`.

        Returns
        -------
        NDArray, or list or tuple of NDArray
            What the closure returned at the current weights.

        Raises
        ------
        TypeError, ValueError, IndexError
            If the closure is not callable, or its loss does not depend on these parameters; if the
            index is missing, not wanted, out of range, or with ``grad_req='add'`` was used since
            the last update; if the mini-batch has other loss entries than its stored gradient.
        FloatingPointError
            If a preconditioner cannot measure the curvature.
        RuntimeError
            If the closure called backward itself, or computed another loss in its second call
            (see `lock_random`); inside `at_snapshot`; if the parameters have changed since the
            snapshot; if the snapshot has no stored gradients, or the data were reshuffled.

        Warns
        -----
        UserWarning
            With ``lock_random='auto'``, if losses that are computed twice differ. If the data of a
            table look reshuffled, and at other likely misuse.
        """
        return self._correct(closure, batch_index, "correct_grads")

    def _correct(self, closure: Callable[[], Loss], batch_index: int | None, name: str) -> Loss:
        """Leave the estimate of a mini-batch in the live gradients, for `step` or for the user."""
        if batch_index is not None or self._method.needs_table:
            batch_index = self._method.checked_index(batch_index, name, type(self).__name__)
        check_closure(closure)
        self._check_outside(name)
        if self._here is None or self._files.waiting or not self._network.is_bound():
            initialize(self._network.parameters, closure, iter([()]))
            self._start_kvstore()
            self._apply_loaded()
            self._bind()
        self._pending.discard_stale()
        if self._method.sets_rate:
            self._measure(closure)
        terms = self._method.terms(batch_index, self._pending.rows)
        estimated = self._stage_estimate(closure, terms, batch_index, name)
        if self._loss_scaler is not None:
            self._loss_scale.let_optimizer_undo()
        self._progress.grad_evaluations += estimated.grad_evaluations
        if self._method.table and terms is not PLAIN_GRADIENT:
            self._watch.row(batch_index is not None)
        if len(estimated.recorded.losses) > 1:
            self._watch.losses(estimated.recorded.losses)
        return estimated.recorded.loss

    def _measure(self, closure: Callable[[], Loss]) -> None:
        """Learn from the last steps, go back where they led away, and measure the curvature."""
        preconditioner, network = self._method.preconditioner, self._network
        preconditioner.read()
        controller = preconditioner.controller
        if controller.has_diverged:
            self._roll_back(preconditioner)
        if controller.probe is None:
            return
        seed = self._lock.next_seed()  # with other dropout masks, a difference would say nothing
        with network.grads_kept(), network.outside.protected(gradients=True, search=True):
            self._progress.grad_evaluations += preconditioner.measure(closure, seed, self._workers)
        if not controller.L:
            _mxnet.forget_momentum(self._all_updaters)

    def _roll_back(self, preconditioner: Any) -> None:
        """Go on from the weights of the snapshot, or of the start, and more slowly."""
        point, network = preconditioner.origin, self._network
        copy_rows(point.weights + point.frozen, network.weights + network.frozen_values)
        _mxnet.forget_momentum(self._all_updaters)
        preconditioner.roll_back()

    def _stage_estimate(
        self, closure: Callable[[], Loss], terms: EstimateCoefficients, index: int | None, name: str
    ) -> Estimate:
        """Compute an estimate with its random numbers; add it to gradients that accumulate."""
        here, accumulating, reference = self._here, self._network.accumulating, terms.reference
        assert here is not None
        scale = 1.0 if self._loss_scaler is None else self._loss_scale.value
        before = list(map(NDArray.copy, accumulating))
        try:
            seed = self._seed_of(closure, reference)
            estimated = estimate(here, closure, terms, seed, scale)
            row = None if index is None else self._method.row(estimated, index)
            self._pending.stage_estimate(estimated, terms, row, scale, is_half=name != "step")
        except BaseException:
            for grad, value in zip(accumulating, before):
                value.copyto(grad)
            if terms is PLAIN_GRADIENT:
                self._network.put_marks_back()
            raise
        finally:
            if isinstance(reference, StoredGradient) and reference.seed is not None:
                mx.random.seed(self._lock.next_seed())  # the next draws are not the same each time
        for grad, value in zip(accumulating, before):
            grad += value
        return estimated

    def _seed_of(self, closure: Callable[[], Loss], reference: Any) -> int | None:
        """The seed of the passes of a step, if its random numbers are locked."""
        lock = self._lock
        if isinstance(reference, StoredGradient):
            if self._method.taken_at is not None:
                self._method.taken_at.check(reference, closure, lock.mode is not False)
            return lock.new_seed() if reference.seed is None else reference.seed
        if lock.mode == "auto" and reference is not None and not self._progress.compared:
            return self._compare_losses(closure, reference)
        return lock.new_seed() if lock.locked else None

    def _compare_losses(
        self, closure: Callable[[], Loss], reference: ParameterValues
    ) -> int | None:
        """The seed of a step, whose losses are compared, unless weights have left a snapshot."""
        here, lock = ParameterValues.here(self._network), self._lock
        with _kept_on_error(lock):
            is_known = self.num_snapshots > 0 and not reference.is_current()
            seed = lock.new_seed()
            while not is_known:
                with self._network.outside.protected():
                    first, second = (losses_at(here, closure, (), seed) for _ in range(2))
                is_known = lock.is_repeated(first, second)
                seed = seed if is_known else lock.new_seed()
        self._progress.compared = True
        return seed

    def allreduce_grads(self) -> None:
        """Sum the gradients over devices and workers, as `gluon.Trainer.allreduce_grads`.

        Raises
        ------
        RuntimeError
            If `correct_grads` must come before, or a backward has overwritten its result; with SAG,
            MARS and a preconditioner, if it was changed.
        """
        self._check_intact("allreduce_grads")
        if self._method.replaces_grads:
            self._pending.check_unchanged("allreduce_grads", self._loss_scale.of_grads)
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
        TypeError, ValueError
            If ``batch_size`` is not positive.
        RuntimeError
            If `correct_grads` or `allreduce_grads` must come before, or a backward has overwritten
            the estimate.
        UserWarning
            As `step`.
        """
        _arguments.number(batch_size, "batch_size", open_low=True)
        if self._pending.awaits_reduction:
            raise RuntimeError(
                "update() needs allreduce_grads() before, even on one device: there "
                f"{self._method.name} computes the optimizer's gradient, or its state."
            )
        self._check_intact("update")
        self._move(super().update, batch_size, ignore_stale_grad)

    def _move(self, update: Any, batch_size: float, ignore_stale_grad: bool) -> None:
        """Mark what is fresh, update, and count a step; if one is stale, it can be tried again."""
        pending, workers = self._pending, self._workers
        shares = ignore_stale_grad and workers.size > 1 and workers.reduces
        pending.show_marks(ignore_stale_grad, workers if shares else None)
        try:
            update(batch_size, ignore_stale_grad)
        except UserWarning:  # a gradient is stale
            if pending.stage != NOTHING:
                self._network.hide_marks()
            raise
        except BaseException:
            if pending.stage != MOVED:
                pending.drop()  # without an update, the method keeps its state
            raise
        if pending.stage != NOTHING or pending.reached:  # AMP has skipped the update
            pending.drop()
        self._progress.steps += 1
        self._progress.inner_steps += bool(self._method.has_reference)

    # `gluon.Trainer`, `KVStoreTrainer` and `gluon.Parameter` call these three.

    def _allreduce_grads(self) -> None:
        """Reduce; let the method compute its next state from V and its loss entries C."""
        pending = self._pending
        if pending.stage == REDUCED:  # as it is when a step is tried again
            return
        super()._allreduce_grads()
        if not pending.awaits_reduction:
            pending.stage = REDUCED if pending.stage == HELD else pending.stage
        else:
            entries = self._sum_over_workers([pending.entries, *self._method.numbers(pending.rows)])
            pending.reduce(self._loss_scale.of_grads, entries, self._workers.sum_arrays)

    def _run_update(self, update: Callable[[], None]) -> None:
        """Update, with the optimizer as the method wants it; then its next state takes effect."""
        if self._prox.operators:
            self._prox.note_moving(self._network.parameters)
        next_state = self._pending.next_state
        # A mini-batch without losses has no next state, but a preconditioner still sets the rate.
        is_prepared = next_state is not None or self._method.sets_rate
        try:
            if is_prepared:
                self._method.before_update(next_state, self._loss_scale.of_grads)
            update()  # raises if a gradient is stale
        finally:
            if is_prepared:
                self._method.after_update()
        self._pending.commit()
        if self._prox.operators:
            self._prox.apply(self._network.parameters, self.optimizer)

    def _row_sparse_pull(self, p: Any, out: Any, row_id: Any, full_idx: bool = False) -> None:
        """Pull rows, unless the network computes elsewhere: weights there have all of them."""
        if full_idx or self._network.at is None or not self._network.at.is_elsewhere:
            super()._row_sparse_pull(p, out, row_id, full_idx)

    # --- before a step -------------------------------------------------------------------------

    def _bind(self) -> None:
        """Bind to the current arrays of the parameters; raise if the reference does not fit."""
        if self._here is not None and self._network.is_bound():
            return
        difference = self._network.difference() if self._method.has_state else ""
        if difference:
            raise RuntimeError(
                f"The parameters have changed since the snapshot: {difference}. Take a new one "
                "with update_full_grads(), or call discard_snapshot()."
            )
        self._here = None  # until all is bound
        if self._method.has_reference or self._method.needs_closure:
            check_gradients(self._network.parameters)
        self._network.bind()
        self._method.bind()
        self._here = ParameterValues.here(self._network, moves_states=True)

    def _is_in_force(self) -> bool:
        """Whether the method has a reference now."""
        self._apply_loaded()
        return bool(self._method.has_reference)

    def _check_intact(self, name: str) -> None:
        """Raise if `correct_grads` must come before, or its gradients were overwritten."""
        self._check_outside(name)
        method = self._method
        if self._pending.stage == NOTHING and (self._is_in_force() or method.needs_closure):
            given = "closure=..., batch_index=..." if method.needs_table else "closure=..."
            raise RuntimeError(NOT_CORRECTED.format(name=name, method=method.name, given=given))
        self._pending.check_intact(name)

    def _check_outside(self, name: str) -> None:
        """Raise if the trainer must not be called here; a job's time-out begins anew."""
        job.rearm_timeout()
        network = self._network
        if self._servers is not None and self._loss_scaler is not None:
            raise RuntimeError(SERVERS_SKIP_NO_STEP)
        if mx.autograd.is_recording():
            raise RuntimeError(
                f"{name}() was called inside `with autograd.record()`. Take it out of the block."
            )
        if network.at is not None and self._block is not None and self._block.gi_frame:
            raise RuntimeError(
                f"{name}() was called inside `with trainer.at_snapshot()`. Call it after the block."
            )
        if network.at or network.kept or _mxnet.notes or self._pending.stage == MOVED:
            # An interrupt has ended the last call, or this is another thread's.
            network.come_back()
            _mxnet.end_notes()
            if self._pending.stage == MOVED:
                self._pending.commit()

    def _overflows_on_kvstore(self) -> bool:
        """Whether gradients must not reach a kvstore that would update with them."""
        self._start_kvstore()
        if not self._updates_on_kvstore:
            return False  # `KVStoreTrainer` looks at them, after they are reduced
        trainable = filter(_mxnet.is_trainable, self._network.parameters)
        return not np.isfinite(norm(grad for p in trainable for grad in _mxnet.gradients(p)))

    # --- a refresh -----------------------------------------------------------------------------

    def update_full_grads(
        self,
        closure: Callable[..., Loss],
        data: Iterable[Any],
        *,
        store_grads: bool = False,
        progress: bool = False,
    ) -> float:
        """Take a snapshot of the parameters and compute the full gradient there.

        Parameters
        ----------
        closure : callable
            Called with the items of each batch. Returns the loss, as for `step`.
        data : iterable
            The whole data. A batch that is a tuple or list is unpacked, ``closure(*batch)``; any
            other is passed unchanged. A method ``reset``, as of `mx.io.DataIter`, is called before
            and after the pass.
        store_grads : bool, default False
            Whether to keep the gradient of each mini-batch, by its position in the data, so that
            ``step(..., batch_index=i)`` takes one gradient instead of two. For small models and
            fixed mini-batches: it needs the memory of all gradients, twice during a refresh.
        progress : bool, default False
            Whether to show a progress bar (needs tqdm), with the memory of stored gradients.

        Returns
        -------
        float
            The mean loss over all loss entries, at the snapshot. If the coefficient's schedule is
            over (`gluon_svrg.schedule.Until`), there is no pass and no snapshot, and this is nan.

        Raises
        ------
        TypeError, ValueError, RuntimeError
            As `correct_grads`; if there are no mini-batches, or no gradients; if another worker
            fails.
        FloatingPointError
            If the full gradient is not finite. With a preconditioner, if that is due to steps, the
            weights go back instead.
        ImportError
            With ``progress=True``, if tqdm is not installed.

        Warns
        -----
        UserWarning
            With ``lock_random='auto'``, if losses that are computed twice differ; at likely misuse.

        Notes
        -----
        The pass waits for the device rarely, and at each mini-batch whose loss it computes twice:
        with ``lock_random='auto'`` the first three, with a preconditioner sometimes all. The
        gradients in `Parameter.grad` do not change. After an exception, nothing has changed, except
        that parameters may be initialized or come from the servers, what was loaded is applied, a
        snapshot of arrays that were replaced is dropped, and with a preconditioner weights are
        inside their bounds. With SVRG
        the snapshot needs three times the memory of the parameters in addition, four times at the
        peak of the pass, and a copy of the frozen ones.
        """
        check_data(data, closure)
        stored = _arguments.flag(store_grads, "store_grads")
        if stored and not self._method.can_store_grads:
            raise ValueError(
                f"{type(self).__name__} has no use for stored gradients. Leave store_grads out."
            )
        self._check_outside("update_full_grads")
        if self._is_over():
            self.discard_snapshot()
            return float("nan")
        keeps_rows = stored or self._method.needs_table
        with _kept_on_error(self._lock, self._loss_scaler):
            while True:
                try:
                    return self._refresh(closure, data, progress, keeps_rows)
                except _OverflowError:
                    self._loss_scale.halve(data)

    def _refresh(
        self, closure: Callable[..., Loss], data: Iterable[Any], progress: bool, keeps_rows: bool
    ) -> float:
        """Make a pass over the data, and hold all of its results or none."""
        network, parameters = self._network, self._network.parameters
        coefficient = self._method.coefficient
        alpha = None if coefficient is None else coefficient.at(self.num_snapshots)
        with ExitStack() as stack:
            ready = stack.enter_context(Agreement(self._workers))
            batches, bar = stack.enter_context(one_pass(data, progress=progress))
            batches = initialize(parameters, closure, job.rearming(batches))
            check_gradients(parameters)
            ready.reach([0.0])
            done = stack.enter_context(Agreement(self._workers))
            self._share_weights()
            self._apply_loaded()  # otherwise it would overwrite this snapshot later
            if self._method.has_state and network.difference():
                self._method.discard()  # its snapshot has other arrays
                self._progress.inner_steps = 0
            self._bind()
            if keeps_rows and bar is not None:
                bar.set_postfix_str(_memory_of_rows(network.grads, bar.total))
            origin, compares = self._method.prepare_refresh(self._lock.locked)
            stack.enter_context(network.grads_kept())
            about = self._lock, self._loss_scale.value, done, keeps_rows, origin, compares
            full = full_gradient(network, closure, batches, *about)
        self._watch.refresh(full.entries, full.first_shape)
        network.give_spare([])  # the snapshot takes its memory
        is_scaled = self._loss_scale.value > 1 and np.isfinite(full.mean_loss)
        if is_scaled and not np.isfinite(full.norm):
            raise _OverflowError
        method = copy(self._method)
        accepted = method.accepts(full)
        if not accepted:
            self._roll_back(method.preconditioner)
        self._held = self._after(method, full, alpha, accepted)
        return float(self._progress.history[-1]["mean_loss"])

    def _after(
        self, method: Method, full: FullGradient, alpha: float | None, accepted: bool
    ) -> _Held:
        """What is held after a refresh, apart from what is held now."""
        progress = copy(self._progress)
        if accepted:
            method.refresh(full)
            progress.num_snapshots += 1
        else:
            method.refuse()
        if alpha is not None:
            method.coefficient = copy(method.coefficient)
            method.coefficient.set(alpha)
        progress.inner_steps, progress.compared = 0, False
        progress.grad_evaluations += full.entries
        line = {
            "data_passes": progress.grad_evaluations / full.entries,
            "steps": progress.steps,
            "mean_loss": full.mean_loss,
            "gradient_norm": full.norm,
            "learning_rate": float(self.learning_rate),
            "coefficient": alpha,
        }
        line.update(method.end_epoch())
        if not accepted:  # the line is of the snapshot, as the one before
            earlier = progress.history[-1:] if method.has_state else []
            line["gradient_norm"] = earlier[0]["gradient_norm"] if earlier else None
        progress.history = [*progress.history, line]
        return _Held(method, PendingUpdate(method, self._network), progress)

    def _is_over(self) -> bool:
        """Whether no more refreshes will be made."""
        coefficient = self._method.coefficient
        return coefficient is not None and coefficient.is_over(self.num_snapshots)

    # --- the snapshot --------------------------------------------------------------------------

    def at_snapshot(self) -> AbstractContextManager[None]:
        """Let the network compute at the snapshot, inside a ``with`` block.

        Its parameters have the values of `snapshot`; with SVRG, frozen values and auxiliary states
        as well. Do not assign values in the block. A backward writes gradients as usual.

        Returns
        -------
        context manager

        Raises
        ------
        RuntimeError
            Without a snapshot, and inside another such block.
        """
        self._check_outside("at_snapshot")
        block = self._computing_at_snapshot()
        self._block = block.gen
        return block

    @contextmanager
    def _computing_at_snapshot(self) -> Iterator[None]:
        point = self._method.point if self._is_in_force() else None
        if point is None:
            raise RuntimeError(f"at_snapshot() needs a snapshot, and {self!r} has none now.")
        self._bind()
        try:
            point.enter()
            yield
        finally:
            point.leave()
            self._network.note_overwritten(_mxnet.take_fresh(point.weights))

    def discard_snapshot(self) -> None:
        """Go back to the plain optimizer, and free the memory of the snapshot or of the table.

        SAGA, SAG, STORM and MARS, which need no refresh, start over, and so does a preconditioner.
        """
        self._check_outside("discard_snapshot")
        method, progress = copy(self._method), copy(self._progress)
        method.discard()
        progress.inner_steps = 0
        self._held = _Held(method, PendingUpdate(method, self._network), progress)
        self._here = None
        self._network.release()
        self._files.discard_method(self._parts())

    @property
    def has_snapshot(self) -> bool:
        """Whether there is a snapshot; a loaded one may wait until parameters are initialized.

        For STORM and MARS: whether there was a step or a refresh.
        """
        has_one = self._method.has_reference or "method" in self._files.waiting
        return bool(has_one) and not self._method.needs_table

    @property
    def wants_snapshot(self) -> bool:
        """Whether there is no snapshot, and the schedule wants one; False for SAGA and SAG."""
        return not (self.has_snapshot or self._method.needs_table or self._is_over())

    @property
    def snapshot(self) -> dict[Parameter, list[NDArray]] | None:
        """Copies of the snapshot's values, per parameter and device. None without a snapshot.

        While a loaded one waits for the parameters, this raises a RuntimeError. For SARAH, STORM
        and exact MARS these are the weights before the last step, without frozen ones.
        """
        point = self._method.point if self._is_in_force() else None
        if point is None:
            return None
        parameters = self._network.trainable + self._network.frozen
        values = zip(parameters, point.weights + (point.frozen or []))
        return {parameter: [v.copy() for v in row] for parameter, row in values}

    @property
    def full_grads(self) -> dict[Parameter, list[NDArray]] | None:
        """Copies of the full gradient, per parameter and device. None without one.

        It is the *mean* over the loss entries of all data, or the method's estimate of it, in
        float32 for float16 parameters. While a loaded one waits, it raises an error as `snapshot`.
        """
        mean = self._method.mean if self._is_in_force() and self._method.has_state else None
        if mean is None:
            return None
        divisor, rows = mean.divisor(), zip(self._network.trainable, zip(*mean.sums))
        return {
            parameter: [_mxnet.like(total / divisor, _mxnet.data(parameter)[0]) for total in sums]
            for parameter, sums in rows
        }

    # --- counters and settings -----------------------------------------------------------------

    @property
    def num_snapshots(self) -> int:
        """The number of accepted refreshes."""
        return self._progress.num_snapshots

    @property
    def inner_steps(self) -> int:
        """The number of steps since the last refresh or `discard_snapshot`.

        For SVRG and SARAH it is 0 without a snapshot.
        """
        return self._progress.inner_steps

    @property
    def grad_evaluations(self) -> int:
        """The number of loss entries that this trainer has differentiated, not in failed passes.

        Divide it by the size of the worker's data for the number of data passes.
        """
        return self._progress.grad_evaluations

    @property
    def history(self) -> list[dict[str, float | None]]:
        """A dict for each refresh: ``pandas.DataFrame(trainer.history)`` makes a table of them.

        It has ``data_passes`` (gradient evaluations so far, divided by the loss entries of the
        pass), ``steps`` so far, ``mean_loss`` and ``gradient_norm`` (of the full gradient) at the
        snapshot, ``learning_rate``, and ``coefficient`` (or None). With a preconditioner it also
        has ``momentum``, ``objective`` (the lowest mean loss with weight decay and penalties),
        ``curvature`` (L), ``noise`` (N), and ``went_back``: the number of rollbacks since the
        last refresh. After a refused refresh, it describes the last snapshot; without one,
        ``gradient_norm`` is None.
        """
        return [dict(line) for line in self._progress.history]

    @property
    def learning_rate(self) -> float:
        """The optimizer's learning rate. Can be set without a scheduler or a preconditioner."""
        return Trainer.learning_rate.fget(self)

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.set_learning_rate(value)

    @property
    def lock_random(self) -> bool | str:
        """Whether both passes of a step draw the same random numbers. Can be set."""
        return self._lock.mode

    @lock_random.setter
    def lock_random(self, value: bool | str) -> None:
        self._lock = RandomLock(value)
        self._progress.compared = False

    def save_states(self, fname: str | os.PathLike[str]) -> None:
        """Save the complete state of training, except the weights, to a file.

        That is the optimizer with its states and scheduler, the snapshot, the full gradient, stored
        gradients, what a preconditioner has learned, counters and history, schedules, the random
        lock, and AMP's loss scaler. With the weights (``net.save_parameters``), training resumes to
        the last bit, even in mid-epoch, if random numbers are locked where the network draws them.

        Parameters
        ----------
        fname : str or path
            The file. If saving is interrupted, the old one or the new one is complete.

        Raises
        ------
        TypeError
            If an attribute of an optimizer, scheduler or schedule cannot be saved, see `register`.
        OSError
            If the file cannot be written.

        See Also
        --------
        export_optimizer_states : The part that `gluon.Trainer` can load.
        """
        self._check_outside("save_states")
        self._check_states_are_here("save_states")
        if self._is_ready:
            self._apply_loaded()
        self._files.save(fname, self._parts())

    def load_states(self, fname: str | os.PathLike[str]) -> None:
        """Load a file of `save_states` or of `gluon.Trainer.save_states`.

        This works before the first step and with deferred parameters, before or after the weights
        are loaded. A file of `gluon.Trainer` has no snapshot, so there is none afterwards.

        Parameters
        ----------
        fname : str or path
            The file. Parameters are matched by name, or those of `gluon.Trainer` by position.
            Loading runs no code of the file, but a crafted one may use up the memory, or raise any
            exception.

        Raises
        ------
        ValueError
            If the file is damaged or of another kind, or does not fit the parameters, the
            optimizer or the schedules of this trainer; nothing changes then.
        OSError
            If the file cannot be read.
        """
        self._check_outside("load_states")
        self._check_states_are_here("load_states")
        if "counters" not in self._files.load(fname, self._parts()):
            self._progress.inner_steps = 0  # of gluon.Trainer
        self._pending.drop()
        self._method.discard()
        self._here = None  # what was discarded is bound again

    def export_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Save the part of the state that `gluon.Trainer.load_states` can load.

        Parameters
        ----------
        fname : str or path
            The file, as for `save_states`.

        Raises
        ------
        RuntimeError
            If parameters are not initialized yet.
        OSError
            If the file cannot be written.
        """
        self._check_outside("export_optimizer_states")
        self._check_states_are_here("export_optimizer_states")
        self._start_kvstore()
        self._apply_loaded()
        saving.write_bytes(fname, self._all_updaters[0].get_states(dump_optimizer=True))

    def register(self, schedule: Any) -> None:
        """Save and load the state of a schedule, or of a sampler, together with this trainer's.

        Refresh schedules of `gluon_svrg.schedule` that have a state register themselves at the
        first call of ``due``.

        Parameters
        ----------
        schedule : object
            Its attributes are saved, except functions. They must be numbers, strings, None, arrays
            of NumPy or MXNet, lists, tuples and dicts of these, or coefficient schedules. Several
            schedules of one class are told apart by their settings, or else by their order.

        Raises
        ------
        ValueError
            If its saved state does not fit.
        """
        self._registered.add(schedule)

    @property
    def epoch_count(self) -> saving.EpochCount:
        """The epochs of an `Estimator` with a `FullGradHandler`, over all its fits; saved."""
        self._registered.add(self._epoch_count)
        return self._epoch_count

    @property
    def _is_ready(self) -> bool:
        """Whether all parameters are initialized."""
        return all(map(_mxnet.has_data, self._network.parameters))

    def _parts(self) -> dict[str, Any]:
        """All parts of a file."""
        optimizer, parameters = self.optimizer, self._network.parameters
        parts = {
            "optimizer": saving.OptimizerSettings(optimizer, parameters),
            "counters": self._progress,
            "lock": self._lock,
            "coefficient_schedule": self._method.coefficient,
            "schedules": self._registered,
            "scaler": self._loss_scale,
            "optimizer_states": saving.OptimizerStates(optimizer, self._all_updaters, parameters),
            "method": self._method,
            "preconditioner": self._method.preconditioner,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def _apply_loaded(self) -> None:
        """Apply what was loaded, once the parameters are initialized; raise if a snapshot waits."""
        if not self._files.waiting:
            return
        if self._is_ready:
            self._start_kvstore()
            self._bind()
            self._files.apply(self._parts())
        if "method" in self._files.waiting:
            raise RuntimeError(
                "The snapshot that was loaded waits for the parameters to be initialized: load "
                "them, run a forward pass, or take a step with a closure."
            )


@contextmanager
def _kept_on_error(*parts: Any) -> Iterator[None]:
    """Put the attributes that parts have, if there are such parts, back if the block raises."""
    before = [(vars(part), dict(vars(part))) for part in filter(None, parts)]
    try:
        yield
    except BaseException:
        for attributes, earlier in before:
            attributes.update(earlier)
        raise


def _memory_of_rows(grads: Columns, count: int | None) -> str:
    """The memory of stored gradients, for a progress bar."""
    each = sum(max(np.dtype(x.dtype).itemsize, 4) * x.size for column in grads for x in column)
    return f"storing {each * (count or 1) / 1e6:.3g} MB" + ("" if count else " each")
