"""What all tests share."""

import os
import signal
import time

# Before MXNet is imported: threads of OpenMP that wait for one another are slow where several
# processes share the cores, as pytest-xdist and clusters do.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import mxnet as mx
import numpy as np
import pytest
from jobs import kill_all

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # As in a background job of a shell script. Processes that tests start would ignore it, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, max_examples=20)
hypothesis.settings.load_profile("tests")


@pytest.fixture(autouse=True)
def _alike():
    """Seeds; and names of layers count from 0: 1.9.1 sorts parameters by them, 10 before 9."""
    mx.random.seed(0)
    np.random.seed(0)
    with mx.name.NameManager():
        yield


@pytest.fixture
def marker(monkeypatch):
    """A value that all processes of a job have in their variables; what is left is killed."""
    value = f"gluon-svrg-test-{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv("MARKER", value)
    yield value
    kill_all(value)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
    """With GLUON_SVRG_TEST_NO_SKIPS=1, a test that would be skipped fails."""
    report = (yield).get_result()
    if report.skipped and os.environ.get("GLUON_SVRG_TEST_NO_SKIPS") == "1":
        report.outcome = "failed"
