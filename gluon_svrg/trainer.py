"""The trainer: SVRG where `gluon.Trainer` stood."""

from __future__ import annotations

import os
from collections import deque
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence, Union

import mxnet as mx
from mxnet.gluon import Parameter, Trainer
from mxnet.ndarray import NDArray

from . import _mxnet, checks, estimate, full_gradient, gradient, memory
from .batches import initialize, number_of, one_pass
from .buffer import GradientBuffer
from .closure import Evaluation, Loss, check_closure
from .control_variate import ControlVariate
from .full_gradient import FullGradient
from .gradient import Network
from .memory import Room
from .mixed_precision import Scaling
from .operations import all_finite
from .others import Others
from .random_lock import RandomLock
from .saving import files as checkpoint
from .saving import states
from .snapshot import Snapshot
from .stored import StoredGradients
from .stored_subtract import can_prepare
from .stores.agreement import agreement
from .stores.kvstore_trainer import KVStoreTrainer

#: A coefficient, or what gives it for each snapshot from the snapshot's index.
Coefficient = Union[float, Callable[[int], float]]


class SVRGTrainer(KVStoreTrainer):
    """A `gluon.Trainer` whose gradients are variance-reduced by SVRG [1]_.

    From time to time `update_full_grads` takes a snapshot of the parameters and the mean gradient
    over all data there. Between snapshots, `step` replaces each minibatch gradient by::

        g - coefficient * (g_snapshot - count * full_grad)

    before anything is reduced, compressed or pushed, and hands it to the optimizer and the store
    exactly as `gluon.Trainer` does. Without a snapshot it *is* `gluon.Trainer`.

    Parameters
    ----------
    params : ParameterDict, dict, list or tuple of Parameter
        The parameters to optimize, as for `gluon.Trainer`.
    optimizer : str or Optimizer
        Any optimizer of MXNet, or registered with it.
    optimizer_params : dict, optional
        Keyword arguments of the optimizer when it is given by name.
    kvstore : str or KVStore, default 'device'
        The store, as for `gluon.Trainer`. Several devices need one.
    compression_params : dict, optional
        Gradient compression, as for `gluon.Trainer`.
    update_on_kvstore : bool, optional
        Where to update, as for `gluon.Trainer`.
    coefficient : float or callable, default 1.0
        How much of the control variate to use: 1 is SVRG, 0 the plain optimizer, in between
        alpha-SVRG [2]_. A callable gives it for each snapshot, from the snapshot's index
        (0, 1, ...); it may be asked more than once.
    lock_random : bool or 'auto', default 'auto'
        Whether both passes of a step draw the same random numbers (dropout masks). ``'auto'``
        compares both gradients at the first step after a snapshot, where they must be equal; if
        they are not, it warns and locks from then on.

    Raises
    ------
    TypeError, ValueError
        If an argument is none of these; if there are several devices and no store; if
        ``update_on_kvstore=True`` and there is no store to update on.

    See Also
    --------
    mxnet.gluon.Trainer : All of its attributes and methods work here.

    References
    ----------
    .. [1] R. Johnson and T. Zhang, "Accelerating Stochastic Gradient Descent using Predictive
       Variance Reduction", NeurIPS 2013.
    .. [2] Y. Yin, Z. Xu, Z. Li, T. Darrell and Z. Liu, "A Coefficient Makes SVRG Effective",
       ICLR 2025, arXiv:2311.05589.

    Examples
    --------
    >>> import numpy as np
    >>> from mxnet import gluon
    >>> from gluon_svrg import SVRGTrainer
    >>> samples = np.random.rand(20, 3).astype('float32')
    >>> labels = samples.sum(axis=1, keepdims=True)
    >>> data = gluon.data.DataLoader(gluon.data.ArrayDataset(samples, labels), batch_size=4)
    >>> net = gluon.nn.Dense(1)
    >>> net.initialize()
    >>> loss_fn = gluon.loss.L2Loss()
    >>> trainer = SVRGTrainer(net.collect_params(), 'sgd', {'learning_rate': 0.1})
    >>> def loss_of(X, y):
    ...     return loss_fn(net(X), y)
    >>> for epoch in range(4):
    ...     if epoch % 2 == 0:
    ...         mean_loss = trainer.update_full_grads(loss_of, data)
    ...     for X, y in data:
    ...         loss = trainer.step(len(X), closure=lambda: loss_of(X, y))
    >>> trainer.num_snapshots, trainer.inner_steps, trainer.grad_evaluations
    (2, 10, 200)
    """

    def __init__(
        self,
        params: Mapping[str, Parameter] | Sequence[Parameter],
        optimizer: Any,
        optimizer_params: dict[str, Any] | None = None,
        kvstore: Any = "device",
        compression_params: dict[str, Any] | None = None,
        update_on_kvstore: bool | None = None,
        *,
        coefficient: Coefficient = 1.0,
        lock_random: bool | str = "auto",
    ) -> None:
        checks.check_coefficient(coefficient)
        lock = RandomLock(lock_random)
        in_force = _coefficient_of(coefficient, 0)
        super().__init__(
            params, optimizer, optimizer_params, kvstore, compression_params, update_on_kvstore
        )
        # Replaced at each snapshot.
        self._control_variate: ControlVariate | None = None
        self._loaded: states.Saved | None = None  # from a file, until parameters are initialized
        # Counted.
        self._num_snapshots = 0
        self._inner_steps = 0
        self._grad_evaluations = 0
        # Of the moment.
        self._corrected = False  # Parameter.grad holds the SVRG estimate
        self._at_snapshot = False  # inside the context manager
        self._being_taken: Snapshot | None = None  # during a full pass
        self._compared = True  # both gradients, where they must be equal, or no need to
        # Fixed, or set by the user.
        self._others = Others(self._params)
        self._scaling = Scaling(self)
        self._schedules: list[Any] = []  # of refreshes, that have asked
        self._saved_schedules: list[dict[str, Any]] = []  # from a file, for those that will ask
        self._room = Room()  # for stored gradients
        self._lock = lock
        self._coefficient_schedule = coefficient
        self._coefficient = in_force

    # --- the method ----------------------------------------------------------------------------

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
            Whether to go on where backward did not reach a parameter, as in `gluon.Trainer`. While
            a snapshot is held, such a parameter is updated all the same if the loss over the whole
            data depends on it: its share of the full gradient is not zero.
        closure : callable
            Returns the loss of this minibatch: an NDArray, or a list or tuple of them. It is
            called twice while a snapshot is held, otherwise once, and must compute the same each
            time. Without a snapshot it may be left out, after a backward of your own.
        batch_index : int, optional
            The position of this minibatch in the data of ``update_full_grads(..., store=True)``.
            Its stored gradient is used, and the closure is called once. Without a snapshot it has
            no effect.

        Returns
        -------
        NDArray, list or tuple of NDArray, or None
            What the closure returned at the current weights, before the update.

        Raises
        ------
        RuntimeError
            If a snapshot is held, and there is neither a closure nor a call of `correct_grads`
            before.
        TypeError, ValueError, IndexError, RuntimeError
            If the closure does not return a loss that depends on the parameters, or no stored
            gradient belongs to it, see `correct_grads`.
        UserWarning
            If backward did not reach a parameter, as in `gluon.Trainer`.
        """
        checks.check_flag(ignore_stale_grad)
        if closure is None and batch_index is not None:
            raise TypeError("step(batch_index=...) needs the closure of that minibatch as well.")
        loss = None if closure is None else self.correct_grads(closure, batch_index=batch_index)
        self._check_corrected("step")
        self._include_all(ignore_stale_grad)
        if self._must_start_kvstore():
            self._start_kvstore()
        if self._has_overflow_before_push():
            self._scaling.skip()
        else:
            super().step(self._prepare_push(batch_size), ignore_stale_grad)
        self._finish_step()
        return loss

    def correct_grads(self, closure: Callable[[], Loss], *, batch_index: int | None = None) -> Loss:
        """Leave the SVRG estimate of a minibatch gradient in `Parameter.grad`.

        The first half of `step`; `step` without a closure, or `allreduce_grads` and `update`, are
        the second. In between, gradients can be clipped or looked at.

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
            If the closure is not callable or does not return a loss; if the index is no integer.
        IndexError
            If no gradient is stored at this index.
        ValueError
            If the loss is on a device without parameters, or depends on none of them; if it has
            another number of entries than that of the minibatch at this index.
        RuntimeError
            If the closure called backward itself, or did not compute the same in its two calls
            (see `lock_random`); inside `at_snapshot`; if parameters have changed in shape, dtype,
            device or ``grad_req`` since the snapshot; if no gradients are stored, or the stored
            one is that of other data: at the first step after a refresh it is computed again
            (unless ``lock_random=False``).
        """
        check_closure(closure)
        checks.check_index(batch_index)
        self._check_outside("correct_grads")
        if self._loaded is not None or self._must_start_kvstore():
            deque(initialize(self._params, closure, iter([()])))
            self._start_kvstore()
        held = self._held()
        if held is not None:
            self._check_unchanged(held)
            if batch_index is not None:
                held.check_stored(batch_index)
        self._corrected = False
        if held is None or self._coefficient == 0:
            found = estimate.plain(self._network(), closure)
        elif batch_index is not None:
            found = estimate.from_stored(
                self._network(), held, batch_index, closure, self._coefficient, self._lock
            )
        else:
            compare = not self._compared and self._lock.mode == "auto"
            found = estimate.corrected(
                self._network(),
                held,
                closure,
                self._coefficient,
                self._lock,
                compare=compare and held.snapshot.is_current(),
            )
            self._compared = True
        self._scaling.let_optimizer_undo()
        self._grad_evaluations += found.entries
        self._corrected = True
        return found.loss

    def update_full_grads(
        self,
        closure: Callable[..., Loss],
        data: Iterable[Any],
        *,
        store: bool = False,
        progress: bool = False,
    ) -> float:
        """Take a snapshot of the parameters and the full gradient there.

        Parameters
        ----------
        closure : callable
            Returns the loss of one minibatch, as for `step`; called with the items of each batch.
        data : iterable
            The whole data. A batch that is a tuple or list is unpacked, ``closure(*batch)``, any
            other is passed as it is, ``closure(batch)``. If the data has a method ``reset``, as
            `mx.io.DataIter`, it is called before and after.
        store : bool, default False
            Whether to keep the gradient of each minibatch, by its position in the data, so that
            ``step(..., batch_index=i)`` takes one gradient instead of two. For small models and
            minibatches that stay the same: the memory is that of the gradients, once for each
            minibatch, and twice during a refresh.
        progress : bool, default False
            Whether to show a progress bar (needs tqdm), with the memory that is stored.

        Returns
        -------
        float
            The mean loss over all loss entries, at the snapshot. nan if the coefficient's schedule
            is over (`gluon_svrg.schedule.Until`): then there is no pass, and no snapshot.

        Raises
        ------
        TypeError, ValueError, RuntimeError
            As `correct_grads`; ValueError if there is no data or no parameter with gradients.
        FloatingPointError
            If the full gradient is not finite.
        MemoryError
            If there is no memory to store the gradients; before the pass, if ``len(data)`` tells
            how many there are, otherwise during it.

        Notes
        -----
        The full gradient is the mean over all loss entries of all batches and devices. Waits for
        the device once. The gradients in `Parameter.grad` and the marks of stale gradients are as
        before; so are weights, auxiliary states, counters and the previous snapshot, if anything
        is raised. Beside the parameters this needs three times their memory, four times at its
        peak when a snapshot is held already.
        """
        check_closure(closure)
        self._check_outside("update_full_grads")
        coefficient = _coefficient_of(self._coefficient_schedule, self._num_snapshots)
        is_over = getattr(self._coefficient_schedule, "is_over", None)
        if is_over is not None and is_over(self._num_snapshots):
            self.discard_snapshot()
            return float("nan")
        with self._scaling.kept_on_error(), self._lock.kept_on_error():
            while True:
                stored = StoredGradients(self._scaling.scale) if store else None
                try:
                    here, held, buffer, full = self._full_pass(closure, data, progress, stored)
                    break
                except FloatingPointError:
                    if not self._scaling.halve(data):
                        raise
        if stored is not None:
            if can_prepare():
                stored.prepare(buffer.arrays)
            before = (held and held.stored) or ()
            self._room.took(self._bytes_of_gradients(), len(before) + len(stored))
        if held is None:
            snapshot = Snapshot(self._params, own=True)
            mean = [[grad.copy() for grad in row] for row in buffer.arrays]
            self._control_variate = ControlVariate(
                snapshot, mean, buffer, full.in_objective, stored
            )
        else:
            held.replace(here, buffer.arrays, full.in_objective, stored)
        self._coefficient = coefficient
        self._num_snapshots += 1
        self._inner_steps = 0
        self._grad_evaluations += full.entries + (stored.repeated if stored else 0)
        self._corrected = self._compared = False
        return full.mean_loss

    @contextmanager
    def at_snapshot(self) -> Iterator[None]:
        """Let the network compute at the snapshot, inside a ``with`` block.

        Weights and auxiliary states are those of the snapshot; nothing is copied but the auxiliary
        states. The values must not be assigned inside, and the trainer takes no step. A backward
        inside leaves its gradients in `Parameter.grad`, as any other.

        Yields
        ------
        None

        Raises
        ------
        RuntimeError
            Without a snapshot, and inside another such block.
        """
        self._check_outside("at_snapshot")
        held = self._held()
        if held is None:
            raise RuntimeError("There is no snapshot. Call update_full_grads() first.")
        self._check_unchanged(held)
        snapshot = held.snapshot
        self._at_snapshot = True
        try:
            with snapshot.entered():
                yield
        finally:
            self._at_snapshot = False
            snapshot.forget_gradients()

    def discard_snapshot(self) -> None:
        """Go back to the plain optimizer and free the memory of the snapshot."""
        self._check_outside("discard_snapshot")
        self._control_variate = None
        if self._loaded is not None:
            self._loaded.manifest["snapshot"] = None
        self._inner_steps = 0

    # --- states --------------------------------------------------------------------------------

    def save_states(self, fname: str | os.PathLike[str]) -> None:
        """Save the whole state of training, but for the weights, to a file.

        That is: the states and counters of the optimizer and its scheduler, the snapshot with its
        auxiliary states, the full gradient, stored gradients, all counters, the coefficient with
        the state of its schedule, the random lock, and AMP's loss scaler. With the weights
        (``net.save_parameters``), training resumes to the last bit, also in mid-epoch.

        Parameters
        ----------
        fname : str or path
            The file. Whenever saving is interrupted, the old file or the new one is whole.

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
        self._apply_loaded()
        checkpoint.write(fname, *(self._loaded or states.collect(self)))

    def load_states(self, fname: str | os.PathLike[str]) -> None:
        """Load what `save_states` has saved, or what `gluon.Trainer.save_states` has.

        Works before the first step and with deferred parameters: the file is checked at once, and
        applied when it is needed and the parameters are initialized. Weights may be loaded before
        or after. A file of `gluon.Trainer` has no snapshot, so there is none afterwards.

        Parameters
        ----------
        fname : str or path
            The file. It is read completely and checked before anything is changed, and cannot run
            code: it holds arrays and plain data for the optimizer and schedules that this trainer
            was made with.

        Raises
        ------
        ValueError
            If the file is damaged or of another kind, or does not fit the parameters, the
            optimizer or the schedules of this trainer; nothing is changed.
        OSError
            If the file cannot be read.
        """
        self._check_outside("load_states")
        self._check_states_are_here("load_states")
        saved = states.read(fname, self)
        states.assign_numbers(self, saved)
        self._loaded = saved  # applied late: weights may be loaded after this, or before
        self._control_variate = None
        self._corrected = False

    def export_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Save the part of the state that a `gluon.Trainer` can load with its `load_states`.

        Parameters
        ----------
        fname : str or path
            The file. Whenever saving is interrupted, the old file or the new one is whole.

        Raises
        ------
        RuntimeError
            If parameters are not initialized yet.
        OSError
            If the file cannot be written.
        """
        self._check_outside("export_optimizer_states")
        self._check_states_are_here("export_optimizer_states")
        if not all(map(_mxnet.has_data, self._params)):
            raise RuntimeError(
                "There are no optimizer states to export before the parameters are initialized. "
                "Run a forward pass first."
            )
        self._start_kvstore()
        self._apply_loaded()
        checkpoint.write_bytes(fname, states.pickled(self))

    def _apply_loaded(self) -> None:
        """Apply what was loaded, as soon as the parameters are initialized."""
        if self._loaded is not None and all(map(_mxnet.has_data, self._params)):
            self._start_kvstore()
            states.assign_arrays(self, self._loaded)
            self._loaded = None

    def _remember(self, schedule: Any) -> None:
        """Save and load the state of a schedule together with this trainer's."""
        if schedule not in self._schedules:
            self._schedules.append(schedule)
            states.assign_schedule(self, schedule)

    def _held(self) -> ControlVariate | None:
        """What the snapshot left behind; None without a snapshot."""
        if self._loaded is None:
            return self._control_variate
        self._apply_loaded()
        if self._loaded is not None and self._loaded.manifest["snapshot"] is not None:
            raise RuntimeError(
                "The snapshot that was loaded waits for the parameters to be initialized. Load "
                "them (net.load_parameters), run a forward pass, or take a step with a closure."
            )
        return self._control_variate

    # --- gluon.Trainer, guarded ----------------------------------------------------------------

    def allreduce_grads(self) -> None:
        """Sum the gradients over devices and workers, as `gluon.Trainer.allreduce_grads`.

        Raises
        ------
        RuntimeError
            If a snapshot is held and `correct_grads` was not called before.
        """
        self._check_corrected("allreduce_grads")
        super().allreduce_grads()

    def update(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Update the parameters, as `gluon.Trainer.update`, after `allreduce_grads`.

        Parameters
        ----------
        batch_size : int
            The gradient is divided by it.
        ignore_stale_grad : bool, default False
            As for `step`.

        Raises
        ------
        RuntimeError
            If a snapshot is held and `correct_grads` was not called before.
        """
        self._check_corrected("update")
        self._include_all(ignore_stale_grad)
        super().update(batch_size, ignore_stale_grad)
        self._finish_step()

    @property
    def learning_rate(self) -> float:
        """The optimizer's learning rate. Can be assigned."""
        return Trainer.learning_rate.fget(self)

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.set_learning_rate(value)

    # --- what can be looked at -----------------------------------------------------------------

    @property
    def coefficient(self) -> float:
        """How much of the control variate is used. Can be set to a number or a callable."""
        return self._coefficient

    @coefficient.setter
    def coefficient(self, value: Coefficient) -> None:
        checks.check_coefficient(value)
        in_force = _coefficient_of(value, max(self._num_snapshots - 1, 0))
        self._coefficient_schedule, self._coefficient = value, in_force

    @property
    def lock_random(self) -> bool | str:
        """Whether both passes of a step draw the same random numbers. Can be set."""
        return self._lock.mode

    @lock_random.setter
    def lock_random(self, value: bool | str) -> None:
        self._lock = RandomLock(value)
        self._compared = False

    @property
    def snapshot(self) -> dict[Parameter, list[NDArray]] | None:
        """Copies of the snapshot's values, per parameter and device. None without a snapshot.

        Parameters with gradients and auxiliary states are in it.
        """
        held = self._held()
        if held is None:
            return None
        there = held.snapshot
        arrays = zip(there.parameters + there.auxiliaries, there.weights + there.states)
        return {parameter: [value.copy() for value in values] for parameter, values in arrays}

    @property
    def full_grads(self) -> dict[Parameter, list[NDArray]] | None:
        """Copies of the full gradient, per parameter and device. None without a snapshot.

        The *mean* over all loss entries of all data.
        """
        held = self._held()
        if held is None:
            return None
        return {
            parameter: [_mxnet.like(grad.copy(), _mxnet.data(parameter)[0]) for grad in grads]
            for parameter, grads in zip(held.snapshot.parameters, held.full_grads)
        }

    @property
    def num_snapshots(self) -> int:
        """The number of snapshots taken."""
        return self._num_snapshots

    @property
    def inner_steps(self) -> int:
        """The number of steps since the last snapshot; 0 without one."""
        return self._inner_steps

    @property
    def grad_evaluations(self) -> int:
        """The number of loss entries that this worker has differentiated.

        Divided by the size of its data, the number of data passes.
        """
        return self._grad_evaluations

    # --- the parts of a step -------------------------------------------------------------------

    def _full_pass(
        self,
        closure: Callable[..., Loss],
        data: Iterable[Any],
        progress: bool,
        stored: StoredGradients | None,
    ) -> tuple[Snapshot, ControlVariate | None, GradientBuffer, FullGradient]:
        """Go through the data, and leave the full gradient in a buffer; change nothing else."""
        workers, size = self._workers, 2 + len(self._params)
        with ExitStack() as stack:
            ready = stack.enter_context(agreement(workers, size))
            batches, say = stack.enter_context(one_pass(data, progress=progress))
            batches = initialize(self._params, closure, batches)
            if not any(map(_mxnet.is_trainable, self._params)):
                raise ValueError("No parameter of the trainer has gradients: all are frozen.")
            checks.check_dtypes(self._params)
            evaluate: Callable[..., Evaluation] = gradient.at_snapshot
            if stored is not None:
                batches = self._with_room(batches, number_of(data), say)
                stack.enter_context(stored.forgotten_on_error())
                evaluate = partial(stored.take, lock=self._lock)
            ready.reach([0.0])
            done = stack.enter_context(agreement(workers, size))
            self._share_weights()
            here = self._being_taken = Snapshot(self._params, own=False)
            stack.callback(setattr, self, "_being_taken", None)
            held = self._held()
            if held is not None and not held.snapshot.is_bound():
                if held.snapshot.difference():
                    held = None  # nothing of it can be used again
                else:
                    held.bind()
            buffer = GradientBuffer(here.buffers) if held is None else held.buffer
            network = self._network()
            full = full_gradient.take(here, closure, batches, network, buffer, done, evaluate)
        return here, held, buffer, full

    def _with_room(
        self, batches: Iterator[Any], count: int | None, say: Callable[[str], None]
    ) -> Iterator[Any]:
        """Go through minibatches while there is memory to store their gradients."""
        each, held = self._bytes_of_gradients(), self._control_variate
        total = memory.in_words(sum(each.values()) * (count or 1))
        say(f"storing {total}" + ("" if count else " each"))
        return self._room.batches(batches, count, each, len(held.stored or ()) if held else 0)

    def _bytes_of_gradients(self) -> dict[Any, int]:
        """What it takes to store the gradients of one minibatch, per device."""
        trainable = filter(_mxnet.is_trainable, self._params)
        return memory.bytes_of_sums([_mxnet.gradients(p) for p in trainable])

    def _finish_step(self) -> None:
        self._corrected = False
        if self._control_variate is not None:
            self._inner_steps += 1

    def _network(self) -> Network:
        devices = _mxnet.devices(self._params[0]) if self._params else []
        return Network(self._params, devices, self._others, self._scaling.scale)

    def _row_sparse_pull(
        self, parameter: Parameter, out: Any, row_id: Any, full_idx: bool = False
    ) -> None:
        """Get rows of a weight from the store, as `gluon.Trainer`; a snapshot has them all."""
        arrays = out if isinstance(out, (list, tuple)) else [out]
        held, taken = self._control_variate, self._being_taken
        if not any(s and s.holds(arrays) for s in (held and held.snapshot, taken)):
            super()._row_sparse_pull(parameter, out, row_id, full_idx)

    def _has_overflow_before_push(self) -> bool:
        """Whether gradients must not reach a store that would update with them."""
        if not self._scaling.is_on:
            return False
        self._start_kvstore()
        if not self._update_on_kvstore:
            return False  # MXNet looks at them itself, after they are reduced
        trainable = filter(_mxnet.is_trainable, self._params)
        return not all_finite(grad for p in trainable for grad in _mxnet.gradients(p))

    def _include_all(self, ignore_stale_grad: bool) -> None:
        """Let no parameter be skipped whose full gradient is part of the estimate."""
        held = self._control_variate
        if ignore_stale_grad and held is not None:
            weights = _mxnet.weights(held.snapshot.parameters)
            used = [[is_used] * len(row) for is_used, row in zip(held.in_objective, weights)]
            _mxnet.mark(weights, used, fresh=True)

    # --- guards --------------------------------------------------------------------------------

    def _check_corrected(self, name: str) -> None:
        self._check_outside(name)
        if self._corrected or self._held() is None:
            return
        raise RuntimeError(
            f"{name}() needs SVRG gradients while a snapshot is held: pass "
            "step(batch_size, closure=...), or call correct_grads(closure) before. To go on with "
            "the plain optimizer, call discard_snapshot()."
        )

    def _check_outside(self, name: str) -> None:
        if mx.autograd.is_recording():
            raise RuntimeError(
                f"{name}() was called inside `with autograd.record()`. Take it out of the block: "
                "the trainer records what the closure computes by itself."
            )
        if self._at_snapshot:
            raise RuntimeError(
                f"{name}() was called inside `with trainer.at_snapshot()`, where the network "
                "computes with other weights. Call it after the block."
            )

    def _check_unchanged(self, held: ControlVariate) -> None:
        if held.snapshot.is_bound():
            return
        difference = held.snapshot.difference()
        if difference:
            raise RuntimeError(
                f"The parameters have changed since the snapshot: {difference}. Take a new one "
                "with update_full_grads(), or call discard_snapshot()."
            )
        held.bind()


def _coefficient_of(schedule: Coefficient, index: int) -> float:
    """The coefficient for a snapshot."""
    value = schedule(index) if callable(schedule) else schedule
    checks.check_number(value, "coefficient")
    return float(value)
