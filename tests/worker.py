"""What the workers of a test cluster run: ``worker.py TASK FOLDER SETTINGS``.

Or many, one after the other: ``worker.py many FOLDER {NAME: [TASK, SETTINGS]}``. A task may be
``worker_methods.tables``.
"""

import importlib
import json
import os
import signal
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import gluon
from problems import Dense, array, parameters, values

from gluon_svrg import SVRGTrainer

IS_2 = mx.util.is_np_array()
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
    store, kvstore = make_store(kvstore)
    if seed is not None:  # each worker starts somewhere else
        mx.random.seed(seed + store.rank)
        net.initialize(mx.init.Normal(0.3), force_reinit=True, ctx=where)
    settings = {"learning_rate": 0.1}
    if optimizer == "sgd":
        settings["momentum"] = 0.9
    settings.update(kwargs.pop("optimizer_params", {}))
    trainer = SVRGTrainer(net.collect_params(), optimizer, settings, kvstore=kvstore, **kwargs)
    return net, PROBLEM.closure(net, dtype, where), trainer, store


def train(net, loss_of, trainer, shares, sizes, epochs=4, rates=(), store=False):
    losses = []
    for epoch in range(epochs):
        if epoch < len(rates):
            trainer.set_learning_rate(rates[epoch])
        if epoch % 2 == 0:
            losses.append(trainer.update_full_grads(loss_of, shares, store_grads=store))
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


def sparse_gradient():
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
    there = {f"there{i}": w for i, w in enumerate(values(net))} if store.rank == 0 else {}
    shares, sizes = minibatches(store.rank, store.num_workers, False)
    trainer.step(sizes[0], closure=lambda: loss_of(shares[0]))  # no snapshot: a plain step
    return store, {**{f"w{i}": w for i, w in enumerate(values(net, mx.cpu(0)))}, **there}


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


class Exchange(mx.kvstore.KVStoreBase):
    """A kvstore of several workers that can only broadcast and add up."""

    def __init__(self):
        self.inside = mx.kv.create("dist_sync")
        self.shapes = {}

    type = "exchange"
    rank = property(lambda self: self.inside.rank)
    num_workers = property(lambda self: self.inside.num_workers)

    @staticmethod
    def is_capable(capability):
        return False

    def broadcast(self, key, value, out, priority=0):
        value = value[0] if isinstance(value, list) else value
        self.shapes[key] = value.shape
        self.inside.broadcast(key, value, out)

    def pushpull(self, key, value, out=None, priority=0):
        assert self.shapes[key] == value[0].shape
        total = value[0].copy()
        for other in value[1:]:
            total += other.copyto(total.context)
        self.inside.pushpull(key, total, out=total)
        for target in value if out is None else out:
            total.copyto(target)


class HorovodRanks:
    """What tasks ask a kvstore, where the trainer makes its own from the name 'horovod'."""

    def __init__(self):
        import horovod.mxnet as hvd

        hvd.init()
        self.rank, self.num_workers = hvd.rank(), hvd.size()


def make_store(kvstore):
    """What tells the rank, and what the trainer gets."""
    if kvstore == "horovod":
        return HorovodRanks(), kvstore
    if kvstore == "MXNet's own horovod":
        return HorovodRanks(), mx.kv.create("horovod")
    store = Exchange() if kvstore == "exchange" else mx.kv.create(kvstore)
    return store, store


class Tied:
    """Three layers that are the same one, and a layer after them."""

    def __init__(self, devices):
        rng = np.random.RandomState(3)
        self.X = rng.randn(24, 4)
        self.y = rng.randn(24, 4)
        self.devices = devices
        self.net = gluon.nn.HybridSequential()
        first = gluon.nn.Dense(4, in_units=4, activation="tanh", dtype="float64")
        last = gluon.nn.Dense(4, in_units=4, dtype="float64")
        self.net.add(first, *(same_as(first) for _ in range(2)), last)
        for layer in (first, last):
            layer.initialize(ctx=devices)
        self.parameters = [first.weight, first.bias, last.weight, last.bias]
        for parameter in self.parameters:
            parameter.set_data(array(rng.randn(*parameter.shape) * 0.4))
        # a list, as users write it, in which MXNet 2.0 finds the shared ones three times
        self.listed = list(self.net.collect_params().values())

    def loss_of(self, index):
        loss = gluon.loss.L2Loss()
        parts = np.array_split(index, len(self.devices))
        return [
            loss(self.net(array(self.X[part], device=d)), array(self.y[part], device=d))
            for part, d in zip(parts, self.devices)
        ]

    def train(self, trainer, mine, size, epochs=4):
        for epoch in range(epochs):
            if epoch % 2 == 0:
                trainer.update_full_grads(self.loss_of, np.array_split(mine, 2))
            for index in np.array_split(mine, 3):
                trainer.step(size, closure=lambda: self.loss_of(index))
        mx.nd.waitall()
        return {f"w{i}": p.list_data()[0].asnumpy() for i, p in enumerate(self.parameters)}


