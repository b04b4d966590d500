"""One pass over the user's data, from its start."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import chain
from typing import Any, Callable, Iterable, Iterator, Sequence

import numpy as np
from mxnet.gluon import Parameter
from mxnet.gluon.data import Dataset
from mxnet.io import DataIter
from mxnet.ndarray import NDArray

from .. import _mxnet
from .closure import Loss, check_closure, forward, takes


def arguments(batch: Any) -> Sequence[Any]:
    """The arguments of a closure for one batch."""
    return batch if isinstance(batch, (tuple, list)) else (batch,)


def number_of(data: Iterable[Any]) -> int | None:
    """The number of batches, if the data knows it."""
    try:
        return len(data)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # of a sampler without a length
        return None


def check_data(data: Any, closure: Callable[..., Loss]) -> None:
    """Raise if the items of data are not the minibatches of a closure."""
    if callable(data) and not callable(closure):
        raise TypeError(
            "update_full_grads(closure, data) was called with its arguments in the other order."
        )
    check_closure(closure)
    if isinstance(data, Dataset):
        raise TypeError(
            f"The data is a {type(data).__name__}, whose items are samples. Pass a DataLoader of "
            "it, whose items are minibatches: DataLoader(dataset, batch_size=...)."
        )
    if not hasattr(data, "__iter__") and not hasattr(data, "__getitem__"):
        raise TypeError(
            f"The data must be a DataLoader, or a list of minibatches, got {type(data).__name__}."
        )
    if takes(closure, [None]):
        return
    if isinstance(data, DataIter):
        raise TypeError(
            f"The data is a {type(data).__name__}, and each of its batches is one object: write "
            "closure(batch), and take batch.data[0] and batch.label[0]."
        )
    arrays = (NDArray, np.ndarray)
    is_list = isinstance(data, (tuple, list)) and len(data) > 0
    if isinstance(data, arrays) or (is_list and all(isinstance(item, arrays) for item in data)):
        raise TypeError(
            f"The data is a {type(data).__name__} of arrays, and the closure cannot be called with "
            "one array: this is one minibatch. Pass minibatches, of which each holds the arguments "
            "of the closure: a DataLoader, or a list such as [(X, y)]."
        )


@contextmanager
def one_pass(
    data: Iterable[Any], *, progress: bool
) -> Iterator[tuple[Iterator[Any], Callable[[str], None]]]:
    """Iterate over data; reset it before and after if it has ``reset``.

    Beside the batches there is a function that shows a line beside the progress bar, if any.
    """
    reset = getattr(data, "reset", lambda: None)
    reset()
    try:
        if progress:
            bar = _with_progress(data)
            yield iter(bar), bar.set_postfix_str
        else:
            yield iter(data), lambda text: None
    finally:
        reset()


def initialize(
    parameters: Sequence[Parameter], closure: Callable[..., Loss], batches: Iterator[Any]
) -> Iterator[Any]:
    """Finish the deferred initialization of parameters with the first batches; return all batches.

    Raises a RuntimeError if no batch initializes a parameter.
    """
    seen: list[Any] = []
    while any(map(_mxnet.is_deferred, parameters)):
        try:
            batch = next(batches)
        except StopIteration:
            if not seen:  # no data at all, which raises its own error
                break
            names = [p.name for p in parameters if _mxnet.is_deferred(p)]
            raise RuntimeError(
                f"No minibatch initializes {', '.join(names)}: the shape is not known until the "
                "network uses the parameter. Give it its shape (in_units, in_channels, ...), or "
                "leave it out of the trainer."
            ) from None
        seen.append(batch)
        # In predict mode, oneDNN may leave weights in a layout that no kvstore can push. Without
        # a backward, a forward in train mode moves no statistics. Some layers only predict.
        for train_mode in (True, False):
            if any(map(_mxnet.is_deferred, parameters)):
                forward(closure, arguments(batch), train_mode=train_mode)
    return chain(seen, batches)


def _with_progress(data: Iterable[Any]) -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError(
            "progress=True needs tqdm. Install it (pip install tqdm), or leave progress out."
        ) from error
    return tqdm(data, desc="full gradient", unit="batch", leave=False)
