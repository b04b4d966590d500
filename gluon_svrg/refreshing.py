"""Refreshes: they take the snapshot and its full gradient together, or neither."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Callable, Iterable, Iterator

from mxnet.gluon import Parameter, Trainer
from mxnet.ndarray import NDArray

from . import _mxnet
from .methods.interface import Method
from .methods.table import Table
from .passes import memory
from .passes.batches import initialize, number_of, one_pass
from .passes.closure import Loss, check_closure
from .passes.full_pass import FullGradient, full_gradient
from .passes.interrupts import uninterrupted
from .passes.network import Network, check_dtypes
from .passes.random_lock import RandomLock
from .resumable import ResumableTrainer
from .stores import calls
from .stores.agreement import agreement


class RefreshingTrainer(ResumableTrainer):
    """A trainer that computes full gradients, and shows its state.

    The parameters are those of `ResumableTrainer`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._budget = memory.Budget()  # for stored gradients

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
            Called with the items of each batch; returns the loss, as for `step`.
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
            The name of ``store_grads`` in version 0.1.0.

        Returns
        -------
        float
            The mean loss over all loss entries, at the snapshot. If the coefficient's schedule is
            over (`gluon_svrg.schedule.Until`), there is no pass and no snapshot, and this is nan.

        Raises
        ------
        TypeError, ValueError, RuntimeError
            As `correct_grads`; ValueError if there is no data or no parameter with gradients.
        FloatingPointError
            If the full gradient is not finite.
        MemoryError
            If there is no memory to store the gradients. It is raised before the pass if
            ``len(data)`` tells how many there are, and otherwise during it.

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
        check_closure(closure)
        self._check_outside("update_full_grads")
        if self._is_over():
            self.discard_snapshot()
            return float("nan")
        loss_scale = self._loss_scale
        with loss_scale.kept_on_error(), self._lock.kept_on_error():
            while True:
                keeps = store_grads or store or self._method.needs_table
                table = Table() if keeps else None
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
        size, coefficient = 2 + len(self.all_parameters), self._new_coefficient()
        with ExitStack() as stack:
            ready = stack.enter_context(agreement(self._workers, size))
            calls.refresh()
            batches, show = stack.enter_context(one_pass(data, progress=progress))
            batches = initialize(self.all_parameters, closure, batches)
            if not any(map(_mxnet.is_trainable, self.all_parameters)):
                raise ValueError("No parameter of the trainer has gradients: all are frozen.")
            if table is not None:
                batches = self._with_memory(batches, number_of(data), show)
            check_dtypes(self.all_parameters)
            ready.reach([0.0])
            done = stack.enter_context(agreement(self._workers, size))
            self._share_weights()
            self._is_in_force()  # otherwise a loaded state would overwrite this one later
            if self._bind():  # no memory of the old snapshot can be reused
                self._method.discard()
                self._bind()
            stack.enter_context(self._network.grads_kept())
            stack.callback(self._mark_points)
            scale = self._loss_scale.value
            full = full_gradient(self._network, closure, batches, self._lock, scale, done, table)
            full = self._method.prepared(full)
            uninterrupted(partial(self._take_over, full, table, coefficient))
        return full.mean_loss

    def _take_over(
        self, full: FullGradient, table: Table | None, coefficient: float | None
    ) -> None:
        """Turn the results of a pass into a snapshot."""
        self._method.refresh(self._network, full, table)
        if coefficient is not None:
            self._method.coefficient = coefficient
        if table is not None:
            self._budget.took(self._bytes_of_a_row(), len(table))
        counters = self._counters
        counters.num_snapshots += 1
        counters.inner_steps = 0
        counters.grad_evaluations += full.differentiated
        counters.compared = self._is_corrected = False
        counters.adds, counters.probed = self._network.adds, True
        self._reached = None

    def _with_memory(
        self, batches: Iterator[Any], count: int | None, show: Callable[[str], None]
    ) -> Iterator[Any]:
        """Iterate over minibatches while there is memory to store their gradients."""
        each = self._bytes_of_a_row()
        total = memory.in_words(sum(each.values()) * (count or 1))
        show(f"storing {total}" + ("" if count else " each"))
        return self._budget.batches(batches, count, each, self._method.num_rows)

    def _bytes_of_a_row(self) -> dict[Any, int]:
        """The bytes that the gradients of one minibatch take, per device."""
        trainable = filter(_mxnet.is_trainable, self.all_parameters)
        return memory.bytes_of_sums([_mxnet.gradients(p) for p in trainable])

    # --- what subclasses replace ---------------------------------------------------------------

    def _is_over(self) -> bool:
        """Whether no more refreshes will be made."""
        return False

    def _new_coefficient(self) -> float | None:
        """The coefficient of the next snapshot; None if the method has none."""
        return None

    # --- the snapshot --------------------------------------------------------------------------

    @contextmanager
    def at_snapshot(self) -> Iterator[None]:
        """Let the network compute at the snapshot, inside a ``with`` block.

        All of the trainer's parameters have the snapshot's values, including frozen ones and
        auxiliary states; only the auxiliary states are copied. Inside the block, do not assign
        values; the trainer refuses to take a step. A backward leaves its gradients in
        `Parameter.grad` as usual.

        Yields
        ------
        None

        Raises
        ------
        RuntimeError
            Without a snapshot, and inside another such block.
        """
        self._check_outside("at_snapshot")
        point = next(self._method.points(), None) if self._is_in_force() else None
        if point is None and self._method.has_reference:
            raise RuntimeError(
                f"{type(self._method).__name__} keeps no weights as it is set up here, so there is "
                "no snapshot to compute at."
            )
        if point is None:
            raise RuntimeError("There is no snapshot. Call update_full_grads() first.")
        self._check_unchanged()
        self._at_snapshot = True
        try:
            with point.entered():
                try:
                    yield
                finally:
                    touched = map(any, point.take_touched())
                    self._network.note_overwritten(list(touched))
        finally:
            self._at_snapshot = False

    def at_current_weights(self) -> Any:
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
        return self._network.lock

    def discard_snapshot(self) -> None:
        """Go back to the plain optimizer and free the memory of the snapshot."""
        self._check_outside("discard_snapshot")
        self._method.discard()
        self._network.release()
        self._here = None
        if self._loaded is not None:
            self._loaded.drop("method")
        self._counters.inner_steps = 0
        self._is_corrected, self._reached = False, None

    def ready_to_compare(self, name: str) -> tuple[Method, Network, bool]:
        """The method, the network and whether the lock is on, for `gluon_svrg.variance`."""
        self._check_outside(name)
        method = self._method
        is_table = method.needs_table
        if not self._is_in_force() or (
            not method.num_rows if is_table else method.terms().is_plain
        ):
            raise RuntimeError(
                f"{name}() has nothing to compare gradients with: "
                + ("the table is empty. " if is_table else "there is no snapshot. ")
                + "Call update_full_grads() first, or take a step with a method that needs none."
            )
        self._check_unchanged()
        return method, self._network, self._lock.locked

    @property
    def loss_scale(self) -> float:
        """The factor of losses before they are differentiated: 1 without AMP."""
        return self._loss_scale.value

    # --- what can be looked at -----------------------------------------------------------------

    @property
    def has_snapshot(self) -> bool:
        """Whether there is a snapshot; a loaded one may wait until parameters are initialized."""
        return self._method.has_reference or self._waits_for_parameters()

    @property
    def wants_snapshot(self) -> bool:
        """Whether there is no snapshot, and a refresh would take one."""
        return not self.has_snapshot and not self._is_over()

    @property
    def snapshot(self) -> dict[Parameter, list[NDArray]] | None:
        """Copies of the snapshot's values, per parameter and device. None without a snapshot."""
        point = next(self._method.points(), None) if self._is_in_force() else None
        if point is None:
            return None
        network = point.network
        values = zip(network.trainable + network.frozen, point.weights + (point.frozen or []))
        return {parameter: [_mxnet.unguarded(v.copy()) for v in row] for parameter, row in values}

    @property
    def full_grads(self) -> dict[Parameter, list[NDArray]] | None:
        """Copies of the full gradient, per parameter and device. None without a snapshot.

        The *mean* over all loss entries of all data; for float16 parameters in float32.
        """
        means = self._method.full_grads if self._is_in_force() else []
        rows = zip(self._network.trainable, means)
        return {
            parameter: [_mxnet.like(grad, _mxnet.data(parameter)[0]) for grad in grads]
            for parameter, grads in rows
        } or None

    @property
    def num_snapshots(self) -> int:
        """The number of snapshots taken."""
        return self._counters.num_snapshots

    @property
    def inner_steps(self) -> int:
        """The number of steps since the last snapshot; 0 without one."""
        return self._counters.inner_steps

    @property
    def grad_evaluations(self) -> int:
        """The number of loss entries that this worker has differentiated.

        Divide it by the size of the worker's data for the number of data passes. The checks
        whether gradients add up and repeat are not counted: up to three minibatches per refresh.
        """
        return self._counters.grad_evaluations

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
        return self._lock.mode

    @lock_random.setter
    def lock_random(self, value: bool | str) -> None:
        self._lock = RandomLock(value)
        self._counters.compared = False
