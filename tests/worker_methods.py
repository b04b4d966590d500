"""What the workers of a test cluster run, of other methods than SVRG."""

import numpy as np
import plays
import worker
from problems import parameters, values

import gluon_svrg
from gluon_svrg.prox import L1


def tables(cls, refresh, kvstore="dist_sync"):
    """A few visits of a table, whose rows each worker has for itself."""
    net = worker.PROBLEM.network("float64")
    store, kvstore = worker.make_store(kvstore)
    settings = {"learning_rate": 0.1, "momentum": 0.5}
    trainer = getattr(gluon_svrg, cls)(net.collect_params(), "sgd", settings, kvstore=kvstore)
    loss_of = worker.PROBLEM.closure(net)
    shares, sizes = worker.minibatches(store.rank, store.num_workers, uneven=True)
    if refresh:
        trainer.update_full_grads(loss_of, shares)
    for number in (2, 0, 2, 3, 1, 0, 3):
        index = shares[number]
        trainer.step(sizes[number], closure=lambda: loss_of(index), batch_index=number)
    means = [trainer.full_grads[p][0].asnumpy() for p in parameters(net)]
    return store, {
        **{f"w{n}": w for n, w in enumerate(values(net))},
        **{f"m{n}": m for n, m in enumerate(means)},
        **{f"share{n}": share for n, share in enumerate(shares)},
    }


def proximal(strength, kvstore="dist_sync"):
    """Two epochs, a refresh before each, with an L1 penalty."""
    net = worker.PROBLEM.network("float64")
    store, kvstore = worker.make_store(kvstore)
    settings, prox = {"learning_rate": 0.1, "momentum": 0.5}, {".*weight": L1(strength)}
    make = gluon_svrg.SVRGTrainer
    trainer = make(net.collect_params(), "sgd", settings, kvstore=kvstore, prox=prox)
    loss_of = worker.PROBLEM.closure(net)
    shares, sizes = worker.minibatches(store.rank, store.num_workers, uneven=True)
    for _ in range(2):
        trainer.update_full_grads(loss_of, shares)
        for index, size in zip(shares, sizes):
            trainer.step(size, closure=lambda: loss_of(index))
    return store, {
        **{f"w{n}": w for n, w in enumerate(values(net))},
        **{f"share{n}": share for n, share in enumerate(shares)},
    }


def method(name, how, kvstore="dist_sync"):
    """A method trains in one of the ways; its twin beside it has the data of all workers."""
    store, kvstore = worker.make_store(kvstore)
    play = plays.Play(plays.WITH_STORED[name], worker.PROBLEM, how, kvstore=kvstore)
    count = store.num_workers
    play.shares = [worker.minibatches(rank, count, uneven=True)[0] for rank in range(count)]
    play.rank = store.rank
    found = np.array(list(play.train([(1, 3, 1), (0, 2, 3, 0), (2, 1)])))
    return store, {"distances": found, **{f"w{n}": w for n, w in enumerate(values(play.net))}}


if __name__ == "__main__":
    worker.main(globals())
