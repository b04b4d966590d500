"""The trainer of MARS."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import numpy as np
from mxnet.gluon import Parameter

from . import _arguments
from ._docstrings import parameters_as
from .methods.mars import MARS
from .prox import ProxArgument
from .storm import STORMTrainer
from .trainer import VarianceReducedTrainer


@parameters_as(STORMTrainer)
class MARSTrainer(VarianceReducedTrainer):
    """A `gluon.Trainer` whose gradients are corrected and clipped by MARS [1]_.

    The first step uses the gradient of its minibatch. All later steps replace that gradient by::

        v = g + s * (g - g_before),        s = gamma * beta / (1 - beta)

    where ``g_before`` is the minibatch's gradient at the weights before the last step. The mean of
    ``v`` over all devices and workers is clipped, each parameter by itself, and passed to the
    optimizer. The paper uses Adam, Lion and Shampoo; any optimizer works. MARS needs no refresh.

    Parameters
    ----------
    compression_params : dict, optional
        Gradient compression, as for `gluon.Trainer`; not with ``exact=False``.
    gamma : float, default 0.025
        How much of the correction to use; 0 is the plain optimizer, with clipping.
    beta : float, default 0.95
        The momentum of the optimizer, such as the ``beta1`` of Adam; below 1.
    clip : float, optional
        The largest norm of the mean estimate of a parameter's gradient, 1.0 by default; None for
        no clipping. Clipping does not wait for the device.
    exact : bool, default True
        Whether ``g_before`` is the gradient of the same minibatch, which takes two gradients per
        step. Otherwise it is the gradient of the previous minibatch, as computed in its step.
    include_vectors : bool, default False
        Whether parameters of one dimension, such as biases, are corrected and clipped as well. The
        paper leaves them to the plain optimizer.

    Raises
    ------
    TypeError, ValueError
        If an argument is none of these; if there are several devices and no kvstore; with
        ``update_on_kvstore=True`` or an asynchronous kvstore, which never return the reduced
        gradient; with ``compression_params`` and ``exact=False``.

    See Also
    --------
    mxnet.gluon.Trainer : All of its attributes and methods work here.
    SVRGTrainer : Everything that is not described here.

    Notes
    -----
    Every step needs a closure, even the first. ``has_snapshot`` tells whether there was a step or
    a refresh. With ``exact=True``, ``snapshot`` and ``at_snapshot`` have the weights before the
    last step, without frozen ones: both passes of a step use the current frozen values. With
    ``exact=False`` they do not exist. Then ``full_grads`` is the mean gradient of the last
    minibatch, zero for parameters that are left alone; with ``exact=True`` it is None.
    `update_full_grads` starts over: the current weights become the reference, and with
    ``exact=False`` its gradient is the full gradient. `discard_snapshot` also starts over: the
    next step uses the gradient of its minibatch.

    Under ``grad_req='add'``, gradients of your own backward are multiplied by ``1 + s`` with all
    others. The trainer needs twice the memory of the parameters in addition; with ``exact=True``,
    once more for large float32 parameters on a CPU, where oneDNN computes gradients. It holds two
    copies of what changes with a step, so a step that AMP skips, or that raises an exception,
    changes nothing.

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
        _arguments.number(gamma, "gamma")
        if np.float32(_arguments.number(beta, "beta", high=1)) == 1:
            raise ValueError(f"beta must be below 1, in float32 too, got {beta}.")
        if clip is not None:
            _arguments.number(clip, "clip", open_low=True)
        super().__init__(
            MARS(
                gamma,
                beta,
                clip,
                _arguments.flag(exact, "exact"),
                _arguments.flag(include_vectors, "include_vectors"),
            ),
            lock_random,
            params,
            optimizer,
            optimizer_params,
            kvstore,
            compression_params,
            update_on_kvstore,
            prox,
        )
