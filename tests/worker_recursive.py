"""What workers run for `test_recursive`: ``worker_recursive.py TASK FOLDER SETTINGS``."""

import mxnet as mx
import numpy as np
import worker
from problems import parameters, values
from worker import PROBLEM, minibatches

import gluon_svrg

#: By name: the trainer, and its own settings.
METHODS = {
    "SARAH": ("SARAHTrainer", {}),
    "STORM": ("STORMTrainer", {"mixing": 0.3}),
    "MARS": ("MARSTrainer", {"gamma": 0.1, "clip": 0.1}),
    "approximate": ("MARSTrainer", {"gamma": 0.1, "exact": False, "clip": 0.2}),
}
SGD = {"learning_rate": 0.1, "momentum": 0.5}


def recursive(devices=1):
    """All methods, one after another, each on the same kvstore's cluster."""
    store, found = None, {}
    where = [mx.cpu(i) for i in range(devices)] if devices > 1 else None
    for name, (cls, own) in METHODS.items():
        store = mx.kv.create("dist_sync")
        net = PROBLEM.network("float64", where)
        loss_of = PROBLEM.closure(net, "float64", where)
        make = getattr(gluon_svrg, cls)
        trainer = make(net.collect_params(), "sgd", SGD, kvstore=store, **own)
        shares, sizes = minibatches(store.rank, store.num_workers, True)
        for epoch in range(3):
            if epoch == 1:
                trainer.update_full_grads(loss_of, shares)
            for index, size in zip(shares, sizes):
                trainer.step(size, closure=lambda: loss_of(index))
        found.update({f"{name} w{i}": w for i, w in enumerate(values(net, mx.cpu(0)))})
        mean = trainer.full_grads or {}
        found.update({f"{name} m{i}": mean[p][0].asnumpy() for i, p in enumerate(mean)})
        assert list(mean) in ([], parameters(net))
        mx.nd.waitall()
        store._barrier()
    return store, {key: np.asarray(value) for key, value in found.items()}


worker.recursive = recursive

if __name__ == "__main__":
    worker.main()
