"""The methods that are compared: what a name means, and how its trainer is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Sequence

from mxnet import gluon
from mxnet.optimizer import Optimizer

from .. import _mxnet
from .._arguments import near, whole
from ..curvature.preconditioner import Nystrom
from ..mars import MARSTrainer
from ..prox import ProxArgument
from ..saga import SAGATrainer, SAGTrainer
from ..sarah import SARAHTrainer
from ..schedule import Linear
from ..storm import STORMTrainer
from ..svrg import SVRGTrainer
from ..trainer import VarianceReducedTrainer
from .data import Data
from .task import Task

LBFGS, DECAY, STORED = "lbfgs", "-decay", "svrg-stored"
NYSTROM = ("svrg-nystrom", "svrg-stored-nystrom")
#: The trainers of the package by the names of their methods.
TRAINERS: dict[str, Any] = dict.fromkeys(("svrg", "alpha-svrg", STORED, *NYSTROM), SVRGTrainer)
TRAINERS.update(saga=SAGATrainer, sag=SAGTrainer, sarah=SARAHTrainer, storm=STORMTrainer)
TRAINERS["mars"] = MARSTrainer
#: The optimizers of methods whose default is not SGD.
OPTIMIZERS = {"mars": "adam", **dict.fromkeys(NYSTROM, "nag")}
#: Defaults of optimizers: SciPy's own memory of 10 needs more passes on large data, and
#: the momentum of NAG is 0 on MXNet 1.9.1.
DEFAULTS: dict[str, Any] = {LBFGS: {"memory": 30}, "nag": {"momentum": 0.9}}
#: Optimizers whose weight decay is the gradient of the penalty, so that the loss needs no penalty.
PENALIZING = ("sgd", "nag", "adam")

Options = Mapping[str, Any]

SCIPY = "scipy.optimize.minimize with {{'maxcor': {memory}}}: see methods.md#l-bfgs in the guide"
SHAPE = 'Pass {"nag": {"momentum": 0.9}}, or a list of dicts to try: {"nag": [{"momentum": 0.9}]}.'


@dataclass
class Contender:
    """One of the methods that are compared."""

    name: str
    make: Callable[..., Any] | None = None  # the user's function of parameters and a rate
    base: str = ""  # the name without optimizer and decay; empty if the user makes the trainer
    optimizer: str = ""
    decays: bool = False
    own: dict[str, Any] = field(default_factory=dict)  # more arguments of a trainer of ours
    options: Sequence[Options] = ({},)  # of the optimizer, all tried with each rate
    penalty: Options = field(default_factory=dict)  # l2 as the weight decay of the optimizer

    @property
    def steps(self) -> bool:
        """Whether a trainer makes its steps, unlike L-BFGS."""
        return self.base != LBFGS

    @property
    def sets_rate(self) -> bool:
        """Whether the method finds its own rate, so that there is nothing to search."""
        return self.base in (LBFGS, *NYSTROM)

    @property
    def stores(self) -> bool:
        """Whether refreshes store the gradients of mini-batches."""
        return self.base.startswith(STORED)

    def batch_size(self, data: Data) -> int:
        """How many samples its mini-batches have; 0 for L-BFGS, which has none."""
        return data.preconditioned_size if self.base in NYSTROM else data.size * self.steps

    @property
    def cls(self) -> Any:
        """The class of its trainer: without a refresh, `SVRGTrainer` is a proximal optimizer."""
        return TRAINERS.get(self.base, SVRGTrainer if "prox" in self.own else gluon.Trainer)

    def settings(self, rate: float, options: Options) -> dict[str, Any]:
        """The arguments of its optimizer."""
        rates = {} if self.sets_rate else {"learning_rate": rate}
        return {**rates, **options, **self.penalty}

    def trainer(self, problem: Task, net: Any, rate: float, options: Options) -> Any:
        """A new trainer of a network, None for L-BFGS; raise if there can be none."""
        params = net.collect_params()
        if not self.steps:
            if "prox" in self.own:
                raise ValueError("It takes no proximal operators.")
            return None
        if self.make is None:
            lock = {} if self.cls is gluon.Trainer else {"lock_random": problem.is_random}
            settings = self.settings(rate, options)
            return self.cls(params, self.optimizer, settings, kvstore=None, **lock, **self.own)
        trainer = self.make(params, rate)
        if not hasattr(trainer, "step"):
            raise TypeError(f"{self.name!r} returned {trainer!r}, expected a trainer with step(n).")
        return trainer

    def code(self, rate: float, options: Options, size: int) -> str:
        """The code that makes its trainer; none for a function of the user's."""
        if self.make is not None:
            return ""
        if not self.steps:
            return SCIPY.format(**options)
        cls = "gluon.Trainer" if self.cls is gluon.Trainer else self.cls.__name__
        own = "".join(f", {name}={value!r}" for name, value in self.own.items())
        arguments = f"net.collect_params(), {self.optimizer!r}, {self.settings(rate, options)}{own}"
        falls = "; the rate falls to 0 like half a cosine" if self.decays else ""
        return f"trainer = {cls}({arguments})  # mini-batches of {size}{falls}"


