"""MXNet's own tests, with `SVRGTrainer` in the place of `gluon.Trainer`.

They are not part of this repository. ``GLUON_SVRG_UPSTREAM_TESTS`` names the root of MXNet's source
in the version that is installed: the branch v1.9.x for 1.9.1, the tag 2.0.0.beta1 for 2.0.0b1. It
needs no more than ``conftest.py`` and ``tests/python``. Those of 1.9 need nose (PyPI: pynose).
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mxnet import gluon

FOLDER = os.environ.get("GLUON_SVRG_UPSTREAM_TESTS", "")
NEEDS_NOSE = not hasattr(gluon.Parameter, "list_device")
pytestmark = [
    pytest.mark.skipif(
        not FOLDER, reason="GLUON_SVRG_UPSTREAM_TESTS names no folder with MXNet's source"
    ),
    pytest.mark.skipif(
        NEEDS_NOSE and importlib.util.find_spec("nose") is None,
        reason="MXNet 1.9's tests need nose: pip install pynose",
    ),
]
NAMES = ("gluon_trainer", "gluon_estimator", "gluon_event_handler", "gluon_batch_processor")
HERE = Path(__file__).resolve().parent


def outcomes(which, folder):
    """What becomes of MXNet's tests with a trainer."""
    root, report = Path(FOLDER).resolve(), folder / f"{which}.json"
    files = [str(root / "tests" / "python" / "unittest" / f"test_{name}.py") for name in NAMES]
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "upstream_plugin"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull]
    command += [f"--rootdir={root}", f"--confcutdir={root}", *files]
    path = os.pathsep.join(filter(None, [str(HERE.parent), str(HERE), os.getenv("PYTHONPATH")]))
    variables = {"PYTHONPATH": path, "UPSTREAM_TRAINER": which, "UPSTREAM_REPORT": str(report)}
    variables.update(PYTHONDONTWRITEBYTECODE="1", MXNET_TEST_SEED="1", MXNET_MODULE_SEED="1")
    done = subprocess.run(
        command,
        cwd=folder,  # they write files
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert report.exists(), done.stdout[-3000:]
    return json.loads(report.read_text())


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """With `gluon.Trainer`: some fail, and say nothing about ours."""
    found = outcomes("plain", tmp_path_factory.mktemp("plain"))["outcomes"]
    passed = {name for name, outcome in found.items() if outcome == "passed"}
    for name in NAMES:
        assert any(each.startswith(f"test_{name}.py") for each in passed), f"nothing of {name}"
    return passed


@pytest.mark.parametrize("which", ["svrg", "estimator"])
def test_no_test_of_mxnet_fails_that_passes_with_its_own_trainer(which, plain, tmp_path):
    found = outcomes(which, tmp_path)
    assert found["refreshes"] > 0 and plain <= set(found["outcomes"])
    worse = {name: error for name, error in found["errors"].items() if name in plain}
    assert not worse, "\n\n".join(f"{name}: {error}" for name, error in worse.items())
