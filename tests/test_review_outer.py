"""Defects that a review of files, kvstores and commands has found, and what replaced machinery."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from mxnet import gluon
from problems import Dense

import gluon_svrg
from gluon_svrg import SVRGTrainer

DEADLINE = 60  # seconds, for what takes one
PACKAGE = str(Path(gluon_svrg.__file__).parents[1])
#: A program becomes the first process of a container, which inherits all orphans.
CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
CONTAINER += [] if os.geteuid() == 0 else ["--map-root-user"]
LEAVES_ORPHANS = """
import subprocess, time
subprocess.run(["sh", "-c", "sleep 0.1 &"], start_new_session=True)
time.sleep(0.5)
print("trained")
"""


def test_launch_as_the_first_process_of_a_container():
    """As in Docker. Other processes than those of roles end there, too: they are no failures."""
    if subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a container needs Linux, and root or user namespaces")
    launch = [sys.executable, "-m", "gluon_svrg", "launch", "-n", "2", "--"]
    done = subprocess.run(
        [*CONTAINER, *launch, sys.executable, "-c", LEAVES_ORPHANS],
        env={**os.environ, "PYTHONPATH": PACKAGE},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[worker 0] trained", "[worker 1] trained"]


@pytest.mark.parametrize("command", ["launch", "join"])
def test_a_file_that_cannot_be_executed(command, tmp_path):
    """As a script of Python without its first line."""
    script = tmp_path / "train"
    script.write_text("import mxnet\n")
    script.chmod(0o755)
    rank = {"OMPI_COMM_WORLD_RANK": "2"}
    sizes = dict.fromkeys(["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"], "3")
    done = subprocess.run(
        [sys.executable, "-m", "gluon_svrg", command, "-n", "1", "--", str(script)],
        env={**os.environ, **rank, **sizes, "PYTHONPATH": PACKAGE},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr and "Exec format error" in done.stderr
    assert f"gluon-svrg {command}: error: " in done.stderr


def test_the_warning_of_a_worker_alone_points_to_the_users_line(monkeypatch):
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    net = Dense("regression", samples=12, seed=38).network()
    with pytest.warns(UserWarning, match="one of 2 workers") as warned:
        SVRGTrainer(net.collect_params(), "sgd")
    assert [one.filename for one in warned] == [__file__]


def test_refreshes_of_two_threads_look_for_parameters_in_turns():
    """Both patch a method of Gluon, which is itself again when both are done."""
    read = gluon.Parameter._check_and_get
    problem = Dense("regression", hidden=(4,), samples=12, seed=38)
    first_is_in, second_is_in, errors = threading.Event(), threading.Event(), []

    def first_looks():
        first_is_in.set()
        assert not second_is_in.wait(0.5)

    def second_looks():
        assert gluon.Parameter._check_and_get is not read
        second_is_in.set()

    def refresh(look):
        net = problem.network()
        loss_of, calls = problem.closure(net), []
        trainer = SVRGTrainer(net[1].collect_params(), "sgd", lock_random=False)

        def closure(index):
            loss = loss_of(index)
            if not calls:
                look()
            calls.append(index)
            return loss

        try:
            trainer.update_full_grads(closure, problem.batches(4))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=refresh, args=(first_looks,))]
    threads[0].start()
    assert first_is_in.wait(DEADLINE)
    threads.append(threading.Thread(target=refresh, args=(second_looks,)))
    threads[1].start()
    for thread in threads:
        thread.join(DEADLINE)
    assert not errors and second_is_in.is_set()
    assert gluon.Parameter._check_and_get is read
