"""What MXNet keeps of its optimizers: states per parameter, counters per device, attributes."""

from __future__ import annotations

import copy
import math
import warnings
from difflib import get_close_matches
from inspect import signature
from typing import Any, Dict, Iterator, Mapping

import mxnet as mx
import numpy as np
from mxnet.lr_scheduler import FactorScheduler, LRScheduler, MultiFactorScheduler
from mxnet.ndarray import NDArray
from mxnet.optimizer import NAG, SGD, Optimizer

#: Attributes with the counts of updates: those of all devices, and those of one of them.
COUNTS = ("_all_index_update_counts", "_index_update_count")
#: Attributes that are dicts by the index of a parameter.
BY_INDEX = ("lr_mult", "wd_mult", "idx2name", "cumgrads")
#: Attributes that are not compared and assigned like all other attributes.
SEPARATE = (*COUNTS, *BY_INDEX)

#: Updates per device and index.
Counts = Dict[int, Dict[int, int]]

_MOST_UPDATES = 2**31


def generation(version: str) -> str:
    """The first number of a version of MXNet: all differences are between 1 and 2."""
    return version.partition(".")[0]


def here() -> str:
    """The first number of the running MXNet's version."""
    return generation(mx.__version__)


def is_of_mxnet(value: Any) -> bool:
    """Whether the class of an object is defined in MXNet, so that its attributes are known."""
    return isinstance(value, (Optimizer, LRScheduler)) and type(value).__module__.startswith(
        "mxnet."
    )


# --- states ------------------------------------------------------------------------------------


def states(updater: Any) -> dict[Any, Any]:
    """The states of an updater, by index."""
    return updater.states


def put_states(updater: Any, states: dict[Any, Any]) -> None:
    """Give an updater its states. It moves them to its device when it uses them."""
    updater.states = states
    updater.states_synced = dict.fromkeys(states, False)


def new_state(optimizer: Optimizer, index: Any, weight: NDArray) -> Any:
    """The initial state of an optimizer for a weight."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # float16 without a master copy: warned at the first update
        return optimizer.create_state_multi_precision(index, weight)


#: The optimizers that keep (momentum, master copy) for float16 weights; all other optimizers of
#: MXNet keep (master copy, the rest).
_MOMENTUM_FIRST = {"1": {"SGD", "NAG", "LARS", "ccSGD"}, "2": frozenset()}


def with_master_copy(state: Any, name: str, was: str, now: str) -> Any:
    """Convert the state of a float16 weight from one generation of MXNet to another.

    Parameters
    ----------
    state : tuple
        Momentum and master copy, in either order.
    name : str
        The class of the optimizer.
    was, now : str
        The generations.
    """
    turned = (name in _MOMENTUM_FIRST[was]) != (name in _MOMENTUM_FIRST[now])
    return state[::-1] if turned else state


#: Attributes with different names in MXNet 1.9.1 and MXNet 2.0.
_RENAMED = {
    "RMSProp": {"gamma1": "rho", "gamma2": "momentum"},
    "AdaGrad": {"float_stable_eps": "epsilon"},
    "GroupAdaGrad": {"float_stable_eps": "epsilon"},
}


def renamed(name: str, was: str, now: str) -> dict[str, str]:
    """Map the attributes of an optimizer to their names in another generation of MXNet."""
    names = _RENAMED.get(name, {})
    if was == now:
        return {}
    return dict(names) if was == "1" else {new: old for old, new in names.items()}


def weight_decays(optimizer: Optimizer, indices: list[Any]) -> list[float]:
    """The weight decay that an optimizer adds to the gradient, for each parameter.

    It is rounded to float32, as in the optimizer's operators.
    """
    return [float(np.float32(wd)) for wd in optimizer._get_wds(indices)]


def class_of(optimizer: Any) -> Any:
    """The class of an optimizer or of an optimizer's name; None for anything else."""
    if isinstance(optimizer, str):
        return Optimizer.opt_registry.get(optimizer.lower())
    return type(optimizer) if isinstance(optimizer, Optimizer) else None


#: Names of other libraries, and those of MXNet.
_NAMES = {"lr": "learning_rate", "weight_decay": "wd", "decay": "wd", "eps": "epsilon"}


def check_optimizer(optimizer: Any, settings: Any) -> None:
    """Raise if MXNet has no optimizer of a name, or it has no argument of a name."""
    cls = class_of(optimizer)
    if isinstance(optimizer, str) and cls is None:
        near = get_close_matches(optimizer.lower(), Optimizer.opt_registry, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"MXNet has no optimizer {optimizer!r}.{hint}")
    if cls is None or not cls.__module__.startswith("mxnet.") or not isinstance(settings, dict):
        return
    classes = (each for each in cls.__mro__ if issubclass(each, Optimizer))
    known = {name for each in classes for name in signature(each.__init__).parameters}
    for name in settings:
        if name not in known:
            near = [_NAMES[name]] if name in _NAMES else get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{cls.__name__} takes no argument {name!r}.{hint}")


