"""The trainer of SVRG."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from mxnet.gluon import Parameter

from . import _arguments, _mxnet, checks
from .methods.coefficient import Schedule
from .methods.svrg import SVRG
from .methods.table import Table
from .passes.full_pass import FullGradient
from .prox import ProxArgument
from .trainer import VarianceReducedTrainer


class SVRGTrainer(VarianceReducedTrainer):
    """A `gluon.Trainer` whose gradients are variance-reduced by SVRG [1]_.

    From time to time `update_full_grads` takes a snapshot of the parameters, and computes the mean
    gradient over all data there. Between snapshots, `step` replaces each minibatch gradient by::

        g - coefficient * (g_snapshot - count * full_grad)

    before anything is reduced, compressed or pushed, and passes it to the optimizer and the kvstore
    exactly as `gluon.Trainer` does. Without a snapshot it trains as `gluon.Trainer` does.

    Parameters
    ----------
    params : ParameterDict, dict, list or tuple of Parameter
        The parameters to optimize, as for `gluon.Trainer`.
    optimizer : str or Optimizer
        Any optimizer of MXNet, or registered with it.
    optimizer_params : dict, optional
        Keyword arguments of the optimizer when it is given by name.
    kvstore : str or KVStore, default 'device'
        The kvstore, as for `gluon.Trainer`. Several devices need one.
    compression_params : dict, optional
        Gradient compression, as for `gluon.Trainer`.
    update_on_kvstore : bool, optional
        Where to update, as for `gluon.Trainer`.
    coefficient : float or callable, default 1.0
        How much of the control variate to use: 1 is SVRG, 0 the plain optimizer, in between
        alpha-SVRG [2]_. A callable is called with the index of each snapshot (0, 1, ...), perhaps
        more than once, and returns its coefficient.
    lock_random : bool or 'auto', default 'auto'
        Whether both passes of a step draw the same random numbers (dropout masks). At the first
        step after a snapshot both gradients must be equal, and ``'auto'`` compares them. If they
        differ, it warns and locks from then on.
    barzilai_borwein : bool, default False
        Whether each refresh sets the learning rate from the last two snapshots [3]_, for SGD and
        NAG without a scheduler. Until the second refresh, the optimizer uses its own rate. Where
        the curvature is not positive, the last rate stays. A momentum moves the weights
        ``1 / (1 - momentum)`` times as far, so the rate is divided by that.
    prox : Prox or dict, optional
        A penalty or constraint of `gluon_svrg.prox`, applied after each update; a dict has one for
        each parameter, or pattern of names: ``{'.*weight': L1(0.01)}``. The update then runs on
        the workers.

    Raises
    ------
    TypeError, ValueError
        If an argument is none of these; if there are several devices and no kvstore; if
        ``update_on_kvstore=True`` and there is no kvstore to update on; if the optimizer or the
        kvstore does not allow ``barzilai_borwein``.

    See Also
    --------
    mxnet.gluon.Trainer : All of its attributes and methods work here.

    References
    ----------
    .. [1] R. Johnson and T. Zhang, "Accelerating Stochastic Gradient Descent using Predictive
       Variance Reduction", NeurIPS 2013.
    .. [2] Y. Yin, Z. Xu, Z. Li, T. Darrell and Z. Liu, "A Coefficient Makes SVRG Effective",
       ICLR 2025, arXiv:2311.05589.
    .. [3] C. Tan, S. Ma, Y.-H. Dai and Y. Qian, "Barzilai-Borwein Step Size for Stochastic
       Gradient Descent", NeurIPS 2016, arXiv:1605.04131.

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
        coefficient: Schedule = 1.0,
        lock_random: bool | str = "auto",
        barzilai_borwein: bool = False,
        prox: ProxArgument = None,
    ) -> None:
        if _arguments.flag(barzilai_borwein, "barzilai_borwein"):
            checks.check_rate_can_be_set(optimizer, optimizer_params, kvstore)
        self._svrg = SVRG(coefficient)
        super().__init__(
            self._svrg,
            lock_random,
            params,
            optimizer,
            optimizer_params,
            kvstore,
            compression_params,
            update_on_kvstore,
            prox,
        )
        self._sets_rate = barzilai_borwein

    def _take_over(self, full: FullGradient, table: Table | None) -> None:
        rate = self._barzilai_borwein_rate(full) if self._sets_rate else None
        super()._take_over(full, table)
        if rate is not None:
            self.set_learning_rate(rate * (1 - self.optimizer.momentum))

    def _barzilai_borwein_rate(self, full: FullGradient) -> float | None:
        """The rate from the last two snapshots, without momentum."""
        network = self._work.network
        indices = list(map(network.parameters.index, network.trainable))
        wds = _mxnet.weight_decays(self.optimizer, indices)
        return self._svrg.learning_rate(network, full, wds, self.inner_steps)

    @property
    def coefficient(self) -> float:
        """How much of the control variate is used. Can be set to a number or a callable."""
        return self._svrg.coefficient.value

    @coefficient.setter
    def coefficient(self, value: Schedule) -> None:
        self._svrg.coefficient.change(value, max(self.num_snapshots - 1, 0))
