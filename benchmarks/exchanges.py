"""A worker of a job whose exchanges are counted: ``exchanges.py ENGINE TRAINER FILE STEPS``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Callable

import mxnet as mx
from mxnet import gluon

from gluon_svrg import SVRGTrainer

from . import models, network

SETTINGS = {"learning_rate": 1e-6}
REFRESHES = 4
BATCHES = 2  # minibatches of a worker, in a refresh
IDLE = 0.5  # seconds


def main() -> None:
    """Count and time the phases; rank 0 writes what it has found."""
    engine, kind, path, steps = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    workload = models.workload("MLP 784-512-512-10")
    params = workload.net.collect_params()
    if engine == "horovod":
        rank, wait, trainer = _with_horovod(kind, params)
    else:
        rank, wait, trainer = _with_servers(engine, kind, params)

    def measure(function: Callable[[], Any], count: int) -> dict[str, float]:
        """Bytes and seconds of a call, of all workers together."""
        mx.nd.waitall()
        wait()  # the others have done all that came before
        bytes_before, start = network.transferred(), time.perf_counter()
        wait()  # and begin when the bytes are read
        for _ in range(count):
            function()
        mx.nd.waitall()
        wait()
        seconds, bytes_after = time.perf_counter() - start, network.transferred()
        wait()
        return {"bytes": (bytes_after - bytes_before) / count, "seconds": seconds / count}

    def step() -> None:
        if kind == "SVRGTrainer":
            trainer.step(workload.batch_size, closure=workload.closure)
        else:
            workload.differentiate()
            trainer.step(workload.batch_size)

    def refresh() -> None:
        trainer.update_full_grads(workload.closure, [()] * BATCHES)

    step()  # the first of each makes keys, and compares gradients
    found: dict[str, Any] = {"parameters": models.parameter_bytes(workload.net)}
    if kind == "SVRGTrainer":
        refresh()
        step()
        found["refresh"] = measure(refresh, REFRESHES)
        step()
    found["step"] = measure(step, steps)
    found["gradient"] = measure(workload.differentiate, steps)
    found["idle"] = measure(lambda: time.sleep(IDLE), 1)
    if rank == 0:
        path.write_text(json.dumps(found))


def _with_horovod(kind: str, params: Any) -> tuple[int, Callable[[], Any], Any]:
    import horovod.mxnet as hvd

    hvd.init()
    cls = SVRGTrainer if kind == "SVRGTrainer" else hvd.DistributedTrainer
    settings = {"kvstore": "horovod"} if kind == "SVRGTrainer" else {}

    def wait() -> None:
        hvd.allreduce(mx.nd.zeros(1), name="wait").asnumpy()

    return hvd.rank(), wait, cls(params, "sgd", SETTINGS, **settings)


def _with_servers(engine: str, kind: str, params: Any) -> tuple[int, Callable[[], Any], Any]:
    name, _, who = engine.partition(", ")
    store = mx.kv.create(name)
    cls = SVRGTrainer if kind == "SVRGTrainer" else gluon.Trainer
    on_servers = who == "servers update" or name == "dist_async"
    trainer = cls(params, "sgd", SETTINGS, kvstore=store, update_on_kvstore=on_servers)
    return store.rank, store._barrier, trainer


if __name__ == "__main__":
    main()
