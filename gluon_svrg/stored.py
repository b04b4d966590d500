"""Stored gradients: those of all minibatches at the snapshot, kept from the full pass.

With them, a step takes one gradient instead of two. Minibatches are known by their positions in
the data of the full pass.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Sequence

from mxnet.ndarray import NDArray

from . import comparison, gradient, random_lock
from ._mxnet import Arrays
from .closure import Evaluation, Loss
from .gradient import Network
from .random_lock import RandomLock
from .snapshot import Snapshot, per_device
from .stored_subtract import for_storage, prepare


class StoredGradients:
    """The gradients of minibatches at a snapshot, with the random numbers that each drew.

    Parameters
    ----------
    scale : float
        Of the losses, and so of the gradients.

    Attributes
    ----------
    grads : list of list of list of NDArray
        Per minibatch, device and parameter: the *sum* over the loss entries, in the form that
        `StoredSubtract` takes.
    prepared : bool
        Whether the full gradient was added to them, once for each entry.
    counts : list of tuple of int
        The number of loss entries, per minibatch and device.
    seeds : list of int or None
        What the random numbers of each minibatch are drawn from, where they are locked.
    confirmed : bool
        Whether one has been computed again and was the same.
    repeated : int
        Loss entries that were differentiated again, to see whether random numbers must be locked.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.grads: list[list[list[NDArray]]] = []
        self.prepared = False
        self.counts: list[tuple[int, ...]] = []
        self.seeds: list[int | None] = []
        self.confirmed = False
        self.repeated = 0

    @contextmanager
    def forgotten_on_error(self) -> Iterator[None]:
        """Free the memory at once if the block raises, not when the error is forgotten."""
        try:
            yield
        except BaseException:
            self.grads.clear()
            raise

    def __len__(self) -> int:
        return len(self.grads)

    def take(
        self,
        snapshot: Snapshot,
        closure: Callable[..., Loss],
        batch: Sequence[Any],
        network: Network,
        lock: RandomLock,
    ) -> Evaluation:
        """Take the gradient of the next minibatch as `gradient.at_snapshot` does, and keep it.

        That of the first minibatch is taken twice, to see whether the network draws random
        numbers; if it does, they are locked.
        """
        seed = lock.new_seed()
        random_lock.start(seed)
        evaluation = gradient.at_snapshot(snapshot, closure, batch, network)
        grads = [[for_storage(grad) for grad in row] for row in snapshot.buffers]
        if not self.grads and lock.mode == "auto" and (self.repeated or not lock.locked):
            self.repeated += sum(evaluation.counts)
            random_lock.start(seed)
            gradient.at_snapshot(snapshot, closure, batch, network)
            again = [[for_storage(grad) for grad in row] for row in snapshot.buffers]
            difference = comparison.difference(grads, again)
            if difference > comparison.tolerance(snapshot.buffers):
                if lock.locked:
                    raise RuntimeError(comparison.NOT_REPEATABLE.format(difference=difference))
                warnings.warn(comparison.RANDOM.format(difference=difference), stacklevel=5)
                lock.locked = True
                self.repeated += sum(evaluation.counts)
                return self.take(snapshot, closure, batch, network, lock)
        self.grads.append(per_device(grads))
        self.counts.append(evaluation.counts)
        self.seeds.append(seed)
        return evaluation

    def prepare(self, full_grads: Arrays) -> None:
        """Do what can be done before the steps, now that the full gradient is known."""
        self.prepared = True
        for device, means in enumerate(per_device(full_grads)):
            for grads, counts in zip(self.grads, self.counts):
                prepare(grads[device], means, counts[device] * self.scale)

    def check_index(self, index: int) -> None:
        """Raise an IndexError if there is no such minibatch."""
        if not 0 <= index < len(self):
            raise IndexError(
                f"batch_index is {index}, and the gradients of {len(self)} minibatches are stored: "
                f"0 to {len(self) - 1}, by their position in the data of update_full_grads()."
            )

    def check_counts(self, index: int, counts: Sequence[int]) -> None:
        """Raise a ValueError if a minibatch has other numbers of loss entries than then."""
        if tuple(counts) != self.counts[index]:
            raise ValueError(
                f"Minibatch {index} had {_entries(self.counts[index])} in the full pass, and the "
                f"closure returned {_entries(counts)}. batch_index must be the minibatch's "
                "position in the data that update_full_grads was given: was the data reshuffled?"
            )


def _entries(counts: Sequence[int]) -> str:
    total = f"{sum(counts)} loss entries"
    return total if len(counts) < 2 else f"{total} ({', '.join(map(str, counts))} per device)"
