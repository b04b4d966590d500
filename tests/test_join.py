"""`gluon-svrg join` under mpirun on this machine, by hand, and as an Indexed Job starts it."""

import os
import re
import shutil
import signal
import socket
import sys
import time
from importlib.util import find_spec

import numpy as np
import pytest
from jobs import (
    GLUON_SVRG,
    SCRIPT,
    TIMEOUT,
    WITHIN,
    assert_nothing_left,
    event,
    find,
    find_role,
    finish,
    start,
    wait_for,
)

pytestmark = [pytest.mark.xdist_group("clusters"), pytest.mark.launchers]
MPIRUN = ["mpirun", "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI's mpirun")
JOBS = {"workers": (2, []), "one role each": (5, ["-n", 2, "-s", 2])}


def mpirun(folder, what, job="workers", *options):
    size, more = JOBS[job]
    words = [*MPIRUN, "-np", size, *GLUON_SVRG, "join", *more, *options]
    return start([*words, "--", sys.executable, SCRIPT, folder, what], folder)


def by_hand(rank, folder, what, *options, size=2, **variables):
    words = [*GLUON_SVRG, "join", *options, "--", sys.executable, SCRIPT, folder, what]
    given = {"JOB_COMPLETION_INDEX": str(rank), **variables}
    return start([*words[:4], "--size", size, *words[4:]], folder, **given)


def files_left(folder):
    return sorted(path.name for path in folder.glob(".gluon-svrg-*"))


@needs_mpirun
@pytest.mark.parametrize("job", JOBS)
def test_the_same_weights_as_launch(job, tmp_path, marker):
    folders = [tmp_path / name for name in ("launch", "join")]
    for folder in folders:
        folder.mkdir()
    one = start([*GLUON_SVRG, "launch", "-n", 2, "--", sys.executable, SCRIPT, folders[0], "train"])
    output = finish(one)
    assert one.returncode == 0, output
    two = mpirun(folders[1], "train", job)
    output = finish(two)
    assert two.returncode == 0, output
    for rank in range(2):
        with np.load(folders[0] / f"{rank}.npz") as a, np.load(folders[1] / f"{rank}.npz") as b:
            for name in a.files:
                np.testing.assert_array_equal(a[name], b[name])
    assert files_left(folders[1]) == []
    assert_nothing_left(marker)


@needs_mpirun
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize(
    "what, message",
    [
        ("raise", r"worker \d \(rank 0\) exited with code 1"),
        ("early", r"worker \d \(rank 0\) exited early(, with code 0)?, while worker \d"),
    ],
)
def test_workers_that_end_badly(what, message, job, tmp_path, marker, stopwatch):
    process = mpirun(tmp_path, what, job)
    wait_for(tmp_path / "reached", process)
    seconds = stopwatch("mpirun", event(what))
    output = finish(process)
    assert seconds() < WITHIN
    assert process.returncode != 0
    assert re.search(rf"^gluon-svrg join: {message}.*; all others are ended", output, re.M), output
    assert_nothing_left(marker)


def test_the_exit_status_is_passed_on(tmp_path, marker):
    processes = [by_hand(rank, tmp_path, "code 7") for rank in range(2)]
    outputs = [finish(process) for process in processes]
    assert [process.returncode for process in processes] == [7, 7], outputs
    assert_nothing_left(marker)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("rank", [0, 1])
def test_signals_are_passed_on(rank, number, tmp_path, marker):
    processes = [by_hand(rank, tmp_path, "step") for rank in range(2)]
    wait_for(tmp_path / "reached", processes[0])
    processes[rank].send_signal(number)
    since = time.monotonic()
    outputs = [finish(process) for process in processes]
    assert time.monotonic() - since < WITHIN
    assert processes[rank].returncode == 128 + number, outputs
    assert processes[1 - rank].returncode != 0
    who = "rank 1" if rank else "the launcher"
    line = f"gluon-svrg join: {who} was ended by {number.name}; all others are ended"
    assert outputs[0].splitlines()[-1] == line, outputs  # rank 0 speaks for the job
    assert_nothing_left(marker)


