"""What the workers of the launcher's tests run: ``launched.py FOLDER WHAT [KVSTORE]``."""

import os
import signal
import sys
import time
from pathlib import Path

import mxnet as mx
import numpy as np
from calls import EQUAL, UNEQUAL
from worker import make, minibatches, values

FOLDER, WHAT = Path(sys.argv[1]), sys.argv[2]
KVSTORE = (*sys.argv[3:], "dist_sync")[0]


def reached():
    (FOLDER / "reached").write_text("")


def train_and_save(net, loss_of, trainer, store):
    """Four epochs; each is saved, and begins where the last one that all have saved has ended."""
    shares, sizes = minibatches(store.rank, store.num_workers, True)
    done = [int(p.name.split("-")[2]) for p in FOLDER.glob(f"saved-{store.rank}-*-weights")]
    saved = int(np.min(gather(store, max(done, default=0))))
    if saved:
        net.load_parameters(str(FOLDER / f"saved-{store.rank}-{saved}-weights"))
        trainer.load_states(FOLDER / f"saved-{store.rank}-{saved}-states")
    deaths = FOLDER / "deaths"
    for epoch in range(saved, 4):
        if epoch % 2 == 0:
            trainer.update_full_grads(loss_of, shares)
        for number, (index, size) in enumerate(zip(shares, sizes)):
            if WHAT == "train and die" and store.rank == 1 and number == 2 and epoch in (1, 2):
                died = deaths.read_text() if deaths.exists() else ""
                if str(epoch) not in died:
                    deaths.write_text(died + str(epoch))
                    os.kill(os.getpid(), signal.SIGKILL)
            trainer.step(size, closure=lambda: loss_of(index))
            if WHAT == "train slowly":
                mx.nd.waitall()
                time.sleep(0.2)
                reached()
        trainer.save_states(FOLDER / f"saved-{store.rank}-{epoch + 1}-states")
        net.save_parameters(str(FOLDER / f"saved-{store.rank}-{epoch + 1}-weights"))
    np.savez(FOLDER / f"{store.rank}.npz", *values(net))


def call(loss_of, trainer, store, calls):
    """Take the steps and refreshes of this rank."""
    shares, sizes = minibatches(store.rank, store.num_workers, True)
    for number, kind in enumerate(calls[store.rank]):
        if kind == "r":
            trainer.update_full_grads(loss_of, shares)
        elif kind == "s":
            loss = trainer.step(sizes[number % 4], closure=lambda: loss_of(shares[number % 4]))
            if "read" in WHAT:
                loss.asnumpy()
        else:
            time.sleep(15)
    reached()


def gather(store, number):
    """Every worker's number."""
    if KVSTORE == "horovod":
        import horovod.mxnet as hvd

        return hvd.allgather(mx.nd.array([number]), name="gather").asnumpy()
    mine = mx.nd.zeros(store.num_workers)
    mine[store.rank] = number
    store.init(1000, mx.nd.zeros_like(mine))
    store.pushpull(1000, mine, out=mine)
    return mine.asnumpy()


def main():
    if WHAT == "start":
        time.sleep(60)
    net, loss_of, trainer, store = make(dtype="float32", kvstore=KVSTORE)
    print(f"rank {store.rank} of {store.num_workers}")
    case = WHAT.replace(", read", "")
    if case in UNEQUAL or case in EQUAL:
        call(loss_of, trainer, store, {**UNEQUAL, **EQUAL}[case])
        return
    if WHAT.startswith("train"):
        train_and_save(net, loss_of, trainer, store)
        return
    shares, sizes = minibatches(store.rank, store.num_workers, True)

    def slow():
        for number, share in enumerate(shares * 100):
            if WHAT == "full pass" and number == 3 and store.rank == 0:
                reached()
            time.sleep(0.05 if WHAT == "full pass" and number > 2 else 0)
            if WHAT != "full pass" and number == 4:
                return
            yield share

    trainer.update_full_grads(loss_of, slow())
    for step in range(400):
        if step == 3 and WHAT == "nothing":
            return
        if step == 3 and store.rank == 0:
            if WHAT != "exit":
                reached()
            if WHAT == "early":
                return
            if WHAT == "early, at once":
                os._exit(0)
            if WHAT == "code 7":
                os._exit(7)
        if step == 5 and WHAT == "exit":
            break
        index, size = shares[step % 4], sizes[step % 4]

        def closure():
            if step == 3 and WHAT == "raise" and store.rank == 0:
                raise ValueError("mine")
            return loss_of(index)

        trainer.step(size, closure=closure).asnumpy()
        mx.nd.waitall()
        time.sleep(0.05)
    if WHAT == "exit" and store.rank == 0:  # the other one waits for it
        reached()
        time.sleep(60)


if __name__ == "__main__":
    main()
