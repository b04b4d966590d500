"""Penalties and bounds for weights: proximal operators [1]_, applied after each update.

Every trainer of `gluon_svrg` takes an operator as ``prox=``. It then minimizes the mean loss plus
the penalty. With the step ``t`` of the last update, each weight becomes::

    the x that minimizes  |x - w|^2 / 2 + t * penalty(x)

So weights become exactly zero, or stay inside bounds, which a penalty inside the loss cannot do.

The step is the learning rate, with scheduler and ``lr_mult``, divided by ``1 - momentum``, because
one gradient moves a weight that far in total. With a preconditioner, the operator is part of the
direction instead, in the metric of the preconditioner, and nothing needs to be tuned. Files of
`save_states` do not store the operator.

An argument of a wrong type raises a TypeError, and one out of range a ValueError.

References
----------
.. [1] N. Parikh and S. Boyd, "Proximal Algorithms", Foundations and Trends in Optimization 1(3),
   2014.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import Any, Mapping, Optional, Sequence, Union

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from . import _arguments, _mxnet
from .kvstore.kinds import parameters_of

__all__ = ["L1", "Box", "ElasticNet", "GroupLasso", "Prox"]

_LEAST = sys.float_info.min  # MXNet's operators refuse smaller ones but 0


class Prox:
    """A proximal operator. Use one of its subclasses, or write one.

    Attributes
    ----------
    is_projection : bool
        A class attribute: whether the result is independent of the step. Then every optimizer
        works; otherwise only SGD, NAG and their subclasses do.

    Examples
    --------
    >>> import mxnet as mx
    >>> from gluon_svrg.prox import Prox
    >>> class UnitBall(Prox):
    ...     is_projection = True
    ...     def __call__(self, weight, step):
    ...         return weight / mx.nd.maximum(mx.nd.norm(weight), 1)
    >>> UnitBall()(mx.nd.array([0.0, 4.0]), 0.1).asnumpy().tolist()
    [0.0, 1.0]
    >>> class Ridge(Prox):
    ...     def __call__(self, weight, step):
    ...         return weight / (1 + step)
    ...     def value(self, weight):
    ...         return (weight**2).sum() / 2
    >>> Ridge().value(mx.nd.array([0.0, 4.0])).asscalar().item()
    8.0
    """

    is_projection = False

    def __call__(self, weight: NDArray, step: float) -> NDArray:
        """Compute the new values of a weight, on its device, without waiting for it.

        Parameters
        ----------
        weight : NDArray
            The weight after the update, or with a preconditioner other weights near it, an array of
            the classic (not NumPy-like) interface.
        step : float
            The step of the update. The result of a projection is the same for all, 0 included.

        Returns
        -------
        NDArray
            The new values, of the same shape and dtype.
        """
        raise NotImplementedError

    def value(self, weight: NDArray) -> Any:
        """Compute the penalty of a weight: a preconditioner and `compare` need it.

        Parameters
        ----------
        weight : NDArray
            The weight, an array of the classic interface.

        Returns
        -------
        float or NDArray
            The penalty, a number or an array of one number. That of a projection is 0.

        Raises
        ------
        NotImplementedError
            If a subclass that is no projection does not define it.
        """
        if self.is_projection:
            return 0.0
        raise NotImplementedError(
            f"{type(self).__name__} needs a method value(self, weight) that returns its penalty, "
            "as abs(weight).sum(). If the step does not matter, set is_projection = True instead."
        )


@dataclass(frozen=True)
class L1(Prox):
    """The sum of absolute values, as in the lasso [1]_: many weights become exactly zero.

    ::

        penalty(x) = strength * sum |x|
        w <- sign(w) * max(|w| - step * strength, 0)

    Parameters
    ----------
    strength : float
        The factor of the penalty, which is added to the *mean* loss: ``alpha`` of scikit-learn's
        ``Lasso``, ``1 / (C n)`` of its ``LogisticRegression`` for n samples.

    References
    ----------
    .. [1] R. Tibshirani, "Regression Shrinkage and Selection via the Lasso", Journal of the Royal
       Statistical Society B 58(1), 1996.

    Examples
    --------
    >>> import mxnet as mx
    >>> from gluon_svrg.prox import L1
    >>> L1(2.0)(mx.nd.array([-3.0, 0.5, 1.0]), 0.25).asnumpy().tolist()
    [-2.5, 0.0, 0.5]
    """

    strength: float

    def __post_init__(self) -> None:
        _arguments.number(self.strength, "strength")

    def __call__(self, weight: NDArray, step: float) -> NDArray:
        return _soft(weight, step * self.strength)

    def value(self, weight: NDArray) -> Any:
        return self.strength * abs(weight).sum()

    def _derivative(self, weight: Any, result: Any, step: float, directions: Any) -> Any:
        return directions * (result != 0)


@dataclass(frozen=True)
class ElasticNet(Prox):
    """The sum of absolute values plus the sum of squares: the elastic net [1]_.

    ::

        penalty(x) = l1 * sum |x| + l2 / 2 * sum x^2
        w <- sign(w) * max(|w| - step * l1, 0) / (1 + step * l2)

    Parameters
    ----------
    l1, l2 : float
        The factors of the penalties, which are added to the mean loss: ``alpha * l1_ratio`` and
        ``alpha * (1 - l1_ratio)`` of scikit-learn's ``ElasticNet``. ``l2`` adds to ``wd``.

    References
    ----------
    .. [1] H. Zou and T. Hastie, "Regularization and Variable Selection via the Elastic Net",
       Journal of the Royal Statistical Society B 67(2), 2005.

    Examples
    --------
    >>> import mxnet as mx
    >>> from gluon_svrg.prox import ElasticNet
    >>> ElasticNet(2.0, 4.0)(mx.nd.array([-3.0, 0.5, 1.0]), 0.25).asnumpy().tolist()
    [-1.25, 0.0, 0.25]
    """

    l1: float
    l2: float

    def __post_init__(self) -> None:
        _arguments.number(self.l1, "l1")
        _arguments.number(self.l2, "l2")

    def __call__(self, weight: NDArray, step: float) -> NDArray:
        return _soft(weight, step * self.l1) / (1 + step * self.l2)

    def value(self, weight: NDArray) -> Any:
        return self.l1 * abs(weight).sum() + self.l2 / 2 * (weight**2).sum()

    def _derivative(self, weight: Any, result: Any, step: float, directions: Any) -> Any:
        return directions * (result != 0) / (1 + step * self.l2)


@dataclass(frozen=True)
class GroupLasso(Prox):
    """The sum of the norms of groups [1]_: whole groups become zero.

    ::

        penalty(x) = strength * sum over groups |x_group|
        w_group <- w_group * max(1 - step * strength / |w_group|, 0)

    Parameters
    ----------
    strength : float
        The factor of the penalty, which is added to the mean loss; the same for groups of all
        sizes.
    axis : int or None, default 0
        The groups are the slices along this axis. For `Dense`, 0 makes a group for each output,
        and 1 for each input. None makes the whole weight one group.

    References
    ----------
    .. [1] M. Yuan and Y. Lin, "Model Selection and Estimation in Regression with Grouped
       Variables", Journal of the Royal Statistical Society B 68(1), 2006.

    Examples
    --------
    >>> import mxnet as mx
    >>> from gluon_svrg.prox import GroupLasso
    >>> weight = mx.nd.array([[3.0, 4.0], [0.3, 0.4]])
    >>> GroupLasso(5.0)(weight, 0.5).asnumpy().tolist()
    [[1.5, 2.0], [0.0, 0.0]]
    """

    strength: float
    axis: int | None = 0

    def __post_init__(self) -> None:
        _arguments.number(self.strength, "strength")
        if self.axis is not None:
            _arguments.whole(self.axis, "axis", 0)

    def __call__(self, weight: NDArray, step: float) -> NDArray:
        least = max(step * self.strength, _LEAST)
        # Not max(1 - least / norm, 0): a norm of zero gives NaN where `least` is 0 in float32.
        return weight * (1 - least / _clipped(self._norms(weight), max(least, 1e-30), inf))

    def value(self, weight: NDArray) -> Any:
        return self.strength * self._norms(weight).sum()

    def _norms(self, weight: Any) -> Any:
        """The norm of each group, with as many axes as the weight."""
        inside = tuple(axis for axis in range(weight.ndim) if axis != self.axis)
        return (weight**2).sum(axis=inside, keepdims=True) ** 0.5 if inside else abs(weight)

    def _derivative(self, weight: Any, result: Any, step: float, directions: Any) -> Any:
        norms = self._norms(weight).clip(_LEAST, None)
        unit, share = weight / norms, np.minimum(step * self.strength / norms, 1)
        inside = tuple(1 + axis for axis in range(weight.ndim) if axis != self.axis)
        along = (directions * unit).sum(axis=inside, keepdims=True) * unit if inside else directions
        return (1 - share) * directions + np.where(share < 1, share, 0) * along


@dataclass(frozen=True)
class Box(Prox):
    """Bounds: each weight stays between two numbers.

    ::

        w <- min(max(w, low), high)

    This is a projection: it works with every optimizer.

    Parameters
    ----------
    low, high : float
        The bounds. They may be infinite: ``Box(0, inf)`` keeps weights from being negative.

    Examples
    --------
    >>> import mxnet as mx
    >>> from gluon_svrg.prox import Box
    >>> Box(-1, 1)(mx.nd.array([-3.0, 0.5, 2.0]), 0.1).asnumpy().tolist()
    [-1.0, 0.5, 1.0]
    """

    low: float
    high: float

    is_projection = True

    def __post_init__(self) -> None:
        for name, value in (("low", self.low), ("high", self.high)):
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(f"{name} must be a number, got {type(value).__name__}.")
        if not (self.low <= self.high and self.low < inf and self.high > -inf):
            raise ValueError(
                f"{self} holds no number: low must not be above high, nor both inf or -inf."
            )

    def __call__(self, weight: NDArray, step: float) -> NDArray:
        return _clipped(weight, float(self.low), float(self.high))

    def _derivative(self, weight: Any, result: Any, step: float, directions: Any) -> Any:
        return directions * (weight == result)


def _soft(weight: NDArray, least: float) -> NDArray:
    """Compute ``sign(w) * max(|w| - least, 0)``, as w minus w clipped to ``[-least, least]``."""
    least = max(least, _LEAST)
    return weight - _clipped(weight, -least, least)


def _clipped(weight: Any, low: float, high: float) -> Any:
    """The nearest numbers between bounds. Operators take arrays of NumPy, too: a preconditioner's.

    MXNet's ``clip`` has bounds in float32.
    """
    F = np if isinstance(weight, np.ndarray) else mx.nd
    return F.minimum(F.maximum(weight, low), high)


#: The argument ``prox`` of trainers: an operator for all parameters, or operators for some.
ProxArgument = Union[Prox, Mapping[Union[str, Parameter], Optional[Prox]], None]


class ProximalOperators:
    """The operators of a trainer's parameters; the arguments are those of the trainer."""

    def __init__(self, prox: ProxArgument, params: Any, optimizer: Any, settings: Any) -> None:
        self.operators = _by_parameter(prox, params)
        self._moving: dict[int, list[bool]] = {}  # per parameter: on which devices
        for parameter, operator in self.operators.items():
            if not operator.is_projection:
                _check_optimizer(operator, optimizer, settings)
            _check_parameter(operator, parameter)

    def note_moving(self, parameters: Sequence[Parameter]) -> None:
        """Note which weights the optimizer is about to move: those with fresh gradients."""
        self._moving = {}
        for index, parameter in enumerate(parameters):
            if parameter in self.operators and _mxnet.is_trainable(parameter):
                _check_parameter(self.operators[parameter], parameter)
                (self._moving[index],) = _mxnet.fresh([_mxnet.data(parameter)])

    def apply(self, parameters: Sequence[Parameter], optimizer: Any) -> None:
        """Apply the operators to the weights that have moved."""
        for index, flags in self._moving.items():
            operator, step = self.operators[parameters[index]], 0.0
            if not operator.is_projection:
                rate = np.float32(optimizer.learning_rate * parameters[index].lr_mult)
                step = float(rate) / (1 - float(np.float32(optimizer.momentum)))
            weights = map(_mxnet.classic, _mxnet.data(parameters[index]))
            for weight in (weight for weight, has_moved in zip(weights, flags) if has_moved):
                operator(weight, step).copyto(weight)