def methods_of(
    methods: Any, optimizer_params: Any, l2: float | None, prox: ProxArgument, snapshots: int
) -> list[Contender]:
    """All methods that are named; raise if one is unknown. l2 is None where wd may be anything."""
    methods = [methods] if isinstance(methods, str) else methods
    named = methods if isinstance(methods, Mapping) else {name: name for name in methods}
    given, contenders, used = dict(optimizer_params or {}), [], set()
    for name, what in named.items():
        if isinstance(what, str):
            method = _named(name, what.lower(), snapshots)
            keys = [name, what.lower(), method.optimizer]
            if method.base not in NYSTROM:  # which sets the momentum, too
                its_own: Any = next((given[key] for key in keys if key in given), {})
                method.options = _options(its_own, method, l2)
                used.update(keys)
            elif {name, what.lower()} & given.keys():
                raise ValueError(f"{name!r} takes no options. Leave it out of optimizer_params.")
            method.penalty = {"wd": l2} if l2 and method.optimizer in PENALIZING else {}
            method.own.update({} if prox is None else {"prox": prox})
            contenders.append(method)
        elif callable(what) and name is not what:
            contenders.append(Contender(name, what))
        else:
            raise TypeError(
                f"{what!r} is no method. Pass a name, as 'svrg+nag', or a dict with functions: "
                '{"mine": lambda params, rate: SAGATrainer(params, "sgd", {"learning_rate": rate})}'
            )
    for key in given.keys() - used:
        hint = near(key.lower(), used)
        raise ValueError(f"optimizer_params has {key!r}, which no method here takes.{hint} {SHAPE}")
    return contenders


def _named(label: str, name: str, snapshots: int) -> Contender:
    """A method by its name; raise a ValueError if it is unknown."""
    if name == LBFGS:
        return Contender(label, base=LBFGS, optimizer=LBFGS)
    decays = name.endswith(DECAY)
    base, _, optimizer = (name[: -len(DECAY)] if decays else name).partition("+")
    is_ours = base in TRAINERS
    optimizer = (optimizer or OPTIMIZERS.get(base, "sgd")) if is_ours else base
    if optimizer not in Optimizer.opt_registry or (not is_ours and "+" in name):
        hint = near(optimizer, [*TRAINERS, *Optimizer.opt_registry, LBFGS])
        raise ValueError(
            f"There is no method {name!r}.{hint} Choose from {', '.join(TRAINERS)}, lbfgs, or an "
            "optimizer of MXNet, as sgd; svrg+nag is SVRG with NAG; sgd-decay has a falling rate."
        )
    if base in NYSTROM and decays:
        raise ValueError(f"{name!r} cannot decay a learning rate that {base!r} sets itself.")
    own: dict[str, Any] = {"preconditioner": Nystrom()} if base in NYSTROM else {}
    if base == "alpha-svrg":
        own["coefficient"] = Linear(0.75, snapshots)
    return Contender(label, None, base, optimizer, decays, own)


def _options(given: Any, method: Contender, l2: float | None) -> list[dict[str, Any]]:
    """The options that are tried, with their defaults; raise if a method cannot have them."""
    several = [given] if isinstance(given, Mapping) else given
    for each in several if isinstance(several, (list, tuple)) and several else [None]:
        if not isinstance(each, Mapping) or {list, tuple} & {*map(type, each.values())}:
            raise TypeError(f"optimizer_params has {given!r} for {method.optimizer!r}. {SHAPE}")
        if "learning_rate" in each:
            raise ValueError("optimizer_params must have no learning_rate: set learning_rates.")
        if "wd" in each and l2 is not None:
            raise ValueError("wd is no part of the loss that is compared. Pass l2=..., which is.")
        if method.steps:
            _mxnet.check_optimizer(method.optimizer, each)
        elif each.keys() - {"memory"}:
            raise TypeError(f"'lbfgs' has a memory alone, as {DEFAULTS[LBFGS]}, got {each}.")
        else:
            whole(each.get("memory", 1), "the memory of 'lbfgs'")
    own = DEFAULTS.get(method.optimizer, {})
    return [{**own, **each} for each in several]


def needs(method: Contender, trainer: Any) -> tuple[bool, bool]:
    """Whether a trainer needs refreshes, and whether it always has a table."""
    if method.base not in ("", *TRAINERS):  # a plain optimizer, or L-BFGS
        return False, False
    if isinstance(trainer, VarianceReducedTrainer):
        return trainer._method.needs_refresh, trainer._method.needs_table
    return hasattr(trainer, "update_full_grads"), False
