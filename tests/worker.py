"""What the workers of a test cluster run: ``worker.py TASK FOLDER SETTINGS``."""

import json
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import gluon
from problems import Dense, parameters, values

from gluon_svrg import SVRGTrainer

PROBLEM = Dense("classification", hidden=(5,), seed=17, samples=46)


def minibatches(rank, workers, uneven):
    """This worker's share of the data, and of each minibatch, as index arrays."""
    order = np.arange(len(PROBLEM.X))
    edges = np.linspace(0, 1, workers + 1) ** (1.5 if uneven else 1.0)

    def part(index):
        cuts = np.round(edges * len(index)).astype(int)
        return index[cuts[rank] : cuts[rank + 1]]

    everything = np.array_split(order, 4)
    return [part(index) for index in everything], [len(index) for index in everything]


def make(optimizer="sgd", devices=1, seed=None, kvstore="dist_sync", dtype="float64", **kwargs):
    where = [mx.cpu(i) for i in range(devices)] if devices > 1 else None
    net = PROBLEM.network(dtype, where, deferred=kwargs.pop("deferred", False))
    store = mx.kv.create(kvstore)
    if seed is not None:  # each worker starts somewhere else
        mx.random.seed(seed + store.rank)
        net.initialize(mx.init.Normal(0.3), force_reinit=True, ctx=where)
    settings = {"learning_rate": 0.1}
    if optimizer == "sgd":
        settings["momentum"] = 0.9
    settings.update(kwargs.pop("optimizer_params", {}))
    trainer = SVRGTrainer(net.collect_params(), optimizer, settings, kvstore=store, **kwargs)
    return net, PROBLEM.closure(net, dtype, where), trainer, store


def train(net, loss_of, trainer, shares, sizes, epochs=4, rates=(), store=False):
    losses = []
    for epoch in range(epochs):
        if epoch < len(rates):
            trainer.set_learning_rate(rates[epoch])
        if epoch % 2 == 0:
            losses.append(trainer.update_full_grads(loss_of, shares, store=store))
        for position, (index, size) in enumerate(zip(shares, sizes)):
            batch_index = position if store else None
            trainer.step(size, closure=lambda: loss_of(index), batch_index=batch_index)
    return losses


def trajectory(uneven=True, epochs=4, rates=(), stored=False, **settings):
    net, loss_of, trainer, store = make(**settings)
    shares, sizes = minibatches(store.rank, store.num_workers, uneven)
    losses = train(net, loss_of, trainer, shares, sizes, epochs, rates, stored)
    mean = [trainer.full_grads[p][0].asnumpy() for p in parameters(net)]
    return store, {
        "losses": np.array(losses),
        "evaluations": np.array(trainer.grad_evaluations),
        **{f"w{i}": w for i, w in enumerate(values(net, mx.cpu(0)))},
        **{f"mu{i}": m for i, m in enumerate(mean)},
        **{f"there{i}": trainer.snapshot[p][0].asnumpy() for i, p in enumerate(parameters(net))},
    }


def by_servers(by="name", epochs=4, **settings):
    """All settings reach the optimizer on the servers, and change there."""
    params = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01, "clip_gradient": 0.05}
    net = PROBLEM.network("float32")
    store = mx.kv.create("dist_sync")
    scheduler = mx.lr_scheduler.FactorScheduler(3, 0.8, base_lr=0.1)
    params["lr_scheduler"] = scheduler
    optimizer, settings = "sgd", params
    if by == "instance":
        optimizer, settings = mx.optimizer.SGD(**params), None
    trainer = SVRGTrainer(
        net.collect_params(), optimizer, settings, kvstore=store, update_on_kvstore=True
    )
    shares, sizes = minibatches(store.rank, store.num_workers, True)
    loss_of = PROBLEM.closure(net, "float32")
    for epoch in range(epochs):
        if epoch % 2 == 0:
            trainer.update_full_grads(loss_of, shares)
        if epoch == 2:  # the multipliers change in the middle, and the sizes always do
            net[0].weight.lr_mult = 0.5
            net[1].bias.wd_mult = 3.0
        for index, size in zip(shares, sizes):
            trainer.step(size, closure=lambda: loss_of(index))
    messages = []
    for method in (trainer.save_states, trainer.load_states, trainer.export_optimizer_states):
        try:
            method("nowhere/at/all")
        except RuntimeError as error:
            messages.append(str(error))
    found = {f"w{i}": w for i, w in enumerate(values(net))}
    return store, {"messages": np.array(messages), **found}


