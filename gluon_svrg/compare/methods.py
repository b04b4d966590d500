"""The methods that are compared: what a name means, and how its trainer is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Sequence

from mxnet import gluon
from mxnet.optimizer import Optimizer

from .. import _mxnet
from .._arguments import near, whole
from ..mars import MARSTrainer
from ..preconditioner import Nystrom
from ..saga import SAGATrainer, SAGTrainer
from ..sarah import SARAHTrainer
from ..schedule import Linear
from ..storm import STORMTrainer
from ..svrg import SVRGTrainer
from ..trainer import VarianceReducedTrainer

#: The trainers of the package by the names of their methods.
TRAINERS: dict[str, Any] = dict.fromkeys(("svrg", "alpha-svrg", "svrg-stored"), SVRGTrainer)
TRAINERS.update(saga=SAGATrainer, sag=SAGTrainer, sarah=SARAHTrainer, storm=STORMTrainer)
TRAINERS.update({"mars": MARSTrainer, "svrg-nystrom": SVRGTrainer})
LBFGS, DECAY, NYSTROM = "lbfgs", "-decay", "svrg-nystrom"
#: Optimizers of those that have another one than SGD.
OPTIMIZERS = {"mars": "adam", NYSTROM: "nag"}
MEMORY = {"memory": 30}  # of L-BFGS: SciPy's own 10 needs more passes on large data
#: Optimizers whose weight decay is the gradient of the penalty, and takes no time of a step.
PENALIZING = ("sgd", "nag", "adam")
#: The middle one of the first three rates, as `rate_at` numbers them, for SGD and for other kinds.
FIRST_FOR_SGD, FIRST_FOR_OTHERS = -2, -5

Options = Mapping[str, Any]

SCIPY = (
    "found = scipy.optimize.minimize(loss_and_gradient, weights, jac=True, method='L-BFGS-B', "
    "options={{'maxcor': {memory}}})  # all of it: methods.md#l-bfgs in the guide"
)
SHAPE = (
    'It has a dict for each optimizer or method, {"nag": {"momentum": 0.9}}, or a list of dicts, '
    'which are all tried: {"nag": [{"momentum": 0.9}, {"momentum": 0.99}]}.'
)
WEIGHT_DECAY = (
    "optimizer_params has wd, which is no part of the loss that is compared. Pass l2=..., which is "
    "in the loss of all methods, or an objective that includes it."
)
NO_METHOD = (
    "{!r} is no method. Pass a name, as 'svrg+nag', or a dict with functions that make a trainer: "
    '{{"mine": lambda params, rate: SVRGTrainer(params, "sgd", {{"learning_rate": rate}})}}.'
)


@dataclass(frozen=True)
class Method:
    """One of the methods that are compared."""

    name: str
    #: Makes a trainer of parameters and a rate, or if it has a base, `settings`. None for L-BFGS.
    make: Callable[..., Any] | None = None
    sets_rate: bool = False  # whether it finds a rate by itself: one training a seed, no search
    options: Sequence[Options] = ({},)  # those that are tried with each rate
    first: int = FIRST_FOR_SGD
    base: str = ""  # the name without optimizer and decay; empty if a function makes the trainer
    decays: bool = False
    penalty: Options = field(default_factory=dict)  # of an optimizer whose weight decay is it
    code: str = ""  # that makes its trainer, with {} for the optimizer's arguments

    @property
    def is_plain(self) -> bool:
        """Whether it needs nothing of this package."""
        return self.base not in ("", *TRAINERS)

    def settings(self, rate: float, options: Options) -> dict[str, Any]:
        """The arguments of its optimizer."""
        rates = {} if self.sets_rate else {"learning_rate": rate}
        return {**rates, **options, **self.penalty}

    def trainer(self, net: Any, rate: float, options: Options) -> Any:
        """A new trainer of a network; raise a TypeError if the user's function makes none."""
        assert self.make is not None
        found = self.make(net.collect_params(), self.settings(rate, options) if self.base else rate)
        if not callable(getattr(found, "step", None)):
            kind = type(found).__name__
            raise TypeError(f"{self.name!r} returned {kind}, expected a trainer with step(n).")
        return found


