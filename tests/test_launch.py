"""`gluon-svrg launch`: what dies ends all, is named, and leaves nothing behind."""

import os
import re
import signal
import sys
import time

import numpy as np
import pytest
from cluster import launch
from jobs import (
    SCRIPT,
    TIMEOUT,
    WITHIN,
    assert_nothing_left,
    event,
    find_role,
    finish,
    wait_for,
)

pytestmark = pytest.mark.xdist_group("clusters")


def start(folder, what, *options):
    arguments = ["-n", 2, "-s", 1, *options, "--", sys.executable, SCRIPT, folder, what]
    return launch(arguments, wait=False)


@pytest.mark.parametrize("moment", ["start", "step", "full pass", "exit"])
@pytest.mark.parametrize("role", ["worker 0", "server 0", "scheduler"])
def test_killed(role, moment, tmp_path, marker, stopwatch):
    process = start(tmp_path, moment)
    if moment != "start":
        wait_for(tmp_path / "reached", process)
    os.kill(find_role(marker, role), signal.SIGKILL)
    seconds = stopwatch("launch", event(signal.SIGKILL, role))
    output = finish(process)
    assert seconds() < WITHIN
    assert process.returncode == 128 + signal.SIGKILL
    before = r"(, after .* had ended with code 0)?" if moment == "exit" else ""
    assert re.fullmatch(
        rf"gluon-svrg launch: {role}( \(rank \d\))? was killed by SIGKILL{before}; "
        "all others were ended",
        output.splitlines()[-1],
    ), output
    assert_nothing_left(marker)


@pytest.mark.parametrize(
    "what, message, status",
    [
        ("raise", r"worker \d \(rank 0\) exited with code 1", 1),
        ("early", r"worker \d \(rank 0\) exited early(, with code 0)?, while worker \d", 1),
        (
            "early, at once",
            r"worker \d \(rank 0\) exited early(, with code 0)?, while worker \d",
            1,
        ),
        ("code 7", r"worker \d \(rank 0\) exited with code 7", 7),
    ],
)
def test_workers_that_end_badly(what, message, status, tmp_path, marker, stopwatch):
    process = start(tmp_path, what)
    wait_for(tmp_path / "reached", process)
    seconds = stopwatch("launch", event(what))
    output = finish(process)
    assert seconds() < WITHIN
    assert process.returncode == status
    assert re.match(f"gluon-svrg launch: {message}", output.splitlines()[-1]), output
    assert_nothing_left(marker)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_launcher_is_ended(number, tmp_path, marker, stopwatch):
    process = start(tmp_path, "step")
    wait_for(tmp_path / "reached", process)
    process.send_signal(number)
    seconds = stopwatch("launch", f"its launcher gets {number.name}")
    output = finish(process)
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number
        assert f"was ended by {number.name}" in output.splitlines()[-1]
    assert_nothing_left(marker)
    seconds()


@pytest.mark.parametrize("role", ["worker 1", "server 0", "scheduler"])
def test_stopped(role, tmp_path, marker, stopwatch):
    """Only MXNet's heartbeats tell of a process that is there but does nothing."""
    process = start(tmp_path, "step", "--timeout", TIMEOUT)
    wait_for(tmp_path / "reached", process)
    os.kill(find_role(marker, role), signal.SIGSTOP)
    seconds = stopwatch("launch", event(signal.SIGSTOP, role))
    output = finish(process)
    assert seconds() < TIMEOUT + WITHIN
    assert process.returncode == 1
    how = rf"did not answer for {TIMEOUT} s(: a signal.*)?; all others were"
    line = rf"gluon-svrg launch: (the )?{role}( \(rank \d\))? {how}"
    assert re.match(line, output.splitlines()[-1]), output
    assert_nothing_left(marker)


