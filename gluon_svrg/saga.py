"""The trainers of SAGA and SAG, which keep the last gradient of each minibatch."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from mxnet.gluon import Parameter

from ._docstrings import parameters_as
from .methods.saga import SAG, SAGA
from .prox import ProxArgument
from .svrg import SVRGTrainer
from .trainer import VarianceReducedTrainer


@parameters_as(SVRGTrainer)
class SAGATrainer(VarianceReducedTrainer):
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
        The kvstore, as for `gluon.Trainer`, but not an asynchronous one: the mean of the table
        moves by the reduced gradient.
    compression_params : None
        Not for this trainer: an error in the mean of the table would stay in it.
    update_on_kvstore : bool, optional
        None or False: the mean moves before the update.
    lock_random : bool or 'auto', default 'auto'
        Whether a minibatch draws the same random numbers (dropout masks) each time. ``'auto'``
        detects them in `update_full_grads`, warns, and locks from then on. A first pass that trains
        does not look for them.

    Raises
    ------
    TypeError, ValueError
        If an argument is none of these; if there are several devices and no kvstore; with
        ``update_on_kvstore=True`` or an asynchronous kvstore, which never return the reduced
        gradient; with ``compression_params``.

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
    - Workers share the mean of the table, and each has the rows of its own minibatches.
    - The memory is one gradient per device for each minibatch, and three more; without
      `update_full_grads` a copy of the weights too, until the first minibatch comes again and is
      compared with its row. While `update_full_grads` runs there are two tables. A MemoryError is
      raised if there is no room.
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
class SAGTrainer(VarianceReducedTrainer):
    """A `gluon.Trainer` whose gradients are variance-reduced by SAG [1]_.

    This is like `SAGATrainer`, but a step passes to the optimizer::

        count * mean,        where the minibatch's row is its new gradient already

    The estimate is biased, but has less variance.

    Raises
    ------
    TypeError, ValueError
        If an argument is none of these; if there are several devices and no kvstore; with
        ``update_on_kvstore=True`` or an asynchronous kvstore, which never return the reduced
        gradient; with ``compression_params``.

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