def methods_of(
    methods: Any,
    optimizer_params: Mapping[str, Any] | None = None,
    l2: float | None = 0.0,
    snapshots: int = 1,
    lock_random: bool = False,
) -> list[Method]:
    """All methods that are named; raise if one is unknown. l2 is None where wd may be anything."""
    if isinstance(methods, str):
        methods = (methods,)
    pairs = methods.items() if isinstance(methods, Mapping) else [(name, name) for name in methods]
    given: Mapping[str, Any] = {} if optimizer_params is None else optimizer_params
    if not isinstance(given, Mapping):
        raise TypeError(f"optimizer_params must be a dict, got {type(given).__name__}. {SHAPE}")
    found, used = [], set()
    for name, what in pairs:
        if isinstance(what, str):
            method, keys = _named(str(name), what.lower(), given, l2, snapshots, lock_random)
            used |= keys
        elif not callable(what) or name is what or what in (gluon.Trainer, *TRAINERS.values()):
            raise TypeError(NO_METHOD.format(what))
        else:
            method = Method(name, what)
        found.append(method)
    names = [method.name for method in found]
    if not names or len({*names}) < len(names):
        raise ValueError(f"methods must be one or more, each once, got {names}.")
    for key in given.keys() - used:
        raise ValueError(
            f"optimizer_params has {key!r}, which is no method or optimizer of this comparison."
            f"{near(key.lower(), used)} {SHAPE}"
        )
    return found


def _options(
    given: Mapping[str, Any], keys: Sequence[str], l2: float | None
) -> list[dict[str, Any]]:
    """The options at the first of some keys, each of which is tried; raise if they are none."""
    options: Any = next((given[key] for key in keys if key in given), {})
    options = [options] if isinstance(options, Mapping) else options
    for each in options if isinstance(options, (list, tuple)) and options else [None]:
        if not isinstance(each, Mapping) or {list, tuple} & {*map(type, each.values())}:
            raise TypeError(f"optimizer_params has {options!r} for {keys[-1]!r}. {SHAPE}")
        if "learning_rate" in each:
            raise ValueError("optimizer_params must have no learning_rate: set learning_rates.")
        if "wd" in each and l2 is not None:
            raise ValueError(WEIGHT_DECAY)
    return [dict(each) for each in options]


def _named(
    label: str,
    name: str,
    given: Mapping[str, Any],
    l2: float | None,
    snapshots: int,
    lock_random: bool,
) -> tuple[Method, set[str]]:
    """A method by its name, and the keys at which its options may stand."""
    if name == LBFGS:
        memories = [{**MEMORY, **each} for each in _options(given, [label, name], l2)]
        for each in memories:
            if each.keys() != MEMORY.keys():
                raise TypeError(f"'lbfgs' has a memory alone, as {MEMORY}, got {each}.")
            whole(each["memory"], "the memory of 'lbfgs'")
        return Method(label, None, True, memories, base=LBFGS, code=SCIPY), {label, name}
    decays = name.endswith(DECAY)
    base, _, optimizer = (name[: -len(DECAY)] if decays else name).partition("+")
    is_ours = base in TRAINERS
    optimizer = (optimizer or OPTIMIZERS.get(base, "sgd")) if is_ours else base
    if optimizer not in Optimizer.opt_registry or (not is_ours and "+" in name):
        known = [*TRAINERS, *Optimizer.opt_registry, LBFGS]
        raise ValueError(
            f"There is no method {name!r}.{near(optimizer if is_ours else base, known)} Choose "
            f"from {', '.join(TRAINERS)}, {LBFGS}, or an optimizer of MXNet such as sgd, nag and "
            "adam; svrg+nag is SVRG with NAG, and sgd-decay has a rate that falls to zero."
        )
    keys, sets_rate = [label, name, optimizer], base == NYSTROM
    if sets_rate:
        decays, given = False, {}  # it sets all of it
    own = {"momentum": 0.9} if optimizer == "nag" and not sets_rate else {}  # 1.9.1 has 0
    options = [{**own, **each} for each in _options(given, keys, l2)]
    for each in options:
        _mxnet.check_optimizer(optimizer, each)
    trainer: Any = TRAINERS.get(base, gluon.Trainer)
    extra: Any = {"lock_random": lock_random} if is_ours else {}
    code = f"trainer = {trainer.__name__ if is_ours else 'gluon.Trainer'}"
    code += f"(net.collect_params(), {optimizer!r}, {{}}"
    if base == "alpha-svrg":
        extra["coefficient"] = Linear(0.75, snapshots)
        code += f", coefficient=Linear(0.75, {snapshots})"
    if sets_rate:
        extra["preconditioner"] = Nystrom()
        code += ", preconditioner=Nystrom()"
    code += ")  # the rate falls to 0 like half a cosine" if decays else ")"

    def make(params: Any, settings: dict[str, Any]) -> Any:
        return trainer(params, optimizer, settings, kvstore=None, **extra)

    first = FIRST_FOR_SGD if _mxnet.steps_along_gradient(optimizer) else FIRST_FOR_OTHERS
    penalty = {"wd": l2} if l2 and optimizer in PENALIZING else {}
    return Method(label, make, sets_rate, options, first, base, decays, penalty, code), {*keys}


def needs(trainer: Any) -> tuple[bool, bool]:
    """Whether a trainer needs refreshes, and fixed minibatches: ours say so."""
    if isinstance(trainer, VarianceReducedTrainer):
        return trainer._method.needs_refresh, trainer._method.needs_table
    return hasattr(trainer, "update_full_grads"), False
