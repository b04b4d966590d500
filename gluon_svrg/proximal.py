"""Proximal operators, applied after each update."""

from __future__ import annotations

import re
from typing import Any, Iterable, Iterator, Mapping, Sequence

import numpy as np
from mxnet.gluon import Parameter

from . import _mxnet
from .kvstore.kinds import parameters_of
from .prox import Prox, ProxArgument


class ProximalOperators:
    """The operators of a trainer's parameters, applied to the weights that an update has moved.

    Parameters
    ----------
    prox : Prox, dict or None
        One operator for all parameters, or a dict. Its keys are parameters, or patterns of their
        names as for ``net.collect_params``. The first key that matches a parameter applies; None
        leaves the parameter alone.
    params : ParameterDict, dict, list or tuple of Parameter
        The trainer's parameters.
    optimizer, optimizer_params
        As for `gluon.Trainer`.

    Raises
    ------
    TypeError, ValueError
        If `prox` is none of these, matches no parameter, or does not work with the optimizer or the
        parameters.
    """

    def __init__(self, prox: ProxArgument, params: Any, optimizer: Any, settings: Any) -> None:
        self._operators = dict(_by_parameter(prox, params))
        _check_optimizer(self._operators.values(), optimizer, settings)
        for parameter, operator in self._operators.items():
            _check_parameter(parameter, operator)
        self._moving: dict[int, list[bool]] = {}  # per parameter: on which devices

    def note_moving(self, parameters: Sequence[Parameter]) -> None:
        """Note which weights the optimizer is about to move: those with fresh gradients."""
        self._moving = {}
        for index, parameter in enumerate(parameters if self._operators else ()):
            if parameter in self._operators and _mxnet.is_trainable(parameter):
                _check_parameter(parameter, self._operators[parameter])
                (self._moving[index],) = _mxnet.fresh([_mxnet.data(parameter)])

    @property
    def are_moving(self) -> bool:
        """Whether an operator is waiting for a weight to move."""
        return bool(self._moving)

    def apply(self, parameters: Sequence[Parameter], optimizer: Any) -> None:
        """Apply the operators to the weights that have moved."""
        for index, flags in self._moving.items():
            parameter = parameters[index]
            operator = self._operators[parameter]
            step = 0.0 if operator.is_projection else _step(optimizer, index)
            for weight, has_moved in zip(map(_mxnet.classic, _mxnet.data(parameter)), flags):
                if has_moved:
                    operator(weight, step).copyto(weight)


def _step(optimizer: Any, index: int) -> float:
    """How far a gradient moves a parameter in total, including later updates by momentum."""
    return _mxnet.last_rate(optimizer, index) / (1 - float(np.float32(optimizer.momentum)))


def _by_parameter(prox: ProxArgument, params: Any) -> Iterator[tuple[Parameter, Prox]]:
    """Yield each parameter that has an operator, with the operator."""
    if prox is None:
        return
    choice: Mapping[Any, Any] = prox if isinstance(prox, Mapping) else {"": prox}
    for key, operator in choice.items():
        _check_choice(key, operator, isinstance(prox, Mapping))
    keys = getattr(params, "keys", None)
    parameters = parameters_of(params)
    names = [p.name for p in parameters] if keys is None else list(keys())
    pairs = list(zip(names, parameters))
    for key in choice:
        if pairs and not any(_fits(key, *pair) for pair in pairs):
            raise ValueError(
                f"prox has the key {getattr(key, 'name', key)!r}, which fits none of the trainer's "
                f"parameters: {', '.join(names[:8])}{', ...' * (len(names) > 8)}."
            )
    for name, parameter in pairs:
        operator = next((choice[key] for key in choice if _fits(key, name, parameter)), None)
        if operator is not None:
            yield parameter, operator


def _fits(key: Any, name: str, parameter: Parameter) -> bool:
    return re.match(key, name) is not None if isinstance(key, str) else key is parameter


def _check_choice(key: Any, operator: Any, is_dict: bool) -> None:
    """Raise unless a key stands for parameters, and an operator is one."""
    if not isinstance(operator, Prox) and not (is_dict and operator is None):
        raise TypeError(
            "prox must be an operator of gluon_svrg.prox, such as L1(0.01), or a dict of them, "
            f"such as {{'.*weight': L1(0.01)}}, got {operator!r}."
        )
    if not isinstance(key, (str, Parameter)):
        raise TypeError(
            "The keys of prox must be parameters, or patterns of their names such as '.*weight', "
            f"got {key!r}."
        )
    try:
        re.compile(key if isinstance(key, str) else "")
    except re.error as error:
        raise ValueError(
            f"prox has the key {key!r}, which is no regular expression: {error}. To fit all names "
            "that end in weight, write '.*weight'."
        ) from error


def _check_optimizer(operators: Iterable[Prox], optimizer: Any, settings: Any) -> None:
    """Raise unless the operators can use the step of an optimizer."""
    operator = next((found for found in operators if not found.is_projection), None)
    if operator is None:
        return
    if not _mxnet.steps_along_gradient(optimizer):
        name = _mxnet.class_of(optimizer).__name__
        raise ValueError(
            f"{operator} needs an optimizer whose step is the learning rate times a direction, but "
            f"{name} has another step, or a different one for each weight. Use 'sgd' or 'nag', or "
            "a subclass of these; Box and NonNegative work with every optimizer."
        )
    momentum = (settings or {}).get("momentum", getattr(optimizer, "momentum", 0.0))
    if not 0 <= momentum < 1:
        raise ValueError(f"{operator} needs a momentum of at least 0 and below 1, got {momentum}.")


def _check_parameter(parameter: Parameter, operator: Prox) -> None:
    """Raise unless an operator can be applied to a parameter."""
    dtype = _mxnet.dtype_of(parameter)
    if dtype not in ("float32", "float64"):
        raise ValueError(
            f"{operator} needs float32 or float64, and {parameter.name} is {dtype}: the optimizer "
            "may keep a copy of it in float32, which would overwrite the result. Use "
            "float32 (as AMP does for its weights), or choose other parameters: "
            f"prox={{'.*weight': {operator}}}."
        )
    if parameter.shape is not None:
        operator.check_shape(parameter.name, parameter.shape)
