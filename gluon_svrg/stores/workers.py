"""Many workers: what they agree on and sum up over a distributed store.

MXNet's distributed stores are parameter servers: what all workers push on a key is summed there.
The parameters have the keys 0, 1, ...; what is summed here has keys of its own, after these.
"""

from __future__ import annotations

import atexit
import os
from contextlib import contextmanager
from typing import Any, Iterator, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from .._mxnet import classic
from . import launcher as telling
from .server import ANSWER, ServerOptimizer, Settings


def is_distributed(kvstore: Any) -> bool:
    """Whether a store, or the name of one, is shared by several processes."""
    return "dist" in str(getattr(kvstore, "type", kvstore))


def is_synchronous(kvstore: Any) -> bool:
    """Whether a distributed store waits for all workers at each push."""
    return is_distributed(kvstore) and "async" not in str(getattr(kvstore, "type", kvstore))


class Workers:
    """All workers of a distributed store.

    Parameters
    ----------
    store : KVStore
        The store.
    parameters : int
        The number of parameters, whose keys are the first. Then come keys for probes, one for each
        server, and those of what is summed.
    """

    def __init__(self, store: Any, parameters: int) -> None:
        self.store = store
        self._parameters = parameters
        self._servers = int(os.environ.get("DMLC_NUM_SERVER", "1"))
        self._first_key = parameters + self._servers
        self._initialized: set[int] = set()
        self._sent: Any = None
        atexit.register(mx.nd.waitall)  # or the last push is lost, and all others wait for it
        telling.joined(store)

    def wait(self) -> None:
        """Wait until all workers are here, and all that they have pushed and pulled has arrived."""
        mx.nd.waitall()
        self.store._barrier()

    # --- sums ----------------------------------------------------------------------------------

    def sum_numbers(self, numbers: np.ndarray) -> np.ndarray:
        """Sum up a vector of float64 over the workers. Waits.

        MXNet's servers may round float64 to float32: a flag of theirs (`multi_precision_`) is not
        initialized. So each worker has a place of its own, with three float32 for each number.
        """
        parts, rest = np.zeros((self.store.num_workers, len(numbers), 3)), numbers
        for part in range(3):
            parts[self.store.rank, :, part] = np.float32(rest)
            rest = rest - np.float32(rest)
        array = mx.nd.array(parts, dtype="float32")
        self._sum({self._first_key: array})
        return array.asnumpy().astype("float64").sum(axis=(0, 2))

    def sum(self, arrays: Mapping[int, NDArray]) -> None:
        """Replace arrays by their sums over the workers.

        Parameters
        ----------
        arrays : dict of NDArray
            Each with the number of its parameter.
        """
        self._sum(
            {self._first_key + 1 + number: classic(array) for number, array in arrays.items()}
        )

    def _sum(self, arrays: Mapping[int, NDArray]) -> None:
        if not is_synchronous(self.store):
            self._sum_by_slots(arrays)
            return
        for key, array in arrays.items():  # the servers add up what all workers push
            self._initialize(key, array)
            scratch = array.copy()  # what is pushed is overwritten
            self.store.pushpull(key, scratch, out=scratch)
            scratch.copyto(array)

    def _sum_by_slots(self, arrays: Mapping[int, NDArray]) -> None:
        """An asynchronous store never adds up: each worker has slots of its own."""
        count, first = self.store.num_workers, self._first_key
        slots = {key: range(first + (key - first) * count, first + (key - first + 1) * count)
                 for key in arrays}  # fmt: skip
        for key, array in arrays.items():
            for slot in slots[key]:
                self._initialize(slot, array)
        for key, array in arrays.items():
            self.store.push(slots[key][self.store.rank], array.copy())
        self.wait()
        for key, array in arrays.items():
            array[:] = 0
            for slot in slots[key]:  # in one order: all workers find the same to the last bit
                scratch = mx.nd.zeros_like(array)
                self.store.pull(slot, out=scratch)
                array += scratch
        self.wait()  # before anyone fills a slot again

    def _initialize(self, key: int, array: NDArray) -> None:
        if key not in self._initialized:  # collective, once per key
            self.store.init(key, mx.nd.zeros_like(array))
            self._initialized.add(key)

    # --- updates on the servers ----------------------------------------------------------------

    def server_optimizer(self, optimizer: Any) -> ServerOptimizer:
        """What the servers need to update parameters and assign the rest."""
        return ServerOptimizer(optimizer, self._parameters, self._servers)

    def check_servers(self) -> None:
        """Raise unless all servers have loaded their optimizer. All workers do.

        Raises
        ------
        RuntimeError
            If one has not.
        """
        question = mx.nd.ones((1,))
        for key in range(self._parameters, self._parameters + self._servers):  # one on each server
            self._initialize(key, question)
            answer = question.copy()
            self.store.push(key, answer)
            self.wait()
            self.store.pull(key, out=answer)
            if answer.asscalar() != ANSWER:
                raise RuntimeError(
                    "A server could not load the optimizer, see its output. Servers unpickle it "
                    "inside `import mxnet`: gluon_svrg, and the module that defines an optimizer "
                    "or scheduler of yours, must be importable there without mxnet.gluon. Or leave "
                    "the update to the workers: update_on_kvstore=False."
                )

    def send_settings(self, optimizer: Any, multipliers: dict[str, Any]) -> None:
        """Give the servers the attributes of the optimizer, where they have changed.

        Rank 0 does, after its last update and before its next push; so all updates use them.
        """
        if self.store.rank != 0:
            return
        settings = {**_plain(optimizer), **multipliers}
        scheduler = {} if optimizer.lr_scheduler is None else _plain(optimizer.lr_scheduler)
        if (settings, scheduler) != self._sent:
            mx.nd.waitall()
            self.store._send_command_to_servers(0, Settings(settings, scheduler).pickled())
            self._sent = settings, scheduler


