"""MXNet's own tests, with `SVRGTrainer` in the place of `gluon.Trainer`.

They are not part of this repository. ``GLUON_SVRG_UPSTREAM_TESTS`` names the root of MXNet's source
in the version that is installed: the branch v1.9.x for 1.9.1, the tag 2.0.0.beta1 for 2.0.0b1. It
needs no more than ``conftest.py`` and ``tests/python``. Those of 1.9 need nose (PyPI: pynose).
"""

import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mxnet import gluon

FOLDER = os.environ.get("GLUON_SVRG_UPSTREAM_TESTS", "")
IS_2 = hasattr(gluon.Parameter, "list_device")
pytestmark = [
    pytest.mark.skipif(
        not FOLDER, reason="GLUON_SVRG_UPSTREAM_TESTS names no folder with MXNet's source"
    ),
    pytest.mark.skipif(
        not IS_2 and importlib.util.find_spec("nose") is None,
        reason="MXNet 1.9's tests need nose: pip install pynose",
    ),
]
FILES = [
    "test_gluon_trainer.py",
    "test_gluon_estimator.py",
    "test_gluon_event_handler.py",
    "test_gluon_batch_processor.py",
]
HERE = Path(__file__).resolve().parent


@functools.lru_cache(maxsize=None)
def outcomes(which, folder):
    """What becomes of MXNet's tests with a trainer."""
    root = Path(FOLDER).resolve()
    files = [root / "tests" / "python" / "unittest" / name for name in FILES]
    missing = [str(file) for file in files if not file.exists()]
    assert not missing, f"GLUON_SVRG_UPSTREAM_TESTS: there is no {missing}"
    report = folder / f"{which}.json"
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "upstream_plugin"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull]
    command += [f"--rootdir={root}", f"--confcutdir={root}", *map(str, files)]
    path = os.pathsep.join(filter(None, [str(HERE.parent), str(HERE), os.getenv("PYTHONPATH")]))
    process = subprocess.Popen(
        command,
        cwd=folder,  # they write files
        env={
            **os.environ,
            "PYTHONPATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
            "UPSTREAM_TRAINER": which,
            "UPSTREAM_REPORT": str(report),
            "MXNET_TEST_SEED": "1",
            "MXNET_MODULE_SEED": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    assert report.exists(), output[-3000:]
    return json.loads(report.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("upstream")


@pytest.fixture(scope="module")
def plain(folder):
    """With `gluon.Trainer`: some fail, and say nothing about ours."""
    found = outcomes("plain", folder)
    passed = [name for name, outcome in found["outcomes"].items() if outcome == "passed"]
    for file in FILES:
        assert [name for name in passed if name.startswith(file)], found["errors"]
    return found


@pytest.mark.parametrize(
    "which",
    ["svrg", "refreshed", "estimator"],
)
def test_no_test_of_mxnet_fails_that_passes_with_its_own_trainer(which, plain, folder):
    found = outcomes(which, folder)
    assert set(found["outcomes"]) == set(plain["outcomes"])
    assert (found["refreshes"] > 0) == (which != "svrg")
    passed = [name for name, outcome in plain["outcomes"].items() if outcome == "passed"]
    worse = {name: found["errors"].get(name) for name in passed if name in found["errors"]}
    assert not worse, "\n\n".join(f"{name}: {error}" for name, error in worse.items())
