"""The trainers of SAGA and SAG, which keep the last gradient of each minibatch."""

from __future__ import annotations

from typing import Any, Callable, Mapping, NoReturn, Sequence

from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from . import checks
from ._docstrings import parameters_as
from .methods.interface import Method
from .methods.saga import SAG, SAGA
from .passes import memory
from .passes.closure import Loss, check_closure
from .prox import ProxArgument
from .svrg import SVRGTrainer
from .trainer import VarianceReducedTrainer


class TableTrainer(VarianceReducedTrainer):
    """A trainer with a table of the last gradients of all minibatches. Use one of its subclasses.

    Parameters
    ----------
    method : Method
        The method that uses the table.
    lock_random : bool or 'auto'
        Whether a minibatch draws the same random numbers each time.
    params, optimizer, optimizer_params, kvstore, compression_params, update_on_kvstore
        As for `gluon.Trainer`.
    prox : Prox or dict, optional
        The operator to apply after each update.
    """

    needs_reduced = True
    _not_corrected = checks.NOT_CORRECTED_ROW

    def __init__(
        self,
        method: Method,
        lock_random: bool | str,
        params: Mapping[str, Parameter] | Sequence[Parameter],
        optimizer: Any,
        optimizer_params: dict[str, Any] | None,
        kvstore: Any,
        compression_params: dict[str, Any] | None,
        update_on_kvstore: bool | None,
        prox: ProxArgument,
    ) -> None:
        checks.refuse_compression(compression_params, type(self).__name__)
        super().__init__(
            method,
            lock_random,
            params,
            optimizer,
            optimizer_params,
            kvstore,
            compression_params,
            update_on_kvstore,
            prox,
        )
        self._budget = memory.Budget(otherwise="")

    # --- a step --------------------------------------------------------------------------------

    def step(
        self,
        batch_size: int,
        ignore_stale_grad: bool = False,
        *,
        closure: Callable[[], Loss] | None = None,
        batch_index: int | None = None,
    ) -> Loss | None:
        """Make one step of parameter update, and replace a row of the table.

        Parameters
        ----------
        batch_size : int
            The gradient, a sum over loss entries, is divided by it, as in `gluon.Trainer`.
        ignore_stale_grad : bool, default False
            Whether to continue if backward did not reach a parameter, as in `gluon.Trainer`. Such
            a parameter is still updated if another row of the table moves it.
        closure : callable
            Returns the loss of this minibatch: an NDArray, or a list or tuple of them. It is
            called once. It is called twice in the first step after `update_full_grads`, to check
            that the data is the same, and three times in a first step without it, to check whether
            gradients add up. You may leave it out after `correct_grads`.
        batch_index : int
            The row of this minibatch: its position in the data, from 0, on each worker. Always
            required with a closure. In a first pass without `update_full_grads`, each new index
            adds a row.

        Returns
        -------
        NDArray, list or tuple of NDArray, or None
            What the closure returned, before the update.

        Raises
        ------
        RuntimeError
            If there is neither a closure nor an earlier call of `correct_grads`; if a backward has
            overwritten the result of `correct_grads`.
        TypeError, ValueError, IndexError, MemoryError, RuntimeError
            As `correct_grads`.
        UserWarning
            If backward did not reach a parameter, as in `gluon.Trainer`.

        Notes
        -----
        Row and mean change after the update has run. A step that raises an exception, or that AMP
        skips, changes nothing, and you can use the same index again. The same holds if another call
        of `correct_grads` has overwritten the estimate.
        """
        checks.check_flag(ignore_stale_grad)
        if closure is not None:
            _check_index(batch_index, "step")
        return super().step(batch_size, ignore_stale_grad, closure=closure, batch_index=batch_index)

    def correct_grads(self, closure: Callable[[], Loss], *, batch_index: int | None = None) -> Loss:
        """Leave the estimate of a minibatch's gradient in `Parameter.grad`.

        This is the first half of `step`. The second half is `step` without a closure, or
        `allreduce_grads` and `update`. With SAG, the optimizer's gradient exists only after
        `allreduce_grads`.

        Parameters
        ----------
        closure : callable
            Returns the loss of this minibatch, as for `step`.
        batch_index : int
            The row of this minibatch, as for `step`.

        Returns
        -------
        NDArray, or list or tuple of NDArray
            What the closure returned.

        Raises
        ------
        TypeError
            If the closure is not callable or does not return a loss; if there is no index, or it
            is not an integer.
        IndexError
            If the index is negative, or has no row after `update_full_grads`, which creates all
            rows.
        ValueError
            If the loss is on a device without parameters, or depends on none of them; if its number
            of entries differs from that of its row; if the index was already used since the last
            update and gradients accumulate (``grad_req='add'``).
        MemoryError
            If there is no memory for another row.
        RuntimeError
            If the closure called backward itself or assigned a parameter; inside another thread's
            pass; if parameters have changed in shape, dtype, device or ``grad_req`` since the
            table was created; if a row differs from its gradient when this is computed again, at
            the first step after `update_full_grads` (unless ``lock_random=False``).
        """
        check_closure(closure)
        index = _check_index(batch_index, "correct_grads")
        return super().correct_grads(closure, batch_index=index)

    # --- what can be looked at -----------------------------------------------------------------

    @property
    def has_snapshot(self) -> bool:
        """Never: gradients are compared with rows of a table, each taken at its own weights."""
        return False

    @property
    def wants_snapshot(self) -> bool:
        """Never: the first pass can train."""
        return False

    @property
    def snapshot(self) -> None:
        """None: there is no snapshot."""
        return None

    @property
    def full_grads(self) -> dict[Parameter, list[NDArray]] | None:
        """Copies of the table's mean, per parameter and device. None while the table is empty.

        The *mean* over the loss entries of all rows of all workers; for float16 parameters in
        float32. After `update_full_grads` it is the full gradient.
        """
        return super().full_grads or None

    def at_snapshot(self) -> NoReturn:
        """Raise: there is no snapshot.

        Raises
        ------
        RuntimeError
            Always.
        """
        raise RuntimeError(
            f"at_snapshot() needs a snapshot, and {type(self).__name__} has none: it keeps a table "
            "of gradients, each taken at other weights."
        )

    def discard_snapshot(self) -> None:
        """Free the memory of the table; the next step begins a new one with zero rows."""
        super().discard_snapshot()