#: Attributes of an optimizer that the servers count by themselves, or that are not plain.
_COUNTED = ("num_update", "begin_num_update")


def _plain(thing: Any) -> dict[str, Any]:
    """Those attributes that are numbers or strings."""
    return {
        name: value
        for name, value in vars(thing).items()
        if name not in _COUNTED and isinstance(value, (bool, int, float, str, type(None)))
    }


class Agreement:
    """What workers agree on once: one vector of numbers, summed up over them.

    Parameters
    ----------
    workers : Workers or None
        None where there is one process only.
    size : int
        The most numbers that there can be.
    """

    def __init__(self, workers: Workers | None, size: int) -> None:
        self._workers = workers
        self._size = size
        self._pending = True

    def reach(self, numbers: Sequence[float]) -> Sequence[float]:
        """Give this worker's numbers and get the sums.

        Raises
        ------
        RuntimeError
            If another worker has failed.
        """
        self._pending = False
        if self._workers is None:
            return numbers
        vector = np.zeros(self._size)
        vector[: len(numbers)] = numbers
        sums = self._workers.sum_numbers(vector)[: len(numbers)]
        if np.isnan(sums[0]):
            raise RuntimeError(
                "Another worker has failed during the full gradient, see its error. Nothing was "
                "changed here: a snapshot held before is still in force."
            )
        return sums.tolist()

    def sum(self, arrays: Mapping[int, NDArray]) -> None:
        """Replace arrays, each with the number of its parameter, by their sums over the workers."""
        if self._workers is not None:
            self._workers.sum(arrays)

    def refuse(self) -> None:
        """Let the others know that this worker has failed, unless it is too late."""
        if self._pending and self._workers is not None:
            self._workers.sum_numbers(np.full(self._size, np.nan))


@contextmanager
def agreement(workers: Workers | None, size: int) -> Iterator[Agreement]:
    """Agree with all workers; if the block raises before it has agreed, they all know."""
    wanted = Agreement(workers, size)
    try:
        yield wanted
    except BaseException:
        wanted.refuse()
        raise