@needs_mpirun
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("role", ["worker 0", "worker 1", "server 0", "scheduler"])
def test_killed_or_stopped(role, number, tmp_path, marker, stopwatch):
    process = mpirun(tmp_path, "step", "workers", "--timeout", TIMEOUT)
    wait_for(tmp_path / "reached", process)
    os.kill(find_role(marker, role), number)
    seconds = stopwatch("mpirun", event(number, role))
    output = finish(process)
    assert seconds() < WITHIN + (TIMEOUT if number == signal.SIGSTOP else 0)
    assert process.returncode != 0
    how = (
        "was killed by SIGKILL"
        if number == signal.SIGKILL
        else f"did not answer for {TIMEOUT} s(: a signal.*)?"
    )
    line = rf"^gluon-svrg join: (the )?{role}( \(rank \d\))? {how}; all others are ended"
    assert re.search(line, output, re.M), output
    assert_nothing_left(marker)


@needs_mpirun
@pytest.mark.parametrize("rank", [0, 1])
def test_a_supervisor_is_killed(rank, tmp_path, marker, stopwatch):
    """Its own processes end with it, and the others find that it is gone."""
    process = mpirun(tmp_path, "step")
    wait_for(tmp_path / "reached", process)
    mine = find(
        marker,
        lambda v, words: v.get("OMPI_COMM_WORLD_RANK") == str(rank) and words[3:4] == ["join"],
        f"rank {rank}",
    )
    os.kill(mine, signal.SIGKILL)
    seconds = stopwatch("mpirun", "a supervisor is killed")
    output = finish(process)
    assert seconds() < WITHIN
    assert process.returncode != 0, output
    assert files_left(tmp_path) == []
    assert_nothing_left(marker)


@needs_mpirun
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_mpirun_is_ended(number, tmp_path, marker, stopwatch):
    process = mpirun(tmp_path, "step")
    wait_for(tmp_path / "reached", process)
    process.send_signal(number)
    seconds = stopwatch("mpirun", f"its launcher gets {number.name}")
    finish(process)
    assert process.returncode != 0
    assert_nothing_left(marker, seconds=WITHIN)
    seconds()


@needs_mpirun
def test_restart(tmp_path, marker):
    """Processes that are left start again, in the same job, from what was saved."""
    process = mpirun(tmp_path, "train and die", "workers", "--restart", 2)
    output = finish(process)
    assert process.returncode == 0, output
    again = re.findall(r"was killed by SIGKILL.*; starting again \((\d) of 2\)", output)
    assert again == ["1", "2"]
    assert (tmp_path / "1.npz").exists()
    assert_nothing_left(marker)


