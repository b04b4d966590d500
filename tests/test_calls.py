"""Workers that make different calls: the job ends and says so; slow workers are left alone."""

import re
import sys
from importlib.util import find_spec

import pytest
from calls import UNEQUAL
from hypothesis import given
from hypothesis import strategies as st
from jobs import GLUON_SVRG, SCRIPT, assert_nothing_left, finish, start

from gluon_svrg.stores import calls, launcher

pytestmark = pytest.mark.xdist_group("clusters")
TIMEOUT = 6  # seconds
ENGINES = [
    "dist_sync",
    pytest.param(
        "horovod",
        marks=pytest.mark.skipif(find_spec("horovod") is None, reason="needs Horovod"),
    ),
]
#: The calls in which two workers wait for one another, as the launcher names them. A worker that
#: is ahead may begin some more steps, for MXNet's arrays wait in their stead.
AHEAD = r"(refresh 2, after \d+ steps|step \d+, after 1 refresh)"
WAITS = {
    "4 steps against 3": [AHEAD, "refresh 2, after 3 steps"],
    "4 + 2 steps against 3 + 3": [AHEAD, "refresh 2, after 3 steps"],
    "one more refresh": ["refresh 2, after 2 steps", AHEAD],
    "a break": ["refresh 2, after 1 step", AHEAD],
    "batch sizes": [AHEAD, "refresh 2, after 2 steps"],
    "only refreshes": ["refresh 2, after 1 step", AHEAD],
}


def run(folder, what, kvstore):
    """A job of two workers, when it has ended, and its output."""
    script = ["--timeout", TIMEOUT, "--", sys.executable, SCRIPT, folder, what, kvstore]
    if kvstore != "horovod":
        process = start([*GLUON_SVRG, "launch", "-n", 2, *script], folder)
        return process, finish(process)
    words = [*GLUON_SVRG, "join", "--horovod", "--size", 2, "--rank"]
    processes = [start([*words, rank, *script], folder) for rank in range(2)]
    outputs = [finish(process) for process in processes]
    return processes[0], outputs[0]


@pytest.mark.parametrize("read", ["", ", read"], ids=["async", "read"])
@pytest.mark.parametrize("case", UNEQUAL)
@pytest.mark.parametrize("kvstore", ENGINES)
def test_workers_that_make_different_calls(kvstore, case, read, tmp_path, marker):
    """Whether they read their losses or run ahead of MXNet."""
    process, output = run(tmp_path, case + read, kvstore)
    assert process.returncode == 1, output
    for rank, waits in enumerate(WAITS[case]):
        line = rf"^gluon-svrg \w+: worker \d \(rank {rank}\) waits in {waits}$"
        assert re.search(line, output, re.M), output
    assert re.search(
        rf"^gluon-svrg \w+: the workers waited for one another in different calls for {TIMEOUT} s: "
        "workers must make the same calls; all (were|are) ended$",
        output,
        re.M,
    ), output
    assert_nothing_left(marker)


@pytest.mark.parametrize("kvstore", ENGINES)
@pytest.mark.jobs
def test_a_worker_that_is_slow_in_its_own_code(kvstore, tmp_path, marker):
    """Its data loader takes more than twice as long as the time-out; the job ends well."""
    process, output = run(tmp_path, "a slow worker", kvstore)
    assert process.returncode == 0, output
    assert "waits in" not in output
    assert_nothing_left(marker)


@pytest.mark.jobs
def test_steps_of_dist_async_wait_for_nobody(tmp_path, marker):
    process, output = run(tmp_path, "more steps", "dist_async")
    assert process.returncode == 0, output
    assert_nothing_left(marker)


def made(text):
    """What a worker reports that has begun some calls."""
    steps = text.count("s")
    before = text.rpartition("r")[0].count("s") if "r" in text else 0
    return calls.Calls(steps, text.count("r"), before)


sequences = st.text("sr", max_size=12)


@given(sequences, sequences)
def test_a_slow_worker_can_still_make_the_same_calls(first, more):
    assert made(first).can_become(made(first + more))
    assert made(first + more).can_become(made(first))


@given(sequences, st.integers(1, 5), st.booleans(), st.integers(0, 5))
def test_different_calls_are_found(common, steps, refreshes, later):
    """One worker has made steps where the other one is in a refresh, which waits for it."""
    one = made(common + "s" * steps + "r" * refreshes)
    other = made(common + "r" + "s" * later)
    assert not one.can_become(other)
    assert not other.can_become(one)


def test_calls_are_counted_where_a_launcher_reads_them(tmp_path, monkeypatch):
    monkeypatch.setattr(calls, "_counts", None)
    calls.step()
    calls.begin()  # no launcher
    assert calls._counts is None
    monkeypatch.setenv(launcher.PLACE, str(tmp_path / "worker 0"))
    monkeypatch.setattr(launcher, "_process", 0)
    assert calls.read(str(tmp_path / "worker 0")) is None
    calls.begin()
    for text in ("", "r", "rs", "rss", "rssr", "rssrs"):
        if text:
            (calls.step if text[-1] == "s" else calls.refresh)()
        assert calls.read(str(tmp_path / "worker 0")) == made(text)
    calls.begin()  # a second trainer
    assert calls.read(str(tmp_path / "worker 0")) == made("rssrs")
    assert [str(made(text)) for text in ("", "s", "sr", "srss")] == [
        "no call yet",
        "step 1, after 0 refreshes",
        "refresh 1, after 1 step",
        "step 3, after 1 refresh",
    ]
