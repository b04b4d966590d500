"""``kvstore='horovod'``: workers that use Horovod's allreduce and broadcast.

MXNet's own kvstore of that name is a local one on 1.9.1, and fails in its broadcast on 2.0. With
one device, `gluon.Trainer` ignores the name: ranks would silently drift apart.
"""

from __future__ import annotations

import atexit
import os
from itertools import count
from typing import Any

import mxnet as mx
from mxnet.kvstore import KVStoreBase
from mxnet.ndarray import NDArray

from .. import _mxnet
from . import launcher
from .collective import Collective

#: The variables by which launchers tell a process the size of its job.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")

_numbers = count()  # of the kvstores in this process, in the same order on all ranks


class HorovodKVStore(KVStoreBase):
    """A kvstore over `horovod.mxnet`.

    Raises
    ------
    ImportError
        If Horovod is not installed, or was built without MXNet.
    RuntimeError
        If Horovod sees only one process, although a launcher has started several.
    """

    def __init__(self) -> None:
        try:
            import horovod.mxnet as hvd
        except ImportError as error:
            raise ImportError(
                "kvstore='horovod' needs Horovod, built for this MXNet. Install it, in a clone of "
                "this package: HOROVOD_WITH_MXNET=1 HOROVOD_WITH_GLOO=1 pip install "
                f"--no-build-isolation '.[horovod]'. ({error})"
            ) from error
        hvd.init()
        launcher.tell("rank", str(hvd.rank()))
        if hvd.size() == 1:
            _check_alone()
        self._hvd = hvd
        self._prefix = f"gluon_svrg.{next(_numbers)}"
        # All others wait for the last sum of a worker, which must not exit before it.
        atexit.register(mx.nd.waitall)
        launcher.tell_the_end()

    @property
    def type(self) -> str:
        """The name of this kind of kvstore."""
        return "horovod"

    @property
    def rank(self) -> int:
        """The number of this worker, from 0."""
        return int(self._hvd.rank())

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return int(self._hvd.size())

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Say that this kvstore has no optimizer."""
        return False

    def broadcast(self, key: int, value: Any, out: Any, priority: int = 0) -> None:
        """Copy rank 0's value to all arrays of all workers."""
        first, *rest = _arrays(out)
        _arrays(value)[0].copyto(first)
        self._hvd.broadcast_(first, 0, name=f"{self._prefix}.broadcast.{key}", priority=priority)
        for array in rest:
            first.copyto(array)

    def pushpull(self, key: int, value: Any, out: Any = None, priority: int = 0) -> None:
        """Copy the sum of all values of all workers to all arrays of all workers."""
        values = _arrays(value)
        first, *rest = values if out is None else _arrays(out)
        total = values[0]
        for addend in values[1:]:
            total = total + addend.copyto(_mxnet.device_of(total))
        if total is not first:
            total.copyto(first)
        self._hvd.allreduce_(
            first, op=self._hvd.Sum, name=f"{self._prefix}.sum.{key}", priority=priority
        )
        for array in rest:
            first.copyto(array)


class HorovodWorkers(Collective):
    """Workers that exchange arrays by Horovod.

    The parameters are those of `Workers`.
    """

    can_compress = False

    #: Horovod refuses a name that is still in use. Small arrays are often new each time, so their
    #: sums could overlap; the trainer waits for large ones at each refresh.
    _SMALL = 1024

    def __init__(self, kvstore: Any, first_free_key: int, updates: bool) -> None:
        super().__init__(kvstore, first_free_key, updates)
        self._own: dict[int, NDArray] = {}

    def _sum(self, key: int, array: NDArray) -> None:
        if array.size > self._SMALL:
            self.kvstore.pushpull(key, [array])
            return
        own = self._own.setdefault(key, mx.nd.zeros_like(array))
        array.copyto(own)
        self.kvstore.pushpull(key, [own])  # one array: MXNet's engine keeps its sums in order
        own.copyto(array)


def _arrays(value: Any) -> list[NDArray]:
    """One or several arrays as a list."""
    arrays = list(value) if isinstance(value, (list, tuple)) else [value]
    return [_mxnet.classic(array) for array in arrays]


def _check_alone() -> None:
    """Raise if a launcher has started several processes that Horovod does not see."""
    for name in _SIZES:
        size = os.environ.get(name, "")
        if size.isdecimal() and int(size) > 1:
            raise RuntimeError(
                f"Horovod sees one process, but {name} is {size}: each process would train alone. "
                "This Horovod was built without MPI and knows only its own launcher. Start with "
                f"horovodrun --gloo -np {size} python ..., or build it with HOROVOD_WITH_MPI=1."
            )