def _by_parameter(prox: ProxArgument, params: Any) -> dict[Parameter, Prox]:
    """Choose the operator of each parameter that has one: that of the first key that fits."""
    parameters = parameters_of(params)
    names = list(params.keys()) if hasattr(params, "keys") else [p.name for p in parameters]
    choice: Mapping[Any, Any] = prox if isinstance(prox, Mapping) else {"": prox}
    chosen: dict[Parameter, Prox | None] = {}
    for key, operator in choice.items():
        if not isinstance(key, (str, Parameter)) or not isinstance(operator, (Prox, type(None))):
            raise TypeError(
                "prox must be an operator of gluon_svrg.prox, or a dict of them whose keys are "
                f"parameters, or patterns as in {{'.*weight': L1(0.01)}}, got {prox!r}."
            )
        try:
            by_name = isinstance(key, str)
            fits = [re.match(key, n) if by_name else key is p for n, p in zip(names, parameters)]
        except re.error as error:
            raise ValueError(
                f"prox has the key {key!r}, which is no regular expression ({error}). To fit "
                "names with weight in them, write '.*weight'."
            ) from error
        if parameters and not any(fits):
            raise ValueError(
                f"prox has the key {getattr(key, 'name', key)!r}, which fits none of the trainer's "
                f"parameters: {', '.join(names[:8])}{', ...' * (len(names) > 8)}."
            )
        for parameter in (p for p, fit in zip(parameters, fits) if fit):
            chosen.setdefault(parameter, operator)
    return {parameter: operator for parameter, operator in chosen.items() if operator is not None}


