"""SVRG, a variance-reduced stochastic gradient, for MXNet Gluon."""

import os as _os

from ._version import __version__

try:
    import mxnet as _mx
except ModuleNotFoundError as error:
    if error.name != "mxnet":
        raise
    raise ImportError(
        "gluon_svrg needs MXNet, which is not installed. Install the build for your machine: "
        "pip install 'gluon-svrg[cpu]', or mxnet-cu112 and the like for a GPU."
    ) from error
except AttributeError as error:
    raise ImportError(
        f"MXNet cannot be imported ({error}). MXNet 1.9.1 and 2.0.0b1 need numpy older than 1.24: "
        "pip install 'numpy<1.24'."
    ) from error

# Servers of a distributed store run inside `import mxnet`, when Gluon is not there yet.
if _os.environ.get("DMLC_ROLE", "worker") == "worker":
    from .mars import MARSTrainer
    from .saga import SAGATrainer, SAGTrainer
    from .sarah import SARAHTrainer
    from .stores.launcher import tell_launcher as _tell_launcher
    from .storm import STORMTrainer
    from .svrg import SVRGTrainer

    _tell_launcher()

__all__ = [
    "MARSTrainer",
    "SAGATrainer",
    "SAGTrainer",
    "SARAHTrainer",
    "STORMTrainer",
    "SVRGTrainer",
    "__version__",
]

del _mx