def test_a_pause_is_no_death(tmp_path, marker):
    process = start(tmp_path, "nothing", "--timeout", 12)
    worker = find_role(marker, "worker 1")
    time.sleep(2)
    os.kill(worker, signal.SIGSTOP)
    time.sleep(4)
    os.kill(worker, signal.SIGCONT)
    output = finish(process)
    assert process.returncode == 0, output


def test_all_ends_well(tmp_path, marker):
    process = start(tmp_path, "nothing")
    output = finish(process)
    assert process.returncode == 0, output
    assert re.search(r"^\[worker 0\] rank \d of 2$", output, re.M)
    assert re.search(r"^\[worker 1\] rank \d of 2$", output, re.M)
    assert_nothing_left(marker)


def test_restart(tmp_path, marker):
    """A script that saves every epoch and resumes ends as if nothing had happened."""
    folders = [tmp_path / name for name in ("undisturbed", "disturbed")]
    for folder in folders:
        folder.mkdir()
    for folder, what in zip(folders, ("train", "train and die")):
        process = start(folder, what, "--restart", 2)
        output = finish(process)
        assert process.returncode == 0, output
        again = re.findall(r"was killed by SIGKILL.*; starting again \((\d) of 2\)", output)
        assert again == (["1", "2"] if "die" in what else [])
    for rank in range(2):
        with np.load(folders[0] / f"{rank}.npz") as one, np.load(folders[1] / f"{rank}.npz") as two:
            for name in one.files:
                np.testing.assert_array_equal(one[name], two[name])
    assert_nothing_left(marker)


@pytest.mark.jobs
def test_restarts_run_out(tmp_path, marker):
    process = start(tmp_path, "raise", "--restart", 1)
    output = finish(process)
    assert process.returncode == 1
    assert output.count("exited with code 1") == 2
    assert "starting again" not in output.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["-n", "0", "--", "true"], "expected a positive whole number, got '0'"),
        (["-n", "x", "--", "true"], "expected a positive whole number, got 'x'"),
        (["-n", "1"], "there is no command"),
        (["-n", "1", "--", "no-such-command"], "cannot start no-such-command: No such file"),
        (["-n", "1", "--", sys.executable, "no.py"], "there is no script no.py"),
        (["-n", "1", "--port", "99999", "--", "true"], "cannot use port 99999"),
        (["-n", "1", "--restart", "-1", "--", "true"], "expected 0 or a positive whole number"),
        (["-n", "1", "--timeout", "2", "--", "true"], "expected 0 or at least 5 seconds, got '2'"),
        (["-n", "1", "-H", "a,a", "--", "true"], "a machine is named twice in 'a,a'"),
        (["-n", "1", "-H", "a:b", "--", "true"], "expected HOST or HOST:SLOTS, got 'a:b'"),
        (["-n", "3", "-H", "a:1,b:1", "--", "true"], "3 workers need as many slots"),
        (["-n", "1", "-H", "a", "--ssh", "no-such", "--", "true"], "cannot start no-such: No such"),
        ([], "required: -n"),
    ],
)
def test_wrong_commands(arguments, message, marker):
    status, output = launch(arguments)
    assert status == 2
    assert message in output.splitlines()[-1]
    assert "Traceback" not in output
    assert_nothing_left(marker)


def test_a_taken_port(marker):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, output = launch(["-n", 1, "--port", port, "--", "true"])
    assert status == 2
    assert f"cannot use port {port}: Address already in use" in output.splitlines()[-1]


@pytest.mark.parametrize("code", [0, 3])
def test_a_command_that_is_no_python(code, marker):
    """It never joins the cluster; when all workers are done, the rest is ended."""
    status, output = launch(["-n", 1, "-s", 1, "--", "sh", "-c", f"echo hello; exit {code}"])
    assert status == code
    assert "[worker 0] hello" in output
    death = "gluon-svrg launch: worker 0 exited with code 3"
    assert output.splitlines()[-1].startswith(death if code else "[worker 0] hello")
    assert_nothing_left(marker)
