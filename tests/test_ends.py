"""What ends a job: a reader that goes away, a launcher that is killed at any moment, Ctrl-C."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from jobs import GLUON_SVRG, PACKAGE, assert_nothing_left, finish, processes_of, start

from gluon_svrg.commands import serve, warden
from gluon_svrg.commands.process import busy_seconds
from gluon_svrg.commands.roles import LaunchError

pytestmark = pytest.mark.xdist_group("clusters")
WITHIN = 5  # seconds

#: Leaves its session and its parent, and would stay.
DAEMON = "setsid sh -c 'sleep 600 & wait' & "


def launch(*script, options=("-n", 2), **settings):
    words = [*GLUON_SVRG, "launch", *options, "--", *script]
    settings.setdefault("stdout", subprocess.PIPE)
    return subprocess.Popen(
        [*map(str, words)],
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **settings,
    )


def test_processes_that_end_while_they_are_measured():
    """Files of a process go at any moment between two looks at it."""
    for _ in range(300):  # in a few of a hundred, it ends between two of the calls of one look
        process = subprocess.Popen(["true"])
        wait = threading.Thread(target=process.wait)
        wait.start()
        while wait.is_alive():
            assert busy_seconds(process.pid) >= 0
        wait.join()


# --- the reader of the output goes away ----------------------------------------------------------


@pytest.mark.parametrize(
    "script",
    [
        "while :; do echo a long line that fills the pipe; done",
        "echo one line; sleep 600",
        f"{DAEMON} while :; do echo a; sleep 0.1; done",
    ],
    ids=["loud", "silent", "daemon"],
)
def test_the_reader_goes_away(script, marker):
    """As under mpirun, the job ends, with the status of a program that dies of SIGPIPE."""
    process = launch("sh", "-c", script)
    assert process.stdout.readline().startswith("[worker ")
    process.stdout.close()
    process.stdout = None
    since = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGPIPE
    assert time.monotonic() - since < WITHIN
    assert errors == (
        "gluon-svrg launch: the launcher was ended by SIGPIPE, for nobody reads its output; "
        "all others were ended\n"
    )
    assert_nothing_left(marker)


def test_the_disk_is_full(marker):
    with open("/dev/full", "w") as full:
        process = launch("sh", "-c", "echo a; sleep 600", stdout=full)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in errors
    assert_nothing_left(marker)


def test_the_exit_status_is_kept_without_a_reader(marker):
    """Only the launcher's own line meets the full disk."""
    with open("/dev/full", "w") as full:
        process = launch("sh", "-c", "exit 7", options=["-n", 1], stdout=full)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 7
    line = "gluon-svrg launch: worker 0 exited with code 7; all others were ended\n"
    assert errors == line
    assert_nothing_left(marker)


# --- the launcher is killed ----------------------------------------------------------------------


@pytest.mark.parametrize("kills", [10, 200])
def test_the_launcher_is_killed_at_any_moment(kills, marker, record_property):
    """With other processes that keep the machine busy: nothing of the job survives."""
    busy = [
        subprocess.Popen(
            [sys.executable, "-c", "while True: pass"], env={"PATH": os.environ["PATH"]}
        )
        for _ in range(os.cpu_count())
    ]
    draw = random.Random(0)
    longest, started = 0.0, 0
    try:
        for _ in range(kills):
            script = f"{DAEMON} (sleep 600 &) ; echo here; sleep 600"
            process = launch("sh", "-c", script, options=["-n", 2, "-s", 1])
            time.sleep(draw.uniform(0, 2))
            process.kill()
            since = time.monotonic()
            output, errors = process.communicate(timeout=60)
            assert_nothing_left(marker, seconds=10)
            longest = max(longest, time.monotonic() - since)
            started += "here" in output
            assert "Traceback" not in errors
    finally:
        for other in busy:
            other.kill()
            other.wait()
    record_property(
        "counted",
        f"{kills} kills of the launcher, {started} when its workers ran: nothing was left after "
        f"{longest:.1f} s",
    )
    assert started


def children_of(process):
    return [int(p) for p in subprocess.getoutput(f"pgrep -P {process}").split()]


@pytest.mark.parametrize("both", [False, True], ids=["the warden", "both"])
def test_the_warden_is_killed(both, marker):
    """Its processes die with it, and the launcher ends."""
    process = launch("sh", "-c", "echo here; exec sleep 600")
    assert "here" in process.stdout.readline()
    (program,) = children_of(process.pid)
    if both:
        os.killpg(process.pid, signal.SIGKILL)
    os.kill(program, signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode in (128 + signal.SIGKILL, -signal.SIGKILL)
    assert_nothing_left(marker)


def test_what_a_worker_leaves_behind_ends_with_the_job(marker):
    """A session of its own does not save a process."""
    process = launch("sh", "-c", f"{DAEMON} sleep 1; exit 7")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 7, output
    assert_nothing_left(marker, seconds=0)


def test_a_job_that_is_not_whole_starts_nothing(tmp_path):
    """The launcher died while it was sending."""
    job = '{"processes": [[["touch", "%s/ran"], {}, 2]], "environment": {}, "folders": ["%s/f"]'
    command = [sys.executable, "-I", "-S", warden.__file__]
    done = subprocess.run(
        command, input=job % (tmp_path, tmp_path), text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert list(tmp_path.iterdir()) == []


# --- Ctrl-C, and a port that is taken ------------------------------------------------------------


#: As the command `gluon-svrg`; before, Python itself may meet the signal, and shows a traceback.
COMMAND = """
import sys
from gluon_svrg.__main__ import main
print("ready", flush=True)
sys.exit(main())
"""


@pytest.mark.parametrize("step", [0.1, 0.01])
def test_ctrl_c_in_the_first_second(step, marker):
    """One line and no traceback, at any moment."""
    for number in range(round(1 / step)):
        process = start([sys.executable, "-c", COMMAND, "launch", "-n", 2, "--", "sleep", 600])
        assert process.stdout.readline() == "ready\n"
        time.sleep(number * step)
        process.send_signal(signal.SIGINT)
        output = finish(process, 60)
        assert process.returncode == 130, output
        assert re.fullmatch(r"gluon-svrg.*SIGINT.*\n", output), (number, output)
    assert_nothing_left(marker)


def test_a_machine_that_was_not_reached_by_ssh(monkeypatch):
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    with pytest.raises(LaunchError, match="SSH_CONNECTION is not set"):
        serve.answer("reached")


def test_a_taken_port_on_another_machine(tmp_path, marker):
    """`launch -H` says so before it starts anything, as on one machine."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        '#!/bin/sh\nfor last; do :; done\nSSH_CONNECTION="127.0.0.1 1 127.0.0.1 22"\n'
        'export SSH_CONNECTION\nexec sh -c "$last"\n'
    )
    ssh.chmod(0o755)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        options = ["-n", 2, "-H", "here", "--ssh", ssh]
        process = launch("sh", "-c", "exit 7", options=options)
        output = process.communicate(timeout=60)[0]
        assert process.returncode == 7, output
        since = time.monotonic()
        process = launch("sh", "-c", "exit 7", options=[*options, "--port", port])
        output, errors = process.communicate(timeout=60)
    assert time.monotonic() - since < 2 + WITHIN
    assert process.returncode == 2
    assert (output, errors) == (
        "",
        f"gluon-svrg launch: error: cannot use port {port}: Address already in use, on here\n",
    )
    assert_nothing_left(marker)
    assert processes_of(marker) == [os.getpid()] or not processes_of(marker)
