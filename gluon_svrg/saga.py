"""The trainers of SAGA and SAG, which keep the last gradient of each minibatch."""

from __future__ import annotations

from typing import Any, Callable, Mapping, NoReturn, Sequence

from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from . import checks
from .methods.interface import Method
from .methods.saga import SAG, SAGA
from .passes import memory
from .passes.closure import Loss, check_closure
from .prox import ProxArgument
from .trainer import VarianceReducedTrainer


class TableTrainer(VarianceReducedTrainer):
    """A trainer with a table of the last gradients of all minibatches. Use one of its subclasses.

    Parameters
    ----------
    method : Method
        What uses the table.
    lock_random : bool or 'auto'
        Whether a minibatch draws the same random numbers each time.
    params, optimizer, optimizer_params, kvstore, compression_params, update_on_kvstore
        As for `gluon.Trainer`.
    prox : Prox or dict, optional
        What is applied after each update.
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
        """Make one step of parameter update, and renew a row of the table.

        Parameters
        ----------
        batch_size : int
            The gradient, a sum over loss entries, is divided by it, as in `gluon.Trainer`.
        ignore_stale_grad : bool, default False
            Whether to go on where backward did not reach a parameter, as in `gluon.Trainer`. Such
            a parameter is updated all the same if another row of the table moves it.
        closure : callable
            Returns the loss of this minibatch: an NDArray, or a list or tuple of them. It is
            called once (twice in the first step after `update_full_grads`, to see that the data is
            the same; three times in the first step without it, to see whether gradients add up).
            It may be left out after `correct_grads`.
        batch_index : int
            The row of this minibatch, its position in the data: from 0 on, on each worker. Always
            needed with a closure. In the first pass without `update_full_grads` a row is added for
            each index that is new.

        Returns
        -------
        NDArray, list or tuple of NDArray, or None
            What the closure returned, before the update.

        Raises
        ------
        RuntimeError
            If there is neither a closure nor a call of `correct_grads` before; if a backward has
            overwritten what `correct_grads` left.
        TypeError, ValueError, IndexError, MemoryError, RuntimeError
            As `correct_grads`.
        UserWarning
            If backward did not reach a parameter, as in `gluon.Trainer`.

        Notes
        -----
        Row and mean move when the update has run. A step that raises, or that AMP skips, changes
        nothing, and the same index can be used again. So it can after an estimate that another
        call of `correct_grads` has overwritten.
        """
        checks.check_flag(ignore_stale_grad)
        if closure is not None:
            _check_index(batch_index, "step")
        return super().step(batch_size, ignore_stale_grad, closure=closure, batch_index=batch_index)

    def correct_grads(self, closure: Callable[[], Loss], *, batch_index: int | None = None) -> Loss:
        """Leave the estimate of a minibatch's gradient in `Parameter.grad`.

        The first half of `step`; `step` without a closure, or `allreduce_grads` and `update`, are
        the second. With SAG, the optimizer's gradient is there after `allreduce_grads` only.

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
            is no integer.
        IndexError
            If the index is negative, or has no row after `update_full_grads`, which has seen all
            minibatches.
        ValueError
            If the loss is on a device without parameters, or depends on none of them; if it has
            another number of entries than that of the minibatch at this index; if the index was
            used since the last update and gradients accumulate (``grad_req='add'``).
        MemoryError
            If there is no memory for another row.
        RuntimeError
            If the closure called backward itself or assigned a parameter; inside another thread's
            pass; if parameters have changed in shape, dtype, device or ``grad_req`` since the
            table was begun; if a row differs, at the first step after `update_full_grads`, from
            the gradient that is computed again (unless ``lock_random=False``).
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
        """Free the memory of the table; the next step begins a new one, with rows of zero."""
        super().discard_snapshot()


