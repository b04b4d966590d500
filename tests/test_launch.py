"""`gluon-svrg launch`: its output, its status, and what it refuses. Ends are in `test_engines`."""

import os
import re
import signal
import subprocess
import sys

import pytest
from jobs import GLUON_SVRG, PACKAGE, assert_nothing_left, launch, run, start


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["-n", "0", "--", "true"], "expected a positive whole number, got '0'"),
        (["-n", "x", "--", "true"], "expected a positive whole number, got 'x'"),
        (["-n", "1", "--timeout", "-2", "--", "true"], "--timeout: invalid seconds value: '-2'"),
        (["-n", "1"], "there is no command: end with -- python train.py"),
        (["-n", "1", "--", "no-such-command"], "No such file or directory: 'no-such-command'"),
        ([], "required: -n"),
    ],
)
def test_wrong_commands(arguments, message):
    status, output = launch(arguments)
    assert status == 2
    assert message in output.splitlines()[-1]
    assert "Traceback" not in output


@pytest.mark.parametrize("command", ["launch", "join"])
def test_a_file_that_cannot_be_executed(command, tmp_path):
    """As a script of Python without its first line."""
    (tmp_path / "train").write_text("import mxnet\n")
    (tmp_path / "train").chmod(0o755)
    rank = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"}
    status, output = run([*GLUON_SVRG, command, "-n", 1, "--", tmp_path / "train"], **rank)
    assert status == 2
    assert "Traceback" not in output
    assert re.search(f"gluon-svrg {command}: error: .*Exec format error", output)


#: A program becomes the first process of a container, which inherits all orphans.
CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
CONTAINER += [] if os.geteuid() == 0 else ["--map-root-user"]


def test_launch_as_the_first_process_of_a_container():
    """As in Docker. Other processes than those of roles end there, too: they are no failures."""
    if subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a container needs Linux, and root or user namespaces")
    script = "setsid sh -c 'sleep 0.1 &'; sleep 0.5; echo trained"  # leaves an orphan
    words = [*GLUON_SVRG, "launch", "-n", 2, "--", "sh", "-c", script]
    status, output = run([*CONTAINER, *words])
    assert status == 0
    assert sorted(output.splitlines()) == ["[worker 0] trained", "[worker 1] trained"]


@pytest.mark.parametrize("code", [0, 3])
def test_a_command_that_is_no_python(code, marker):
    """It never joins the others; when all workers are done, the rest is ended."""
    script = f"echo $DMLC_ROLE; sleep 600 & echo a; exit {code}"  # which leaves something behind
    status, output = launch(["-n", 2, "-s", 1, "--", "sh", "-c", script])
    assert status == code
    for line in ("worker", "a"):
        assert f"[worker 0] {line}\n" in output or f"[worker 1] {line}\n" in output
    end = r"gluon-svrg launch: worker \d exited with code 3; all others were ended"
    assert bool(re.fullmatch(end, output.splitlines()[-1])) == (code == 3)
    assert_nothing_left(marker)


def test_a_worker_that_is_killed(marker):
    """The status is that of shells."""
    status, output = launch(["-n", 2, "--", "sh", "-c", "kill -9 $$"])
    assert status == 137
    assert re.search(r"worker \d was ended by signal 9 \(Killed\); all", output.splitlines()[-1])
    assert_nothing_left(marker)


def test_the_reader_goes_away(marker):
    """As in ``| head -1``: the launcher dies of its next line, and all with it."""
    script = "while :; do echo a line; sleep 0.1; done"
    process = start([*GLUON_SVRG, "launch", "-n", 1, "--", "sh", "-c", script])
    assert process.stdout.readline().startswith("[worker 0] a line")
    process.stdout.close()
    assert process.wait(30) == -signal.SIGPIPE
    assert_nothing_left(marker)


TIMED = """import time
from gluon_svrg.kvstore.job import rearm_timeout
for _ in range(4):
    rearm_timeout()
    time.sleep(1)
print('steps', flush=True)
time.sleep(4)
print('end', flush=True)
"""


def test_a_timeout_is_a_variable_too(tmp_path, marker):
    """It begins anew in each step, and has no effect where it is not set."""
    (tmp_path / "train.py").write_text(TIMED)
    for seconds, last in ((None, "end"), ("2", "steps")):
        variables = {"GLUON_SVRG_TIMEOUT": seconds} if seconds else {}
        status, output = run([sys.executable, tmp_path / "train.py"], **variables)
        assert re.search(rf"^{last}$", output, re.M), output
        assert ("end" in output.split()) == (last == "end")
        assert status == (1 if seconds else 0)
        assert ("line 7 in <module>" in output) == bool(seconds)  # where it waited


@pytest.mark.parametrize("seconds", ["abc", "nan", "-5"])
def test_a_timeout_that_is_no_number_of_seconds(seconds):
    """A trainer raises, a command ends with a sentence."""
    trains = "from gluon_svrg.kvstore.job import rearm_timeout; rearm_timeout()"
    status, output = run([sys.executable, "-c", trains], GLUON_SVRG_TIMEOUT=seconds)
    message = f"GLUON_SVRG_TIMEOUT must be a number of seconds, 0 or more, got '{seconds}'"
    assert status == 1 and message in output.splitlines()[-1]
    command = [*GLUON_SVRG, "launch", "-n", 1, "--", "true"]
    status, output = run(command, GLUON_SVRG_TIMEOUT=seconds)
    message = f"gluon-svrg launch: error: argument --timeout: invalid seconds value: '{seconds}'"
    assert status == 2 and output.splitlines()[-1] == message


def test_nothing_of_ours_listens():
    """Only MXNet and Horovod do, which have no authentication."""
    for path in (PACKAGE / "gluon_svrg").rglob("*.py"):
        assert "listen" not in path.read_text(), path
