"""Errors about arguments, raised where these arrive."""

from __future__ import annotations

from math import isfinite
from numbers import Integral, Real
from typing import Any, Iterable

from mxnet.gluon import Parameter

from . import _mxnet
from .operations import SUMMED_IN


def check_number(value: Any, name: str) -> None:
    """Raise unless a value is a finite number that is not negative."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}.")
    if not isfinite(value) or value < 0:
        raise ValueError(
            f"{name} must be finite and not negative, got {value}. 1 is SVRG, 0 the plain "
            "optimizer, in between alpha-SVRG."
        )


def check_coefficient(coefficient: Any) -> None:
    """Raise unless a coefficient is a number or a callable that gives numbers."""
    if not callable(coefficient):
        check_number(coefficient, "coefficient")


def check_flag(ignore_stale_grad: Any) -> None:
    """Raise where a closure was passed as the second argument of `step`."""
    if callable(ignore_stale_grad):
        raise TypeError(
            "The second argument of step() is ignore_stale_grad, as in gluon.Trainer. Pass the "
            "closure by its name: step(batch_size, closure=...)."
        )


def check_index(index: Any) -> None:
    """Raise unless an index is an integer, or left out."""
    if index is not None and (isinstance(index, bool) or not isinstance(index, Integral)):
        raise TypeError(
            f"batch_index must be the position of a minibatch, an integer, got "
            f"{type(index).__name__}."
        )


def check_dtypes(parameters: Iterable[Parameter]) -> None:
    """Raise unless all gradients are of a dtype that can be corrected."""
    for parameter in parameters:
        if _mxnet.is_trainable(parameter):
            dtype = _mxnet.dtype_name(_mxnet.data(parameter)[0])
            if dtype not in SUMMED_IN:
                raise TypeError(
                    f"{parameter.name} is {dtype}; SVRG needs parameters of {', '.join(SUMMED_IN)}."
                )
