"""What workers run for `test_recursive`: ``worker_recursive.py TASK FOLDER SETTINGS``."""

import mxnet as mx
import worker
from problems import parameters, values
from worker import PROBLEM, make_store, minibatches

import gluon_svrg

SGD = {"learning_rate": 0.1, "momentum": 0.5}


def recursive(trainer, own, devices=1, kvstore="dist_sync"):
    """An epoch without a refresh, and two after one."""
    where = [mx.cpu(i) for i in range(devices)] if devices > 1 else None
    store, kvstore = make_store(kvstore)
    net = PROBLEM.network("float64", where)
    loss_of = PROBLEM.closure(net, "float64", where)
    make = getattr(gluon_svrg, trainer)
    trainer = make(net.collect_params(), "sgd", SGD, kvstore=kvstore, **own)
    shares, sizes = minibatches(store.rank, store.num_workers, True)
    for epoch in range(3):
        if epoch == 1:
            trainer.update_full_grads(loss_of, shares)
        for index, size in zip(shares, sizes):
            trainer.step(size, closure=lambda: loss_of(index))
    mean = trainer.full_grads or {}
    rows = [mean[p] for p in parameters(net) if mean]
    found = {f"m{i}": row[0].asnumpy() for i, row in enumerate(rows)}
    found.update({f"w{i}": w for i, w in enumerate(values(net, mx.cpu(devices - 1)))})
    return store, found


if __name__ == "__main__":
    worker.main(globals())
