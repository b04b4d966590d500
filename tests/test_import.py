"""What a user sees where MXNet or the right NumPy is missing: in interpreters that lack them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gluon_svrg

PACKAGE = Path(gluon_svrg.__file__).parent.parent


def import_package(*first, flags=()):
    """Import gluon_svrg in a fresh interpreter that finds the folders `first` before others."""
    path = [str(folder) for folder in first]
    return subprocess.run(
        [sys.executable, *flags, "-c", f"import sys; sys.path[:0] = {path}; import gluon_svrg"],
        capture_output=True,
        text=True,
        cwd=first[0],
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        timeout=120,
        check=False,
    )


def test_without_mxnet(tmp_path):
    (tmp_path / "gluon_svrg").symlink_to(PACKAGE / "gluon_svrg")
    done = import_package(tmp_path, flags=["-S"])  # without site-packages, where MXNet is
    assert done.returncode == 1
    assert "ImportError: gluon_svrg needs MXNet, which is not installed." in done.stderr
    assert "pip install 'gluon-svrg[cpu]'" in done.stderr


def test_with_a_numpy_that_is_too_new(tmp_path):
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    done = subprocess.run(
        [*install, str(tmp_path), "numpy==1.24.4"], capture_output=True, timeout=300, check=False
    )
    if done.returncode:
        pytest.skip("needs NumPy 1.24 from a package index, and none can be reached")
    done = import_package(tmp_path, PACKAGE, flags=["-W", "ignore"])
    assert done.returncode == 1
    assert "ImportError: MXNet cannot be imported" in done.stderr
    assert "pip install 'numpy<1.24'" in done.stderr
