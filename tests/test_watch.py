"""The watch in every role, without a launcher that would notice more: MXNet's heartbeats alone."""

import os
import signal
import sys
import time

import pytest
from jobs import SCRIPT, assert_nothing_left, finish, start, wait_for

from gluon_svrg.commands.local import usable_port

pytestmark = [pytest.mark.xdist_group("clusters"), pytest.mark.launchers]
IDLE = [sys.executable, "-m", "gluon_svrg.commands.idle"]
TIMEOUT = 6


def start_cluster(folder, what, timeout):
    """Start a scheduler, a server and two workers, each on its own."""
    variables = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(usable_port(None)),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "1",
        "OMP_NUM_THREADS": "1",
        "GLUON_SVRG_TIMEOUT": str(timeout),
        **({"PS_HEARTBEAT_INTERVAL": "1"} if timeout else {}),
    }
    worker = [sys.executable, SCRIPT, folder, what]
    commands = {"scheduler": IDLE, "server 0": IDLE, "worker 0": worker, "worker 1": worker}
    return {
        role: start(
            command,
            folder,
            **variables,
            DMLC_ROLE=role.split()[0],
            GLUON_SVRG_TELL=str(folder / role),
        )
        for role, command in commands.items()
    }


@pytest.mark.parametrize("role", ["worker 1", "server 0", "scheduler"])
def test_a_process_falls_silent(role, tmp_path, marker):
    """The scheduler finds it, or all find the scheduler; each ends, and then the rest does."""
    processes = start_cluster(tmp_path, "step", TIMEOUT)
    wait_for(tmp_path / "reached", processes["worker 0"])
    if role != "scheduler":  # it is told within a second
        wait_for(tmp_path / f"{role}.rank", processes[role])
        rank = (tmp_path / f"{role}.rank").read_text()
    processes[role].send_signal(signal.SIGSTOP)
    since = time.monotonic()
    outputs = {name: finish(process) for name, process in processes.items() if name != role}
    assert time.monotonic() - since < 2 * TIMEOUT + 15  # the others find the scheduler's death
    processes[role].kill()
    finish(processes[role])
    assert all(processes[name].returncode == 1 for name in outputs)
    silent = "the scheduler" if role == "scheduler" else f"{role.split()[0]} {rank}"
    first = outputs["worker 0" if role == "scheduler" else "scheduler"]
    assert f"gluon-svrg: {silent} did not answer for {TIMEOUT} s; this process ends" in first
    assert_nothing_left(marker)


@pytest.mark.parametrize("timeout", [0, TIMEOUT])
def test_all_goes_well(timeout, tmp_path, marker):
    """A watch changes nothing at the end, where MXNet closes its kvstores."""
    processes = start_cluster(tmp_path, "nothing", timeout)
    outputs = {name: finish(process) for name, process in processes.items()}
    assert [process.returncode for process in processes.values()] == [0] * 4, outputs
    assert not any("did not answer" in output for output in outputs.values())
    assert_nothing_left(marker)


def test_programs_that_a_worker_starts_are_no_workers(tmp_path):
    """They may import gluon_svrg, end, and fail; that is the worker's own business."""
    place = tmp_path / "worker 0"
    script = (
        "import gluon_svrg, os, subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'import gluon_svrg'], check=True)\n"
        "if os.fork() == 0:\n    sys.exit()\n"
        "os.wait()\n"
        f"print(os.path.exists({str(place) + '.end'!r}))\n"
    )
    variables = {"DMLC_ROLE": "worker", "GLUON_SVRG_TELL": str(place)}
    process = start([sys.executable, "-c", script], tmp_path, **variables)
    output = finish(process)
    assert (process.returncode, output) == (0, "False\n")
    assert sorted(os.listdir(tmp_path)) == ["worker 0.end"]
