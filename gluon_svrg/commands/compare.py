"""Train a linear model by several methods, and say which is nearest to the minimum.

All start at zero, see the samples in the same order, and take equally many gradients, full ones
included. Each tries learning rates in factors of about 3, and trains with all seeds at the best.

a .csv or .tsv file, or one of them as .gz:
  UTF-8 text whose first line names the columns, separated by commas, semicolons, tabs or |. Rows
  without a target are left out. A text, or up to 20 whole numbers, are classes. Missing numbers
  become the mean of their column; each text, "missing" included, an input of 0 and 1. Columns that
  are left out are listed with the reason. Inputs, and numbers to predict, are scaled to mean 0 and
  variance 1.

for example:
  gluon-svrg compare digits --methods sgd,svrg,saga --learning-rates 0.03,0.1,0.3,1
  gluon-svrg compare houses.csv --target price --output houses
"""

from __future__ import annotations  # functions import the rest: --help must need no MXNet

import argparse
import json
import math
import os
import sys
import tempfile
import time
import warnings
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .. import __version__, _require_mxnet

BUNDLED = ("digits", "breast_cancer", "diabetes", "wine")
LARGE = 50_000  # rows, from which on all seeds and passes would take too long
ROUNDING = 1e-14  # differences of losses below it are rounding errors


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
        "trainers, as svrg, svrg-stored, saga, mars, alone or with an optimizer, as svrg+nag; "
        "plain optimizers, as sgd, nag, adam: with -decay the rate falls to 0 like half a "
        f"cosine; lbfgs {shown}"
    )
    add("--methods", type=names, default="sgd,nag-decay,lbfgs,svrg,svrg+nag", help=text)
    text = "to try with each method; by default factors of about 3 until the best is no end"
    add("--learning-rates", type=numbers, help=text)
    add("--momenta", type=numbers, default="0.9,0.99", help=f"of nag, for each rate {shown}")
    for name, default, low, text in (
        ("--weight-decay", 0.01, 0.0, "times half the squared norm of all weights is in the loss"),
        ("--plain-epochs", 1, 0, "epochs of the plain optimizer before the first full gradient"),
        ("--update-freq", 1, 1, "epochs from one full gradient to the next"),
        ("--batch-size", 16, 1, "samples in a minibatch"),
        ("--seed", 0, 0, "the first seed of the order of the samples"),
    ):
        add(name, type=partial(number, low), default=default, help=f"{text} {shown}")
    for name, few, most, text in (
        ("--passes", 20, 30, "gradients that each method takes, divided by the samples"),
        ("--seeds", 1, 3, "how many seeds"),
    ):
        text += f" (default: {most}; from {LARGE:,} rows on {few})"
        add(name, type=partial(number, 1), help=text)
    add("--output", type=Path, default=Path("results"), help=f"the folder for the files {shown}")


def names(text: str) -> list[str]:
    """Names, separated by commas."""
    return text.lower().replace(" ", "").split(",")


def number(low: float, text: str) -> float:
    """A number from `low` on, whole if `low` is."""
    try:
        value = type(low)(text)
    except ValueError:
        value = math.nan
    if not low <= value < math.inf:
        kind = "a whole number" if isinstance(low, int) else "a number"
        raise argparse.ArgumentTypeError(f"{kind} of {low:g} or more is needed, not {text!r}")
    return value