def same_as(layer):
    """A layer with the parameters of another, as each MXNet says it."""
    settings = {"in_units": 4, "activation": "tanh", "dtype": "float64"}
    if hasattr(layer, "share_parameters"):
        return gluon.nn.Dense(4, **settings).share_parameters(layer.collect_params())
    return gluon.nn.Dense(4, **settings, params=layer.params)


def tied(devices=1, kvstore="dist_sync", rate=0.1, **settings):
    """Shared parameters, whose keys have gaps in MXNet 2.0."""
    problem = Tied([mx.cpu(i) for i in range(devices)])
    store, kvstore = make_store(kvstore)
    params = {"learning_rate": rate, "momentum": 0.9}
    trainer = SVRGTrainer(problem.listed, "sgd", params, kvstore=kvstore, **settings)
    problem.parameters[-1].lr_mult = 0.5  # after the gap
    mine = np.arange(len(problem.X))[store.rank :: store.num_workers]
    return store, problem.train(trainer, mine, 8)


def convolutions(
    deferred=False, predict_first=False, kvstore="dist_sync", evaluate=False, **settings
):
    """Convolutions, whose weights a prediction may reorder, and BatchNorm."""
    store, kvstore = make_store(kvstore)
    mx.random.seed(1)
    rng = np.random.RandomState(4)
    net = gluon.nn.HybridSequential()
    known = (0, 0, 0) if deferred else (4, 16, 8)
    net.add(gluon.nn.Conv2D(16, 3, in_channels=known[0]))
    net.add(gluon.nn.BatchNorm(in_channels=known[1]), gluon.nn.Activation("relu"))
    net.add(gluon.nn.Conv2D(8, 3, in_channels=known[1]), gluon.nn.GlobalAvgPool2D())
    net.add(gluon.nn.Flatten(), gluon.nn.Dense(3, in_units=known[2]))
    net.initialize(mx.init.Xavier())
    X, y = rng.randn(16, 4, 8, 8), rng.randint(0, 3, 16)
    mine = np.arange(16)[store.rank :: store.num_workers]
    if predict_first:
        net(array(X[mine], "float32")).wait_to_read()
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = SVRGTrainer(
        net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=kvstore, **settings
    )

    def loss_of(index):
        return loss(net(array(X[index], "float32")), array(y[index], "float32"))

    batches = np.array_split(mine, 2)
    for epoch in range(4):
        if epoch % 2 == 0:
            trainer.update_full_grads(loss_of, batches)
        for index in batches:
            trainer.step(4 * store.num_workers, closure=lambda: loss_of(index))
        if evaluate:  # a prediction in the middle
            net(array(X[mine], "float32")).wait_to_read()
    trainer._share_weights()
    layers = (net[0].weight, net[3].weight, net[6].weight)
    trained = {f"w{i}": p.list_data()[0].asnumpy() for i, p in enumerate(layers)}
    return store, {**trained, "bias": net[1].beta.list_data()[0].asnumpy()}


