"""Jobs by every engine: the weights of one process, and an end when anything goes wrong.

Run with ``-rP``, this prints how long each end took.
"""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from cluster import WORKER, found_by
from engines import ENGINES, Machines, begin, missing, needs
from jobs import assert_nothing_left, finish, processes_of, variables_of, wait_for
from problems import distance
from union import assert_identical, reference, weights

SCRIPT = Path(__file__).with_name("launched.py")
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
def job(machines, tmp_path, marker):
    """Starts a job; what is left of it is killed."""
    started = []

    def start(engine, *script_and_options):
        needs(engine)
        started.append(begin(engine, machines, tmp_path, *script_and_options))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def cases(found):
    """Cases, by their engine and more; plain pytest runs the first one, that of gluon-svrg."""
    for engine, *more in found:
        marks = () if engine == "launch" else pytest.mark.slow
        yield pytest.param(engine, *more, marks=marks, id="-".join([engine, *more]))


@pytest.mark.parametrize("engine", [*cases([engine] for engine in SERVED)])
def test_the_weights_of_one_process(engine, job, tmp_path, marker):
    """In float64, with the update on the workers; Horovod's are in `test_horovod`."""
    rates = (0.1, 0.05, 0.2)
    settings = f'{{"rates": [{", ".join(map(str, rates))}], "update_on_kvstore": false}}'
    process = job(engine, [WORKER, "trajectory", tmp_path, settings])
    output = finish(process)
    assert process.returncode == 0, output
    found = found_by(tmp_path, 2)
    assert_identical(found)
    expected = reference(rates=rates)
    difference = distance(weights(found[0]), expected.weights)
    print(f"\n{engine} | difference from one process | {difference:.1e}")
    assert difference < 1e-12
    assert distance(weights(found[0], "mu"), expected.full_grad) < 1e-12
    assert_nothing_left(marker)


def find_role(marker, role):
    """The process of a role; of several workers, the one that has started last."""
    ids = [process for process in processes_of(marker) if is_role(role, process)]
    return max(ids)


def is_role(role, process):
    words = Path(f"/proc/{process}/cmdline").read_bytes().decode().split("\0")
    if role == "worker":
        return words[1:2] == [str(SCRIPT)]
    is_ours = words[1] == "-c" and words[2].endswith("import mxnet")
    return is_ours and variables_of(process)["DMLC_ROLE"] == role


ENDS = [
    *(("killed", role) for role in ("worker", "server", "scheduler")),
    *(("stopped", role) for role in ("worker", "server", "scheduler")),
    ("raise", "worker"),
    ("uneven", "worker"),
    *((name, "launcher") for name in ("SIGINT", "SIGTERM", "SIGKILL")),
]


@pytest.mark.parametrize(
    "engine, what, who",
    [
        *cases((engine, *end) for engine in SERVED for end in ENDS),
        *cases(("horovodrun", *end) for end in ENDS if end[1] in ("worker", "launcher")),
    ],
)
def test_ends(engine, what, who, job, tmp_path, marker):
    """All processes of the job end, and its status is not 0."""
    is_silent = what in ("stopped", "uneven")
    # Steps need no scheduler, but the end of a worker does.
    program = "short" if (what, who) == ("stopped", "scheduler") else what
    kvstore = "horovod" if engine == "horovodrun" else "dist_sync"
    options = ["--timeout", TIMEOUT] if is_silent else []
    process = job(engine, [SCRIPT, tmp_path, program, kvstore], *options)
    for rank in range(2):
        wait_for(tmp_path / f"reached-{rank}", process)
    since = time.monotonic()
    if what in ("killed", "stopped"):
        number = signal.SIGKILL if what == "killed" else signal.SIGSTOP
        os.kill(find_role(marker, who), number)
    elif who == "launcher":
        for _ in range(
            2 if "srun" in engine and what == "SIGINT" else 1
        ):  # srun wants Ctrl-C twice
            process.send_signal(getattr(signal, what))
            time.sleep(0.2)
    output = finish(process, 60)
    ended = time.monotonic() - since
    if (engine, what) != ("horovodrun", "SIGINT"):  # its status is 0 after Ctrl-C
        assert process.returncode != 0, output
    assert_nothing_left(marker, seconds=WITHIN)
    gone = time.monotonic() - since
    print(f"\n{engine} | {who} {what} | {ended:.1f} s, and nothing left after {gone:.1f} s")
    assert ended < WITHIN + (TIMEOUT if is_silent else 0)
    if what == "raise":
        assert "ValueError: mine" in output
    if is_silent:
        assert re.search(rf"Timeout \(0:00:0{TIMEOUT}\)!", output), output
    if what == "uneven":
        assert "launched.py" in output  # where it has waited
