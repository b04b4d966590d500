"""The trainer of STORM."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from mxnet.gluon import Parameter

from . import _arguments
from ._docstrings import parameters_as
from .methods.storm import STORM
from .prox import ProxArgument
from .sarah import SARAHTrainer
from .trainer import VarianceReducedTrainer


@parameters_as(SARAHTrainer)
class STORMTrainer(VarianceReducedTrainer):
    """A `gluon.Trainer` whose gradients are variance-reduced by STORM [1]_.

    The first step uses the gradient of its minibatch. All later steps replace that gradient by::

        v = g - (1 - mixing) * (g_before - count * mean_grad),  then mean_grad = the mean of v

    where ``g_before`` is the minibatch's gradient at the weights before the last step, and pass
    ``v`` to the optimizer as `gluon.Trainer` does. STORM needs no refresh.

    Parameters
    ----------
    mixing : float, default 0.1
        The share of the fresh gradient, 0 to 1: the ``a`` of the paper. 1 is the plain optimizer,
        0 is SARAH that starts with one minibatch.
    lock_random : bool or 'auto', default 'auto'
        Whether both passes of a step draw the same random numbers (dropout masks). At the first
        step that has a reference, ``'auto'`` compares two gradients of a minibatch at the same
        weights. If they differ, it warns and locks from then on.

    Raises
    ------
    TypeError, ValueError
        If an argument is none of these; if there are several devices and no kvstore; with
        ``update_on_kvstore=True`` or an asynchronous kvstore, which never return the reduced
        gradient; with ``compression_params``.

    See Also
    --------
    mxnet.gluon.Trainer : All of its attributes and methods work here.
    SVRGTrainer : Everything that is not described here.

    Notes
    -----
    Every step needs a closure, even the first. ``has_snapshot`` tells whether there was a step or
    a refresh. ``snapshot`` and ``at_snapshot`` have the weights before the last step, without
    frozen ones: both passes of a step use the current frozen values. ``full_grads`` is the mean
    gradient of the formula, an estimate. `update_full_grads` starts over and sets it to the full
    gradient. `discard_snapshot` also starts over: the next step uses the gradient of its minibatch.

    The trainer needs four times the memory of the parameters in addition; once more for large
    float32 parameters on a CPU, where oneDNN computes gradients. It holds two copies of what
    changes with a step, so a step that AMP skips, or that raises an exception, changes nothing.
    Rounding errors fade away: each step keeps ``1 - mixing`` of the earlier ones.

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
        _arguments.number(mixing, "mixing", high=1)
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
