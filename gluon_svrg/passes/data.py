"""One pass over the user's data, from its start."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import chain
from typing import Any, Callable, Iterable, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter
from mxnet.gluon.data import Dataset
from mxnet.io import DataIter
from mxnet.ndarray import NDArray

from .. import _mxnet
from .closure import Loss, called, check_closure, takes

NO_DATA = "There were no data or losses. Pass at least one batch; a used generator is empty."
NOT_ALL = (
    "len(data) is {length}, and this pass over the data had {count} mini-batches. On MXNet 2.0 a "
    "DataLoader with workers goes on where a `break` or an error has left it: call this again, and "
    "let loops run to their end. Otherwise len(data) must be the number of mini-batches. Its "
    "results were not used."
)


def arguments(batch: Any) -> Sequence[Any]:
    """The arguments of a closure for one batch."""
    return batch if isinstance(batch, (tuple, list)) else (batch,)


def check_data(data: Any, closure: Callable[..., Loss]) -> None:
    """Raise if the items of data are not the mini-batches of a closure."""
    if callable(data) and not callable(closure):
        raise TypeError("The closure comes before the data, and here they are in the other order.")
    check_closure(closure)
    kind, arrays = type(data).__name__, (NDArray, np.ndarray)
    if isinstance(data, Dataset):
        raise TypeError(f"The data is a {kind}, whose items are samples. Pass a DataLoader of it.")
    if not hasattr(data, "__iter__") and not hasattr(data, "__getitem__"):
        raise TypeError(f"The data must be a DataLoader, or a list of mini-batches, got {kind}.")
    items = data if isinstance(data, (tuple, list)) and data else [data]
    is_iterator, are_arrays = isinstance(data, DataIter), all(isinstance(x, arrays) for x in items)
    if not (is_iterator or are_arrays) or takes(closure, [None]):
        return
    if is_iterator:
        raise TypeError(
            f"The data is a {kind}, and each of its batches is one object: write closure(batch), "
            "and take batch.data[0] and batch.label[0]."
        )
    raise TypeError(
        f"The data is a {kind} of arrays, and the closure cannot be called with one array: this is "
        "one mini-batch. Pass a DataLoader, or a list of mini-batches such as [(X, y)]."
    )


@contextmanager
def one_pass(data: Iterable[Any], *, progress: bool) -> Iterator[tuple[Iterator[Any], Any]]:
    """Iterate over data, reset before and after if it can be; and a progress bar, or None."""
    reset = getattr(data, "reset", lambda: None)
    bar: Any = None
    if progress:
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise ImportError(
                "progress=True needs tqdm. Install it (pip install tqdm), or leave progress out."
            ) from error
        data = bar = tqdm(data, desc="full gradient", unit="batch", leave=False)
    reset()
    try:
        yield _all_of(data), bar
    finally:
        reset()


def _all_of(data: Any) -> Iterator[Any]:
    """The mini-batches of data; raise if there are fewer than its length, where that is known."""
    try:
        length = len(data)
    except (AttributeError, NotImplementedError, TypeError):
        length = 0
    count = 0
    for batch in data:
        count += 1
        yield batch
    if count < length:
        raise RuntimeError(NOT_ALL.format(length=length, count=count))


def initialize(
    parameters: Sequence[Parameter], closure: Callable[..., Loss], batches: Iterator[Any]
) -> Iterator[Any]:
    """Finish the deferred initialization with the first batches, or raise; return all batches."""
    seen, deferred = [], list(filter(_mxnet.is_deferred, parameters))
    for batch in batches if deferred else ():
        seen.append(batch)
        # In predict mode, oneDNN may leave weights in a layout that no kvstore can push. Without
        # a backward, a forward in train mode moves no statistics. Some layers only predict.
        for train_mode in (True, False):
            if deferred:
                called(closure, arguments(batch), mx.autograd.pause(train_mode))
                deferred = list(filter(_mxnet.is_deferred, deferred))
        if not deferred:
            break
    if deferred and not seen:
        raise ValueError(NO_DATA)
    if deferred:
        raise RuntimeError(_mxnet.not_initialized(deferred))
    return chain(seen, batches)
