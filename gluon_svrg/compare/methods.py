"""The methods that are compared: what a name means, and how its trainer is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

from mxnet import gluon
from mxnet.optimizer import Optimizer

from .. import _mxnet
from .._arguments import near
from ..mars import MARSTrainer
from ..saga import SAGATrainer, SAGTrainer
from ..sarah import SARAHTrainer
from ..schedule import Linear
from ..storm import STORMTrainer
from ..svrg import SVRGTrainer
from ..trainer import VarianceReducedTrainer

#: The trainers of the package by the names of their methods.
TRAINERS: dict[str, Any] = dict.fromkeys(("svrg", "alpha-svrg", "svrg-stored"), SVRGTrainer)
TRAINERS.update(saga=SAGATrainer, sag=SAGTrainer, sarah=SARAHTrainer, storm=STORMTrainer)
TRAINERS.update(mars=MARSTrainer)
LBFGS, DECAY = "lbfgs", "-decay"
#: The middle one of the first three rates, as `rate_at` numbers them, for SGD and for other kinds.
FIRST_FOR_SGD, FIRST_FOR_OTHERS = -2, -5

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Method:
    """One of the methods that are compared."""

    name: str
    #: Makes a trainer of parameters and a rate; if it has a base, of options too. None for L-BFGS.
    make: Callable[..., Any] | None = None
    options: Sequence[Options] = ({},)  # those that are tried with each rate
    first: int = FIRST_FOR_SGD
    base: str = ""  # the name without optimizer and decay; empty if a function makes the trainer
    decays: bool = False
    code: str = ""  # of its trainer, with {} for the optimizer's arguments

    @property
    def is_plain(self) -> bool:
        """Whether it needs nothing of this package."""
        return self.base not in ("", *TRAINERS)

    def trainer(self, net: Any, rate: float, options: Options) -> Any:
        """A new trainer of a network; raise a TypeError if the user's function makes none."""
        assert self.make is not None
        arguments = (rate, options) if self.base else (rate,)
        found = self.make(net.collect_params(), *arguments)
        if not callable(getattr(found, "step", None)):
            kind = type(found).__name__
            raise TypeError(f"{self.name!r} returned {kind}, expected a trainer with step(n).")
        return found


def methods_of(
    methods: Any, optimizer_params: Mapping[str, Any] | None, snapshots: int, lock_random: bool
) -> list[Method]:
    """All methods that are named; raise if one is unknown."""
    if isinstance(methods, str):
        methods = (methods,)
    pairs = methods.items() if isinstance(methods, Mapping) else [(name, name) for name in methods]
    given, found, used = optimizer_params or {}, [], set()
    for name, what in pairs:
        if isinstance(what, str):
            method, keys = _named(name, what.lower(), given, snapshots, lock_random)
            used |= keys
        else:
            method = Method(name, what)
        found.append(method)
    names = [method.name for method in found]
    if not names or len({*names}) < len(names):
        raise ValueError(f"methods must be one or more, each once, got {names}.")
    for key in given.keys() - used:
        raise ValueError(
            f"optimizer_params has {key!r}, which is no method or optimizer of this comparison."
            f"{near(key.lower(), used)}"
        )
    return found


def _named(
    label: str, name: str, given: Mapping[str, Any], snapshots: int, lock_random: bool
) -> tuple[Method, set[str]]:
    """A method by its name, and the keys at which its options may stand."""
    if name == LBFGS:
        return Method(label, base=LBFGS), set()
    decays = name.endswith(DECAY)
    base, _, optimizer = (name[: -len(DECAY)] if decays else name).partition("+")
    is_ours = base in TRAINERS
    optimizer = optimizer or ("adam" if base == "mars" else "sgd") if is_ours else base
    if optimizer not in Optimizer.opt_registry or (not is_ours and "+" in name):
        known = [*TRAINERS, *Optimizer.opt_registry, LBFGS]
        raise ValueError(
            f"There is no method {name!r}.{near(optimizer if is_ours else base, known)} Choose "
            f"from {', '.join(TRAINERS)}, {LBFGS}, or an optimizer of MXNet such as sgd, nag and "
            "adam; svrg+nag is SVRG with NAG, and sgd-decay has a rate that falls to zero."
        )
    keys = [label, name, optimizer]
    options: Any = next((given[key] for key in keys if key in given), {})
    options = [options] if isinstance(options, Mapping) else list(options)
    if optimizer == "nag":  # its default is 0 in MXNet 1.9.1
        options = [{"momentum": 0.9, **each} for each in options]
    for each in options:
        if "learning_rate" in each:
            raise ValueError("optimizer_params must have no learning_rate: set learning_rates.")
        _mxnet.check_optimizer(optimizer, dict(each))
    trainer: Any = TRAINERS.get(base, gluon.Trainer)
    own: Any = {"lock_random": lock_random} if is_ours else {}
    code = trainer.__name__ if is_ours else "gluon.Trainer"
    code += f"(net.collect_params(), {optimizer!r}, {{}}"
    if base == "alpha-svrg":
        own["coefficient"] = Linear(0.75, snapshots)
        code += f", coefficient=Linear(0.75, {snapshots})"
    code += ")  # the rate falls to 0 like half a cosine" if decays else ")"

    def make(params: Any, rate: float, options: Options) -> Any:
        return trainer(params, optimizer, {**options, "learning_rate": rate}, kvstore=None, **own)

    first = FIRST_FOR_SGD if _mxnet.steps_along_gradient(optimizer) else FIRST_FOR_OTHERS
    return Method(label, make, options, first, base, decays, code), {*keys}


def needs(trainer: Any) -> tuple[bool, bool]:
    """Whether a trainer needs refreshes, and fixed minibatches: ours say so."""
    if isinstance(trainer, VarianceReducedTrainer):
        return trainer._method.needs_refresh, trainer._method.needs_table
    return hasattr(trainer, "update_full_grads"), False
