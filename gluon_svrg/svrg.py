"""The trainer of SVRG."""

from __future__ import annotations

import math
from typing import Any, Callable, Iterator, Mapping, Sequence, Union

from mxnet.gluon import Parameter

from . import _mxnet, checks, saving
from .methods.svrg import SVRG
from .passes.full_pass import FullGradient
from .prox import ProxArgument
from .trainer import VarianceReducedTrainer

#: A coefficient, or a function from the snapshot's index to the coefficient.
Coefficient = Union[float, Callable[[int], float]]


class SVRGTrainer(VarianceReducedTrainer):
    """A `gluon.Trainer` whose gradients are variance-reduced by SVRG [1]_.

    From time to time `update_full_grads` takes a snapshot of the parameters, and computes the mean
    gradient over all data there. Between snapshots, `step` replaces each minibatch gradient by::

        g - coefficient * (g_snapshot - count * full_grad)

    before anything is reduced, compressed or pushed, and passes it to the optimizer and the kvstore
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
        coefficient: Coefficient = 1.0,
        lock_random: bool | str = "auto",
        barzilai_borwein: bool = False,
        prox: ProxArgument = None,
    ) -> None:
        checks.check_coefficient(coefficient)
        if not isinstance(barzilai_borwein, bool):
            raise TypeError(f"barzilai_borwein must be True or False, got {barzilai_borwein!r}.")
        if barzilai_borwein:
            checks.check_rate_can_be_set(optimizer, optimizer_params, kvstore)
        in_force = _coefficient_of(coefficient, 0)
        self._svrg = SVRG(in_force)
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
        self._coefficient_schedule = coefficient
        self._sets_rate = barzilai_borwein

    def _take_over(self, full: FullGradient, *args: Any) -> None:
        rate = None
        if self._sets_rate and self._svrg.has_reference:
            network, steps = self._network, self._counters.inner_steps
            indices = list(map(network.parameters.index, network.trainable))
            wds = _mxnet.weight_decays(self.optimizer, indices)
            rate = self._svrg.learning_rate(network, full, wds, steps)
        super()._take_over(full, *args)
        if rate is not None:
            self.set_learning_rate(rate * (1 - self.optimizer.momentum))

    @property
    def coefficient(self) -> float:
        """How much of the control variate is used. Can be set to a number or a callable."""
        return self._method.coefficient

    @coefficient.setter
    def coefficient(self, value: Coefficient) -> None:
        checks.check_coefficient(value)
        in_force = _coefficient_of(value, max(self.num_snapshots - 1, 0))
        self._coefficient_schedule, self._method.coefficient = value, in_force

    def _is_over(self) -> bool:
        is_over = getattr(self._coefficient_schedule, "is_over", None)
        return is_over is not None and bool(is_over(self.num_snapshots))

    def _new_coefficient(self) -> float | None:
        return _coefficient_of(self._coefficient_schedule, self.num_snapshots)

    def _coefficient_part(self) -> Any:
        return CoefficientPart(self)


class CoefficientPart:
    """The current coefficient and its schedule, as a part of a file.

    Parameters
    ----------
    trainer : SVRGTrainer
        The trainer that uses the coefficient.
    """

    def __init__(self, trainer: SVRGTrainer) -> None:
        self._trainer = trainer

    def state(self) -> dict[str, Any]:
        """The coefficient, and its schedule: a number, an object, or the word "function"."""
        schedule: Any = self._trainer._coefficient_schedule
        if not callable(schedule):
            schedule = float(schedule)
        elif hasattr(schedule, "__name__"):
            schedule = "function"
        return {"schedule": schedule, "coefficient": self._trainer.coefficient}

    def problems(self, state: Any) -> Iterator[str]:
        """Tell why a state cannot be assigned."""
        if not isinstance(state, dict) or set(state) != {"schedule", "coefficient"}:
            yield "its coefficient has another form"
            return
        for value in (state["coefficient"], state["schedule"]):
            if isinstance(value, float) and not 0 <= value < math.inf:
                yield f"its coefficient is {value}"
        if not isinstance(state["coefficient"], float):
            yield "its coefficient is no number"
        saved, live = state["schedule"], self.state()["schedule"]
        was, is_now = map(_kind, (saved, live))
        if was != is_now:
            yield f"the coefficient was {was} and is {is_now} here"
        elif isinstance(saved, saving.SavedObject):
            yield from saving.object_problems(saved, live, "the coefficient")

    def assign(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        trainer, schedule = self._trainer, state["schedule"]
        if isinstance(schedule, saving.SavedObject):
            saving.assign_object(schedule, trainer._coefficient_schedule)
        elif isinstance(schedule, float):
            trainer._coefficient_schedule = schedule
        trainer._method.coefficient = state["coefficient"]


def _kind(schedule: Any) -> str:
    if isinstance(schedule, saving.SavedObject):
        return schedule.class_name
    if isinstance(schedule, (float, str)):
        return "a number" if isinstance(schedule, float) else schedule
    return type(schedule).__name__


def _coefficient_of(schedule: Coefficient, index: int) -> float:
    """The coefficient for a snapshot."""
    value = schedule(index) if callable(schedule) else schedule
    checks.check_number(value, "coefficient")
    return float(value)
