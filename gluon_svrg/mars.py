"""The trainer of MARS."""

from __future__ import annotations

import math
from typing import Any, Mapping, Sequence

from mxnet.gluon import Parameter

from . import checks
from .methods.mars import MARS
from .prox import ProxArgument
from .recursive import RecursiveTrainer


class MARSTrainer(RecursiveTrainer):
    """A `gluon.Trainer` whose gradients are corrected and clipped by MARS [1]_.

    The first step has the gradient of its minibatch. All others replace it by::

        v = g + s * (g - g_before),        s = gamma * beta / (1 - beta)

    where ``g_before`` is the minibatch's gradient at the weights before the last step. The mean of
    ``v`` over all devices and workers is clipped, each parameter by itself, and handed to the
    optimizer. The paper has Adam, Lion and Shampoo; any optimizer works. It needs no refresh.

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
    compression_params : dict, optional
        Gradient compression, as for `gluon.Trainer`; not with ``exact=False``.
    update_on_kvstore : bool, optional
        None and False are the same: the reduced gradient is needed before the update.
    gamma : float, default 0.025
        How much of the correction to use; 0 is the plain optimizer, with clipping.
    beta : float, default 0.95
        The momentum of the optimizer, such as the ``beta1`` of Adam; below 1.
    clip : float, optional
        The largest norm of the mean estimate of a parameter's gradient, 1.0 by default; None for
        no clipping. Nothing waits for the device.
    exact : bool, default True
        Whether ``g_before`` is the gradient of the same minibatch, which takes two gradients a
        step. Otherwise it is that of the minibatch before, as it was taken then.
    include_vectors : bool, default False
        Whether parameters of one dimension, such as biases, are corrected and clipped as well. In
        the paper they are left to the plain optimizer.
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
        compressed and ``exact=False``.

    See Also
    --------
    mxnet.gluon.Trainer : All of its attributes and methods work here.
    SVRGTrainer : What is not said here is as it is there.

    Notes
    -----
    Each step needs a closure, the first one too. ``has_snapshot`` tells whether there was a step,
    or a refresh. ``snapshot``, and ``at_snapshot``, are the weights before the last step, without
    frozen ones: both passes of a step use those of the moment. There are none with
    ``exact=False``. ``full_grads`` is the mean gradient of the last minibatch with
    ``exact=False``, zero for parameters that are left alone, otherwise None. `update_full_grads`
    starts anew: the reference is here, and with ``exact=False`` its gradient is the full gradient.
    `discard_snapshot` starts anew as well: the next step has the gradient of its minibatch.

    Gradients that a backward of your own has put under ``grad_req='add'`` are multiplied by
    ``1 + s`` with all others. Beside the parameters this needs twice their memory: what moves with
    a step is there twice, and a step that AMP skips, or that raises, moves nothing.

    References
    ----------
    .. [1] H. Yuan, Y. Liu, S. Wu, X. Zhou and Q. Gu, "MARS: Unleashing the Power of Variance
       Reduction for Training Large Models", 2024, arXiv:2411.10438.

    Examples
    --------
    >>> import numpy as np
    >>> from mxnet import gluon
    >>> from gluon_svrg import MARSTrainer
    >>> samples = np.random.rand(20, 3).astype('float32')
    >>> labels = samples.sum(axis=1, keepdims=True)
    >>> data = gluon.data.DataLoader(gluon.data.ArrayDataset(samples, labels), batch_size=4)
    >>> net = gluon.nn.Dense(1)
    >>> net.initialize()
    >>> loss_fn = gluon.loss.L2Loss()
    >>> trainer = MARSTrainer(net.collect_params(), 'adam', {'learning_rate': 0.01}, beta=0.9)
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
        gamma: float = 0.025,
        beta: float = 0.95,
        clip: float | None = 1.0,
        exact: bool = True,
        include_vectors: bool = False,
        lock_random: bool | str = "auto",
        prox: ProxArgument = None,
    ) -> None:
        checks.check_between(gamma, "gamma", 0, math.inf)
        checks.check_between(beta, "beta", 0, 1 - 2**-24)  # 1 in float32 is refused
        if clip is not None:
            checks.check_between(clip, "clip", 0, math.inf, open_low=True)
        if not exact:
            checks.refuse_compression(compression_params, "MARSTrainer(exact=False)")
        super().__init__(
            MARS(gamma, beta, clip, bool(exact), bool(include_vectors)),
            lock_random,
            params,
            optimizer,
            optimizer_params,
            kvstore,
            compression_params,
            update_on_kvstore,
            prox,
        )
