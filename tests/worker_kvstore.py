"""What the workers of `test_kvstore` run: ``worker_kvstore.py TASK FOLDER SETTINGS``."""

import time

import mxnet as mx
import numpy as np
import worker
from mxnet import autograd, gluon
from problems import array, parameters
from worker import PROBLEM, make_store, minibatches

import gluon_svrg


class Alone:
    """One process in place of all workers."""

    rank, num_workers = 0, 1


def joined(kvstore):
    """What tells the rank, and what the trainer gets; None for one process."""
    return (Alone, None) if kvstore is None else make_store(kvstore)


def found_in(params):
    return {f"w{n}": p.list_data()[0].asnumpy() for n, p in enumerate(params)}


def halves(cls, own, way, kvstore="dist_sync"):
    """Steps in halves, or of two micro-batches, while rank 1 sends its sums late."""
    store, chosen = joined(kvstore)
    net = PROBLEM.network("float64")
    loss_of = PROBLEM.closure(net)
    settings = {"learning_rate": 0.1, "momentum": 0.5}
    trainer = getattr(gluon_svrg, cls)(net.collect_params(), "sgd", settings, kvstore=chosen, **own)
    shares, sizes = minibatches(store.rank, store.num_workers, uneven=True)
    if store.rank == 1:
        send = trainer._workers.sum_arrays
        trainer._workers.sum_arrays = lambda arrays: (time.sleep(0.1), send(arrays))
    for p in parameters(net):
        p.grad_req = "add" if way == "add" else "write"
    for step, number in enumerate((2, 0, 2, 3, 1, 0, 3, 1, 2)):
        if step in (3, 6):
            trainer.discard_snapshot()
        if step % 3 == 0 and cls == "SARAHTrainer":
            trainer.update_full_grads(loss_of, shares)
        for part, index in enumerate(np.array_split(shares[number], 2 if way == "add" else 1)):
            row = {"batch_index": 2 * number + part} if cls in ("SAGATrainer", "SAGTrainer") else {}
            trainer.correct_grads(lambda index=index: loss_of(index), **row)
        if way == "add":
            trainer.step(sizes[number])
            for p in parameters(net):
                p.grad()[:] = 0
        else:
            trainer.allreduce_grads()
            trainer.update(sizes[number])
    mean = trainer.full_grads or {}
    means = {f"m{n}": mean[p][0].asnumpy() for n, p in enumerate(parameters(net)) if mean}
    return store, {**found_in(parameters(net)), **means}


def many_parameters(begin, kvstore="dist_sync"):
    """Two steps of 72 parameters.

    They begin with a backward of the user's own, before the weights are shared, or with a refresh,
    where only the samples of rank 1 depend on the last parameters.
    """
    store, chosen = joined(kvstore)
    rng, params = np.random.RandomState(1), []
    layers = [gluon.nn.Dense(3, in_units=3, dtype="float64") for _ in range(36)]
    for layer in layers:
        layer.initialize()
        for p in (layer.weight, layer.bias):
            p.set_data(array(rng.randn(*p.shape) / 3))
            params.append(p)
    X = rng.randn(12, 3)

    def loss_of(index):
        hidden = array(X[index])
        for layer in layers[:-1]:
            hidden = hidden + 0.1 * layer(hidden)
        others = index[index >= 6]
        if begin == "own backward" or not len(others):
            return (hidden**2).sum(axis=1)
        return [(hidden**2).sum(axis=1), (layers[-1](array(X[others])) ** 2).sum(axis=1)]

    trainer = gluon_svrg.SVRGTrainer(params, "sgd", {"learning_rate": 0.01}, kvstore=chosen)
    mine = np.arange(12).reshape(2, 2, 3)
    mine = mine.swapaxes(0, 1).reshape(2, 6) if chosen is None else mine[store.rank]
    if begin == "refresh":
        trainer.update_full_grads(loss_of, list(mine))
    for index in mine:
        if begin == "refresh":
            trainer.step(6, True, closure=lambda index=index: loss_of(index))
            continue
        with autograd.record():
            losses = loss_of(index)
        autograd.backward(losses)
        trainer.step(6, True)
    return store, found_in(params)


def start(kvstore="dist_sync"):
    """A first step whose gradient is there before the weights are shared, and other arrays travel.

    The learning rate is 0, so the weights stay.
    """
    store, _ = make_store(kvstore)
    layer = gluon.nn.Dense(3, use_bias=False, in_units=2)
    layer.initialize(mx.init.One())
    others = {5000 + n: mx.nd.zeros((1000, 1000)) for n in range(30)}
    store.init(list(others), list(others.values()))
    trainer = gluon_svrg.SVRGTrainer([layer.weight], "sgd", {"learning_rate": 0.0}, kvstore=store)
    with autograd.record():
        loss = layer(array(np.ones((1, 2)), "float32"))
    loss.backward()
    mx.nd.waitall()
    for key, other in others.items():
        store.pull(key, out=other)
    trainer.step(1)
    return store, found_in([layer.weight])


def refresh_late(kvstore="dist_async"):
    """Rank 0 takes steps, and then all take a snapshot, which rank 1 must fetch first."""
    store, chosen = make_store(kvstore)
    net = PROBLEM.network("float64")
    loss_of = PROBLEM.closure(net)
    trainer = gluon_svrg.SVRGTrainer(net.collect_params(), "sgd", kvstore=chosen)
    trainer.update_full_grads(loss_of, [np.arange(9)])
    for _ in range(3 if store.rank == 0 else 0):
        trainer.step(9, closure=lambda: loss_of(np.arange(9)))
    trainer.update_full_grads(loss_of, [np.arange(9)])
    snapshot = {p: trainer.snapshot[p][0].asnumpy() for p in parameters(net)}
    return store, {f"s{n}": snapshot[p] for n, p in enumerate(parameters(net))}


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
