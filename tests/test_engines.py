"""Jobs by every engine: the weights of one process, and an end when anything goes wrong."""

import os
import re
import signal
import time
from pathlib import Path

import jobs
import pytest
from engines import ENGINES, Machines, begin, missing

TIMEOUT = 8  # seconds
WITHIN = 15  # seconds from an event to the end, beside the time-out
SERVED = [engine for engine in ENGINES if engine != "horovodrun"]


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """Two machines, where they can be made."""
    if missing("mpirun 4, two machines") and missing("srun, two machines"):
        yield None
        return
    with Machines(tmp_path_factory.mktemp("machines")) as made:
        yield made


@pytest.fixture
def job(request, tmp_path, marker):
    """Starts a job; what is left of it is killed."""
    started = []

    def start(engine, *words_and_options):
        if missing(engine):
            pytest.skip(missing(engine))
        machines = request.getfixturevalue("machines") if "two machines" in engine else None
        started.append(begin(engine, machines, tmp_path, *words_and_options))
        return started[-1]

    yield start
    for process in started:
        jobs.end(process)


@pytest.mark.slow
@pytest.mark.parametrize("engine", SERVED)
def test_the_weights_of_one_process(engine, job, tmp_path, marker):
    """In float64, with the update on the workers; Horovod's are in `test_workers`."""
    process = job(engine, jobs.words_of(tmp_path, "method"))
    output = jobs.finish(process)
    assert process.returncode == 0, output
    found = jobs.found_by(tmp_path, 2)
    jobs.assert_identical(found)
    print(f"\n{engine} | difference from one process | {found[0]['distances'].max():.1e}")
    assert found[0]["distances"].max() < 1e-12
    jobs.assert_nothing_left(marker)


def is_role(role, process):
    words = Path(f"/proc/{process}/cmdline").read_bytes().decode().split("\0")
    if role == "worker":
        return words[1:2] == [str(jobs.WORKER)]
    is_ours = words[1] == "-c" and words[2].endswith("import mxnet")
    return is_ours and jobs.variables_of(process)["DMLC_ROLE"] == role


ENDS = [
    *(("killed", role) for role in ("worker", "server", "scheduler")),
    *(("stopped", role) for role in ("worker", "server", "scheduler")),
    ("raise", "worker"),
    ("uneven", "worker"),
    ("early", "worker"),
    *((name, "launcher") for name in ("SIGINT", "SIGTERM", "SIGKILL")),
]
PLAIN = [("launch", "raise", "worker"), ("launch", "killed", "server")]
PLAIN += [("launch", "uneven", "worker"), ("launch", "SIGKILL", "launcher")]
CASES = [
    pytest.param(engine, *way, marks=() if (engine, *way) in PLAIN else pytest.mark.slow)
    for engine in ENGINES
    for way in ENDS
    if engine != "horovodrun" or way[1] in ("worker", "launcher")
]


@pytest.mark.parametrize("engine, what, who", CASES)
def test_ends(engine, what, who, job, tmp_path, marker):
    """All processes of the job end, and its status is not 0."""
    is_silent = what in ("stopped", "uneven", "early")
    # Steps need no scheduler, but the end of a worker does.
    program = "short" if (what, who) == ("stopped", "scheduler") else what
    kvstore = "horovod" if engine == "horovodrun" else "dist_sync"
    options = ["--timeout", TIMEOUT] if is_silent else []
    settings = {"folder": str(tmp_path), "what": program, "kvstore": kvstore}
    process = job(engine, jobs.words_of(tmp_path, "disturbed", **settings), *options)
    for rank in range(2):
        jobs.wait_for(tmp_path / f"reached-{rank}", process)
    since = time.monotonic()
    if what in ("killed", "stopped"):
        number = signal.SIGKILL if what == "killed" else signal.SIGSTOP
        processes = [each for each in jobs.processes_of(marker) if is_role(who, each)]
        os.kill(max(processes), number)  # of several workers, the one that has started last
    elif who == "launcher":
        times = 2 if "srun" in engine and what == "SIGINT" else 1  # srun wants Ctrl-C twice
        for _ in range(times):
            process.send_signal(getattr(signal, what))
            time.sleep(0.2)
    output = jobs.finish(process, 60)
    ended = time.monotonic() - since
    if (engine, what) != ("horovodrun", "SIGINT"):  # its status is 0 after Ctrl-C
        assert process.returncode != 0, output
    jobs.assert_nothing_left(marker, seconds=WITHIN)
    gone = time.monotonic() - since
    # With pytest -rP:
    print(f"\n{engine} | {who} {what} | {ended:.1f} s, and nothing left after {gone:.1f} s")
    assert ended < WITHIN + (TIMEOUT if is_silent else 0)
    if what == "raise":
        assert "ValueError: mine" in output
    if is_silent:
        assert re.search(rf"Timeout \(0:00:0{TIMEOUT}\)!", output), output
    if what == "uneven":
        assert "in disturbed" in output  # where it has waited
