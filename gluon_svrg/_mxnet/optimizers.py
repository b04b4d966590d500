"""What MXNet keeps of its optimizers: attributes, and counters per device."""

from __future__ import annotations

from inspect import signature
from typing import Any, Iterable

from mxnet.optimizer import NAG, SGD, Optimizer

from .._arguments import near

__all__ = [
    "PLAIN_OPTIMIZERS", "check_optimizer", "class_of", "forget_momentum", "steps_along_gradient",
]  # fmt: skip

#: The attributes with the counts of updates: those of all devices, and those of one of them.
COUNTS = ("_all_index_update_counts", "_index_update_count")
#: The attributes that are dicts by the index of a parameter, or its name.
BY_INDEX = ("lr_mult", "wd_mult", "idx2name", "cumgrads")


def forget_momentum(updaters: Iterable[Any]) -> None:
    """Set the momentum of all parameters to zero."""
    for updater in updaters:
        for state in updater.states.values():
            state[:] = 0


def class_of(optimizer: Any) -> Any:
    """The class of an optimizer or of an optimizer's name; None for anything else."""
    if isinstance(optimizer, str):
        return Optimizer.opt_registry.get(optimizer.lower())
    return type(optimizer) if isinstance(optimizer, Optimizer) else None


#: Those that move weights along what they are handed over, at one rate.
PLAIN_OPTIMIZERS = (SGD, NAG)

#: Names of other libraries, and those of MXNet.
_NAMES = {"lr": "learning_rate", "weight_decay": "wd", "decay": "wd", "eps": "epsilon"}


def check_optimizer(optimizer: Any, settings: Any) -> None:
    """Raise if this is no optimizer and no name of one, or if it has no argument of a name."""
    cls = class_of(optimizer)
    if not isinstance(optimizer, (str, Optimizer)):
        is_class = isinstance(optimizer, type)
        found = f"the class {optimizer.__name__}" if is_class else type(optimizer).__name__
        name = optimizer.__name__.lower() if is_class else "sgd"
        raise TypeError(f"optimizer is {found}, expected a name such as {name!r}, or an Optimizer.")
    if isinstance(optimizer, str) and cls is None:
        hint = near(optimizer.lower(), Optimizer.opt_registry)
        raise ValueError(f"MXNet has no optimizer {optimizer!r}.{hint}")
    if not cls.__module__.startswith("mxnet.") or not isinstance(settings, dict):
        return
    classes = (each for each in cls.__mro__ if issubclass(each, Optimizer))
    known = {name for each in classes for name in signature(each.__init__).parameters}
    known -= {"self", "kwargs"}
    for name in settings:
        if name not in known:
            hint = near(name, known, _NAMES)
            raise TypeError(f"{cls.__name__} takes no argument {name!r}.{hint}")


def steps_along_gradient(optimizer: Any) -> bool:
    """Whether the step of an optimizer is one rate times a direction; True for an unknown name."""
    cls = class_of(optimizer)
    return cls is None or issubclass(cls, PLAIN_OPTIMIZERS)
