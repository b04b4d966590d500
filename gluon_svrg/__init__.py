"""Variance-reduced stochastic gradients for MXNet Gluon.

Each trainer replaces `gluon.Trainer`, and takes the same arguments:

- `SVRGTrainer` corrects gradients by those at a snapshot of the weights.
- `SAGATrainer` and `SAGTrainer` correct them by a table of the last gradients of all mini-batches.
- `SARAHTrainer` and `STORMTrainer` correct them by those at the weights before the last step.
- `MARSTrainer` does the same for Adam and other optimizers for networks.

`Nystrom` is a preconditioner for `SVRGTrainer`, which then sets its own rate and momentum.

These modules support the trainers:

- `gluon_svrg.compare`: trains your network by several methods.
- `gluon_svrg.schedule`: refresh and coefficient schedules, refreshes over part of the data.
- `gluon_svrg.variance`: the variance and the bias of the estimates.
- `gluon_svrg.prox`: penalties and bounds.
- `gluon_svrg.estimator`: training with Gluon's `Estimator`.

The command ``gluon-svrg`` compares methods (``compare``), starts jobs of several processes
(``launch``), and takes a role in one (``join``).
"""

# Names are imported on first use: `--help` needs no MXNet, and servers import this early.
from __future__ import annotations

from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING, Any

from .kvstore import job as _job

if TYPE_CHECKING:
    from .curvature.preconditioner import Nystrom as Nystrom
    from .mars import MARSTrainer as MARSTrainer
    from .saga import SAGATrainer as SAGATrainer
    from .saga import SAGTrainer as SAGTrainer
    from .sarah import SARAHTrainer as SARAHTrainer
    from .storm import STORMTrainer as STORMTrainer
    from .svrg import SVRGTrainer as SVRGTrainer

__version__ = "0.7.0"

#: Where each public name is defined.
_MODULES = {
    "MARSTrainer": "mars",
    "Nystrom": "curvature.preconditioner",
    "SAGATrainer": "saga",
    "SAGTrainer": "saga",
    "SARAHTrainer": "sarah",
    "STORMTrainer": "storm",
    "SVRGTrainer": "svrg",
}
__all__ = [*_MODULES, "__version__"]

#: Modules that users import.
_SUPPORTING = ("compare", "estimator", "prox", "schedule", "variance")

if _job.is_worker():
    _job.end_on_errors()


def __getattr__(name: str) -> Any:
    if name not in _MODULES and name not in _SUPPORTING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _require_mxnet()
    module = _import_module(f".{_MODULES.get(name, name)}", __name__)
    return getattr(module, name) if name in _MODULES else module


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUPPORTING})


def _find_mxnet() -> None:
    """Look for MXNet without importing it, which takes seconds; raise an ImportError if not."""
    if _find_spec("mxnet") is None:
        raise ImportError(
            "gluon_svrg needs MXNet, which is not installed. Run pip install '.[cpu]' in a clone, "
            "or install a build for your GPU, such as mxnet-cu112."
        )


def _require_mxnet() -> None:
    """Import MXNet; raise an ImportError that says how to install it, or its NumPy."""
    _find_mxnet()
    try:
        import mxnet  # noqa: F401
    except AttributeError as error:
        raise ImportError(
            f"MXNet cannot be imported ({error}). It needs an old NumPy: pip install 'numpy<1.24'."
        ) from error
