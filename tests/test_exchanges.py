"""What the processes of a job send, as benchmarks/README.md says: counted in a network of its own.

This file is also the worker: ``test_exchanges.py KVSTORE FILE``.
"""

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import mxnet as mx
import pytest
from mxnet import gluon

from gluon_svrg import SVRGTrainer

ALONE = ["unshare", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
ALONE += [] if os.geteuid() == 0 else ["--map-root-user"]
SIZE = 1000
n = 3  # workers


@pytest.mark.parametrize(
    ("kvstore", "step", "refresh"),
    [
        ("dist_sync", 2 * n, 2 * n),
        ("dist_async", 2 * n, n**2 + 2 * n),
        ("horovod", 2 * (n - 1), 2 * (n - 1)),
    ],
)
def test_what_all_processes_send(kvstore, step, refresh, tmp_path):
    if subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a network of its own needs Linux, and root or user namespaces")
    if kvstore == "horovod" and find_spec("horovod") is None:
        pytest.skip("Horovod is not installed: .ci/horovod builds it")
    python, found = Path(sys.executable), tmp_path / "found.json"
    launcher = [python, "-m", "gluon_svrg", "launch", "-n", n, "-s", 1, "--"]
    if kvstore == "horovod":
        horovodrun = python.with_name("horovodrun")
        launcher = [horovodrun, "--gloo", "--network-interface", "lo", "-np", n]
    command = [*ALONE, python, __file__, "alone", *launcher, python, __file__, kvstore, found]
    variables = {
        "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    # At the deadline unshare is killed, and all processes with it.
    subprocess.run(
        list(map(str, command)), env={**os.environ, **variables}, timeout=120, check=True
    )
    sent = json.loads(found.read_text())  # in multiples of the parameters, with TCP's headers
    assert step <= sent["step"] < step + 0.3
    assert refresh <= sent["refresh"] < refresh + 0.3


def alone(*command):
    """Bring up the loopback of a new network, and become the command."""
    socket.sethostname("localhost")  # Horovod's workers look each other up by the host's name
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh22x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
    os.execvp(command[0], command)


def work(kvstore, path):
    """Count what is sent in a step and in a refresh; rank 0 writes it."""
    if kvstore == "horovod":
        import horovod.mxnet as hvd

        hvd.init()
        store, rank = kvstore, hvd.rank()
    else:
        store = mx.kv.create(kvstore)
        rank = store.rank
    net = gluon.nn.Dense(SIZE, in_units=SIZE, use_bias=False)
    net.initialize()
    X = (mx.np if mx.util.is_np_array() else mx.nd).ones((2, SIZE))
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 1e-6}, kvstore=store)

    def wait():
        mx.nd.waitall()
        if kvstore == "horovod":
            hvd.allreduce(mx.nd.zeros(1), name="wait").asnumpy()
        else:
            store._barrier()

    def transferred():
        """Bytes that have gone over the loopback of this network."""
        wait()
        lines = Path("/proc/self/net/dev").read_text().splitlines()
        wait()  # nobody goes on before all have read
        return next(int(line.split()[1]) for line in lines if line.split()[0] == "lo:")

    def sent(function, times=3):
        before = transferred()
        for _ in range(times):
            function()
        return (transferred() - before) / (4 * SIZE**2) / times

    def step():
        trainer.step(2, closure=lambda: net(X).sum(axis=1))

    def refresh():
        trainer.update_full_grads(lambda: net(X).sum(axis=1), [()] * 2)

    refresh()
    step()  # the first of each makes keys
    found = {"step": sent(step), "refresh": sent(refresh)}
    if rank == 0:
        Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    alone(*sys.argv[2:]) if sys.argv[1] == "alone" else work(*sys.argv[1:])
