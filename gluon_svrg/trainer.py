"""The trainer of all methods: what happens in a step and in a refresh, in which order."""

from __future__ import annotations

import os
from collections import deque
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Callable, Iterable

from mxnet.gluon import Parameter, Trainer
from mxnet.ndarray import NDArray

from . import _arguments, _mxnet, checks, saving
from .loading import LoadedStates
from .methods.at_work import MethodAtWork
from .methods.interface import Method
from .methods.live_gradients import NOTHING, LiveGradients
from .methods.table import Table
from .passes.batches import check_data, initialize, one_pass
from .passes.closure import Loss, check_closure
from .passes.entries import all_finite
from .passes.estimate import Terms
from .passes.full_pass import FullGradient
from .passes.interrupts import uninterrupted
from .passes.network import check_dtypes
from .prox import ProxArgument, ProximalOperators
from .registered import EpochCount, Registered
from .stores import calls
from .stores.agreement import agreement
from .stores.kvstore_trainer import KVStoreTrainer


class VarianceReducedTrainer(KVStoreTrainer):
    """A `gluon.Trainer` whose gradients a method corrects. Use one of its subclasses.

    It says what happens in which order. Its parts own what they change: the method at work, what
    the live gradients hold, the proximal operators, and states that were loaded. The kvstore is
    that of its base class.

    Parameters
    ----------
    method : Method
        Decides what to add to a minibatch's gradient.
    lock_random : bool or 'auto'
        Whether both passes of a step draw the same random numbers.
    params, optimizer, optimizer_params, kvstore, compression_params, update_on_kvstore
        As for `gluon.Trainer`.
    prox : Prox, dict or None
        The operators to apply after each update.
    """

    def __init__(
        self,
        method: Method,
        lock_random: Any,
        params: Any,
        optimizer: Any,
        optimizer_params: Any,
        kvstore: Any,
        compression_params: Any,
        update_on_kvstore: Any,
        prox: ProxArgument = None,
    ) -> None:
        name = type(self).__name__
        method.check_compression(compression_params, name)
        self._prox = ProximalOperators(prox, params, optimizer, optimizer_params)
        super().__init__(
            params,
            optimizer,
            optimizer_params,
            kvstore,
            compression_params,
            update_on_kvstore,
            name if method.needs_reduced else "A prox" if prox is not None else "",
        )
        self._work = MethodAtWork(method, lock_random, self._all_parameters)
        self._live = LiveGradients(method, self._work.network)
        self._loaded = LoadedStates(params)
        self._registered = Registered()

    def __repr__(self) -> str:
        method, counters = self._work.method, self._work.counters
        about = [type(self.optimizer).__name__.lower(), *method.settings]
        if method.needs_table:
            about.append(f"{len(method.table or ())} gradients stored")
        elif method.needs_refresh and self.has_snapshot:
            about.append(f"snapshot {self.num_snapshots}, {counters.inner_steps} steps since")
        elif method.needs_refresh:
            about.append("no snapshot")
        if method.coefficient is not None:
            about.append(f"coefficient {method.coefficient.value:g}")
        return f"{type(self).__name__}({', '.join(about)})"

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
            Returns the loss of this minibatch: an NDArray, or a list or tuple of them. It must
            compute the same loss each time, and its last call is at the current weights. It is
            called twice if the method compares with other weights; once if it does not, or there is
            nothing to compare with; and up to twice more in the first step after a refresh, which
            is checked. You may leave it out after `correct_grads`, and after your own backward
            where the trainer is the plain optimizer.
        batch_index : int, optional
            The position of this minibatch in the data, from 0, on each worker. `SAGATrainer` and
            `SAGTrainer` always need it; `SVRGTrainer` takes it if gradients were stored.

        Returns
        -------
        NDArray, list or tuple of NDArray, or None
            What the closure returned at the current weights, before the update.

        Raises
        ------
        RuntimeError
            If the method needs an estimate, but there is neither a closure nor an earlier call of
            `correct_grads`; if a backward has overwritten the result of `correct_grads`.
        TypeError, ValueError
            If ``batch_size`` is no positive number.
        TypeError, ValueError, IndexError, MemoryError, RuntimeError
            As `correct_grads`.
        UserWarning
            If backward did not reach a parameter, as in `gluon.Trainer`.

        Notes
        -----
        What changes with a step takes effect when the update has run. A step that raises an
        exception, or that AMP skips, changes nothing. A gradient that is NaN or infinite stays in
        the mean gradient of SARAH, STORM and approximate MARS, and in the table of SAGA and SAG,
        until `discard_snapshot` or `update_full_grads`: `full_grads` and `gluon_svrg.variance` show
        it.
        """
        checks.check_not_closure(ignore_stale_grad)
        checks.check_batch_size(batch_size)
        loss, live, loss_scale = None, self._live, self._loss_scale
        if closure is not None:
            checked_index = self._work.method.checked_index
            batch_index = checked_index(batch_index, "step", type(self).__name__)
            loss = self._correct(closure, batch_index, loss_scale, is_half=False)
        elif batch_index is not None:
            raise TypeError("step(batch_index=...) needs the closure of that minibatch as well.")
        else:
            self._check_intact("step")
            self._start_shared_kvstore()
        live.check_unchanged("step", loss_scale.of_live_grads)
        if live.entries == 1 and batch_size > 1:
            self._work.check_batch_size(batch_size, self._num_workers)
        live.show_marks(ignore_stale_grad)
        if loss_scale.is_on and self._overflows_on_kvstore():
            loss_scale.skip()
        else:
            try:
                super().step(self._prepare_push(batch_size), ignore_stale_grad)
            except BaseException:
                self._on_not_updated()
                raise
        self._finish_step()
        return loss

    def correct_grads(self, closure: Callable[[], Loss], *, batch_index: int | None = None) -> Loss:
        """Leave the estimate of a minibatch's gradient in `Parameter.grad`.

        This is the first half of `step`. The second half is `step` without a closure, or
        `allreduce_grads` and `update`. In between, you can clip or inspect the gradients. A state
        that changes with a step is computed from the result of `allreduce_grads`, before you clip
        it, and takes effect in `update`. With SAG, the optimizer's gradient exists only after
        `allreduce_grads`.

        Parameters
        ----------
        closure : callable
            Returns the loss of this minibatch, as for `step`.
        batch_index : int, optional
            The position of this minibatch, as for `step`.

        Returns
        -------
        NDArray, or list or tuple of NDArray
            What the closure returned at the current weights.

        Raises
        ------
        TypeError
            If the closure is not callable or returns no loss; if the index is missing, is not
            wanted, or is not an integer.
        IndexError
            If no gradient is stored at this index.
        ValueError
            If the loss is on a device without parameters, or depends on none of them; if its number
            of entries differs from that of the stored minibatch; if the index of a table was
            already used since the last update and gradients accumulate (``grad_req='add'``).
        MemoryError
            If there is no memory for another row of a table.
        RuntimeError
            If the closure called backward itself, assigned a parameter, or computed something else
            in its second call (see `lock_random`); inside `at_snapshot`; if parameters have changed
            in shape, dtype, device or ``grad_req`` since the snapshot; if no gradients are stored,
            or the stored one differs at the first step after a refresh (unless
            ``lock_random=False``).

        Warns
        -----
        UserWarning
            If both gradients differ at the first step after a refresh (``lock_random='auto'``).
        """
        checked_index = self._work.method.checked_index
        batch_index = checked_index(batch_index, "correct_grads", type(self).__name__)
        return self._correct(closure, batch_index, self._loss_scale, is_half=True)

    def _correct(
        self,
        closure: Callable[[], Loss],
        batch_index: int | None,
        loss_scale: _mxnet.LossScale,
        *,
        is_half: bool,
    ) -> Loss:
        """Compute an estimate; the user has the other half of the step if this is one half."""
        check_closure(closure)
        self._check_outside("correct_grads" if is_half else "step")
        is_in_force = self._start_with(closure)
        work, live, scale = self._work, self._live, loss_scale.value
        before = live.make_room(is_half=is_half)
        terms = work.method.terms(batch_index, live) if is_in_force else Terms()
        try:
            found = work.estimate(closure, terms, scale)
            loss_scale.let_optimizer_undo()
            live.hold(batch_index, terms, found, before, scale)
        except Exception:
            raise  # what was held is as before
        except BaseException:
            live.drop()  # an interrupt may have come before it was known what they hold
            raise
        work.look_at(found, has_schedule=self._registered.has_refreshes)
        return found.loss

    def allreduce_grads(self) -> None:
        """Sum the gradients over devices and workers, as `gluon.Trainer.allreduce_grads`.

        Raises
        ------
        RuntimeError
            If `correct_grads` was not called before, or a backward has overwritten its result.
        """
        self._check_intact("allreduce_grads")
        self._live.check_unchanged("allreduce_grads", self._loss_scale.of_live_grads)
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
        checks.check_batch_size(batch_size)
        self._live.check_reduced()
        self._check_intact("update")
        self._live.show_marks(ignore_stale_grad)
        super().update(batch_size, ignore_stale_grad)
        self._finish_step()

    # `gluon.Trainer` calls these, in this order, in a step.

    def _on_reduced(self) -> None:
        """Let the method compute its next state from V and its loss entries C."""
        live, work = self._live, self._work
        if live.awaits_reduction:
            work.check_unchanged()
            entries = self._sum_over_workers([live.entries, *work.method.numbers(live)])
            live.reduce(self._loss_scale.of_live_grads, entries, self._workers.sum_arrays)

    def _on_update(self) -> None:
        """Let the parts see the weights before the optimizer moves them."""
        self._prox.note_moving(self._work.network.parameters)
        self._live.prepare_update()

    def _on_updated(self) -> None:
        """Let the method's next state take effect, and apply the proximal operators."""
        self._live.end()
        if self._prox.are_moving:
            self._prox.apply(self._work.network.parameters, self.optimizer)

    def _on_not_updated(self) -> None:
        """Keep the method's old state."""
        self._live.drop_next_state()

    def _has_all_rows(self) -> bool:
        """Whether the network computes with sparse weights that have all their rows."""
        return self._work.network.is_elsewhere

    def _finish_step(self) -> None:
        self._live.drop()  # of a step that was skipped
        self._work.count_step()

    # --- before a step -------------------------------------------------------------------------

    def _start_with(self, closure: Callable[[], Any]) -> bool:
        """Prepare a pass: parameters, kvstore, and a snapshot that fits the parameters.

        Returns
        -------
        bool
            Whether the method corrects gradients now.
        """
        work = self._work
        is_new = work.method.has_reference and not work.is_bound
        if is_new or self._loaded.is_waiting or self._must_start_kvstore():
            deque(initialize(work.network.parameters, closure, iter([()])))
            self._start_kvstore()
        is_in_force = self._is_in_force()
        if is_in_force:
            work.check_unchanged()
        return is_in_force

    def _is_in_force(self) -> bool:
        """Whether the method corrects gradients now."""
        self._apply_loaded()
        return self._work.method.has_reference

    def _check_intact(self, name: str) -> None:
        """Raise unless the live gradients hold what `correct_grads` left."""
        self._check_outside(name)
        self._work.bind_copy()
        method = self._work.method
        if self._live.stage == NOTHING and (self._is_in_force() or method.needs_closure):
            raise RuntimeError(method.not_corrected.format(name=name, method=type(method).__name__))
        self._live.check_intact(name)

    def _check_outside(self, name: str) -> None:
        """Raise if the trainer must not be called here."""
        if _mxnet.is_recording():
            raise RuntimeError(
                f"{name}() was called inside `with autograd.record()`. Take it out of the block: "
                "the trainer records what the closure computes by itself."
            )
        if self._work.is_at_snapshot:
            raise RuntimeError(
                f"{name}() was called inside `with trainer.at_snapshot()`, where the network "
                "computes with other weights. Call it after the block."
            )

    def _overflows_on_kvstore(self) -> bool:
        """Whether gradients must not reach a kvstore that would update with them."""
        self._start_kvstore()
        if not self._updates_on_kvstore:
            return False  # MXNet looks at them itself, after they are reduced
        trainable = filter(_mxnet.is_trainable, self._work.network.parameters)
        return not all_finite(grad for p in trainable for grad in _mxnet.gradients(p))

    # --- a refresh -----------------------------------------------------------------------------

    def update_full_grads(
        self,
        closure: Callable[..., Loss],
        data: Iterable[Any],
        *,
        store_grads: bool = False,
        progress: bool = False,
        store: bool = False,
    ) -> float:
        """Take a snapshot of the parameters and compute the full gradient there.

        Parameters
        ----------
        closure : callable
            Called with the items of each batch, and by checks again with those of the first ones;
            returns the loss, as for `step`.
        data : iterable
            The whole data. A batch that is a tuple or list is unpacked, ``closure(*batch)``; any
            other is passed unchanged, ``closure(batch)``. If the data has a method ``reset``, as
            `mx.io.DataIter` has, it is called before and after the pass.
        store_grads : bool, default False
            Whether to keep the gradient of each minibatch, by its position in the data, so that
            ``step(..., batch_index=i)`` takes one gradient instead of two. Use it for small models
            and fixed minibatches: it takes the memory of the gradients once for each minibatch,
            and twice during a refresh.
        progress : bool, default False
            Whether to show a progress bar (needs tqdm), with the memory of stored gradients.
        store : bool, default False
            The same as ``store_grads``.

        Returns
        -------
        float
            The mean loss over all loss entries, at the snapshot. If the coefficient's schedule is
            over (`gluon_svrg.schedule.Until`), there is no pass and no snapshot, and this is nan.

        Raises
        ------
        TypeError, ValueError, RuntimeError
            As `correct_grads`. TypeError if the data is a Dataset or one minibatch, whose items are
            no minibatches, or if ``store_grads`` is neither True nor False. ValueError if there is
            no data or no parameter with gradients. RuntimeError if a parameter is not initialized,
            or no minibatch initializes it, or if another worker has failed.
        FloatingPointError
            If the full gradient is not finite.
        MemoryError
            If there is no memory to store the gradients. It is raised before the pass if
            ``len(data)`` tells how many there are, and otherwise during it.
        ImportError
            With ``progress=True``, if tqdm is not installed.

        Warns
        -----
        UserWarning
            With ``lock_random='auto'``, if a minibatch has another loss or gradient the second
            time: the network draws random numbers, which are locked from now on.

        Notes
        -----
        The full gradient is the mean over all loss entries of all batches and devices. The pass
        waits for the device once. With ``lock_random='auto'`` it also waits at each of the first
        three minibatches, whose losses it computes twice to detect random numbers. The gradients in
        `Parameter.grad` and the marks of stale gradients do not change. If an exception is raised,
        nothing changes: weights, auxiliary states, counters and the previous snapshot stay. In
        addition to the parameters, this needs twice their memory, three times at its peak, and a
        copy of the frozen ones; once more for large float32 parameters on a CPU, where oneDNN
        computes gradients.
        """
        if callable(data) and not callable(closure):
            raise TypeError(
                "update_full_grads(closure, data) was called with its arguments in the other order."
            )
        check_closure(closure)
        check_data(data, closure)
        method, loss_scale = self._work.method, self._loss_scale
        stored = _arguments.flag(store_grads, "store_grads") or _arguments.flag(store, "store")
        method.check_store_grads(stored, type(self).__name__)
        self._check_outside("update_full_grads")
        if self._is_over():
            self.discard_snapshot()
            return float("nan")
        with loss_scale.kept_on_error(), self._work.lock.kept_on_error():
            while True:
                table = Table() if stored or method.needs_table else None
                try:
                    return self._refresh(closure, data, progress, table)
                except FloatingPointError:
                    if not loss_scale.halve(data):
                        raise

    def _refresh(
        self,
        closure: Callable[..., Loss],
        data: Iterable[Any],
        progress: bool,
        table: Table | None,
    ) -> float:
        """Make a pass over the data, then take over all of its results or none."""
        work, parameters = self._work, self._work.network.parameters
        size = 2 + len(parameters)
        if work.method.coefficient is not None:
            work.method.coefficient.ask(self.num_snapshots)
        with ExitStack() as stack:
            ready = stack.enter_context(agreement(self._workers, size))
            calls.refresh()
            batches, show = stack.enter_context(one_pass(data, progress=progress))
            batches = initialize(parameters, closure, batches)
            if not any(map(_mxnet.is_trainable, parameters)):
                raise ValueError("No parameter of the trainer has gradients: all are frozen.")
            check_dtypes(parameters)
            if table is not None:
                batches = work.with_memory(batches, data, show)
            ready.reach([0.0])
            done = stack.enter_context(agreement(self._workers, size))
            self._share_weights()
            self._apply_loaded()  # otherwise it would overwrite this snapshot later
            stack.enter_context(work.refreshing())
            full = work.full_gradient(closure, batches, self._loss_scale.value, done, table)
            uninterrupted(partial(self._take_over, full, table))
        return full.mean_loss

    def _take_over(self, full: FullGradient, table: Table | None) -> None:
        """Turn the results of a pass into a snapshot."""
        self._live.drop()
        self._work.take_over(full, table)

    def _is_over(self) -> bool:
        """Whether no more refreshes will be made."""
        coefficient = self._work.method.coefficient
        return coefficient is not None and coefficient.is_over(self.num_snapshots)

    # --- the snapshot --------------------------------------------------------------------------

    def at_snapshot(self) -> AbstractContextManager[None]:
        """Let the network compute at the snapshot, inside a ``with`` block.

        All of the trainer's parameters have the snapshot's values, including frozen ones and
        auxiliary states; only the auxiliary states are copied. Inside the block, do not assign
        values; the trainer refuses to take a step. A backward leaves its gradients in
        `Parameter.grad` as usual.

        Returns
        -------
        context manager

        Raises
        ------
        RuntimeError
            Without a snapshot, and inside another such block.
        """
        self._check_outside("at_snapshot")
        method = self._work.method
        if method.needs_table:
            raise RuntimeError(
                f"at_snapshot() needs a snapshot, and {type(self).__name__} has none: it keeps a "
                "table of gradients, each taken at other weights."
            )
        point = self._work.point if self._is_in_force() else None
        if point is None and method.has_reference:
            raise RuntimeError(
                f"{type(method).__name__} keeps no weights as it is set up here, so there is "
                "no snapshot to compute at."
            )
        if point is None:
            raise RuntimeError("There is no snapshot. Call update_full_grads() first.")
        self._work.check_unchanged()
        return self._work.at_point(point)

    def at_current_weights(self) -> AbstractContextManager[Any]:
        """Keep the network at its current weights, inside a ``with`` block, for another thread.

        During `step` and `update_full_grads` the network computes with other weights part of the
        time, in all threads. A thread that predicts meanwhile waits here for its turn.

        Returns
        -------
        context manager
            Only one thread is inside such a block at a time, and none while the network computes
            with other weights.

        Examples
        --------
        >>> from mxnet import gluon
        >>> from gluon_svrg import SVRGTrainer
        >>> net = gluon.nn.Dense(1, in_units=2)
        >>> net.initialize()
        >>> trainer = SVRGTrainer(net.collect_params(), 'sgd')
        >>> with trainer.at_current_weights():
        ...     weight = net.weight.data().asnumpy()
        """
        return self._work.network.lock

    def discard_snapshot(self) -> None:
        """Go back to the plain optimizer, and free the memory of the snapshot or of the table.

        A method that needs neither a refresh nor a snapshot starts over.
        """
        self._check_outside("discard_snapshot")
        self._live.release()
        self._work.discard()
        self._loaded.drop_snapshot()

    @property
    def has_snapshot(self) -> bool:
        """Whether there is a snapshot; a loaded one may wait until parameters are initialized."""
        method = self._work.method
        return method.has_snapshot or (self._loaded.has_snapshot and not method.needs_table)

    @property
    def wants_snapshot(self) -> bool:
        """Whether there is no snapshot, and a refresh would take one."""
        return not (self.has_snapshot or self._work.method.needs_table or self._is_over())

    @property
    def snapshot(self) -> dict[Parameter, list[NDArray]] | None:
        """Copies of the snapshot's values, per parameter and device. None without a snapshot."""
        return self._work.snapshot() if self._is_in_force() else None

    @property
    def full_grads(self) -> dict[Parameter, list[NDArray]] | None:
        """Copies of the full gradient, per parameter and device. None without one.

        The *mean* over all loss entries of all data, or the method's estimate of it; for float16
        parameters in float32.
        """
        return self._work.full_grads() if self._is_in_force() else None

    @property
    def _needs_refresh(self) -> bool:
        """Whether this is the plain optimizer until a refresh, for `gluon_svrg.estimator`."""
        return self._work.method.needs_refresh

    def _check_estimator(self) -> None:
        """Raise if Gluon's `Estimator` cannot train with this."""
        if self._work.method.needs_table:
            raise TypeError(
                f"{type(self).__name__} needs batch_index, the position of each minibatch, which "
                "an Estimator does not tell. Write the loop yourself, or use SVRGTrainer."
            )

    def _compared(self, name: str) -> MethodAtWork:
        """The method at work, for `gluon_svrg.variance`; raise if it corrects nothing."""
        self._check_outside(name)
        work, is_in_force = self._work, self._is_in_force()
        is_table = work.method.needs_table
        if not is_in_force or (is_table and not work.method.table):
            raise RuntimeError(
                f"{name}() has nothing to compare gradients with: "
                + ("the table is empty. " if is_table else "there is no snapshot. ")
                + "Call update_full_grads() first, or take a step with a method that needs none."
            )
        if not is_table and work.method.terms().is_plain:
            raise RuntimeError(
                f"{name}() has nothing to compare gradients with: as it is set up here, "
                f"{type(work.method).__name__} corrects no gradients (coefficient=0, gamma=0 or "
                "mixing=1). Change this setting first."
            )
        work.check_unchanged()
        return work

    # --- counters and settings -----------------------------------------------------------------

    @property
    def num_snapshots(self) -> int:
        """The number of snapshots taken."""
        return self._work.counters.num_snapshots

    @property
    def inner_steps(self) -> int:
        """The number of steps since the last snapshot; 0 without one."""
        return self._work.counters.inner_steps

    @property
    def grad_evaluations(self) -> int:
        """The number of loss entries that this worker has differentiated.

        Divide it by the size of the worker's data for the number of data passes. All gradients of
        steps are counted. A refresh counts each minibatch once, but not its checks whether
        gradients add up and repeat, which compute up to three minibatches again.
        """
        return self._work.counters.grad_evaluations

    @property
    def learning_rate(self) -> float:
        """The optimizer's learning rate. Can be set."""
        return Trainer.learning_rate.fget(self)

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.set_learning_rate(value)

    @property
    def lock_random(self) -> bool | str:
        """Whether both passes of a step draw the same random numbers. Can be set."""
        return self._work.lock.mode

    @lock_random.setter
    def lock_random(self, value: bool | str) -> None:
        self._work.change_lock(value)

    @property
    def _loss_scale(self) -> _mxnet.LossScale:
        """The loss scale of AMP. It keeps the trainer, so nothing must keep it."""
        return _mxnet.LossScale(self)

    # --- files ---------------------------------------------------------------------------------

    def save_states(self, fname: str | os.PathLike[str]) -> None:
        """Save the complete state of training, except the weights, to a file.

        The file holds the states and counters of the optimizer and its scheduler, the snapshot with
        its frozen values and auxiliary states, the full gradient, stored gradients, all counters,
        the coefficient with the state of its schedule, registered schedules, the random lock, and
        AMP's loss scaler. With the weights (``net.save_parameters``), training resumes to the last
        bit, even in the middle of an epoch.

        Parameters
        ----------
        fname : str or path
            The file; a link is followed. If saving is interrupted, the old file or the new one is
            complete. This does not hold where the file can be written but not its folder.

        Raises
        ------
        TypeError
            If an optimizer or schedule has an attribute that is no plain data.
        OSError
            If the file cannot be written.

        See Also
        --------
        export_optimizer_states : The part that `gluon.Trainer` can load.
        """
        self._check_outside("save_states")
        self._check_states_are_here("save_states")
        if self._work.is_ready:
            self._apply_loaded()
        self._loaded.save(fname, self._header(), self._parts())

    def load_states(self, fname: str | os.PathLike[str]) -> None:
        """Load a file of `save_states` or of `gluon.Trainer.save_states`.

        This works before the first step and with deferred parameters: the file is checked at once,
        and applied when it is needed and the parameters are initialized. Load the weights before or
        after it. A file of `gluon.Trainer` has no snapshot, so there is none afterwards.

        Parameters
        ----------
        fname : str or path
            The file. It is read and checked completely before anything changes. It cannot run
            code: it holds arrays and plain data for the trainer's own optimizer and schedules.
            Parameters are matched by name.

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
        self._loaded.load(fname, self._header(), self._parts(), self._work.network.parameters)
        self._live.drop()
        self._work.forget_reference()

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
        if not self._work.is_ready:
            raise RuntimeError(
                "There are no optimizer states to export before the parameters are initialized. "
                "Run a forward pass first."
            )
        self._start_kvstore()
        self._apply_loaded()
        saving.write_bytes(fname, self._all_updaters[0].get_states(dump_optimizer=True))

    def register(self, schedule: Any) -> None:
        """Save and load the state of a schedule, or of a sampler, together with this trainer's.

        Refresh schedules of `gluon_svrg.schedule` register themselves at the first call of ``due``.
        If a file was loaded before, the schedule takes over its saved state.

        Parameters
        ----------
        schedule : object
            Its attributes are saved, and must be plain data. Several objects of one class are
            distinguished by their settings, or else by the order in which they were registered.

        Raises
        ------
        ValueError
            If its saved state does not fit.
        """
        self._registered.add(schedule)

    @property
    def epoch_count(self) -> EpochCount:
        """The epochs that an `Estimator` has trained, over all calls of ``fit``; saved."""
        return self._registered.shared(EpochCount)

    def _header(self) -> dict[str, Any]:
        network = self._work.network
        name = type(self._work.method).__name__
        return self._loaded.header(name, network.parameters, len(network.devices))

    def _parts(self) -> dict[str, Any]:
        """All parts of a file."""
        work, parameters = self._work, self._work.network.parameters
        return {
            "optimizer": saving.OptimizerSettings(self.optimizer, parameters),
            "counters": work.counters,
            "lock": work.lock,
            "coefficient_schedule": work.method.coefficient or saving.NoPart(),
            "schedules": self._registered,
            "scaler": self._loss_scale,
            "optimizer_states": saving.OptimizerStates(
                self.optimizer, self._all_updaters, parameters
            ),
            "method": work,
        }

    def _apply_loaded(self) -> None:
        """Apply what was loaded, once the parameters are initialized; raise if a snapshot waits."""
        if not self._loaded.is_waiting:
            return
        if self._work.is_ready:
            self._start_kvstore()
            self._work.bind()
            self._loaded.apply(self._header(), self._parts())
        if self._loaded.has_snapshot:
            raise RuntimeError(
                "The snapshot that was loaded waits for the parameters to be initialized. Load "
                "them (net.load_parameters), run a forward pass, or take a step with a closure."
            )
