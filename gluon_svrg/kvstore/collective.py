"""Workers of a kvstore in Python that can only broadcast and add, as that of Horovod."""

from __future__ import annotations

import atexit
import os
from itertools import count
from typing import Any, Mapping

import mxnet as mx
from mxnet.kvstore import KVStoreBase
from mxnet.ndarray import NDArray

from .. import _mxnet
from . import job
from .workers import Workers

_numbers = count()  # of Horovod's kvstores in this process, in the same order on all ranks


class Collective(Workers):
    """Workers of a `KVStoreBase` with `broadcast`, and `pushpull` with the same bits on all."""

    is_alone = False

    def wait(self) -> None:
        mx.nd.waitall()
        self.sum_numbers([0.0])

    def _initialize(self, arrays: Mapping[int, NDArray]) -> None:
        for key, array in arrays.items():  # as `gluon.Trainer` does before it uses a key
            self.kvstore.broadcast(key, mx.nd.zeros_like(array), [array])

    def _sum(self, arrays: Mapping[int, NDArray]) -> None:
        for key, array in arrays.items():
            self.kvstore.pushpull(key, [array], out=[array])


class HorovodKVStore(KVStoreBase):
    """``kvstore='horovod'`` over `horovod.mxnet`: the name is local on 1.9.1, and fails on 2.0."""

    type = "horovod"
    rank = property(lambda self: int(self._hvd.rank()))
    num_workers = property(lambda self: int(self._hvd.size()))
    is_capable = staticmethod(lambda capability: False)  # of updates

    def __init__(self) -> None:
        try:
            import horovod.mxnet as hvd
        except ImportError as error:
            raise ImportError(
                "kvstore='horovod' needs Horovod, built for this MXNet. In a clone: HOROVOD_WITH_"
                "MXNET=1 HOROVOD_WITH_GLOO=1 pip install --no-build-isolation '.[horovod]'"
            ) from error
        hvd.init()
        self._hvd, self._prefix = hvd, f"gluon_svrg.{next(_numbers)}"
        for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"):
            size = os.environ.get(name, "1")
            if self.num_workers == 1 and size != "1":
                raise RuntimeError(
                    f"Horovod sees one process, but {name} is {size}: each would train alone. Use "
                    f"horovodrun --gloo -np {size} python ..., or build with HOROVOD_WITH_MPI=1."
                )
        # All others wait for the last sum of a worker, which must not exit before it.
        atexit.register(mx.nd.waitall)
        job.end_on_errors()

    def broadcast(self, key: int, value: Any, out: list[NDArray], priority: int = 0) -> None:
        """Copy rank 0's value to all arrays of all workers."""
        first, *rest = map(_mxnet.classic, out)
        if value is not out[0]:  # MXNet warns of a copy to itself
            _mxnet.classic(value).copyto(first)
        self._hvd.broadcast_(first, 0, name=f"{self._prefix}.broadcast.{key}", priority=priority)
        for array in rest:
            first.copyto(array)

    def pushpull(self, key: int, value: list[NDArray], out: Any = None, priority: int = 0) -> None:
        """Replace all arrays of all workers by their sum; `out` is the same arrays, if any."""
        first, *rest = map(_mxnet.classic, value)
        for addend in rest:
            first += addend.copyto(_mxnet.device_of(first))
        name = f"{self._prefix}.sum.{key}"
        self._hvd.allreduce_(first, op=self._hvd.Sum, name=name, priority=priority)
        for array in rest:
            first.copyto(array)