def sparse_weight(kind="sparse", kvstore="dist_sync", cls="SVRGTrainer", **settings):
    """A row_sparse weight, or the same dense."""
    words, rng = 20, np.random.RandomState(2)
    store = mx.kv.create(kvstore)
    net = gluon.nn.Sequential()
    is_sparse = kind == "sparse"
    net.add(
        gluon.contrib.nn.SparseEmbedding(words, 4) if is_sparse else gluon.nn.Embedding(words, 4)
    )
    net.add(gluon.nn.Dense(3, in_units=12))
    net.initialize(mx.init.Zero())
    for p in (net[0].weight, net[1].weight):
        p.set_data(mx.nd.array(rng.randn(*p.shape)).tostype(p._stype))
    X, y = rng.randint(0, 15, (30, 3)), rng.randint(0, 3, 30)
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    trainer_class = SVRGTrainer if cls == "SVRGTrainer" else gluon.Trainer
    params = {"learning_rate": 0.2, "momentum": 0.9}
    trainer = trainer_class(net.collect_params(), "sgd", params, kvstore=store, **settings)

    def loss_of(index):
        return loss(net(mx.nd.array(X[index])), mx.nd.array(y[index]))

    mine = np.arange(30)[store.rank :: store.num_workers]
    for epoch in range(4):
        if cls == "SVRGTrainer" and epoch % 2 == 0:
            trainer.update_full_grads(loss_of, np.array_split(mine, 2))
        for index in np.array_split(mine, 3):
            if cls == "SVRGTrainer":
                trainer.step(10, closure=lambda: loss_of(index))
                continue
            with mx.autograd.record():
                losses = loss_of(index)
            losses.backward()
            trainer.step(10)
    if is_sparse:
        rows = mx.nd.arange(words, dtype="int64")
        embedding = net[0].weight.row_sparse_data(rows).tostype("default").asnumpy()
    else:
        embedding = net[0].weight.data().asnumpy()
    return store, {
        "embedding": embedding,
        "weight": net[1].weight.data().asnumpy(),
        "bias": net[1].bias.data().asnumpy(),
    }


def scaled(overflow=-1, **settings):
    """AMP's loss scaler; on one rank, the gradients of one step overflow."""
    amp = importlib.import_module("mxnet.amp" if IS_2 else "mxnet.contrib.amp")
    scaler = importlib.import_module(f"{amp.__name__}.loss_scaler").LossScaler()
    net, loss_of, trainer, store = make(dtype="float32", **settings)
    trainer._amp_loss_scaler, trainer._amp_original_scale = scaler, trainer._scale
    shares, sizes = minibatches(store.rank, store.num_workers, True)
    step = 0
    for epoch in range(4):
        if epoch % 2 == 0:
            trainer.update_full_grads(loss_of, shares)
        for index, size in zip(shares, sizes):
            bad = step == overflow and store.rank == 1
            trainer.step(size, closure=lambda: loss_of(index) * (1e38 if bad else 1))
            step += 1
    return store, {
        "scale": np.array(scaler.loss_scale),
        **{f"w{i}": w for i, w in enumerate(values(net))},
    }


def two_trainers(**settings):
    """Two trainers with keys of their own, and a full gradient of each between the other's."""
    first, second = make(**settings), make(**settings)
    store = first[3]
    shares, sizes = minibatches(store.rank, store.num_workers, True)
    for _, loss_of, trainer, _ in (first, second):
        trainer.update_full_grads(loss_of, shares)
    for index, size in zip(shares, sizes):
        for _, loss_of, trainer, _ in (first, second):
            trainer.step(size, closure=lambda: loss_of(index))
    found = [values(net) for net, *_ in (first, second)]
    return store, {f"{n}{i}": w for n, some in zip("wv", found) for i, w in enumerate(some)}


def dying(how="exit", **settings):
    """One rank ends in the middle of training."""
    _, loss_of, trainer, store = make(**settings)
    shares, sizes = minibatches(store.rank, store.num_workers, True)
    for epoch in range(1000):
        if epoch % 2 == 0:
            trainer.update_full_grads(loss_of, shares)
        if epoch == 3 and store.rank == 1:
            if how == "raise":
                raise KeyError("mine")
            os.kill(os.getpid(), signal.SIGKILL)
        for index, size in zip(shares, sizes):
            trainer.step(size, closure=lambda: loss_of(index))
            mx.nd.waitall()
    return store, {}


def main(available):
    task, folder, settings = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    tasks = settings if task == "many" else {"": (task, settings)}
    for name, (each, its_settings) in tasks.items():
        with mx.name.NameManager():  # as in a process of its own
            module, _, function = each.rpartition(".")  # of a file beside this one, or of this one
            where = vars(importlib.import_module(module)) if module else available
            store, found = where[function](**its_settings)
        (folder / name).mkdir(exist_ok=True)
        np.savez(folder / name / f"{store.rank}.npz", **found)


if __name__ == "__main__":
    main(globals())
