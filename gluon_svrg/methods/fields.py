"""What a file holds of a method's state: a list of named fields.

Each kind of field turns a value into plain data for a file, tells what is wrong with such data from
a file, and turns it back. A method lists its fields, and `Fields` does the rest.
"""

from __future__ import annotations

from math import isfinite
from typing import Any, Callable, Iterator, Sequence

import numpy as np

from .. import _mxnet
from .._mxnet import Arrays
from ..passes.network import Network
from ..saving.values import ByParameter
from . import checks
from .table import Table


class Field:
    """A value that a file holds as it is.

    Parameters
    ----------
    is_valid : callable
        Whether plain data can be such a value.
    problem : str
        The message if it cannot.
    default : object, optional
        The value for files without the field, of earlier versions; by default all have it.
    """

    default: Any = ...

    def __init__(self, is_valid: Callable[[Any], bool], problem: str, default: Any = ...) -> None:
        self._is_valid, self._problem, self.default = is_valid, problem, default

    def encode(self, value: Any, network: Network) -> Any:
        """The value as plain data."""
        return value

    def problems(self, data: Any, network: Network) -> Iterator[str]:
        """Describe what is wrong with data from a file, whatever it is."""
        if not self._is_valid(data):
            yield self._problem

    def decode(self, data: Any, network: Network) -> Any:
        """The value of data without problems."""
        return data


class ArrayPerParameter(Field):
    """An array per trainable parameter and device, the same on all devices.

    Parameters
    ----------
    what : str
        The name of the arrays, for messages.
    summed : bool
        Whether they are sums of gradients, which are wider than float16.
    is_kept : bool
        Whether the method has them as it is set up.
    """

    def __init__(self, what: str, *, summed: bool, is_kept: bool = True) -> None:
        self._what, self._summed, self._is_kept = what, summed, is_kept

    def encode(self, value: Arrays | None, network: Network) -> ByParameter | None:
        """The arrays of the first device, by the number of the parameter."""
        if not self._is_kept or value is None:
            return None
        return ByParameter(zip(trainable(network), (row[0] for row in value)))

    def problems(self, data: Any, network: Network) -> Iterator[str]:
        """Look for an array of the right shape and dtype for each parameter."""
        if not self._is_kept:
            if data is not None:
                yield (
                    f"it has the {self._what}, which this method does not keep as it is set up here"
                )
        elif data is None:
            yield f"it lacks the {self._what}, which this method keeps as it is set up here"
        else:
            chosen = trainable(network)
            yield from checks.by_parameter(
                data, self._what, network.parameters, chosen, summed=self._summed
            )

    def decode(self, data: Any, network: Network) -> list[Any]:
        """What to `assign`."""
        return [[data[n]] for n in trainable(network)] if self._is_kept else []


class Flags(Field):
    """A flag per trainable parameter: whether the loss depends on it."""

    def __init__(self) -> None:
        pass

    def encode(self, value: Sequence[bool], network: Network) -> ByParameter:
        """The flags by the number of the parameter."""
        return ByParameter(zip(trainable(network), value))

    def problems(self, data: Any, network: Network) -> Iterator[str]:
        """Look for a flag for each parameter."""
        yield from checks.flags(data, trainable(network))

    def decode(self, data: Any, network: Network) -> list[bool]:
        """A list of flags."""
        return [data[n] for n in trainable(network)]


class FrozenValues(Field):
    """Values per frozen parameter and device. States that operators change differ by device."""

    def __init__(self) -> None:
        pass

    def encode(self, value: Arrays | None, network: Network) -> ByParameter:
        """All values of such states, and the first of all others."""
        number = {p: n for n, p in enumerate(network.parameters)}
        return ByParameter(
            (number[p], list(values if _mxnet.is_auxiliary(p) else values[:1]))
            for p, values in zip(network.frozen, value or ())
        )

    def problems(self, data: Any, network: Network) -> Iterator[str]:
        """Look for arrays of the right shape and dtype; a file of 0.1.0 has only some of them."""
        is_frozen = checks.numbers_of(network.parameters, trainable=False)
        if not isinstance(data, dict) or not set(data) <= set(is_frozen):
            yield "its frozen values belong to other parameters"
            return
        for n, values in data.items():
            for value in values if isinstance(values, list) and values else [None]:
                parameter = network.parameters[n]
                yield from checks.array(value, "frozen value", parameter, summed=False)

    def decode(self, data: Any, network: Network) -> list[Any]:
        """What to `assign`."""
        number = {p: n for n, p in enumerate(network.parameters)}
        return [data.get(number[p], ()) for p in network.frozen]


class StoredGradients(Field):
    """A `Table`, or None.

    Parameters
    ----------
    hint : str
        What to do if they belong to other devices.
    """

    def __init__(self, hint: str = "") -> None:
        self._hint = hint

    def encode(self, value: Table | None, network: Network) -> Any:
        """The rows by the number of the parameter."""
        return None if value is None else value.state(trainable(network))

    def problems(self, data: Any, network: Network) -> Iterator[str]:
        """Look for rows of the right shapes and dtypes."""
        devices = len(network.devices)
        chosen = trainable(network)
        yield from checks.table(data, network.parameters, chosen, devices, self._hint)

    def decode(self, data: Any, network: Network) -> Table | None:
        """A table that is not confirmed: the data may have changed."""
        return None if data is None else Table.of_state(data, trainable(network), network.devices)


class Fields:
    """The fields of a method.

    Parameters
    ----------
    other_form : str
        The problem of a state with other fields.
    **fields
        The fields, by name.
    """

    def __init__(self, other_form: str, **fields: Field) -> None:
        self._other_form = other_form
        self._fields = fields

    def encode(self, values: dict[str, Any] | None, network: Network) -> Any:
        """A method's values as plain data."""
        if values is None:
            return None
        return {name: field.encode(values[name], network) for name, field in self._fields.items()}

    def problems(self, data: Any, network: Network) -> Iterator[str]:
        """Describe what is wrong with data from a file."""
        if data is None:
            return
        data = self._completed(data)
        if not self._fields or not isinstance(data, dict) or set(data) != set(self._fields):
            yield self._other_form
            return
        for name, field in self._fields.items():
            yield from field.problems(data[name], network)

    def decode(self, data: dict[str, Any], network: Network) -> dict[str, Any]:
        """The values of data without problems."""
        data = self._completed(data)
        return {name: field.decode(data[name], network) for name, field in self._fields.items()}

    def _completed(self, data: Any) -> Any:
        """Data with the defaults of fields that it lacks."""
        fields = self._fields.items()
        defaults = {name: field.default for name, field in fields if field.default is not ...}
        return {**defaults, **data} if isinstance(data, dict) else data


def trainable(network: Network) -> list[int]:
    """The numbers of the parameters with gradients."""
    return checks.numbers_of(network.parameters, trainable=True)


def assign(rows: Sequence[Sequence[Any]], targets: Arrays) -> None:
    """Assign values to arrays per parameter and device.

    The first value goes to all devices that have none; without any, the arrays stay.
    """
    for values, arrays in zip(rows, targets):
        for n, array in enumerate(arrays if values else ()):
            value = np.asarray(values[n] if n < len(values) else values[0])
            _mxnet.to_ndarray(value, _mxnet.device_of(array)).copyto(_mxnet.classic(array))


def is_positive(value: Any) -> bool:
    """Whether a value is a finite number above zero."""
    return isinstance(value, float) and isfinite(value) and value > 0
