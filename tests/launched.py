"""What the workers of `test_engines` run: ``launched.py FOLDER WHAT [KVSTORE]``."""

import sys
import time
from pathlib import Path

from plays import WITH_STORED, Play
from worker import PROBLEM, make_kvstore, minibatches


def main(folder, what, kvstore="dist_sync"):
    """Train until something ends it; say when that may come."""
    who, chosen = make_kvstore(kvstore)
    play = Play(WITH_STORED["SVRG"], PROBLEM, kvstore=chosen)
    play.shares = [minibatches(who.rank, who.num_workers)[0]]  # its twin has no part in this
    play.refresh()
    for step in range(100 if what == "short" else 10_000):
        if step == 5:
            (folder / f"reached-{who.rank}").write_text("")
            if what == "raise" and who.rank == 0:
                raise ValueError("mine")
            if what == "early" and who.rank == 1:
                sys.exit()
        if what == "uneven" and step == 5 + who.rank:
            play.refresh()
        play.update(step % 4)
        play.distance()
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