def steps_along_gradient(optimizer: Any) -> bool:
    """Whether the step of an optimizer, or of a named one, is the rate times a direction.

    The rate must be the same for all weights; momentum is allowed. True for an unknown name, about
    which MXNet raises its own error.
    """
    cls = class_of(optimizer)
    return cls is None or issubclass(cls, (SGD, NAG))


def last_rate(optimizer: Optimizer, index: int) -> float:
    """The learning rate of the last update of a parameter, with scheduler and multiplier.

    It is rounded to float32, as in the operators of MXNet's optimizers.
    """
    (rate,) = optimizer._get_lrs([index])
    return float(np.float32(rate))


# --- counters ----------------------------------------------------------------------------------


def counts(optimizer: Optimizer) -> Counts:
    """The number of updates of each parameter, by device and index."""
    return {device: dict(row) for device, row in optimizer._all_index_update_counts.items()}


def put_counts(optimizer: Optimizer, counts: Mapping[int, Mapping[int, int]], device: int) -> None:
    """Assign the counts of all devices to an optimizer, and let it count for one of them."""
    found = {number: dict(row) for number, row in counts.items()}
    optimizer._all_index_update_counts = found
    optimizer._index_update_count = found.setdefault(device, {})


# --- checks ------------------------------------------------------------------------------------


def count_problems(optimizer: Optimizer, num_update: Any, counts: Any) -> Iterator[str]:
    """Describe what is wrong with saved counts, by device and index."""
    lowest = min(0, optimizer.begin_num_update)
    rows = counts.values() if isinstance(counts, dict) else [None]
    numbers = [num_update]
    for row in rows:
        if not isinstance(row, dict):
            yield "its counts of updates are malformed"
            return
        numbers += row.values()
    if not all(type(number) is int and lowest <= number < _MOST_UPDATES for number in numbers):
        yield f"its counts of updates must be whole numbers from {lowest} to {_MOST_UPDATES}"
    elif any(type(device) is not int or device < 0 for device in counts):
        yield "its counts of updates belong to no device"
    elif len(numbers) > 1 and max(numbers[1:]) > num_update:
        yield f"it counts {num_update} updates, and {max(numbers[1:])} of one parameter"


def scheduler_problem(scheduler: Any, num_update: int) -> str:
    """Try a disposable copy of a scheduler at the next update.

    Returns
    -------
    str
        The problem; empty if there is none.
    """
    for inner in _schedulers_in(scheduler):
        if isinstance(inner, FactorScheduler):  # it counts up to the update in steps
            step, count = inner.step, inner.count
            if not (step >= 1 and (num_update - count) / step < 1e6):
                return f"its FactorScheduler cannot count from {count} by {step} to {num_update}"
        if isinstance(inner, MultiFactorScheduler):
            place = inner.cur_step_ind
            if not 0 <= place <= len(inner.step):
                return f"its MultiFactorScheduler is at step {place} of {len(inner.step)}"
    rate = scheduler(num_update + 1)
    if isinstance(rate, complex) or not math.isfinite(rate):
        return f"its {type(scheduler).__name__} gives a learning rate of {rate}"
    return ""


def _schedulers_in(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield a scheduler, and the schedulers in its attributes."""
    if isinstance(value, LRScheduler):
        yield value
        value = list(vars(value).values())
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)) and depth < 60:
        for item in value:
            yield from _schedulers_in(item, depth + 1)


def scratch(value: Any) -> Any:
    """Copy an optimizer or scheduler with all of its contents except parameters.

    Returns None if something in it cannot be copied.
    """
    try:
        return copy.deepcopy(value)
    except Exception:  # a scheduler of the user's may raise anything when it is copied
        return None


def update_problem(optimizer: Optimizer) -> str:
    """Try a disposable copy of an optimizer of MXNet on a new weight.

    Returns
    -------
    str
        The problem; empty if there is none.
    """
    if optimizer.lr_scheduler is not None:
        problem = scheduler_problem(optimizer.lr_scheduler, optimizer.num_update)
        if problem:
            return problem
    if type(optimizer).__name__ == "SGLD":  # it would draw random numbers, with nothing to try
        return ""
    index = -1
    weight, gradient = (mx.nd.ones((2, 2)) for _ in range(2))
    for row in optimizer._all_index_update_counts.values():
        row[index] = optimizer.num_update
    updater = mx.optimizer.get_updater(optimizer)
    updater([index], [gradient], [weight])
    weight.asnumpy()
    return "" if np.isfinite(optimizer.learning_rate) else "its learning rate is not finite"