@parameters_as(SVRGTrainer)
class SAGATrainer(TableTrainer):
    """A `gluon.Trainer` whose gradients are variance-reduced by SAGA [1]_.

    A table keeps the last gradient of each minibatch, and a step replaces the gradient by::

        g - row + count * mean

    ``mean`` is the mean of the table per loss entry; row and mean change with the step. A step
    takes one gradient, and there are no other passes over the data. So a step costs little more
    than one of `gluon.Trainer`, but the table has a gradient for each minibatch. Use it for small
    models and fixed minibatches, in any order.

    Parameters
    ----------
    kvstore : str or KVStore, default 'device'
        The kvstore, as for `gluon.Trainer`; it must reduce gradients, as all but 'dist_async' do.
        Workers share the mean, and each has the rows of its own minibatches.
    compression_params : dict, optional
        Must be left out: an error that compression makes would stay in the mean.
    update_on_kvstore : bool, optional
        None and False are the same: the reduced gradient must come back before the update.
    lock_random : bool or 'auto', default 'auto'
        Whether a minibatch draws the same random numbers (dropout masks) each time. ``'auto'``
        detects them in `update_full_grads`, warns, and locks from then on. A first pass that trains
        does not look for them.

    Raises
    ------
    TypeError, ValueError
        If an argument is none of these; if there are several devices and no kvstore.

    See Also
    --------
    SAGTrainer : Passes the mean of the table to the optimizer.
    mxnet.gluon.Trainer : All of its attributes and methods work here.

    Notes
    -----
    - `update_full_grads` fills the table with all gradients at the current weights (with or without
      ``store_grads``). Otherwise the steps themselves fill it: unvisited rows are zero, and the
      mean is over the entries of visited ones.
    - There is no snapshot: ``has_snapshot`` is False, ``snapshot`` is None, and `at_snapshot`
      raises an error. `full_grads` is the mean of the table. `discard_snapshot` begins a new one.
    - ``inner_steps`` counts from the last `update_full_grads`, or from the start.
    - The memory is one gradient per device for each minibatch, and three more. While
      `update_full_grads` runs there are two tables. A MemoryError is raised if there is no room.
    - With ``grad_req='add'`` several minibatches make one update. Each needs its own index.
    - Save and load each worker's states separately: only its own file has its rows.

    References
    ----------
    .. [1] A. Defazio, F. Bach and S. Lacoste-Julien, "SAGA: A Fast Incremental Gradient Method
       With Support for Non-Strongly Convex Composite Objectives", NeurIPS 2014.

    Examples
    --------
    >>> import numpy as np
    >>> import mxnet as mx
    >>> from mxnet import gluon
    >>> from gluon_svrg import SAGATrainer
    >>> samples = np.random.rand(20, 3).astype('float32')
    >>> labels = samples.sum(axis=1, keepdims=True)
    >>> data = gluon.data.DataLoader(gluon.data.ArrayDataset(samples, labels), batch_size=4)
    >>> minibatches = list(data)
    >>> net = gluon.nn.Dense(1)
    >>> net.initialize()
    >>> loss_fn = gluon.loss.L2Loss()
    >>> trainer = SAGATrainer(net.collect_params(), 'sgd', {'learning_rate': 0.1})
    >>> for epoch in range(4):
    ...     for i in np.random.permutation(len(minibatches)):
    ...         X, y = minibatches[i]
    ...         loss = trainer.step(len(X), closure=lambda: loss_fn(net(X), y), batch_index=i)
    >>> trainer.num_snapshots, trainer.inner_steps, trainer.grad_evaluations
    (0, 20, 80)
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
        lock_random: bool | str = "auto",
        prox: ProxArgument = None,
    ) -> None:
        super().__init__(
            SAGA(),
            lock_random,
            params,
            optimizer,
            optimizer_params,
            kvstore,
            compression_params,
            update_on_kvstore,
            prox,
        )


@parameters_as(SAGATrainer)
class SAGTrainer(TableTrainer):
    """A `gluon.Trainer` whose gradients are variance-reduced by SAG [1]_.

    This is like `SAGATrainer`, but the optimizer gets the mean of the table after the minibatch's
    row was replaced. The estimate is biased, but has less variance.

    Raises
    ------
    TypeError, ValueError
        If an argument is none of these; if there are several devices and no kvstore.

    See Also
    --------
    SAGATrainer : Describes the table and its methods, which are the same here.

    References
    ----------
    .. [1] M. Schmidt, N. Le Roux and F. Bach, "Minimizing Finite Sums with the Stochastic Average
       Gradient", Mathematical Programming 162, 2017.

    Examples
    --------
    Draw the minibatches with replacement, once all were visited:

    >>> import random
    >>> import mxnet as mx
    >>> from mxnet import gluon
    >>> from gluon_svrg import SAGTrainer
    >>> net = gluon.nn.Dense(1, in_units=2)
    >>> net.initialize()
    >>> ones = mx.np.ones if mx.util.is_np_array() else mx.nd.ones
    >>> data = [(k * ones((3, 2)), ones((3, 1))) for k in range(1, 5)]
    >>> def loss_of(X, y):
    ...     return gluon.loss.L2Loss()(net(X), y)
    >>> trainer = SAGTrainer(net.collect_params(), 'sgd', {'learning_rate': 0.01})
    >>> for i in [*range(4), *random.choices(range(4), k=8)]:
    ...     X, y = data[i]
    ...     loss = trainer.step(len(X), closure=lambda: loss_of(X, y), batch_index=i)
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
        lock_random: bool | str = "auto",
        prox: ProxArgument = None,
    ) -> None:
        super().__init__(
            SAG(),
            lock_random,
            params,
            optimizer,
            optimizer_params,
            kvstore,
            compression_params,
            update_on_kvstore,
            prox,
        )


def _check_index(index: int | None, name: str) -> int:
    """Return the index; raise if there is none."""
    if index is None:
        raise TypeError(checks.NO_INDEX.format(name=name))
    checks.check_index(index)
    return int(index)
