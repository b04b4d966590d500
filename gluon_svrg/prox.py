"""Penalties and constraints for weights: proximal operators, applied after each update.

Every trainer of `gluon_svrg` takes an operator as ``prox=``. It then minimizes the mean loss plus
the penalty. With the step ``t`` of the last update, each weight becomes::

    the x that minimizes  |x - w|^2 / 2 + t * penalty(x)

So weights become exactly zero, or stay inside a box. Weight decay and penalties inside the loss
cannot do this.

The step is the learning rate, with scheduler and ``lr_mult``, divided by ``1 - momentum``: that is
how far one gradient moves a weight in total. With the learning rate alone, SGD with momentum would
find the minimum for a penalty ``1 - momentum`` times as strong.

Files of `save_states` do not store the operator: it is an argument of the trainer.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import inf
from numbers import Integral, Real
from typing import Mapping, Optional, Sequence, Union

import mxnet as mx
from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from . import _arguments

__all__ = ["L1", "Box", "ElasticNet", "GroupLasso", "NonNegative", "Prox"]


class Prox:
    """A proximal operator. Use one of its subclasses, or write one.

    Attributes
    ----------
    is_projection : bool
        A class attribute: whether the result is independent of the step. If so, every optimizer
        works; otherwise only those whose step is the learning rate times a direction.

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
    """

    is_projection = False

    def __call__(self, weight: NDArray, step: float) -> NDArray:
        """Compute the new values of a weight, on its device, without waiting for it.

        Parameters
        ----------
        weight : NDArray
            The weight after the update, an array of the classic (not NumPy-like) interface.
        step : float
            The step of the update; 0 for a projection.

        Returns
        -------
        NDArray
            The new values, of the same shape and dtype. The trainer copies them into the weight.
        """
        raise NotImplementedError

    def check_shape(self, name: str, shape: Sequence[int]) -> None:
        """Raise ValueError if the operator cannot take weights of a shape.

        Parameters
        ----------
        name : str
            The name of the parameter, for the message.
        shape : sequence of int
            Its shape; unknown sizes are 0 or -1.
        """


@dataclass(frozen=True)
class L1(Prox):
    """The sum of absolute values, as in the lasso: many weights become exactly zero.

    ::

        penalty(x) = strength * sum |x|
        w <- sign(w) * max(|w| - step * strength, 0)

    Parameters
    ----------
    strength : float
        The factor of the penalty, which is added to the *mean* loss. It is ``alpha`` of
        scikit-learn's ``Lasso``, and ``1 / (C n)`` of its ``LogisticRegression`` for n samples.

    Raises
    ------
    TypeError, ValueError
        If the strength is no finite number, or negative.

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
        """Compute the new values of a weight."""
        return _soft(weight, _times(step, self.strength))


