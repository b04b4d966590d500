"""Jobs that tests start, disturb, and look for afterwards."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import gluon_svrg

PACKAGE = Path(gluon_svrg.__file__).parents[1]  # the code under test, installed or not
DEADLINE = int(os.environ.get("GLUON_SVRG_TEST_DEADLINE", 180))  # seconds for a job
GLUON_SVRG = [sys.executable, "-m", "gluon_svrg"]


def start(command, folder=None, **variables):
    """Start a command in a process group of its own; its output goes to a pipe."""
    common = {
        "PYTHONPATH": os.pathsep.join(map(str, [PACKAGE, Path(__file__).parent])),
        "PYTHONWARNINGS": "ignore",  # MXNet's own, at import
        "MXNET_STORAGE_FALLBACK_LOG_VERBOSE": "0",
    }
    return subprocess.Popen(
        [*map(str, command)],
        cwd=folder,
        env={**os.environ, **common, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process, deadline=DEADLINE):
    """Wait for a command; return its output."""
    try:
        return process.communicate(timeout=deadline)[0]
    except subprocess.TimeoutExpired:
        raise AssertionError(f"not done within {deadline} s:\n{end(process)}") from None
    finally:
        end(process)


def run(command, folder=None, deadline=DEADLINE, **variables):
    """Run a command until a deadline; its exit status and its output."""
    process = start(command, folder, **variables)
    output = finish(process, deadline)
    return process.returncode, output


def end(process):
    """Kill a command, and all processes of its job, unless it has ended; return its output."""
    if process.poll() is not None:
        return ""
    os.killpg(process.pid, signal.SIGKILL)
    for left in processes_of(os.environ.get("MARKER", "none")):
        if left != os.getpid():
            with suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
    return process.communicate(timeout=30)[0]


def wait_for(path, process, deadline=DEADLINE):
    """Wait for a file that the job writes."""
    end = time.monotonic() + deadline
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "the job does not get there"
        time.sleep(0.02)


def variables_of(process):
    try:
        items = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(item.split("=", 1) for item in items if "=" in item)


def processes_of(marker):
    """Processes, by id, that have a marker in their variables, on all machines of a test."""
    ids = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
    return [process for process in ids if variables_of(process).get("MARKER") == marker]


def assert_nothing_left(marker, seconds=5):
    """List processes; those of the job must be gone."""
    deadline = time.monotonic() + seconds
    while processes_of(marker) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = processes_of(marker)
    assert left == [], [Path(f"/proc/{p}/cmdline").read_bytes() for p in left]