def test_an_indexed_job(tmp_path, marker):
    """No shared folder and no size: rank 0 listens where --scheduler says."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = ["--scheduler", f"localhost:{port}"]
    processes = [by_hand(rank, tmp_path, "nothing", *address) for rank in (1, 0)]
    outputs = [finish(process) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert re.search(r"^\[worker 1\] rank \d of 2$", outputs[0], re.M)
    assert re.search(r"^\[worker 0\] rank \d of 2$", outputs[1], re.M)
    assert files_left(tmp_path) == []
    assert_nothing_left(marker)


def test_rank_0_is_killed(tmp_path, marker):
    """Without a launcher that would end the others: they end themselves, and say why."""
    processes = [by_hand(rank, tmp_path, "step") for rank in range(2)]
    wait_for(tmp_path / "reached", processes[0])
    processes[0].kill()
    died = time.monotonic()
    output = finish(processes[1])
    assert time.monotonic() - died < WITHIN
    assert processes[1].returncode == 1
    finish(processes[0])
    assert output.splitlines()[-1] == (
        "gluon-svrg join: rank 0 is out of reach: the connection has ended; "
        "all processes of rank 1 were ended"
    )
    assert_nothing_left(marker)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_supervisor_is_stopped(stopped, tmp_path, marker):
    processes = [by_hand(rank, tmp_path, "step", "--timeout", TIMEOUT) for rank in range(2)]
    wait_for(tmp_path / "reached", processes[0])
    processes[stopped].send_signal(signal.SIGSTOP)
    at = time.monotonic()
    output = finish(processes[1 - stopped])
    assert time.monotonic() - at < TIMEOUT + WITHIN
    assert processes[1 - stopped].returncode == 1
    assert re.search(rf"rank {stopped} did not answer for {TIMEOUT} s; all", output), output
    processes[stopped].send_signal(signal.SIGCONT)
    finish(processes[stopped])
    assert processes[stopped].returncode == 1
    assert_nothing_left(marker)


def test_the_meeting_is_over_with_rank_0(tmp_path, marker):
    """Its file goes when it dies, too."""
    process = by_hand(0, tmp_path, "step")
    wait_for(tmp_path / ".gluon-svrg-kubernetes", process)
    assert (tmp_path / ".gluon-svrg-kubernetes").stat().st_mode & 0o777 == 0o600
    process.kill()
    finish(process)
    deadline = time.monotonic() + 5
    while files_left(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert files_left(tmp_path) == []
    assert_nothing_left(marker)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"addresses": ["127.0.0.1"], "port": 9, "token": "x"}',
        b'{"addresses": 3}',
    ],
)
def test_a_file_of_an_old_job(content, tmp_path, marker):
    path = tmp_path / ".gluon-svrg-kubernetes"
    path.write_bytes(content)
    late = by_hand(1, tmp_path, "nothing")
    time.sleep(1)
    first = by_hand(0, tmp_path, "nothing")
    outputs = [finish(process) for process in (first, late)]
    assert (first.returncode, late.returncode) == (0, 0), outputs
    assert_nothing_left(marker)


def test_two_jobs_in_one_folder(tmp_path, marker):
    first = by_hand(0, tmp_path, "nothing")
    wait_for(tmp_path / ".gluon-svrg-kubernetes", first)
    second = by_hand(0, tmp_path, "nothing")
    output = finish(second)
    assert second.returncode == 2
    assert "another job waits in" in output
    assert (tmp_path / ".gluon-svrg-kubernetes").exists()
    first.terminate()
    output = finish(first)
    assert "ended by SIGTERM before all had joined" in output.splitlines()[-1]
    assert_nothing_left(marker)


def test_some_do_not_come(tmp_path, marker):
    processes = [by_hand(rank, tmp_path, "step", "--wait", 5, size=4) for rank in (0, 2)]
    outputs = [finish(process) for process in processes]
    assert "ranks 1, 3 of 4 did not join within 5 s" in outputs[0]
    assert processes[0].returncode == 2
    assert processes[1].returncode != 0
    alone = by_hand(1, tmp_path, "step", "--wait", 1)
    assert "rank 0 did not answer within 1 s" in finish(alone)
    assert alone.returncode == 2
    assert_nothing_left(marker)


def test_sizes_that_differ(tmp_path, marker):
    first = by_hand(0, tmp_path, "step", "--wait", 20, size=2)
    second = by_hand(1, tmp_path, "step", size=3)
    assert "rank 0 expects 2 processes, and rank 1 3" in finish(second)
    assert second.returncode == 2
    first.terminate()
    finish(first)
    assert_nothing_left(marker)


@pytest.mark.parametrize(
    "options, variables, message",
    [
        ([], {}, "no launcher has told this process its rank"),
        (["--rank", 1], {}, "rank 1 does not know how many processes there are: set --size"),
        (["--rank", 2, "--size", 2], {}, "rank 2 does not fit a job of size 2"),
        ([], {"JOB_COMPLETION_INDEX": "0"}, "rank 0 does not know how many"),
        ([], {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "no launcher has told"),
        (["--rank", 0, "--size", 1, "-n", 1], {}, "1 scheduler, 1 servers and 1 workers need 3"),
        (["--rank", 0, "--size", 2, "-s", 3], {}, "3 servers need as many processes; there are 2"),
        (["--rank", 0, "--size", 2, "--folder", "/no/where"], {}, "cannot write /no/where/"),
        (["--scheduler", "here"], {}, "expected NAME:PORT, got 'here'"),
    ],
)
def test_wrong_calls(options, variables, message, tmp_path, marker):
    process = start([*GLUON_SVRG, "join", *options, "--", "true"], tmp_path, **variables)
    output = finish(process)
    assert process.returncode == 2, output
    assert message in output.splitlines()[-1]
    assert "Traceback" not in output
    assert_nothing_left(marker)


# --- Horovod -------------------------------------------------------------------------------------

needs_horovod = pytest.mark.skipif(find_spec("horovod") is None, reason="needs Horovod")


def with_horovod(folder, what, *options, size=2):
    words = [*MPIRUN, "-np", size, *GLUON_SVRG, "join", "--horovod", *options]
    return start([*words, "--", sys.executable, SCRIPT, folder, what, "horovod"], folder)


@needs_mpirun
@needs_horovod
@pytest.mark.parametrize("size", [2, 3])
def test_horovod(size, tmp_path, marker):
    process = with_horovod(tmp_path, "train", size=size)
    output = finish(process)
    assert process.returncode == 0, output
    for rank in range(size):
        assert re.search(rf"^\[worker {rank}\] rank {rank} of {size}$", output, re.M), output
    assert_same_weights(tmp_path, size)
    assert_nothing_left(marker)


def assert_same_weights(folder, size):
    """All ranks have trained the same ones."""
    found = [np.load(folder / f"{rank}.npz") for rank in range(size)]
    for other in found[1:]:
        for name in found[0].files:
            np.testing.assert_array_equal(found[0][name], other[name])


@needs_mpirun
@needs_horovod
@pytest.mark.parametrize(
    "what, message",
    [
        ("raise", r"worker 0 \(rank 0\) exited with code 1"),
        ("early", r"worker 1 .* code 1, after worker 0 \(rank 0\) had ended with code 0"),
        (signal.SIGKILL, r"worker 1 \(rank 1\) was killed by SIGKILL"),
        (signal.SIGSTOP, rf"worker 1 \(rank 1\) did not answer for {TIMEOUT} s"),
    ],
)
def test_horovod_ends_badly(what, message, tmp_path, marker, stopwatch):
    is_signal = isinstance(what, signal.Signals)
    process = with_horovod(tmp_path, "step" if is_signal else what, "--timeout", TIMEOUT)
    wait_for(tmp_path / "reached", process)
    if is_signal:
        os.kill(find_role(marker, "worker 1"), what)
    seconds = stopwatch("mpirun, `--horovod`", event(what))
    output = finish(process)
    assert seconds() < WITHIN + (TIMEOUT if what == signal.SIGSTOP else 0)
    assert process.returncode != 0
    assert re.search(rf"^gluon-svrg join: {message}.*; all others are ended", output, re.M), output
    assert_nothing_left(marker)


@needs_mpirun
@needs_horovod
def test_horovod_restarts(tmp_path, marker):
    process = with_horovod(tmp_path, "train and die", "--restart", 2)
    output = finish(process)
    assert process.returncode == 0, output
    again = re.findall(r"was killed by SIGKILL.*; starting again \((\d) of 2\)", output)
    assert again == ["1", "2"]
    assert_same_weights(tmp_path, 2)
    assert_nothing_left(marker)


@pytest.mark.skipif(find_spec("horovod") is not None, reason="needs to lack Horovod")
def test_without_horovod(tmp_path, marker):
    words = [*GLUON_SVRG, "join", "--rank", 0, "--size", 1, "--horovod", "--", "true"]
    process = start(words, tmp_path)
    output = finish(process)
    assert process.returncode == 2
    assert "Horovod is not installed: pip install '.[horovod]' in a clone" in output
    assert_nothing_left(marker)