@dataclass(frozen=True)
class ElasticNet(Prox):
    """The sum of absolute values plus the sum of squares.

    ::

        penalty(x) = l1 * sum |x| + l2 / 2 * sum x^2
        w <- sign(w) * max(|w| - step * l1, 0) / (1 + step * l2)

    Parameters
    ----------
    l1, l2 : float
        The factors of the two penalties, which are added to the mean loss. ``l2`` means the same as
        the optimizer's ``wd``, which is part of the gradient, and adds to it. They are
        ``alpha * l1_ratio`` and ``alpha * (1 - l1_ratio)`` of scikit-learn's ``ElasticNet``.

    Raises
    ------
    TypeError, ValueError
        If a strength is no finite number, or negative.

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
        """Compute the new values of a weight."""
        return _soft(weight, _times(step, self.l1)) / (1 + step * self.l2)


@dataclass(frozen=True)
class GroupLasso(Prox):
    """The sum of the norms of groups: whole groups become zero.

    ::

        penalty(x) = strength * sum over groups |x_group|
        w_group <- w_group * max(1 - step * strength / |w_group|, 0)

    Parameters
    ----------
    strength : float
        The factor of the penalty, which is added to the mean loss; the same for groups of all
        sizes.
    axis : int or None, default 0
        The groups are the slices along this axis. In Gluon's layers, 0 makes a group for each
        output: the row of a unit in a matrix, the filter of a channel in a convolution. 1 makes a
        group for each input: the column of a feature. None makes the whole weight one group. Along
        axis 0 of a vector, such as a bias, each entry is a group.

    Raises
    ------
    TypeError, ValueError
        If the strength is no finite number, or negative; if ``axis`` is not the number of an axis.

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
        if self.axis is None:
            return
        if isinstance(self.axis, bool) or not isinstance(self.axis, Integral):
            name = type(self.axis).__name__
            raise TypeError(f"axis must be the number of an axis, or None, got {name}.")
        if self.axis < 0:
            raise ValueError(f"axis must be the number of an axis, from 0 on, got {self.axis}.")

    def __call__(self, weight: NDArray, step: float) -> NDArray:
        """Compute the new values of a weight."""
        least = _times(step, self.strength)
        others = tuple(axis for axis in range(weight.ndim) if axis != self.axis)
        norm = (weight**2).sum(axis=others, keepdims=True).sqrt() if others else weight.abs()
        # Not max(1 - least / norm, 0): a norm of zero would give NaN where `least` is zero.
        share = least / mx.nd.maximum(norm, max(least, 1e-30))
        return mx.nd.broadcast_mul(weight, 1 - share)

    def check_shape(self, name: str, shape: Sequence[int]) -> None:
        """Raise ValueError unless weights of a shape have the axis.

        Parameters
        ----------
        name : str
            The name of the parameter, for the message.
        shape : sequence of int
            Its shape.
        """
        if self.axis is not None and self.axis >= len(shape):
            raise ValueError(
                f"{self} cannot group {name} of shape {tuple(shape)}, which has no axis "
                f"{self.axis}. Choose the parameters: prox={{'.*weight': {self}}}."
            )


@dataclass(frozen=True)
class Box(Prox):
    """Bounds: each weight stays between two numbers.

    ::

        w <- min(max(w, low), high)

    This is a projection: it works with every optimizer.

    Parameters
    ----------
    low, high : float
        The bounds, ``-inf`` and ``inf`` included.

    Raises
    ------
    TypeError, ValueError
        If a bound is no number, or the lower one is above the upper one.

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
            raise ValueError(f"{self} holds no number: low must not be above high.")

    def __call__(self, weight: NDArray, step: float) -> NDArray:
        """Compute the new values of a weight."""
        return mx.nd.minimum(mx.nd.maximum(weight, float(self.low)), float(self.high))


@dataclass(frozen=True)
class NonNegative(Prox):
    """Weights that are not negative.

    ::

        w <- max(w, 0)

    This is a projection: it works with every optimizer.

    Examples
    --------
    >>> import mxnet as mx
    >>> from gluon_svrg.prox import NonNegative
    >>> NonNegative()(mx.nd.array([-3.0, 0.5]), 0.1).asnumpy().tolist()
    [0.0, 0.5]
    """

    is_projection = True

    def __call__(self, weight: NDArray, step: float) -> NDArray:
        """Compute the new values of a weight."""
        return mx.nd.maximum(weight, 0.0)


#: The argument ``prox`` of trainers: an operator for all parameters, or operators for some.
ProxArgument = Union[Prox, Mapping[Union[str, Parameter], Optional[Prox]], None]


def _times(step: float, strength: float) -> float:
    """Multiply the two; MXNet's operators refuse numbers too small for all digits: these are 0."""
    product = step * strength
    return product if product >= sys.float_info.min else 0.0


def _soft(weight: NDArray, least: float) -> NDArray:
    """Compute ``sign(w) * max(|w| - least, 0)``, as w minus w clipped to ``[-least, least]``."""
    return weight - mx.nd.maximum(mx.nd.minimum(weight, least), -least)
