"""MXNet's parameter servers (ps-lite): ``dist_sync``, ``dist_async`` and their variants.

The keys of parameters come first, then those of probes, one for each server, then those of sums.
"""

from __future__ import annotations

import atexit
import os
from typing import Any, Mapping, Sequence

import mxnet as mx
from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from .. import _mxnet
from . import job
from .server_optimizer import ANSWER, ServerOptimizer, Settings
from .workers import Workers


class SynchronousServers(Workers):
    """Workers of a kvstore that waits for all of them at each push, and sums their pushes."""

    is_alone = False
    has_servers = True

    def __init__(self, kvstore: Any, first_free_key: int) -> None:
        servers = int(os.environ.get("DMLC_NUM_SERVER", "1"))
        super().__init__(kvstore, first_free_key + servers)
        self._probes = range(first_free_key, first_free_key + servers)
        self._sent: dict[str, Any] = {}  # the last settings
        # All others wait for the last push of a worker, which must not exit before it.
        atexit.register(mx.nd.waitall)
        job.end_on_errors()  # the script may have set a hook of its own since the import

    def wait(self) -> None:
        mx.nd.waitall()
        _mxnet.barrier(self.kvstore)

    def _initialize(self, arrays: Mapping[int, NDArray]) -> None:
        self.kvstore.init(list(arrays), list(arrays.values()))

    def _sum(self, arrays: Mapping[int, NDArray]) -> None:
        for key, array in arrays.items():
            self.kvstore.pushpull(key, array, out=array)

    def wrapped(self, optimizer: Any) -> ServerOptimizer:
        """The optimizer for servers; raise if it needs whole arrays, of which they hold slices."""
        name, servers = type(optimizer).__name__, len(self._probes)
        if servers > 1 and name in ("LARS", "LAMB", "LANS", "LBSGD"):
            raise ValueError(f"{name} needs whole arrays: start one server, and not {servers}.")
        return ServerOptimizer(optimizer, self._probes)

    def check(self) -> None:
        """Ask each server for an answer that only its optimizer can give; raise without it."""
        for key in self._probes:
            if key not in self._travelling:
                self._travelling[key] = mx.nd.ones((1,))
                self.kvstore.init(key, self._travelling[key])
            answer = self._travelling[key]
            self.kvstore.push(key, answer)
            self.wait()
            self.kvstore.pull(key, out=answer)
            if answer.asscalar() != ANSWER:
                raise RuntimeError(
                    "A server could not load the optimizer, see its output: it and gluon_svrg must "
                    "be importable there, without mxnet.gluon. Or use the defaults of 'dist_sync'."
                )

    def send_settings(self, optimizer: Any, parameters: Sequence[Any]) -> None:
        """Send the servers what has changed of the optimizer's settings and the multipliers."""
        now = {**_plain(optimizer), **_plain(optimizer.lr_scheduler, "lr_scheduler.")}
        for name in ("lr_mult", "wd_mult"):
            now[name] = {key: getattr(p, name) for key, p in enumerate(parameters)}
        changed = Settings(item for item in now.items() if item not in self._sent.items())
        if self.rank == 0 and changed:
            mx.nd.waitall()  # after its last update, before its next push: with 'dist_sync' for all
            self.kvstore.set_optimizer(changed)
            self._sent = now


class AsynchronousServers(SynchronousServers):
    """Workers of a kvstore that never sums: each has slots for sums, and all read all slots."""

    reduces = False

    def share_weights(self, parameters: Sequence[Parameter]) -> None:
        """Give all workers the weights that the servers have when all workers call this."""
        self.wait()
        for key, p in enumerate(parameters):
            if _mxnet.is_trainable(p) and not _mxnet.has_sparse_values(p):
                self.kvstore.pull(key, out=_mxnet.data(p))
        self.wait()

    def _initialize(self, arrays: Mapping[int, NDArray]) -> None:
        super()._initialize({s: array for key, array in arrays.items() for s in self._slots(key)})

    def _sum(self, arrays: Mapping[int, NDArray]) -> None:
        for key, array in arrays.items():
            self.kvstore.push(self._slots(key)[self.rank], array)
        self.wait()
        for key, array in arrays.items():
            total = mx.nd.zeros_like(array)
            for slot in self._slots(key):  # in one order: all workers get the same bits
                self.kvstore.pull(slot, out=array)
                total += array
            total.copyto(array)
        self.wait()  # before anyone fills a slot again

    def _slots(self, key: int) -> range:
        """The keys of all workers' slots, in place of one key."""
        start = self._first_key + (key - self._first_key) * self.size
        return range(start, start + self.size)


def _plain(thing: Any, prefix: str = "") -> dict[str, Any]:
    """The attributes that are numbers or strings, but those that the servers count themselves."""
    return {
        prefix + name: value
        for name, value in ({} if thing is None else vars(thing)).items()
        if isinstance(value, (bool, int, float, str, type(None)))
        and name not in ("num_update", "begin_num_update")
    }
