"""Warnings about probable misuse, which heuristics find.

They look at counts and shapes only, so nothing waits for the device.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any, Sequence

from mxnet.ndarray import NDArray

from .. import _mxnet
from .closure import Recorded

_PACKAGE = str(Path(__file__).parents[1])

RETURNS_OUTPUT = (
    "The closure returns losses of shapes {one} and {other}. Everything that it returns is "
    "differentiated: if one is the output of the network, return the loss alone, and keep the "
    "output by other means."
)
MEAN_LOSS = (
    "The closure returned one loss entry for each of the last {count} mini-batches, and batch_size "
    "is {batch_size}, by which its gradient is divided. Is the loss the mean over the mini-batch? "
    "Then call step({workers}). If it is the sum, in update_full_grads too, all is right."
)
ONE_AND_MANY = (
    "update_full_grads had one loss entry for a minibatch, and this step has {entries}. The full "
    "gradient is the mean over loss entries: of sums it is as many times too large as a mini-batch "
    "has samples. Return the same losses in both, best one for each sample."
)
BROADCAST = (
    "The losses of a mini-batch of {n} samples have the shape ({n}, {n}): were shapes ({n}, 1) and "
    "({n},) broadcast? Reshape the labels: y.reshape((-1, 1))."
)
TWO_GRADIENTS = (
    "update_full_grads(store_grads=True) has stored gradients, and the last {count} mini-batches "
    "have not used them: each took two gradients. Pass step(..., batch_index=...), or leave "
    "store_grads out."
)
EACH_STEP = (
    "EveryEpochs was asked before each of the last {count} steps, and counts each as an epoch. Ask "
    "it once before each epoch, or use EverySteps."
)
_IN_A_ROW, _EPOCHS = 5, 20  # how often something must repeat before there is a warning


def warn(message: str) -> None:
    """Warn at the innermost line outside this package and MXNet."""
    level, frame, name = 1, sys._getframe(), __file__
    while frame.f_back is not None and (name.startswith(_PACKAGE) or "mxnet" in Path(name).parts):
        level, frame = level + 1, frame.f_back
        name = frame.f_code.co_filename
    warnings.warn(message, stacklevel=level)


def first_shape(inputs: Sequence[Any], recorded: Recorded) -> tuple[int, ...]:
    """The shape of a first loss that looks wrong: () for several samples, or (n, n); else (0,)."""
    shapes = [tuple(x.shape) for x in inputs if getattr(x, "shape", ())]
    shape = recorded.losses[0].shape
    if recorded.entries == 1 and shapes and min(sizes[0] for sizes in shapes) > 1:
        return ()
    n = shape[0] if shape else 0
    is_square = n > 2 and shape == (n, n) and shape not in shapes[1:]
    return shape if is_square and {(n,), (n, 1)} & {*shapes} else (0,)


class WarnOnce:
    """Warns with each message once."""

    def __init__(self) -> None:
        self.messages: set[str] = set()

    def __call__(self, message: str, **values: Any) -> None:
        if message not in self.messages:
            self.messages.add(message)
            warn(message.format(**values))


class MisuseWarnings:
    """What this worker has seen so far, and has warned about."""

    def __init__(self, workers: int, divides: bool) -> None:
        self._workers, self._divides = workers, divides  # whether a step divides by the batch size
        self._once = WarnOnce()
        self._in_a_row = {MEAN_LOSS: 0, TWO_GRADIENTS: 0, EACH_STEP: 0}
        self._refresh_entries = self._step_entries = 0
        self._has_one = False  # whether the last refresh had one entry for several samples
        self._steps = 0  # when `EveryEpochs` was asked last

    def _if_it_lasts(self, message: str, is_so: bool, most: int = _IN_A_ROW, **values: Any) -> None:
        """Warn if a condition has held a number of times in a row."""
        self._in_a_row[message] = self._in_a_row[message] + 1 if is_so else 0
        if self._in_a_row[message] == most:
            self._once(message, count=most, **values)

    def refresh(self, entries: int, shape: tuple[int, ...]) -> None:
        """Note a refresh, with the result of `first_shape`."""
        self._refresh_entries, self._has_one = entries, shape == ()
        if len(shape) == 2:
            self._once(BROADCAST, n=shape[0])

    def losses(self, losses: Sequence[NDArray]) -> None:
        """Look at several losses of a closure: one may be an output of the network."""
        shapes = {(_mxnet.device_of(loss), loss.shape) for loss in losses}
        for device, shape in shapes:
            if len(shape) > 1 and shape[1] > 1 and (device, shape[:1]) in shapes:
                self._once(RETURNS_OUTPUT, one=shape[:1], other=shape)

    def row(self, is_used: bool) -> None:
        """Note whether a step has used its stored gradient, if there are stored gradients."""
        self._if_it_lasts(TWO_GRADIENTS, not is_used)

    def step(self, entries: int, batch_size: float) -> None:
        """Note a step: its losses may be means, which the batch size then divides once more."""
        self._step_entries, are_several = entries, batch_size > self._workers
        are_means = self._divides and entries == 1 and are_several
        if are_means or self._in_a_row[MEAN_LOSS]:
            self._if_it_lasts(MEAN_LOSS, are_means, batch_size=batch_size, workers=self._workers)
        if self._has_one and entries > 1 and are_several:
            self._once(ONE_AND_MANY, entries=entries)

    def epoch(self, steps: int) -> None:
        """Note that `EveryEpochs` is asked after so many steps: perhaps before each step."""
        is_step = steps == self._steps + 1 and 2 * self._step_entries < self._refresh_entries
        self._if_it_lasts(EACH_STEP, is_step, _EPOCHS)
        self._steps = steps
