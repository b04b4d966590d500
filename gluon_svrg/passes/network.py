"""The trainer's parameters, and their arrays: where passes compute, and where gradients are."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any, Callable, Iterator, Sequence

import mxnet as mx
from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from .. import _mxnet
from .._mxnet import Arrays, Flags
from .columns import SUMMED_IN, Columns, are_close, columns, copy_rows, zeros_like
from .combine import copy
from .outside import ExternalParameters

STALE_ARRAYS = (
    "MXNet has written the gradient of {parameter} to an array that it had before: a network that "
    "is hybridized with static_shape=True keeps its arrays, also after net.initialize(force_reinit="
    "True) and the like. Hybridize it again: net.hybridize(static_alloc=True, static_shape=True)."
)


class ParameterBuffers:
    """The parameters of a trainer, and their arrays.

    Passes compute at aliases of the weights, so that MXNet's marks of fresh gradients at the
    weights themselves show the user's own backward.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = list(parameters)
        self.devices: list[Any] = _mxnet.devices(parameters[0]) if parameters else []
        self.outside = ExternalParameters(parameters)  # other parameters that closures read
        self.at: Any = None  # the point at which the network computes now
        self.kept: Flags | None = None  # the marks of gradients that the spare memory keeps
        self.release()

    def release(self) -> None:
        """Free all arrays except the parameters' own."""
        self.trainable: list[Parameter] = []  # with gradients
        self.frozen: list[Parameter] = []  # without
        self.weights: Arrays = []  # the trainable parameters' values
        self.frozen_values: Arrays = []  # those of the others
        self.aliases: Arrays = []  # other arrays with the memory of the weights
        self.grads_by_parameter: Arrays = []  # the gradient buffers
        self.grads: Columns = []  # the same as columns
        self.accumulating: list[NDArray] = []  # those under ``grad_req='add'``
        self.unseen: set[Parameter] = set()  # those that no backward has reached since `bind`
        self._spare: Columns = []
        self._overwritten: list[Parameter] = []
        self._hidden: Flags = []
        self._lists: list[Any] = []  # the lists of arrays that are known
        self._were: list[str] = []  # descriptions of the parameters

    def is_bound(self) -> bool:
        """Whether the parameters still have the arrays that are known here."""
        now = chain(map(_mxnet.data, self.parameters), map(_mxnet.gradients, self.parameters))
        return bool(self._lists) and all(map(is_, now, self._lists))

    def bind(self) -> None:
        """Bind to the current arrays of the parameters."""
        self._lists, self._spare = [], []
        self.trainable = [p for p in self.parameters if _mxnet.is_trainable(p)]
        self.frozen = [p for p in self.parameters if not _mxnet.is_trainable(p)]
        self.devices = _mxnet.devices(self.parameters[0])
        self.weights = [_mxnet.data(p) for p in self.trainable]
        self.frozen_values = [_mxnet.data(p) for p in self.frozen]
        self.grads_by_parameter = [_mxnet.gradients(p) for p in self.trainable]
        self.grads = columns(self.grads_by_parameter)
        pairs = list(zip(self.trainable, self.grads_by_parameter))
        self.accumulating = [g for p, row in pairs if p.grad_req == "add" for g in row]
        self.unseen = set(self.trainable)
        self.aliases = [[w.detach() for w in row] for row in self.weights]
        self.mark(self.aliases)
        self._were = list(map(_described, self.parameters))
        self._lists = [*map(_mxnet.data, self.parameters), *map(_mxnet.gradients, self.parameters)]

    def mark(self, weights: Arrays) -> None:
        """Let backward write the gradients of arrays like the weights to the live gradients.

        Where the user lets gradients add up, it adds, to zero: so a network that is hybridized with
        ``static_shape=True`` sees what the user's own backward shows it. MXNet cannot add sparse
        ones.
        """
        rows = [
            (weight, grad, "write" if _mxnet.is_sparse(p) else p.grad_req)
            for p, row, grads in zip(self.trainable, weights, self.grads_by_parameter)
            for weight, grad in zip(row, grads)
        ]
        if rows:
            mx.autograd.mark_variables(*map(list, zip(*rows)))

    def check_written(self, weights: Arrays, touched: Flags) -> None:
        """Raise if the first backward since `bind` has written to other arrays than the live ones.

        A network hybridized with ``static_shape=True`` keeps the arrays that it saw before, unless
        their ``grad_req`` is another one now. MXNet shows them as the gradients of the weights.
        """
        for p, row, grads, flags in zip(self.trainable, weights, self.grads_by_parameter, touched):
            if p in self.unseen and any(flags):
                for weight, grad, flag in zip(row, grads, flags):
                    if flag and not _mxnet.is_gradient_in(weight, grad):
                        self._lists = []  # MXNet has changed its notes: bind again
                        raise RuntimeError(STALE_ARRAYS.format(parameter=_mxnet.name_of(p)))
                self.unseen.remove(p)

    def difference(self) -> str:
        """Describe how the parameters differ from those known here, but for rounding and states."""
        for p, was, known in zip(self.parameters, self._were, self._lists):
            now, name = _described(p), _mxnet.name_of(p)
            if now != was:
                return f"{name} is {now} now and was {was} then"
            values, is_state = _mxnet.data(p), _mxnet.is_auxiliary(p)
            if values is not known and not is_state and not are_close(values, known):
                return f"{name} has other values, as after net.initialize(force_reinit=True)"
        return ""

    @property
    def spare(self) -> Columns:
        """Memory for a sum of gradients, which holds nothing between two calls of the trainer."""
        if not self._spare:
            self._spare = zeros_like(self.grads)
        return self._spare

    def take_spare(self) -> Columns:
        """Take the spare memory away, to keep something there."""
        taken, self._spare = self.spare, []
        return taken

    def give_spare(self, memory: Columns) -> None:
        """Return memory for a sum of the current gradients, or an empty list to free it."""
        self._spare = memory

    def sum_everywhere(self, sums: Columns, sum_arrays: Callable[[Any], None]) -> None:
        """Replace sums of gradients by those over all devices, and by a function over workers."""
        first, *others = sums
        for other in others:
            for total, addend in zip(first, other):
                total += addend.copyto(_mxnet.device_of(total))
        numbers = map(self.parameters.index, self.trainable)
        sum_arrays(dict(zip(numbers, first)))
        copy_rows([first] * len(others), others)

    @contextmanager
    def grads_kept(self) -> Iterator[None]:
        """Put the live gradients, meanwhile in the spare memory, and their marks back."""
        copy(self.grads, self.spare)
        self.kept = _mxnet.fresh(self.weights)
        try:
            _mxnet.take_fresh(self.weights)
            yield
        finally:
            self._put_grads_back()

    def _put_grads_back(self) -> None:
        with mx.autograd.pause():  # an interrupt may have left MXNet recording
            copy(self.spare, self.grads)
        _mxnet.take_fresh(self.weights)
        _mxnet.mark(self.weights, self.kept or [])
        self.kept = None

    def come_back(self) -> None:
        """Put back what an interrupt at the end of a pass has left elsewhere."""
        if self.at is not None:
            self.at.leave()
        if self.kept is not None:
            self._put_grads_back()

    def overwritten(self) -> list[Parameter]:
        """Parameters whose gradient was overwritten since `hide_marks`, and does not add up."""
        self.note_overwritten(_mxnet.fresh(self.weights))
        return self._overwritten

    def note_overwritten(self, touched: Sequence[Sequence[bool]]) -> None:
        """Remember which live gradients the user's own backward has overwritten."""
        rows = zip(self.trainable, touched)
        self._overwritten += [p for p, row in rows if any(row) and p.grad_req != "add"]

    def hide_marks(self) -> None:
        """Mark all live gradients as stale, so that new marks show what backward writes."""
        self._overwritten = []
        self._hidden = _mxnet.take_fresh(self.weights)

    def put_marks_back(self) -> None:
        """Undo `hide_marks`, where a plain gradient could not be computed."""
        _mxnet.mark(self.weights, self._hidden)

    def check_hidden(self) -> None:
        """Raise if a backward at other arrays has reached the weights themselves."""
        if any(map(any, _mxnet.take_fresh(self.weights))):
            raise RuntimeError(
                "The closure computes with values of parameters that it took before it was called, "
                "so that the trainer cannot compute at other weights. Call Parameter.data() inside "
                "the closure."
            )


def check_gradients(parameters: Sequence[Parameter]) -> None:
    """Raise unless there are gradients, and all are of a dtype that can be corrected."""
    trainable = list(filter(_mxnet.is_trainable, parameters))
    if not trainable:
        raise ValueError("No parameter of the trainer has gradients: all are frozen.")
    for parameter in trainable:
        dtype = _mxnet.dtype_of(_mxnet.data(parameter)[0])
        if dtype not in SUMMED_IN:
            raise TypeError(
                f"{_mxnet.name_of(parameter)} is {dtype}, and gradients can be corrected in "
                f"{', '.join(SUMMED_IN)}. Cast it, or set its grad_req to 'null'."
            )


def _described(parameter: Parameter) -> str:
    """The dtype, shape and devices of a parameter's arrays, and whether it has gradients."""
    arrays = _mxnet.data(parameter)
    where = ", ".join(str(_mxnet.device_of(array)) for array in arrays)
    frozen = "" if _mxnet.is_trainable(parameter) else " with grad_req='null'"
    return f"{_mxnet.dtype_of(arrays[0])} {tuple(arrays[0].shape)} on {where}{frozen}"