class Unknown(mx.optimizer.SGD):
    """Not importable on a server, where `__main__` is another."""


def not_loaded():
    net = PROBLEM.network("float32")
    store = mx.kv.create("dist_sync")
    trainer = SVRGTrainer(
        net.collect_params(), Unknown(learning_rate=0.1), kvstore=store, update_on_kvstore=True
    )
    loss_of = PROBLEM.closure(net, "float32")
    before, message = values(net), ""
    try:
        trainer.step(5, closure=lambda: loss_of(np.arange(5)))
    except RuntimeError as error:
        message = str(error)
    unchanged = all(map(np.array_equal, values(net), before))
    return store, {"message": np.array(message), "unchanged": np.array(unchanged)}


def asynchronous(svrg=True, epochs=12, rate=0.5):
    """Softmax regression with dist_async."""
    problem = Dense("classification", seed=18, samples=60)
    net = problem.network("float64")
    store = mx.kv.create("dist_async")
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": rate}, kvstore=store)
    loss_of = problem.closure(net)
    mine = np.array_split(np.arange(len(problem.X)), store.num_workers)[store.rank]
    rng = np.random.RandomState(store.rank)
    means = []
    for epoch in range(epochs):
        if svrg and epoch % 2 == 0:
            trainer.update_full_grads(loss_of, [mine])
            means += [trainer.full_grads[p][0].asnumpy() for p in parameters(net)]
            means += [trainer.snapshot[p][0].asnumpy() for p in parameters(net)]
        if epoch == epochs // 2:
            trainer.set_learning_rate(rate / 2)
        for _ in range(0, len(mine), 5):
            index = rng.permutation(mine)[:5]
            trainer.step(5, closure=lambda: loss_of(index))
    trainer._share_weights()
    return store, {
        **{f"w{i}": w for i, w in enumerate(values(net))},
        **{f"mu{i}": m for i, m in enumerate(means)},
    }


def sparse():
    """What `SVRGTrainer` refuses: `gluon.Trainer` with a sparse gradient."""
    net = gluon.nn.Embedding(5, 2, sparse_grad=True)
    net.initialize()
    store = mx.kv.create("dist_sync")
    trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=store)
    for _ in range(3):
        with mx.autograd.record():
            loss = net(mx.nd.array([0, 1, store.rank]))
        loss.backward()
        trainer.step(3)
    return store, {"weight": net.weight.data().asnumpy()}


def start_up(**settings):
    """Where `gluon.Trainer` races: weights that become sums of gradients."""
    net, loss_of, trainer, store = make(dtype="float32", **settings)
    shares, sizes = minibatches(store.rank, store.num_workers, False)
    trainer.step(sizes[0], closure=lambda: loss_of(shares[0]))  # no snapshot: a plain step
    return store, {f"w{i}": w for i, w in enumerate(values(net, mx.cpu(0)))}


def means(trainer):
    return [row[0].asnumpy() for row in (trainer.full_grads or {}).values()]


def failing(where="closure", failing_rank=1, first=False, **settings):
    """One worker fails in the full gradient; all raise, and go on afterwards."""
    net, loss_of, trainer, store = make(deferred=first, **settings)
    shares, sizes = minibatches(store.rank, store.num_workers, True)
    if not first:
        trainer.update_full_grads(loss_of, shares)
    before = means(trainer)

    def bad(index):
        if first or (len(index) and index[0] >= shares[1][0]):
            raise KeyError("mine")
        return loss_of(index)

    def bad_data():
        if not first:
            yield shares[0]
        raise KeyError("mine")

    is_bad = store.rank == failing_rank
    try:
        if where == "closure":
            trainer.update_full_grads(bad if is_bad else loss_of, shares)
        else:
            trainer.update_full_grads(loss_of, bad_data() if is_bad else shares)
    except (KeyError, RuntimeError) as error:
        message = f"{type(error).__name__}: {error}"
    unchanged = all(map(np.array_equal, before, means(trainer)))
    unchanged = unchanged and trainer.num_snapshots == (0 if first else 1)
    if first:
        trainer.update_full_grads(loss_of, shares)
    train(net, loss_of, trainer, shares, sizes, epochs=1)
    return store, {
        "message": np.array(message),
        "unchanged": np.array(unchanged),
        **{f"w{i}": w for i, w in enumerate(values(net, mx.cpu(0)))},
    }


def main():
    task, folder, settings = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    store, found = globals()[task](**settings)
    np.savez(folder / f"{store.rank}.npz", **found)


if __name__ == "__main__":
    main()
