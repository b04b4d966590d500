"""The trainer's parameters for passes, and the other parameters that its closures read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import compress
from operator import is_
from typing import Any, Callable, Iterator, Sequence

from mxnet.gluon import Parameter

from .. import _mxnet
from .._mxnet import Arrays, Flags
from .arrays import SUMMED_IN, Buffers, copies, put_back, zero
from .closure import Recorded, record
from .outside import Outside

_NOTHING = nullcontext()


class Network:
    """The parameters whose gradients passes compute.

    Parameters
    ----------
    parameters : sequence of Parameter
        The trainer's.

    Attributes
    ----------
    adds : bool
        Whether backward may add gradients in the live gradients, see `sums`.
    may_add : bool
        Whether the dtypes and sizes of the parameters allow it.
    is_known_to_add : bool
        Whether this was tested with the parameters' current arrays.
    lock : RLock
        Held while the network computes at other weights.
    is_elsewhere : bool
        Whether it does so now, at copies.
    trainable, frozen : list of Parameter
        With and without gradients.
    weights, live_grads : list of list of NDArray
        The trainable parameters' own arrays, per device.
    aliases : list of list of NDArray
        The same memory as the weights. Passes compute with these, so that the weights' own
        gradient requests and marks stay as they are.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        # Fixed.
        self.parameters = list(parameters)
        self.devices: list[Any] = _mxnet.devices(parameters[0]) if parameters else []
        self.outside = Outside(parameters)
        self._set_up()

    def _set_up(self) -> None:
        """Begin without arrays."""
        self.lock = threading.RLock()
        # Changes with the user's parameters.
        self.adds, self.is_known_to_add, self.may_add = True, False, False
        self._factors: OrderedDict[Any, Any] = OrderedDict()  # see `closure`
        self.combinations: OrderedDict[Any, Any] = OrderedDict()  # see `sums`
        self.sums: Arrays = []  # see `sums`
        self._lists: list[Any] = []
        self._accumulating: Arrays = []
        self.trainable: list[Parameter] = []
        self.frozen: list[Parameter] = []
        self.weights: Arrays = []
        self.aliases: Arrays = []
        self.live_grads = Buffers()
        # Between two calls.
        self._overwritten: list[Parameter] = []
        self.is_elsewhere = False

    def __getstate__(self) -> dict[str, Any]:
        """What a copy keeps: it binds to the arrays of its own parameters."""
        kept = ("parameters", "devices", "outside", "trainable", "frozen")
        return {name: vars(self)[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set_up()
        vars(self).update(state)

    # --- binding to arrays ---------------------------------------------------------------------

    def is_bound(self) -> bool:
        """Whether the parameters still have the arrays that are known here."""
        now = _array_lists(self.parameters)
        return len(now) == len(self._lists) and all(map(is_, now, self._lists))

    def bind(self, adds: bool, *, is_known: bool) -> None:
        """Bind to the current arrays of the parameters.

        Parameters
        ----------
        adds : bool
            Whether backward adds gradients up.
        is_known : bool
            Whether this was tested.
        """
        check_dtypes(self.parameters)
        self.trainable = [p for p in self.parameters if _mxnet.is_trainable(p)]
        self.frozen = [p for p in self.parameters if not _mxnet.is_trainable(p)]
        self.devices = _mxnet.devices(self.parameters[0])
        self.weights = [_mxnet.data(p) for p in self.trainable]
        self.live_grads = Buffers(_mxnet.gradients(p) for p in self.trainable)
        self.aliases = [[_mxnet.guard(w.detach()) for w in row] for row in self.weights]
        self._accumulating = [g for p, g in zip(self.trainable, self.live_grads) if _accumulates(p)]
        self.is_known_to_add = is_known
        self.sums = []
        self.combinations.clear()
        self._factors.clear()
        self.may_add = self._may_add()
        self.adds = adds and self.may_add
        self.mark(self.aliases)
        self._lists = _array_lists(self.parameters)  # last: an interrupt leaves it unbound

    def release(self) -> None:
        """Keep no arrays."""
        self.weights, self.aliases, self._accumulating = [], [], []
        self.live_grads = Buffers()
        self.trainable, self.frozen, self._lists, self.sums = [], [], [], []
        self.combinations.clear()
        self._factors.clear()

    def mark(self, arrays: Arrays) -> None:
        """Let backward put the gradients of arrays like the weights into the live gradients."""
        _mxnet.put_gradients_into(arrays, self.live_grads, "add" if self.adds else "write")

    def _may_add(self) -> bool:
        """Whether adding gradients in the live gradients is possible, and better than apart.

        Sparse gradients cannot be added to, and float16 has too few digits for a sum. oneDNN's
        operators add slowly if arrays are large, see `sums`.
        """
        return not any(
            _mxnet.is_sparse(p)
            or SUMMED_IN[_mxnet.dtype_name(w[0])] != _mxnet.dtype_name(w[0])
            or any(map(_mxnet.is_for_onednn, w))
            for p, w in zip(self.trainable, self.weights)
        )

    def record(
        self, closure: Callable[..., Any], batch: Sequence[Any] = (), *, count: bool = True
    ) -> Recorded:
        """Record what a closure computes, see `closure.record`, and count its loss entries."""
        recorded = record(closure, batch, self.devices, self._factors)
        return recorded.count() if count else recorded

    # --- what the user has in the live gradients -----------------------------------------------

    def accumulating(self) -> AbstractContextManager[None]:
        """Keep the gradients of a block, added to the old ones where gradients accumulate.

        Gradients accumulate under the user's ``grad_req='add'``. Inside the block backward writes
        them, as not all operators can add; they are restored if it raises an exception.
        """
        return self._added_up() if self._accumulating else _NOTHING

    @contextmanager
    def _added_up(self) -> Iterator[None]:
        before = copies(self._accumulating)
        weights = [w for p, w in zip(self.trainable, self.weights) if _accumulates(p)]
        write, add = (_mxnet.marking(weights, self._accumulating, r) for r in ("write", "add"))
        # An interrupt reaches Python between two bytecodes; each call is one, hence two of `add`.
        try:
            try:
                write()
                yield
            except BaseException:
                put_back(before, self._accumulating)
                raise
            finally:
                add()
        finally:
            add()
        for row, addends in zip(self._accumulating, before):
            for grad, addend in zip(row, addends):
                grad += addend

    def clear_accumulated(self) -> None:
        """Set the live gradients that accumulate to zero."""
        for row in self._accumulating:
            zero(row)

    @contextmanager
    def grads_kept(self) -> Iterator[None]:
        """Put the live gradients and their marks back at the end of a block."""
        before, fresh = self.live_grads.copies(), _mxnet.take_fresh(self.weights)
        try:
            yield
        finally:
            put_back(before, self.live_grads)
            _mxnet.mark(self.weights, fresh, fresh=True)
            stale = [[not flag for flag in row] for row in fresh]
            _mxnet.mark(self.weights, stale, fresh=False)

    # --- marks ---------------------------------------------------------------------------------

    def overwritten(self) -> list[Parameter]:
        """The parameters whose live gradient another backward has overwritten since `hide_marks`.

        Where gradients accumulate, nothing is overwritten.
        """
        flags = [any(row) for row in _mxnet.fresh(self.weights)]
        self.note_overwritten(flags)
        return self._overwritten

    def note_overwritten(self, flags: Sequence[bool]) -> None:
        """Remember which live gradients the user's own backward has overwritten."""
        rows = zip(self.trainable, flags)
        self._overwritten += [p for p, flag in rows if flag and not _accumulates(p)]

    def hide_marks(self) -> None:
        """Mark all live gradients as stale, so that new marks show what backward writes."""
        self._overwritten = []
        _mxnet.take_fresh(self.weights)

    def check_hidden(self) -> None:
        """Raise if a backward at other arrays has reached the weights themselves."""
        if any(map(any, _mxnet.take_fresh(self.weights))):
            raise RuntimeError(
                "The closure computes with values of parameters that it took before it was called, "
                "so that the trainer cannot compute at other weights. Call Parameter.data() inside "
                "the closure."
            )

    def show_marks(self, reached: Sequence[bool]) -> None:
        """Mark live gradients as `gluon.Trainer` expects: fresh on all devices, or on none."""
        _mxnet.mark_fresh(compress(self.weights, reached))


def check_dtypes(parameters: Sequence[Parameter]) -> None:
    """Raise unless all gradients are of a dtype that can be corrected."""
    for parameter in filter(_mxnet.is_trainable, parameters):
        dtype = _mxnet.dtype_name(_mxnet.data(parameter)[0])
        if dtype not in SUMMED_IN:
            raise TypeError(
                f"{parameter.name} is {dtype}, and gradients can be corrected in "
                f"{', '.join(SUMMED_IN)}. Cast it, or set its grad_req to 'null'."
            )


def check_dependent(touched: Flags) -> list[bool]:
    """Tell which parameters backward has reached, on any device; raise if there is none."""
    reached = [any(row) for row in touched]
    if not any(reached):
        raise ValueError(
            "The loss depends on none of the trainer's parameters. Compute it from the network "
            "whose parameters the trainer was given."
        )
    return reached


def _accumulates(parameter: Parameter) -> bool:
    return parameter.grad_req == "add"


def _array_lists(parameters: Sequence[Parameter]) -> list[Any]:
    return [*map(_mxnet.data, parameters), *map(_mxnet.gradients, parameters)]
