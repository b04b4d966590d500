"""Train a linear model with a plain optimizer, SVRG and other methods, and compare their losses.

All start at zero, see the samples in the same order, and make as many data passes, full gradients
included. Each tries all learning rates with one seed, and trains at the best one with more seeds.

a .csv or .tsv file:
  UTF-8 text whose first line names the columns, separated by commas, semicolons, tabs or |. Rows
  without a target are left out. A text, or up to 20 whole numbers, are classes. Missing numbers
  become the mean of their column; each text, "missing" included, an input of 0 and 1. Left out are
  columns without a name, or with more than 100 texts or fewer than two rows for each. Inputs, and
  numbers to predict, are scaled to mean 0 and variance 1.

for example:
  gluon-svrg compare digits --methods sgd,svrg,saga --learning-rates 0.03,0.1,0.3,1
  gluon-svrg compare houses.csv --target price --output houses
"""

from __future__ import annotations  # functions import the rest: --help must need no MXNet

import argparse
import csv
import json
import math
import sys
import tempfile
import warnings
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Iterator

from .. import __version__, _require_mxnet

#: Each method's trainer, color (Okabe and Ito's, for color-blind readers too) and marker.
METHODS = {
    "sgd": ("SVRGTrainer", "#777777", "o"),  # without a snapshot it is `gluon.Trainer`
    "sgd-decay": ("SVRGTrainer", "#777777", "X"),
    "svrg": ("SVRGTrainer", "#0072B2", "s"),
    "alpha-svrg": ("SVRGTrainer", "#56B4E9", "D"),
    "saga": ("SAGATrainer", "#009E73", "^"),
    "sag": ("SAGTrainer", "#E69F00", "v"),
    "sarah": ("SARAHTrainer", "#CC79A7", "P"),
    "storm": ("STORMTrainer", "#D55E00", "h"),
    "mars": ("MARSTrainer", "#000000", "*"),
}
#: 1e-05, 3e-05, ... 100, 300: the learning rates of a search, which begins with 0.01 to 3.
LADDER = [float(f"{digit}e{power}") for power in range(-5, 3) for digit in (1, 3)]
BUNDLED = ("digits", "breast_cancer", "diabetes")
ROUNDING = 1e-14  # differences of losses below it are rounding errors
INFINITE = sys.float_info.max  # stands for infinity, which JSON does not have


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "compare",
        help=str(__doc__).partition("\n")[0],
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=partial(run, parser))
    add, shown = parser.add_argument, "(default: %(default)s)"
    add("data", metavar="DATA", help=f"{', '.join(BUNDLED)}, or a file")
    add("--target", help="the column of the file to predict")
    text = (
        f"some of {', '.join(METHODS)}. Here sgd is the plain --optimizer. The rate of sgd-decay "
        f"falls to 0 like half a cosine, the coefficient of alpha-svrg linearly from 0.75 {shown}"
    )
    add("--methods", type=str.lower, default="sgd,sgd-decay,svrg", help=text)
    add("--optimizer", choices=("sgd", "nag", "adam"), default="sgd", help=f"of all {shown}")
    text = "to try with each method; by default 0.01,0.03,0.1,0.3,1,3, and beyond if an end is best"
    add("--learning-rates", help=text)
    for name, default, text in (
        ("--weight-decay", 0.01, "times half the squared norm of all weights is in the loss"),
        ("--coefficient", 1.0, "how much of its correction SVRG uses: 1 is all, 0 is none"),
        ("--epochs", 20, "how many epochs SVRG trains; all others make as many data passes"),
        ("--plain-epochs", 1, "epochs of the plain optimizer before the first full gradient"),
        ("--update-freq", 2, "epochs from one full gradient to the next"),
        ("--batch-size", 16, "samples in a minibatch"),
        ("--seed", 0, "the first seed of the order of the samples"),
        ("--seeds", 3, "how many seeds train at the best rate"),
    ):
        add(name, type=type(default), default=default, help=f"{text} {shown}")
    add("--output", type=Path, default=Path("results"), help=f"the folder for the files {shown}")


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Compare the methods, print the table, and write the files."""
    try:
        _require_mxnet()
        for name in ("matplotlib", "pandas", "sklearn", "tqdm"):
            if find_spec(name) is None:
                raise ImportError(f"{name} is not installed: pip install '.[compare]' in a clone")
        check(options)
        problem = Problem(options)
        options.output.mkdir(parents=True, exist_ok=True)
        record, figure = options.output / "results.json", options.output / "curves.png"
        tempfile.TemporaryFile(dir=options.output).close()  # so files can be written there
    except (ImportError, OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    results = compare(problem, options)
    record.write_text(json.dumps(results, indent=1, allow_nan=False, default=str) + "\n")
    draw(results, figure)
    print(f"{table(results)}\n\nwritten: {figure}, {record}")
    return 0


def check(options: argparse.Namespace) -> None:
    """Raise a ValueError unless the options can be used; make lists of methods and rates."""
    options.methods = options.methods.replace(" ", "").split(",")
    if options.learning_rates is not None:
        options.learning_rates = sorted({float(rate) for rate in options.learning_rates.split(",")})
    for name in options.methods:
        if name not in METHODS or options.methods.count(name) > 1:
            raise ValueError(f"--methods: choose each once from {', '.join(METHODS)}, not {name!r}")
    if not all(0 < rate < 2.0**128 for rate in options.learning_rates or [1]):
        raise ValueError("--learning-rates must be positive, as in 0.01,0.1,1")
    for name, value in vars(options).items():
        low = 1 if name in ("epochs", "update_freq", "batch_size", "seeds") else 0
        if isinstance(value, (int, float)) and not low <= value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be {low} or more, got {value}")


def read(path: Path, target: str | None) -> tuple[Any, Any, int]:
    """Read inputs, targets, and the number of classes (0 for a regression) from a file."""
    import pandas as pd

    try:
        with path.open(encoding="utf-8-sig") as file, warnings.catch_warnings():
            separator = csv.Sniffer().sniff(next(filter(str.strip, file), ""), ",;\t|").delimiter
            warnings.simplefilter("error", pd.errors.ParserWarning)  # of cells without a column
            options = {"index_col": False, "skipinitialspace": True, "na_values": "?"}
            frame = pd.read_csv(path, sep=separator, encoding="utf-8-sig", **options)
    except (csv.Error, OSError, ValueError, pd.errors.ParserWarning) as error:
        raise ValueError(f"cannot read {path} as UTF-8 text: {str(error).strip()}") from error
    if target not in frame:
        names = ", ".join(map(repr, frame))
        raise ValueError(f"{path} has no column {target!r}: choose a --target from {names}")
    rows = frame.dropna(subset=[target])
    y = rows.pop(target)
    texts, columns = [*frame.select_dtypes(exclude="number")], {}
    for name, cells in rows.items():
        most = min(100, cells.count() // 2) if name in texts else math.inf
        if 0 < cells.nunique() <= most and not name.startswith("Unnamed: "):
            coded = pd.get_dummies(cells, dummy_na=cells.hasnans) if name in texts else cells
            columns[name] = coded.fillna(coded.mean())
    if not columns:
        raise ValueError(f"{path} has no numbers and no categories to learn {target!r} from")
    labels, most = y.nunique(), len(y) // 2
    is_class = target in texts or (labels <= min(20, most) and (y % 1 == 0).all())
    if labels < 2 or (is_class and labels > most):
        found = "constant" if labels < 2 else f"text with {labels} values in {len(y)} rows"
        raise ValueError(f"{path} has a target {target!r} that nothing can learn: it is {found}")
    X = pd.concat(columns, axis=1).to_numpy(float)
    text = f"{len(y)} of {len(frame)} rows, {X.shape[1]} inputs, {labels if is_class else 'no'} "
    text += f"classes, {rows[[*columns]].isna().sum().sum()} missing cells, columns left out: "
    print(f"{path}: {text}{[*rows.columns.difference([*columns])]}", file=sys.stderr)
    return (X, pd.factorize(y, sort=True)[0], labels) if is_class else (X, y.to_numpy(float), 0)


class Problem:
    """A linear model on a data set, and its mean loss with the L2 penalty."""

    def __init__(self, options: argparse.Namespace) -> None:
        import sklearn.datasets
        from mxnet import gluon
        from sklearn.preprocessing import StandardScaler

        if options.data in BUNDLED:
            X, y = getattr(sklearn.datasets, f"load_{options.data}")(return_X_y=True)
            self.classes = 0 if options.data == "diabetes" else len(set(y))
        else:
            X, y, self.classes = read(Path(options.data), options.target)
        scaled = StandardScaler().fit_transform
        self.X = X / 16 if options.data == "digits" else scaled(X)
        self.y = y if self.classes else scaled(y[:, None])[:, 0]
        self.n, self.decay = len(X), options.weight_decay
        outputs = self.classes if self.classes > 2 else 1
        self.net = gluon.nn.Dense(outputs, in_units=X.shape[1], dtype="float64")
        self.net.hybridize()
        kind = {0: "L2", 2: "SigmoidBinaryCrossEntropy"}.get(self.classes, "SoftmaxCrossEntropy")
        self.loss = getattr(gluon.loss, f"{kind}Loss")()

    def loss_of(self, X: Any, y: Any) -> Any:
        """The penalized loss of each sample."""
        penalty = (self.net.weight.data() ** 2).sum() + (self.net.bias.data() ** 2).sum()
        return self.loss(self.net(X), y) + 0.5 * self.decay * penalty

    def measure(self, weights: Any) -> tuple[float, float, float | None]:
        """The loss (MXNet 2.0 rounds it to float32), the norm of its gradient, and the accuracy."""
        import numpy as np

        X, rows, accuracy = np.c_[self.X, np.ones(self.n)], range(self.n), None
        output = X @ weights.T
        if self.classes:
            if self.classes == 2:
                output = np.c_[np.zeros(self.n), output]
            total = np.logaddexp.reduce(output, axis=1)
            losses, slopes = total - output[rows, self.y], np.exp(output - total[:, None])
            slopes[rows, self.y] -= 1
            accuracy = float((output.argmax(axis=1) == self.y).mean())
        else:
            slopes = output - self.y[:, None]
            losses = 0.5 * slopes**2
        gradient = slopes[:, -len(weights) :].T @ X / self.n + self.decay * weights
        loss = losses.mean() + 0.5 * self.decay * (weights**2).sum()
        return float(loss), float(np.linalg.norm(gradient)), accuracy

    def minimum(self) -> float | None:
        """The lowest loss, by scikit-learn; None if it is not known."""
        import numpy as np
        from sklearn.linear_model import LogisticRegression, Ridge

        if self.classes and not self.decay:
            return None
        solver: Any = Ridge(self.decay * self.n, fit_intercept=False, solver="svd")
        if self.classes:
            exact = {"solver": "newton-cg", "tol": 1e-12, "max_iter": 1000}
            solver = LogisticRegression(C=1 / solver.alpha, fit_intercept=False, **exact)
        X = np.c_[self.X, np.ones(self.n)]  # the bias is penalized like a weight
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the gradient shows whether it has converged
            loss, norm, _ = self.measure(np.atleast_2d(solver.fit(X, self.y).coef_))
        # The loss is strongly convex: this bounds its distance to the minimum.
        return loss if norm**2 <= 2 * self.decay * ROUNDING or not self.decay else None

    def epochs(self, name: str, size: int, seed: int) -> Iterator[list[tuple[Any, dict[str, int]]]]:
        """Yield the minibatches of each epoch, with their index if the method has a table."""
        import mxnet as mx
        import numpy as np

        random, np_like = np.random.RandomState(seed), mx.util.is_np_array()
        make = partial(mx.np.array if np_like else mx.nd.array, dtype="float64")

        def shuffled() -> list[tuple[Any, Any]]:
            order = random.permutation(self.n)
            X, y = make(self.X[order]), make(self.y[order])
            return [(X[i : i + size], y[i : i + size]) for i in range(0, self.n, size)]

        while name not in ("saga", "sag"):
            yield [(batch, {}) for batch in shuffled()]
        fixed = shuffled()
        count, order = len(fixed), random.permutation(len(fixed))
        while True:
            yield [(fixed[i], {"batch_index": int(i)}) for i in order]
            # With replacement for SAG, which otherwise diverges at lower rates.
            order = random.randint(0, count, count) if name == "sag" else random.permutation(count)


def train(problem: Problem, options: argparse.Namespace, name: str, rate: float, seed: int) -> Any:
    """Train from zero, until all data passes are made or the loss is not finite."""
    import mxnet as mx
    import numpy as np

    import gluon_svrg
    from gluon_svrg.schedule import Linear

    net, refreshes = problem.net, name.endswith(("svrg", "sarah"))
    net.initialize(mx.init.Zero(), force_reinit=True)
    snapshots = math.ceil(options.epochs / options.update_freq)
    gradients = (2 if options.coefficient else 1) * options.epochs
    budget = (options.plain_epochs + snapshots + gradients) * problem.n  # as many as SVRG
    alphas = {"svrg": options.coefficient, "alpha-svrg": Linear(0.75, snapshots)}
    own = {"coefficient": alphas[name]} if name in alphas else {}
    cls, first_rate = getattr(gluon_svrg, METHODS[name][0]), {"learning_rate": rate}
    trainer = cls(net.collect_params(), options.optimizer, first_rate, lock_random=False, **own)
    run: Any = {"seed": seed, "learning_rate": rate, "data_passes": [], "losses": []}

    def note() -> None:
        weights = np.c_[net.weight.data().asnumpy(), net.bias.data().asnumpy()]
        with np.errstate(all="ignore"):  # of trainings that diverge
            loss, norm, run["accuracy"] = problem.measure(weights)
        run["data_passes"].append(trainer.grad_evaluations / problem.n)
        run["losses"].append(loss if math.isfinite(loss) else INFINITE)
        run["gradient_norm"] = norm if math.isfinite(norm) else INFINITE

    note()
    first = -options.plain_epochs if refreshes else 0
    for epoch, batches in enumerate(problem.epochs(name, options.batch_size, seed), first):
        if refreshes and epoch >= 0 and epoch % options.update_freq == 0:
            trainer.update_full_grads(problem.loss_of, [batch for batch, _ in batches])
        for batch, row in batches:
            if trainer.grad_evaluations >= budget:
                break
            if name == "sgd-decay":
                done = trainer.grad_evaluations / budget
                trainer.set_learning_rate(rate * 0.5 * (1 + math.cos(math.pi * done)))
            trainer.step(len(batch[0]), closure=partial(problem.loss_of, *batch), **row)
        note()
        if run["losses"][-1] == INFINITE or trainer.grad_evaluations >= budget:
            break
    return run


def compare(problem: Problem, options: argparse.Namespace) -> dict[str, Any]:
    """Train by each method with every learning rate, and with the best one by further seeds."""
    import mxnet as mx
    from tqdm import tqdm

    found: dict[str, Any] = {}
    rates = options.learning_rates or LADDER[6:12]
    with tqdm(total=len(options.methods) * len(rates), unit="rate", disable=None) as bar:
        for name in options.methods:
            train_by = partial(train, problem, options, name)
            bar.set_description(name)
            ahead, tried = list(rates), {}
            while ahead:
                rate = ahead.pop(0)
                tried[rate] = train_by(rate, options.seed)
                best = min(tried, key=lambda rate: tried[rate]["losses"][-1])
                if not ahead and options.learning_rates is None:  # look beyond the ends
                    place = LADDER.index(best)
                    beside = LADDER[max(place - 1, 0) : place + 2]
                    ahead = [rate for rate in beside if rate not in tried]
                bar.update()
            seeds = [train_by(best, options.seed + number) for number in range(1, options.seeds)]
            seeds = sorted([tried[best], *seeds], key=lambda run: run["losses"][-1])
            found[name] = {"rates": [tried[rate] for rate in sorted(tried)], "seeds": seeds}
            loss = tried[best]["losses"][-1]
            tqdm.write(f"{name}: best rate {best:g}, loss {loss:.6g}", file=sys.stderr)
    minimum = problem.minimum()
    every = [run for part in found.values() for run in part["rates"] + part["seeds"]]
    return {
        "settings": {key: value for key, value in vars(options).items() if key != "run"},
        "versions": {"gluon_svrg": __version__, "mxnet": mx.__version__},
        "minimum": minimum,
        "lowest": min(min(run["losses"]) for run in every) if minimum is None else minimum,
        "methods": found,
    }


def table(results: dict[str, Any]) -> str:
    """A table of each method's run in the middle of its seeds, and what the columns are."""
    import pandas as pd

    rows = {}
    for name, part in results["methods"].items():
        run = part["seeds"][len(part["seeds"]) // 2]
        gaps = [max(one["losses"][-1] - results["lowest"], 0) for one in part["seeds"]]
        tried, rate = [one["learning_rate"] for one in part["rates"]], run["learning_rate"]
        end = run["losses"][-1]
        rows[name] = {
            "best rate": f"{rate:g}" + "*" * (len(tried) > 1 and rate in (tried[0], tried[-1])),
            "loss": "diverged" if end == INFINITE else f"{end:.6g}",
            "gap": f"{gaps[len(gaps) // 2]:.1e}",
            "lowest": f"{gaps[0]:.1e}",
            "highest": f"{gaps[-1]:.1e}",
            "|gradient|": f"{run['gradient_norm']:.1e}",
            "accuracy": "-" if run["accuracy"] is None else f"{run['accuracy']:.4f}",
            "data passes": f"{run['data_passes'][-1]:.0f}",
        }
    known = "lowest loss of all runs" if results["minimum"] is None else "minimum"
    return f"""{pd.DataFrame(rows).T.to_string()}

loss: the mean over all samples, and half the weight decay times |w|^2 over all weights and biases
gap: the distance to the {known}; lowest, highest: of all seeds, the rest is of that in the middle
*: the lowest or highest rate that was tried; others may be better"""


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw each method's runs at its best rate, and where its runs end at all rates."""
    import numpy as np
    from matplotlib.figure import Figure

    def height(losses: list[float]) -> Any:
        return np.clip(np.subtract(losses, results["minimum"] or 0.0), ROUNDING, 10 * start)

    figure = Figure(figsize=(10, 5), layout="constrained")
    curves, rates = figure.subplots(ncols=2, sharey=True, width_ratios=(3, 2))
    for name, part in results["methods"].items():
        start = part["rates"][0]["losses"][0]
        _, color, marker = METHODS[name]
        look = {"color": color, "marker": marker, "linestyle": "--" if "decay" in name else "-"}
        for run in part["seeds"]:
            curves.plot(run["data_passes"], height(run["losses"]), color=color, alpha=0.5, lw=0.7)
        run = part["seeds"][len(part["seeds"]) // 2]
        label = f"{name}, rate {run['learning_rate']:g}"
        curves.plot(run["data_passes"], height(run["losses"]), markevery=0.1, label=label, **look)
        tried = [run["learning_rate"] for run in part["rates"]]
        rates.plot(tried, height([run["losses"][-1] for run in part["rates"]]), **look)
    known = "loss" if results["minimum"] is None else "loss - minimum"
    curves.set(yscale="log", ylabel=known, xlabel="data passes (gradients evaluated / samples)")
    rates.set(xscale="log", xlabel="learning rate (at the top: diverged)")
    text = "{data}, {optimizer}, batch size {batch_size}, weight decay {weight_decay:g}"
    figure.suptitle(text.format_map(results["settings"]))
    for axes in (curves, rates):
        axes.grid(color="#dddddd")
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=150)
