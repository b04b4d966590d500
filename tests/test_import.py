"""What a user sees where MXNet or the right NumPy is missing: in interpreters that lack them."""

import os
import sys

import pytest
from jobs import PACKAGE, run

import gluon_svrg

USES = ["from gluon_svrg import SVRGTrainer", "import gluon_svrg; gluon_svrg.SVRGTrainer"]


@pytest.fixture
def without_mxnet(tmp_path):
    """Run an interpreter without site-packages, where MXNet is."""
    (tmp_path / "gluon_svrg").symlink_to(PACKAGE / "gluon_svrg")
    variables = {"PYTHONPATH": str(tmp_path), "PYTHONWARNINGS": ""}
    return lambda *words: run([sys.executable, "-S", *words], tmp_path, **variables)


def test_without_mxnet(without_mxnet):
    for use in USES:
        status, output = without_mxnet("-c", use)
        assert status == 1
        assert "ImportError: gluon_svrg needs MXNet, which is not installed." in output
        assert "pip install '.[cpu]' in a clone" in output
    assert without_mxnet("-m", "gluon_svrg", "--version") == (0, f"{gluon_svrg.__version__}\n")


@pytest.mark.parametrize("command", [(), ("compare",), ("launch",), ("join",)], ids=" ".join)
def test_help_without_mxnet(command, without_mxnet):
    status, output = without_mxnet("-m", "gluon_svrg", *command, "--help")
    assert status == 0 and output.startswith("usage: gluon-svrg")
    assert "example" in output and "(default: None)" not in output


@pytest.mark.parametrize("command", [("compare", "digits"), ("launch", "-n", "1", "--", "true")])
def test_commands_without_mxnet(command, without_mxnet):
    status, output = without_mxnet("-m", "gluon_svrg", *command)
    assert status == 2 and "Traceback" not in output
    assert "error: gluon_svrg needs MXNet, which is not installed." in output


def test_names():
    assert {*gluon_svrg.__all__} <= {*dir(gluon_svrg)}
    assert not {"Any", "TYPE_CHECKING", "annotations", "stores"} & {*dir(gluon_svrg)}
    assert gluon_svrg.schedule.Until(1)(0) == 1
    with pytest.raises(AttributeError, match="module 'gluon_svrg' has no attribute 'SVGRTrainer'"):
        _ = gluon_svrg.SVGRTrainer


def test_with_a_numpy_that_is_too_new(tmp_path):
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    if run([*install, tmp_path, "numpy==1.24.4"])[0]:
        pytest.skip("needs NumPy 1.24 from a package index, and none can be reached")
    for use in USES:
        path = os.pathsep.join(map(str, [tmp_path, PACKAGE]))
        status, output = run([sys.executable, "-c", use], tmp_path, PYTHONPATH=path)
        assert status == 1
        assert "ImportError: MXNet cannot be imported" in output
        assert "pip install 'numpy<1.24'" in output
