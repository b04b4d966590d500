"""Check that MXNet is installed, and say how to install it, before anything else fails."""

from __future__ import annotations

from importlib.util import find_spec

_MISSING = (
    "gluon_svrg needs MXNet, which is not installed. Install the build for your machine: "
    "pip install '.[cpu]' in a clone of this package, or mxnet-cu112 and the like for a GPU."
)


def find_mxnet() -> None:
    """Look for MXNet without importing it, which takes seconds.

    Raises
    ------
    ImportError
        If MXNet is not installed.
    """
    if find_spec("mxnet") is None:
        raise ImportError(_MISSING)


def require_mxnet() -> None:
    """Import MXNet.

    Raises
    ------
    ImportError
        If MXNet is not installed, or cannot use the installed NumPy.
    """
    try:
        import mxnet  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "mxnet":
            raise
        raise ImportError(_MISSING) from error
    except AttributeError as error:
        raise ImportError(
            f"MXNet cannot be imported ({error}). MXNet 1.9.1 and 2.0.0b1 need numpy older than "
            "1.24: pip install 'numpy<1.24'."
        ) from error
