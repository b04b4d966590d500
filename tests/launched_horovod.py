"""What Horovod's workers of the launcher's tests run: ``launched_horovod.py FOLDER WHAT``."""

import os
import signal
import sys
import time
from pathlib import Path

import horovod.mxnet as hvd
import mxnet as mx

import gluon_svrg
from gluon_svrg.stores import launcher

FOLDER, WHAT = Path(sys.argv[1]), sys.argv[2]


def main():
    hvd.init()
    launcher.tell("rank", str(hvd.rank()))
    print(f"rank {hvd.rank()} of {hvd.size()}, gluon_svrg {gluon_svrg.__version__}")
    ones = mx.nd.ones(3) * (hvd.rank() + 1)
    total = hvd.allreduce(ones, average=False, name="first").asnumpy()
    print(f"sum {total.tolist()}")
    for step in range(10 if WHAT == "nothing" else 1000):
        if step == 5 and hvd.rank() == 1 and WHAT != "nothing":
            (FOLDER / "reached").write_text("")
            if WHAT == "link":
                continue
            if WHAT == "raise":
                raise ValueError("mine")
            if WHAT == "early":
                return
            os.kill(os.getpid(), signal.SIGKILL if WHAT == "kill" else signal.SIGSTOP)
        hvd.allreduce(ones, name=f"step{step}").asnumpy()
        time.sleep(0.05)


if __name__ == "__main__":
    main()
