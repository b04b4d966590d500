"""What the processes of a job send, as benchmarks/README.md says: counted in a network."""

import fcntl
import os
import socket
import struct
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from jobs import GLUON_SVRG, contained, found_by, run, words_of

n = 3  # workers
SENT = [("dist_sync", 2 * n, 2 * n), ("dist_async", 2 * n, n**2 + 2 * n)]
SENT += [("horovod", 2 * (n - 1), 2 * (n - 1))]


@pytest.mark.slow
@pytest.mark.parametrize("kvstore, step, refresh", SENT)
def test_what_all_processes_send(kvstore, step, refresh, tmp_path, marker):
    if kvstore == "horovod" and find_spec("horovod") is None:
        pytest.skip("needs Horovod: .ci/horovod builds it")
    python, launcher = Path(sys.executable), [*GLUON_SVRG, "launch", "-n", n, "-s", 1, "--"]
    if kvstore == "horovod":
        horovodrun = python.with_name("horovodrun")
        launcher = [horovodrun, "--gloo", "--network-interface", "lo", "-np", n]
    task = words_of(tmp_path, "exchanges", kvstore=kvstore)
    path = os.pathsep.join([str(python.parent), os.environ["PATH"]])
    alone = contained("--net", "--uts")
    status, output = run([*alone, python, __file__, *launcher, *task], PATH=path)
    assert status == 0, output
    sent = found_by(tmp_path, n)[0]  # in multiples of the parameters, with TCP's headers
    assert step <= sent["step"] < step + 0.3
    assert refresh <= sent["refresh"] < refresh + 0.3


if __name__ == "__main__":  # runs a command in such a network
    socket.sethostname("localhost")  # Horovod's workers look each other up by the host's name
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh22x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
    os.execvp(sys.argv[1], sys.argv[1:])