def _check_optimizer(operator: Prox, optimizer: Any, settings: Any) -> None:
    """Raise unless an operator can use the step of an optimizer."""
    if not _mxnet.steps_along_gradient(optimizer):
        name = _mxnet.class_of(optimizer).__name__
        raise ValueError(
            f"{operator} needs an optimizer whose step is the learning rate times a direction, but "
            f"{name} has another step. Use 'sgd' or 'nag'; Box works with every optimizer."
        )
    momentum = (settings or {}).get("momentum", getattr(optimizer, "momentum", 0.0))
    if not 0 <= np.float32(momentum) < 1:
        raise ValueError(f"{operator} needs a momentum of at least 0 and below 1, got {momentum}.")


def _check_parameter(operator: Prox, parameter: Parameter) -> None:
    """Raise unless an operator can be applied to a parameter."""
    name, dtype, shape = _mxnet.name_of(parameter), _mxnet.dtype_of(parameter), parameter.shape
    choose = f"Choose other parameters: prox={{'.*weight': {operator}}}."
    if dtype not in ("float32", "float64"):
        raise ValueError(f"{operator} needs float32 or float64, and {name} is {dtype}. {choose}")
    axis = operator.axis if isinstance(operator, GroupLasso) else None
    if axis is not None and shape is not None and axis >= len(shape):
        raise ValueError(f"{operator} cannot group {name} of shape {shape}. {choose}")
