"""What the workers of `test_engines` run: ``launched.py FOLDER WHAT [KVSTORE]``."""

import sys
import time
from pathlib import Path

from worker import make, minibatches


def main(folder, what, kvstore="dist_sync"):
    """Train until something ends it; say when that may come."""
    _, loss_of, trainer, store = make(kvstore=kvstore)
    shares, sizes = minibatches(store.rank, store.num_workers, True)
    trainer.update_full_grads(loss_of, shares)
    for step in range(100 if what == "short" else 10_000):
        if step == 5:
            (folder / f"reached-{store.rank}").write_text("")
            if what == "raise" and store.rank == 0:
                raise ValueError("mine")
        if what == "uneven" and step == 5 + store.rank:
            trainer.update_full_grads(loss_of, shares)
        closure = lambda step=step: loss_of(shares[step % 4])  # noqa: E731
        trainer.step(sizes[step % 4], closure=closure).asnumpy()
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