class SAGATrainer(TableTrainer):
    """A `gluon.Trainer` whose gradients are variance-reduced by SAGA [1]_.

    A table keeps the last gradient of each minibatch, and a step replaces the gradient by::

        g - row + count * mean

    ``mean`` is the mean of the table per loss entry; row and mean move with the step. A step takes
    one gradient, and there are no further passes over the data: it costs little more than a step
    of `gluon.Trainer`, and the memory of a gradient for each minibatch. For small models, and
    minibatches that stay the same and are visited in any order.

    Parameters
    ----------
    params : ParameterDict, dict, list or tuple of Parameter
        The parameters to optimize, as for `gluon.Trainer`.
    optimizer : str or Optimizer
        Any optimizer of MXNet, or registered with it.
    optimizer_params : dict, optional
        Keyword arguments of the optimizer when it is given by name.
    kvstore : str or KVStore, default 'device'
        The kvstore, as for `gluon.Trainer`; it must reduce gradients, as all but 'dist_async' do.
        Several workers have a common mean, and each the rows of its own minibatches.
    compression_params : dict, optional
        Must be left out: an error that compression makes would stay in the mean.
    update_on_kvstore : bool, optional
        None and False are the same: the reduced gradient must come back before the update.
    lock_random : bool or 'auto', default 'auto'
        Whether a minibatch draws the same random numbers (dropout masks) each time. ``'auto'``
        finds out in `update_full_grads` whether there are any, warns, and locks from then on; a
        first pass that trains does not look for them.
    prox : Prox or dict, optional
        A penalty or constraint of `gluon_svrg.prox`, applied after each update; a dict has one for
        each parameter, or pattern of names: ``{'.*weight': L1(0.01)}``. The update is then on the
        workers.

    Raises
    ------
    TypeError, ValueError
        If an argument is none of these; if there are several devices and no kvstore.

    See Also
    --------
    SAGTrainer : Gives the optimizer the mean of the table.
    mxnet.gluon.Trainer : All of its attributes and methods work here.

    Notes
    -----
    - The table is begun by `update_full_grads`, which takes all gradients at the current weights
      (with or without ``store_grads``), or else by the steps themselves: rows that were not
      visited are zero, and the mean is over the entries of those that were.
    - There is no snapshot: ``has_snapshot`` is False, ``snapshot`` is None, `at_snapshot` raises.
      `full_grads` is the mean of the table. `discard_snapshot` begins a new table.
    - ``inner_steps`` counts from the last `update_full_grads`, or from the start.
    - Memory, in gradients per device: one for each minibatch, and three besides. While
      `update_full_grads` runs there are two tables. It is refused where there is none.
    - With ``grad_req='add'`` several minibatches make one update. Each must have an index of its
      own.
    - Save and load each worker's states by itself: its rows are in its file only.

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


class SAGTrainer(TableTrainer):
    """A `gluon.Trainer` whose gradients are variance-reduced by SAG [1]_.

    As `SAGATrainer`, but the optimizer gets the mean of the table, after the minibatch's row was
    renewed. The estimate is biased, with less variance.

    Parameters
    ----------
    params : ParameterDict, dict, list or tuple of Parameter
        The parameters to optimize, as for `gluon.Trainer`.
    optimizer : str or Optimizer
        Any optimizer of MXNet, or registered with it.
    optimizer_params : dict, optional
        Keyword arguments of the optimizer when it is given by name.
    kvstore : str or KVStore, default 'device'
        As for `SAGATrainer`.
    compression_params : dict, optional
        Must be left out: an error that compression makes would stay in the mean.
    update_on_kvstore : bool, optional
        None and False are the same: the reduced gradient must come back before the update.
    lock_random : bool or 'auto', default 'auto'
        Whether a minibatch draws the same random numbers each time, as for `SAGATrainer`.
    prox : Prox or dict, optional
        A penalty or constraint of `gluon_svrg.prox`, applied after each update; a dict has one for
        each parameter, or pattern of names: ``{'.*weight': L1(0.01)}``. The update is then on the
        workers.

    Raises
    ------
    TypeError, ValueError
        If an argument is none of these; if there are several devices and no kvstore.

    See Also
    --------
    SAGATrainer : What the table is, and what its methods do; it is the same here.

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
    """The index; raise unless there is one."""
    if index is None:
        raise TypeError(checks.NO_INDEX.format(name=name))
    checks.check_index(index)
    return int(index)