def numbers(text: str) -> list[float]:
    """Positive numbers, separated by commas."""
    return sorted({number(1e-9, part) for part in text.split(",")})


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Compare the methods, print the table and the verdict, and write the files."""
    # Before MXNet is imported: with small minibatches, threads wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        _require_mxnet()
        for name in ("matplotlib", "pandas", "scipy", "sklearn", "tqdm"):
            if find_spec(name) is None:
                raise ImportError(f"{name} is not installed: pip install '.[compare]' in a clone")
        from ..compare import compare as compare_methods
        from ..compare.methods import methods_of

        methods_of(options.methods, None, 1, False)  # so mistakes need not wait for the data
        problem = Problem(options)
        options.output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.output).close()  # so files can be written there
    except (ImportError, OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    is_large = problem.n >= LARGE
    options.passes = options.passes or (20 if is_large else 30)
    options.seeds = options.seeds or (1 if is_large else 3)
    if is_large:
        text = f"--passes {options.passes} --seeds {options.seeds}"
        print(f"{problem.n:,} rows: as with {text}", file=sys.stderr)
    minimum, own = problem.minimum(), {}
    if any("nag" in name for name in options.methods):
        own["nag"] = [{"momentum": momentum} for momentum in options.momenta]
    found = compare_methods(
        problem.new_net,
        problem.loss_of,
        (problem.X, problem.y),
        methods=options.methods,
        passes=options.passes,
        batch_size=options.batch_size,
        seeds=range(options.seed, options.seed + options.seeds),
        measure={"training accuracy": problem.accuracy} if problem.classes else {},
        minimum=minimum["loss"],
        learning_rates=options.learning_rates,
        optimizer_params=own,
        plain_epochs=options.plain_epochs,
        refresh_every=options.update_freq,
    )
    record, figure = options.output / "results.json", options.output / "curves.png"
    settings = {key: value for key, value in vars(options).items() if key != "run"}
    results = {
        "settings": settings,
        "versions": {"gluon_svrg": __version__, "mxnet": sys.modules["mxnet"].__version__},
        "scikit-learn": minimum,
        "verdict": found.verdict,
        "table": json.loads(found.table().to_json(orient="index")),
        "runs": json.loads(found.runs.to_json(orient="records")),  # null is infinite or unknown
    }
    record.write_text(json.dumps(results, indent=1, allow_nan=False, default=str) + "\n")
    plot = found.plot()
    text = "batch size {batch_size}, weight decay {weight_decay:g}".format_map(settings)
    plot.suptitle(f"{Path(options.data).name}: {problem.kind}, {text}")
    plot.savefig(figure, dpi=150)
    print(f"loss: the mean over all samples plus half the weight decay times |w|^2\n{found}")
    if minimum["solver"]:
        print("scikit-learn's {solver} takes {seconds:.2g} s to the minimum.".format_map(minimum))
    print(f"\nwritten: {figure}, {record}")
    return 130 if found.interrupted else 0


def reason_against(name: str, cells: Any, is_text: bool) -> str | None:
    """Why nothing is learned from a column, if so."""
    known = cells.dropna()
    labels = known.nunique()
    if name.startswith("Unnamed: ") or not labels:
        return "no name" if labels else "empty"
    if is_text and has_decimal_commas(known):
        return "decimal commas, write points"
    if is_text and labels > min(200, len(known) // 2):
        return f"{labels} texts in {len(known)} rows"
    return None


def has_decimal_commas(cells: Any) -> bool:
    """Whether texts are numbers such as 1,5."""
    texts = cells.astype(str)
    return bool(texts.str.fullmatch(r"[-+]?\d+(,\d+)?").all() and texts.str.contains(",").any())


def read(path: Path, target: str | None) -> tuple[Any, Any, int]:
    """Read inputs, targets, and the number of classes (0 for a regression) from a file."""
    import numpy as np
    import pandas as pd

    if not path.exists():
        raise ValueError(f"there is no file {path}; bundled data are {', '.join(BUNDLED)}")
    settings: Any = {"encoding": "utf-8-sig", "skipinitialspace": True, "na_values": "?"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # of cells without a column
            heads = {mark: pd.read_csv(path, sep=mark, nrows=0, **settings) for mark in ",;\t|"}
            separator = max(heads, key=lambda mark: heads[mark].shape[1])
            frame = pd.read_csv(path, sep=separator, index_col=False, **settings)
    except pd.errors.EmptyDataError as error:
        raise ValueError(f"{path} is empty") from error
    except (EOFError, OSError, ValueError, pd.errors.ParserWarning) as error:
        raise ValueError(f"cannot read {path} as UTF-8 text: {str(error).strip()}") from error
    if frame.shape[1] == 1:
        text = "separate columns by commas, semicolons, tabs or |"
        raise ValueError(f"{path} has only one column, {frame.columns[0]!r}: {text}")
    if target not in frame:
        lacks = "needs a --target" if target is None else f"has no column {target!r}: choose one"
        raise ValueError(f"{path} {lacks} from {', '.join(map(repr, frame))}")
    rows = frame.dropna(subset=[target])
    y = rows.pop(target)
    texts = [*frame.select_dtypes(exclude="number")]
    against = {name: reason_against(name, cells, name in texts) for name, cells in rows.items()}
    columns = {}
    for name, cells in rows.items():
        if against[name] is None:
            coded = pd.get_dummies(cells, dummy_na=cells.hasnans) if name in texts else cells
            columns[name] = coded.fillna(coded.mean())
    for name, cells in [*columns.items(), (target, y)]:
        with np.errstate(all="ignore"):
            if name not in texts and not math.isfinite(np.var(cells.to_numpy(float))):
                raise ValueError(f"{path} has an infinity, or too large numbers, in {name!r}")
    labels, most = y.nunique(), len(y) // 2
    is_class = target in texts or (labels <= min(20, most) and (y % 1 == 0).all())
    if target in texts and has_decimal_commas(y):
        raise ValueError(f"{path} has decimal commas in {target!r}: write points")
    if labels < 2 or (is_class and labels > most):
        found = "constant" if labels < 2 else f"text with {labels} values in {len(y)} rows"
        raise ValueError(f"{path} has a target {target!r} that nothing can learn: it is {found}")
    left_out = "; ".join(f"{name!r} ({why})" for name, why in against.items() if why)
    if not columns:
        text = f"no numbers and no categories to learn {target!r} from; left out: {left_out}"
        raise ValueError(f"{path} has {text}")
    X = pd.concat(columns, axis=1).to_numpy(float)
    text = f"{len(y)} of {len(frame)} rows, {X.shape[1]} inputs, {labels if is_class else 'no'} "
    text += f"classes, {rows[[*columns]].isna().sum().sum()} missing cells"
    print(f"{path}: {text}; left out: {left_out or 'no column'}", file=sys.stderr)
    return (X, pd.factorize(y, sort=True)[0], labels) if is_class else (X, y.to_numpy(float), 0)


class Problem:
    """A linear model on a data set, and its mean loss with the L2 penalty."""

    def __init__(self, options: argparse.Namespace) -> None:
        import numpy as np
        import sklearn.datasets
        from mxnet import gluon
        from sklearn.preprocessing import StandardScaler

        if options.data in BUNDLED:
            if options.target is not None:
                raise ValueError(f"--target is for files; {options.data} has a target of its own")
            X, y = getattr(sklearn.datasets, f"load_{options.data}")(return_X_y=True)
            self.classes = 0 if options.data == "diabetes" else len(set(y))
        else:
            X, y, self.classes = read(Path(options.data), options.target)
        scaled = StandardScaler().fit_transform
        X = X / 16 if options.data == "digits" else scaled(X)
        # A column of ones makes the bias a weight, which is penalized as one.
        self.X = np.ascontiguousarray(np.c_[X, np.ones(len(X))])
        self.y = y if self.classes else scaled(y[:, None])[:, 0]
        self.n, self.decay = len(X), options.weight_decay
        self.kind = {0: "ridge", 2: "logistic"}.get(self.classes, "softmax") + " regression"
        self.softplus = gluon.nn.Activation("softrelu")

    def new_net(self) -> Any:
        """The linear network, with all weights zero."""
        from mxnet import gluon, init

        outputs = self.classes if self.classes > 2 else 1
        net = gluon.nn.Dense(outputs, in_units=self.X.shape[1], use_bias=False, dtype="float64")
        net.initialize(init.Zero())
        net.hybridize()
        return net

    def loss_of(self, net: Any, X: Any, y: Any) -> Any:
        """The penalized loss of each sample; those of Gluon are float32 with MXNet 2.0."""
        import mxnet as mx

        outputs, penalty = net(X), 0.5 * self.decay * (net.weight.data() ** 2).sum()
        if self.classes > 2:
            functions = mx.npx if mx.util.is_np_array() else mx.nd
            return penalty - functions.pick(functions.log_softmax(outputs), y)
        outputs = outputs.reshape(-1)
        losses = self.softplus(outputs * (1 - 2 * y)) if self.classes else (outputs - y) ** 2 / 2
        return losses + penalty

    def accuracy(self, net: Any) -> float:
        """The part of the samples whose class is the most probable one."""
        outputs = self.X @ net.weight.data().asnumpy().T
        guesses = outputs.argmax(axis=1) if self.classes > 2 else outputs[:, 0] > 0
        return float((guesses == self.y).mean())

    def minimum(self) -> dict[str, Any]:
        """The lowest loss (None if it is not known), the solver of scikit-learn, its seconds."""
        from sklearn.linear_model import LogisticRegression, Ridge

        from ..compare.data import Data
        from ..compare.training import mean_gradient

        solvers = ["newton-cholesky", "newton-cg"] if self.classes else ["cholesky", "svd"]
        if not self.decay:  # a minimum of classes may be infinitely far
            solvers = [] if self.classes else ["svd"]
        net, data = self.new_net(), Data((self.X, self.y), 1, 0)
        data.put_on(net)
        for solver in solvers:
            model: Any = Ridge(self.decay * self.n, fit_intercept=False, solver=solver)
            if self.classes:
                exact = {"solver": solver, "tol": 1e-12, "max_iter": 1000}
                model = LogisticRegression(C=1 / model.alpha, fit_intercept=False, **exact)
            start = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the gradient shows whether it has converged
                fitted = model.fit(self.X, self.y).coef_
            seconds = time.perf_counter() - start
            net.weight.data()[:] = fitted.reshape(net.weight.shape)
            loss, gradient = mean_gradient(partial(self.loss_of, net), [net.weight], data)
            # The loss is strongly convex: this bounds its distance to the minimum.
            if gradient @ gradient <= 2 * self.decay * ROUNDING or not self.decay:
                return {"loss": loss, "solver": solver, "seconds": seconds}
        return {"loss": None, "solver": None, "seconds": None}
