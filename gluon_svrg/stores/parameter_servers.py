"""MXNet's parameter servers (ps-lite): ``dist_sync``, ``dist_async`` and their variants.

The parameters have the keys 0, 1, ... of `gluon.Trainer`. Then come keys for probes, one for each
server, and the keys of sums.
"""

from __future__ import annotations

import atexit
import os
from abc import abstractmethod
from typing import Any, Callable, Iterable, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from .. import _mxnet
from . import watch
from .interface import Workers
from .server import ANSWER, ServerOptimizer, Settings


class Servers(Workers):
    """Workers of a kvstore with parameter servers.

    The parameters are those of `Workers`.
    """

    has_servers = True
    can_update = True
    can_compress = False

    def __init__(self, kvstore: Any, first_free_key: int, updates: bool) -> None:
        super().__init__(kvstore, first_free_key, updates)
        self._first_probe = first_free_key
        self._servers = int(os.environ.get("DMLC_NUM_SERVER", "1"))
        self._first_key = first_free_key + self._servers
        self._initialized: set[int] = set()
        self._sent: Any = None
        # All others wait for the last push of a worker, which must not exit before it.
        atexit.register(mx.nd.waitall)
        watch.joined(kvstore)

    def wait(self) -> None:
        """Wait until all workers call this, and everything that they have sent has arrived."""
        mx.nd.waitall()
        _mxnet.barrier(self.kvstore)

    # --- sums ----------------------------------------------------------------------------------

    def sum_block(self, numbers: np.ndarray) -> np.ndarray:
        """Sum `BLOCK` numbers over all workers, and wait for the result.

        MXNet's servers may round float64 to float32, because they do not initialize a flag
        (`multi_precision_`). So each worker has its own place, with three float32 for each number.
        """
        parts, rest = np.zeros((self.size, len(numbers), 3)), numbers
        for part in range(3):
            parts[self.rank, :, part] = np.float32(rest)
            rest = rest - np.float32(rest)
        array = mx.nd.array(parts, dtype="float32")
        self._sum({self._first_key: array})
        return array.asnumpy().astype("float64").sum(axis=(0, 2))

    def sum_arrays(self, arrays: Mapping[int, NDArray]) -> None:
        """Replace arrays by their sums over all workers; float64 may be rounded to float32."""
        first = self._first_key + 1
        self._sum({first + number: _mxnet.classic(array) for number, array in arrays.items()})

    @abstractmethod
    def _sum(self, arrays: Mapping[int, NDArray]) -> None:
        """Replace arrays, each with its key, by their sums over all workers."""

    def _initialize(self, key: int, array: NDArray) -> None:
        if key not in self._initialized:  # collective, once per key
            self.kvstore.init(key, mx.nd.zeros_like(array))
            self._initialized.add(key)

    # --- updates on the servers ----------------------------------------------------------------

    def server_optimizer(self, optimizer: Any) -> ServerOptimizer:
        """The optimizer for servers, which updates parameters and assigns all other keys."""
        return ServerOptimizer(optimizer, self._first_probe, self._servers)

    def check_servers(self) -> None:
        """Raise if servers update and one of them has not loaded its optimizer.

        Raises
        ------
        RuntimeError
            If a server has not loaded it.
        """
        if not self.updates:
            return
        question = mx.nd.ones((1,))
        for key in range(self._first_probe, self._first_key):  # one on each server
            self._initialize(key, question)
            answer = question.copy()
            self.kvstore.push(key, answer)
            self.wait()
            self.kvstore.pull(key, out=answer)
            if answer.asscalar() != ANSWER:
                raise RuntimeError(
                    "A server could not load the optimizer, see its output. Servers unpickle it "
                    "inside `import mxnet`: gluon_svrg, and the module that defines your optimizer "
                    "or scheduler, must be importable there without mxnet.gluon. Or update on the "
                    "workers: update_on_kvstore=False."
                )

    def prepare_push(
        self,
        optimizer: Any,
        multipliers: Mapping[str, Mapping[int, float]],
        gradients: Iterable[NDArray],
        batch_size: float,
    ) -> float:
        """Divide the gradients here, and send new settings to the servers.

        MXNet's servers would keep the first batch size.
        """
        if self.rank == 0:  # after its last update and before its next push: all updates use them
            self._send_settings(optimizer, multipliers)
        for gradient in map(_mxnet.classic, gradients):
            gradient /= batch_size
        return 1

    def _send_settings(
        self, optimizer: Any, multipliers: Mapping[str, Mapping[int, float]]
    ) -> None:
        """Send the servers those attributes of the optimizer that have changed."""
        settings = {**_plain(optimizer), **multipliers}
        scheduler = {} if optimizer.lr_scheduler is None else _plain(optimizer.lr_scheduler)
        if (settings, scheduler) != self._sent:
            mx.nd.waitall()
            _mxnet.send_to_servers(self.kvstore, Settings(settings, scheduler).pickled())
            self._sent = settings, scheduler


class SynchronousServers(Servers):
    """Workers of a kvstore that waits for all of them at each push, and sums their pushes."""

    def _sum(self, arrays: Mapping[int, NDArray]) -> None:
        for key, array in arrays.items():
            self._initialize(key, array)
            scratch = array.copy()  # the kvstore overwrites it; and a copy has a plain layout
            self.kvstore.pushpull(key, scratch, out=scratch)
            scratch.copyto(array)


class AsynchronousServers(Servers):
    """Workers of a kvstore that updates at each push of any worker, and never sums.

    So each worker has its own slots for sums, and all workers read all slots.
    """

    reduces = False

    def prepare_servers(self, optimizer: Callable[[], Any]) -> None:
        """Give the servers the optimizer, without which they store nothing."""
        self.kvstore.set_optimizer(optimizer())
        self.wait()

    def share_weights(self, weights: Mapping[int, Sequence[NDArray]]) -> None:
        """Give all workers the weights that the servers have when all workers call this."""
        self.wait()
        for key, arrays in weights.items():
            self.kvstore.pull(key, out=list(arrays))
        self.wait()

    def _sum(self, arrays: Mapping[int, NDArray]) -> None:
        slots = {key: self._slots(key) for key in arrays}
        for key, array in arrays.items():
            for slot in slots[key]:
                self._initialize(slot, array)
        for key, array in arrays.items():
            self.kvstore.push(slots[key][self.rank], array.copy())
        self.wait()
        for key, array in arrays.items():
            array[:] = 0
            for slot in slots[key]:  # in one order: all workers get the same sum to the last bit
                scratch = mx.nd.zeros_like(array)
                self.kvstore.pull(slot, out=scratch)
                array += scratch
        self.wait()  # before anyone fills a slot again

    def _slots(self, key: int) -> range:
        """The keys of all workers' slots, in place of one key."""
        start = self._first_key + (key - self._first_key) * self.size
        return range(start, start + self.size)


#: Attributes of an optimizer that the servers count by themselves.
_COUNTED = ("num_update", "begin_num_update")


def _plain(thing: Any) -> dict[str, Any]:
    """The attributes that are numbers or strings."""
    return {
        name: value
        for name, value in vars(thing).items()
        if name not in _COUNTED and isinstance(value, (bool, int, float, str, type(None)))
    }
