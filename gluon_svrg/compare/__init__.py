"""Several methods on your own network and data, with equal numbers of gradients and tuned rates.

Each method starts from the same weights, sees the same minibatches, and searches its own rate.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Callable, Mapping, Sequence

from .. import _arguments
from ..passes.closure import takes
from .comparison import Comparison
from .data import Data
from .methods import methods_of, needs
from .search import Search
from .training import Problem

__all__ = ["Comparison", "compare"]


def compare(
    new_net: Callable[[], Any],
    loss_of: Callable[..., Any],
    data: Any,
    *,
    methods: Any = ("sgd", "sgd-decay", "adam", "svrg", "svrg+nag", "mars"),
    passes: float = 30,
    batch_size: int = 32,
    seeds: int | Sequence[int] = 3,
    measure: Mapping[str, Callable[[Any], float]] | None = None,
    objective: str = "loss",
    maximize: bool = False,
    minimum: float | None = None,
    gaps: Sequence[float] = (1e-3, 1e-6, 1e-9),
    learning_rates: Sequence[float] | None = None,
    optimizer_params: Mapping[str, Any] | None = None,
    plain_epochs: int = 1,
    refresh_every: int = 1,
    progress: bool = True,
) -> Comparison:
    """Train a network by several methods, and tell which is best.

    All methods make equally many gradients. Each searches its learning rate in factors of about 3
    with the first seed, until the best is no edge. Then all seeds train there and at each rate
    whose first seed is in the range of theirs, and the best median counts.

    Parameters
    ----------
    new_net : callable
        Returns a new network, initialized or not, with the same weights after the same seeds.
    loss_of : callable
        ``loss_of(net, X, y)`` returns the loss of each sample.
    data : tuple of arrays, or callable
        Arrays of NumPy or MXNet, or ``batches(seed, epoch)``, which returns the minibatches of an
        epoch. Arrays are shuffled for each epoch.
    methods : sequence of str, or dict
        ``svrg``, ``alpha-svrg``, ``svrg-stored``, ``saga``, ``sag``, ``sarah``, ``storm``,
        ``mars``; ``lbfgs`` of SciPy; or an optimizer of MXNet. ``svrg+nag`` has another optimizer
        than ``sgd`` (``adam`` for ``mars``), and with ``-decay`` the rate falls to 0 like half a
        cosine. A dict has such names, or functions of the parameters and a learning rate that
        return a trainer.
    passes : float, default 30
        How many data passes each training makes, full gradients included.
    batch_size : int, default 32
        Samples in a minibatch of arrays.
    seeds : int or sequence of int, default 3
        How many seeds, or which.
    measure : dict, optional
        Functions of the network by their names, measured once a data pass, without their time.
    objective : str, default 'loss'
        What is compared: the mean loss over the data, or a measure.
    maximize : bool, default False
        Whether a larger objective is better.
    minimum : float, optional
        The best possible objective, if it is known.
    gaps : sequence of float, default (1e-3, 1e-6, 1e-9)
        Distances to the minimum, as parts of the first one, whose passes the table has.
    learning_rates : sequence of float, optional
        The only rates to try.
    optimizer_params : dict, optional
        For an optimizer or a method, its arguments, or a list of arguments to try with each rate:
        ``{"nag": [{"momentum": 0.9}, {"momentum": 0.99}]}``.
    plain_epochs : int, default 1
        How many epochs a method makes before its first refresh.
    refresh_every : int, default 1
        How many epochs there are from one refresh to the next.
    progress : bool, default True
        Whether to show a bar.

    Returns
    -------
    Comparison
        The table, the figure, all trainings and the verdict. An interrupt returns what there is.

    Raises
    ------
    TypeError, ValueError
        If an argument is none of these; if the network was trained before; if the loss is a mean.
    ImportError
        If pandas or tqdm is not installed.

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
    for name in ("pandas", "tqdm"):
        if find_spec(name) is None:
            raise ImportError(f"compare needs {name}: pip install {name}.")
    _arguments.number(passes, "passes", open_low=True)
    _arguments.whole(batch_size, "batch_size")
    _arguments.whole(plain_epochs, "plain_epochs", 0)
    _arguments.whole(refresh_every, "refresh_every")
    some: Any = seeds if hasattr(seeds, "__iter__") else range(_arguments.whole(seeds, "seeds"))
    all_seeds = [_arguments.whole(seed, "a seed", low=0) for seed in some]
    rates = learning_rates
    if rates is not None:
        rates = sorted({_arguments.number(rate, "a rate", open_low=True) for rate in rates})
    if not all_seeds or rates == []:
        raise ValueError("seeds and learning_rates must not be empty.")
    source = Data(data, batch_size, all_seeds[0])
    if not takes(loss_of, (None, *next(source.batches(all_seeds[0], 0)))):
        raise TypeError("loss_of must take the network and a minibatch, as in loss_of(net, X, y).")
    measures = dict(measure or {})
    problem = Problem(new_net, loss_of, source, passes, measures, plain_epochs, refresh_every)
    if objective not in problem.measures:
        hint = _arguments.near(objective, problem.measures)
        raise ValueError(f"objective is {objective!r}, which is neither 'loss' nor measured.{hint}")
    is_random = problem.check(all_seeds[0])
    snapshots = max(1, round((passes - plain_epochs) / (1 + 2 * refresh_every)))
    known = methods_of(methods, optimizer_params, snapshots, is_random)
    for method in known:  # mistakes must not wait for the first trainings
        if method.make is not None:
            net = problem.network(all_seeds[0])
            trainer = method.trainer(net, 0.01, method.options[0])
            if needs(trainer)[1] or method.base == "svrg-stored":
                source.fixed(all_seeds[0], method.name)
        elif is_random:
            raise ValueError(
                "'lbfgs' needs the same loss each time, and this network draws random numbers "
                "(dropout), or loss_of does. Leave it out."
            )
    search = Search(problem, known, all_seeds, rates, objective, -1 if maximize else 1)
    search.run(progress)
    return Comparison(search, minimum, gaps)
