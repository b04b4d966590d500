"""Several methods on your own network and data, with equal numbers of gradients and tuned rates.

Each method starts from the same weights, and searches its own rate, unless it sets that itself.
This needs pandas, scipy and tqdm, and for figures matplotlib.
"""

from __future__ import annotations

import re
from math import inf
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from .. import _arguments
from ..prox import ProxArgument
from .comparison import TAKEN, Comparison
from .data import Data
from .methods import methods_of, needs
from .search import Search
from .task import Task

__all__ = ["Comparison", "compare"]

METHODS = ("sgd", "sgd-decay", "adam", "svrg", "svrg+nag", "svrg-nystrom", "mars", "lbfgs")
RANDOM = "'lbfgs' needs the same loss each time, and here it is random (dropout). Leave it out."
NO_REFRESH = "{!r} would never refresh: pass more than plain_epochs + 1 = {} passes, not {:g}."
MANY = 10**6  # L-BFGS is not a default for more weights: it needs 520 bytes for each


def compare(
    new_net: Callable[[], Any],
    loss_of: Callable[..., Any],
    data: Any,
    *,
    methods: Any = METHODS,
    passes: float = 30,
    batch_size: int | None = None,
    seeds: int | Sequence[int] = 3,
    measure: Mapping[str, Callable[[Any], float]] | None = None,
    objective: str = "loss",
    maximize: bool | None = None,
    minimum: float | None = None,
    gaps: float | Sequence[float] = (1e-3, 1e-6, 1e-9),
    l2: float = 0.0,
    prox: ProxArgument = None,
    learning_rates: float | Sequence[float] | None = None,
    optimizer_params: Mapping[str, Any] | None = None,
    plain_epochs: int = 1,
    refresh_every: int = 1,
    seconds: float | None = None,
    rivals: Mapping[str, Mapping[str, Any]] | None = None,
    progress: bool = True,
) -> Comparison:
    """Train a network by several methods, and name the fastest in seconds and in passes.

    All methods compute equally many gradients. Each searches its learning rate in factors of about
    3 with the first seed, until the best one is in the interior of those tried. Then all seeds
    train at that rate, and at each rate whose first seed ends within the range of these seeds. The
    best median counts. L-BFGS searches nothing. It is the last to train, and goes on for as long as
    the slowest of the others took.

    Parameters
    ----------
    new_net : callable
        Returns a new network, initialized or not, with the same weights after the same seeds. If
        all are zero, small random ones take their place: some gradients of MXNet are wrong there.
    loss_of : callable
        ``loss_of(net, X, y)`` returns the loss of each sample.
    data : tuple of arrays, DataLoader, list of mini-batches, or callable
        Arrays of NumPy, MXNet or SciPy (dense ones are made), shuffled for each epoch;
        mini-batches, read once into arrays; or ``batches(seed, epoch)``, which returns those of an
        epoch.
    methods : sequence of str, or dict
        ``svrg``, ``alpha-svrg``, ``svrg-stored``, ``saga``, ``sag``, ``sarah``, ``storm``,
        ``mars``; ``lbfgs`` of SciPy; or an optimizer of MXNet. ``svrg+nag`` has another optimizer
        than ``sgd`` (``adam`` for ``mars``), and with ``-decay`` the rate falls to 0 like half a
        cosine. ``svrg-nystrom`` and ``svrg-stored-nystrom`` set their own rate and momentum. A dict
        has such names, or functions of the parameters and a rate that return a trainer. By default
        several, L-BFGS for at most 10^6 weights and where losses are not random.
    passes : float, default 30
        How many data passes each training makes, full gradients included.
    batch_size : int, optional
        Samples in a mini-batch of arrays, for all methods. By default that of a DataLoader, or from
        32 to 1,024: an epoch has about 128 to 256 steps if it can. ``svrg-nystrom`` has about 32.
    seeds : int or sequence of int, default 3
        How many seeds, or which.
    measure : dict, optional
        Functions of the network by their names, measured once a data pass, without their time.
    objective : str, default 'loss'
        What is compared: the mean loss over the data, or a measure.
    maximize : bool, optional
        Whether a larger objective is better; a measure as the objective needs it.
    minimum : float, optional
        The best possible objective, if it is known.
    gaps : float or sequence of float, default (1e-3, 1e-6, 1e-9)
        Distances to the minimum, as parts of the first one, whose passes and seconds the table has.
    l2 : float, default 0
        Half of it times the squared norm of all weights is in the loss of all methods.
    prox : Prox or dict, optional
        Penalties and bounds of all methods, as for `SVRGTrainer`, which are in the loss. Methods
        that cannot have them are left out; functions of yours pass them to trainers themselves.
    learning_rates : float or sequence of float, optional
        The only rates to try.
    optimizer_params : dict, optional
        For an optimizer or a method, its arguments, or a list of arguments to try with each rate:
        ``{"nag": [{"momentum": 0.9}, {"momentum": 0.99}]}``. ``lbfgs`` has a ``memory``, of 30.
    plain_epochs : int, default 1
        How many epochs a method makes before its first refresh.
    refresh_every : int, default 1
        How many epochs there are from one refresh to the next.
    seconds : float, optional
        When to end with what there is. Each method has an equal share of what is left.
    rivals : dict, optional
        What solvers of elsewhere need: ``{"newton-cholesky": {"loss": 0.74, "seconds": 0.6}}``,
        with the objective in place of the loss.
    progress : bool, default True
        Whether to show a bar, and the expected time.

    Returns
    -------
    Comparison
        The table, the figure, all trainings and the verdict. An interrupt returns what there is.

    Raises
    ------
    TypeError, ValueError
        If an argument is none of these, or makes no fair comparison.
    TimeoutError
        If the seconds are over before a training is complete.

    Examples
    --------
    >>> import numpy as np
    >>> from mxnet import gluon
    >>> from gluon_svrg.compare import compare
    >>> X = np.random.RandomState(0).normal(size=(64, 3))
    >>> found = compare(
    ...     lambda: gluon.nn.Dense(1), lambda net, X, y: gluon.loss.L2Loss()(net(X), y),
    ...     (X, X.sum(axis=1)), methods=["sgd", "svrg"], passes=4, seeds=1, progress=False)
    >>> list(found.chosen)
    ['sgd', 'svrg']
    """
    _arguments.number(passes, "passes", open_low=True)
    _arguments.whole(1 if batch_size is None else batch_size, "batch_size")
    _arguments.whole(plain_epochs, "plain_epochs", 0)
    _arguments.whole(refresh_every, "refresh_every")
    _arguments.number(l2, "l2")
    _arguments.number(minimum or 0, "minimum", low=-inf)
    most = inf if seconds is None else _arguments.number(seconds, "seconds", open_low=True)
    some: Any = seeds if hasattr(seeds, "__iter__") else range(_arguments.whole(seeds, "seeds", 0))
    all_seeds = [_arguments.whole(seed, "a seed", low=0) for seed in some]
    rates = None if learning_rates is None else _numbers(learning_rates, "learning_rates")
    parts = _numbers(gaps, "gaps")[::-1]
    if not all_seeds or rates == [] or not parts:
        raise ValueError("seeds, learning_rates and gaps must not be empty.")
    measures = dict(measure or {})
    for name in measures:
        if re.fullmatch(TAKEN, name) or (name == "gap" and minimum is not None):
            raise ValueError(f"A measure cannot be called {name!r}: the tables have such a column.")
    source = Data(data, batch_size, all_seeds[0])
    task = Task(new_net, loss_of, source, passes, measures, plain_epochs, refresh_every, l2, prox)
    if objective not in task.measures:
        raise ValueError(f"objective is {objective!r}, which is neither 'loss' nor measured.")
    if maximize is None and objective != "loss":
        raise ValueError(f"Is a larger {objective!r} better? Pass maximize=True or maximize=False.")
    for name, row in (rivals or {}).items():
        for key in (objective, "seconds"):
            _arguments.number(row.get(key), f"{key} of the rival {name!r}", low=-inf)
    task.check(all_seeds[0])
    if methods is METHODS and (task.is_random or task.weights > MANY):
        methods = [name for name in METHODS if name != "lbfgs"]
    snapshots = max(1, round((passes - plain_epochs) / (1 + 2 * refresh_every)))
    penalty = l2 if l2 or objective == "loss" else None
    known, left_out = methods_of(methods, optimizer_params, penalty, prox, snapshots), {}
    for name in {each.name for each in known}.intersection(rivals or ()):
        raise ValueError(f"A rival cannot be called {name!r}, as a method is.")
    for method in known:  # a mistake should not show only after the first trainings
        if not method.steps and task.is_random:
            raise ValueError(RANDOM)
        try:
            net, options = task.network(all_seeds[0]), method.options[0]
            refreshes, has_table = needs(method, method.trainer(task, net, 0.01, options))
        except ValueError as error:
            if prox is None:
                raise
            left_out[method.name] = str(error)
            continue
        if has_table or method.stores:
            source.fixed(all_seeds[0], method.name, source.size)
        if refreshes and passes <= plain_epochs + 1:
            raise ValueError(NO_REFRESH.format(method.name, plain_epochs + 1, passes))
    known = [method for method in known if method.name not in left_out]
    if not known:
        raise ValueError(f"No method is left to compare: {left_out}.")
    sign, start = -1 if maximize else 1, task.first[objective]
    if minimum is not None and sign * (start - minimum) <= 0:
        raise ValueError(f"minimum is {minimum:g}, and a new network is there already: {start:g}.")
    search = Search(task, known, all_seeds, rates, objective, sign, most)
    search.run(progress)
    return Comparison(search, minimum, parts, rivals or {}, left_out)


def _numbers(given: Any, name: str) -> list[float]:
    """One or several numbers above zero, in ascending order."""
    values = np.unique(given).tolist()
    return [_arguments.number(each, f"each of {name}", open_low=True) for each in values]
