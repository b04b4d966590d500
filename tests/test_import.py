"""What a user sees where MXNet or the right NumPy is missing: in interpreters that lack them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gluon_svrg

PACKAGE = Path(gluon_svrg.__file__).parent.parent
USES = ["from gluon_svrg import SVRGTrainer", "import gluon_svrg; gluon_svrg.SVRGTrainer"]


def python(*arguments, path, flags=()):
    """Run a fresh interpreter that finds these folders before others."""
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *flags, *arguments],
        capture_output=True,
        text=True,
        cwd=path[0],
        env={**variables, "PYTHONPATH": os.pathsep.join(map(str, path))},
        timeout=120,
        check=False,
    )


@pytest.fixture
def without_mxnet(tmp_path):
    """Run an interpreter without site-packages, where MXNet is."""
    (tmp_path / "gluon_svrg").symlink_to(PACKAGE / "gluon_svrg")
    return lambda *arguments: python(*arguments, path=[tmp_path], flags=["-S"])


def test_without_mxnet(without_mxnet):
    for use in USES:
        done = without_mxnet("-c", use)
        assert done.returncode == 1
        assert "ImportError: gluon_svrg needs MXNet, which is not installed." in done.stderr
        assert "pip install '.[cpu]' in a clone" in done.stderr
    done = without_mxnet("-m", "gluon_svrg", "--version")
    assert (done.returncode, done.stdout.strip()) == (0, gluon_svrg.__version__)


@pytest.mark.parametrize("command", [(), ("compare",), ("launch",), ("join",)], ids=" ".join)
def test_help_without_mxnet(command, without_mxnet):
    done = without_mxnet("-m", "gluon_svrg", *command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "example" in done.stdout
    assert "(default: None)" not in done.stdout


@pytest.mark.parametrize("command", [("compare", "digits"), ("launch", "-n", "1", "--", "true")])
def test_commands_without_mxnet(command, without_mxnet):
    done = without_mxnet("-m", "gluon_svrg", *command)
    assert done.returncode == 2
    assert "error: gluon_svrg needs MXNet, which is not installed." in done.stderr
    assert "Traceback" not in done.stderr


def test_names():
    assert {*gluon_svrg.__all__} <= {*dir(gluon_svrg)}
    assert not {"Any", "TYPE_CHECKING", "annotations", "stores"} & {*dir(gluon_svrg)}
    assert gluon_svrg.schedule.Until(1)(0) == 1
    with pytest.raises(AttributeError, match="module 'gluon_svrg' has no attribute 'SVGRTrainer'"):
        _ = gluon_svrg.SVGRTrainer


def test_with_a_numpy_that_is_too_new(tmp_path):
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    done = subprocess.run(
        [*install, str(tmp_path), "numpy==1.24.4"], capture_output=True, timeout=300, check=False
    )
    if done.returncode:
        pytest.skip("needs NumPy 1.24 from a package index, and none can be reached")
    for use in USES:
        done = python("-c", use, path=[tmp_path, PACKAGE], flags=["-W", "ignore"])
        assert done.returncode == 1
        assert "ImportError: MXNet cannot be imported" in done.stderr
        assert "pip install 'numpy<1.24'" in done.stderr
