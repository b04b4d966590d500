"""The trainer of STORM."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from mxnet.gluon import Parameter

from . import checks
from .methods.storm import STORM
from .prox import ProxArgument
from .recursive import RecursiveTrainer


class STORMTrainer(RecursiveTrainer):
    """A `gluon.Trainer` whose gradients are variance-reduced by STORM [1]_.

    The first step has the gradient of its minibatch. All others replace it by::

        v = g - (1 - mixing) * (g_before - count * mean_grad),  then mean_grad = the mean of v

    where ``g_before`` is the minibatch's gradient at the weights before the last step, and hand it
    to the optimizer as `gluon.Trainer` does. It needs no refresh.

    Parameters
    ----------
    params : ParameterDict, dict, list or tuple of Parameter
        The parameters to optimize, as for `gluon.Trainer`.
    optimizer : str or Optimizer
        Any optimizer of MXNet, or registered with it.
    optimizer_params : dict, optional
        Keyword arguments of the optimizer when it is given by name.
    kvstore : str or KVStore, default 'device'
        The kvstore, as for `gluon.Trainer`; none that is asynchronous.
    compression_params : None
        Not for this trainer: an error in the mean gradient would stay in it.
    update_on_kvstore : bool, optional
        None and False are the same: the reduced gradient is needed before the update.
    mixing : float, default 0.1
        The share of the fresh gradient, 0 to 1: the ``a`` of the paper. 1 is the plain optimizer,
        0 is SARAH that starts with one minibatch.
    lock_random : bool or 'auto', default 'auto'
        Whether both passes of a step draw the same random numbers (dropout masks). ``'auto'``
        compares two gradients of a minibatch at the same weights at the first step that has a
        reference;
        if they differ, it warns and locks from then on.
    prox : Prox or dict, optional
        A penalty or constraint of `gluon_svrg.prox`, applied after each update; a dict has one for
        each parameter, or pattern of names: ``{'.*weight': L1(0.01)}``. The update is then on the
        workers.

    Raises
    ------
    TypeError, ValueError
        If an argument is none of these; if there are several devices and no kvstore; with
        ``update_on_kvstore=True`` or an asynchronous kvstore, which never hand back the reduced
        gradient; if gradients are to be
        compressed.

    See Also
    --------
    mxnet.gluon.Trainer : All of its attributes and methods work here.
    SVRGTrainer : What is not said here is as it is there.

    Notes
    -----
    Each step needs a closure, the first one too. ``has_snapshot`` tells whether there was a step,
    or a refresh. ``snapshot``, and ``at_snapshot``, are the weights before the last step, without
    frozen ones: both passes of a step use those of the moment. ``full_grads`` is the mean gradient
    of the formula, an estimate. `update_full_grads` starts anew: it is the full gradient then.
    `discard_snapshot` starts anew as well: the next step has the gradient of its minibatch.

    Beside the parameters this needs four times their memory: what moves with a step is there
    twice, and a step that AMP skips, or that raises, moves nothing. Rounding errors fade away:
    each step keeps ``1 - mixing`` of those before.

    References
    ----------
    .. [1] A. Cutkosky and F. Orabona, "Momentum-Based Variance Reduction in Non-Convex SGD",
       NeurIPS 2019.

    Examples
    --------
    >>> import numpy as np
    >>> from mxnet import gluon
    >>> from gluon_svrg import STORMTrainer
    >>> samples = np.random.rand(20, 3).astype('float32')
    >>> labels = samples.sum(axis=1, keepdims=True)
    >>> data = gluon.data.DataLoader(gluon.data.ArrayDataset(samples, labels), batch_size=4)
    >>> net = gluon.nn.Dense(1)
    >>> net.initialize()
    >>> loss_fn = gluon.loss.L2Loss()
    >>> trainer = STORMTrainer(net.collect_params(), 'sgd', {'learning_rate': 0.1}, mixing=0.3)
    >>> def loss_of(X, y):
    ...     return loss_fn(net(X), y)
    >>> for epoch in range(4):
    ...     for X, y in data:
    ...         loss = trainer.step(len(X), closure=lambda: loss_of(X, y))
    """

    _not_corrected = checks.NEEDS_CLOSURE

    def __init__(
        self,
        params: Mapping[str, Parameter] | Sequence[Parameter],
        optimizer: Any,
        optimizer_params: dict[str, Any] | None = None,
        kvstore: Any = "device",
        compression_params: dict[str, Any] | None = None,
        update_on_kvstore: bool | None = None,
        *,
        mixing: float = 0.1,
        lock_random: bool | str = "auto",
        prox: ProxArgument = None,
    ) -> None:
        checks.check_between(mixing, "mixing", 0, 1)
        checks.refuse_compression(compression_params, "STORMTrainer")
        super().__init__(
            STORM(mixing),
            lock_random,
            params,
            optimizer,
            optimizer_params,
            kvstore,
            compression_params,
            update_on_kvstore,
            prox,
        )
