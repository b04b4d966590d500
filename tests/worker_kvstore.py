"""What the workers of `test_kvstore` run: ``worker_kvstore.py TASK FOLDER SETTINGS``."""

import time

import mxnet as mx
import numpy as np
import worker
from mxnet import autograd, gluon
from problems import array, parameters, values
from worker import PROBLEM, make_store, minibatches

import gluon_svrg


class Alone:
    """One process in place of all workers."""

    rank, num_workers = 0, 1


def halves(cls, own, way, kvstore="dist_sync"):
    """Steps in halves, or of two micro-batches, while rank 1 sends its sums late."""
    store, chosen = (Alone, None) if kvstore is None else make_store(kvstore)
    net = PROBLEM.network("float64")
    loss_of = PROBLEM.closure(net)
    settings = {"learning_rate": 0.1, "momentum": 0.5}
    trainer = getattr(gluon_svrg, cls)(net.collect_params(), "sgd", settings, kvstore=chosen, **own)
    shares, sizes = minibatches(store.rank, store.num_workers, uneven=True)
    if store.rank == 1:
        send = trainer._workers.sum_arrays
        trainer._workers.sum_arrays = lambda arrays: (time.sleep(0.1), send(arrays))
    has_rows = cls in ("SAGATrainer", "SAGTrainer")
    for p in parameters(net):
        p.grad_req = "add" if way == "add" else "write"
    for step, number in enumerate((2, 0, 2, 3, 1, 0, 3, 1, 2)):
        if step in (3, 6):
            trainer.discard_snapshot()
        if step % 3 == 0 and cls == "SARAHTrainer":
            trainer.update_full_grads(loss_of, shares)
        parts = np.array_split(shares[number], 2) if way == "add" else [shares[number]]
        for part, index in enumerate(parts):
            row = {"batch_index": 2 * number + part} if has_rows else {}
            trainer.correct_grads(lambda index=index: loss_of(index), **row)
        if way == "add":
            trainer.step(sizes[number])
            for p in parameters(net):
                p.zero_grad() if not worker.IS_2 else p.grad()[:].__setitem__(slice(None), 0)
        else:
            trainer.allreduce_grads()
            trainer.update(sizes[number])
    mean = trainer.full_grads or {}
    return store, {
        **{f"w{n}": w for n, w in enumerate(values(net))},
        **{f"m{n}": mean[p][0].asnumpy() for n, p in enumerate(parameters(net)) if mean},
    }


def many_parameters(kvstore="dist_sync"):
    """A loss that reaches the last one of 72 parameters on rank 1 only, after a plain step."""
    store, chosen = (Alone, None) if kvstore is None else make_store(kvstore)
    layers = [gluon.nn.Dense(3, in_units=3, dtype="float64") for _ in range(36)]
    rng = np.random.RandomState(1)
    for layer in layers:
        layer.initialize()
        for p in (layer.weight, layer.bias):
            p.set_data(array(rng.randn(*p.shape) / 3))
    params = [p for layer in layers for p in (layer.weight, layer.bias)]
    trainer = gluon_svrg.SVRGTrainer(params, "sgd", {"learning_rate": 0.1}, kvstore=chosen)
    X = rng.randn(12, 3)

    def loss_of(index):
        hidden = array(X[index])
        for layer in layers[:-1]:
            hidden = hidden + layer(hidden).tanh()
        reached = mx.nd.array(index >= 6, dtype="float64")
        if (index >= 6).any():
            last = layers[-1](array(X[index[index >= 6]]))
            return [((hidden**2).sum(axis=1)), (last**2).sum(axis=1)]
        return [(hidden**2).sum(axis=1)]

    mine = np.arange(12).reshape(2, 6)[store.rank] if store.num_workers == 2 else np.arange(12)
    return store, {}


def numbers(kvstore="dist_sync"):
    """Sums of more numbers than one exchange takes."""
    store, chosen = make_store(kvstore)
    net = PROBLEM.network("float64")
    trainer = gluon_svrg.SVRGTrainer(net.collect_params(), "sgd", kvstore=chosen)
    given = np.random.RandomState(store.rank).randn(150) * 10.0 ** np.arange(-75, 75)
    given[:3] = [np.inf, store.rank / 0.3, np.nan if store.rank else 1]
    return store, {"given": given, "sums": trainer._workers.sum_numbers(given)}


if __name__ == "__main__":
    worker.main(globals())
