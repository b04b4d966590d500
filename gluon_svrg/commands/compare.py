"""Train a linear model by several methods, and say which is first in seconds and in passes.

All start beside zero, see the samples in the same order, and take equally many gradients, full ones
included. Each tries learning rates in factors of about 3, and trains with all seeds at the best.

a .csv or .tsv file, or one of them as .gz:
  UTF-8 text whose first line names the columns, separated by commas, semicolons, tabs or |. Rows
  without a target are left out. A text, or up to 20 whole numbers, are classes. Decimal commas are
  read, and dates as days. Missing numbers become the mean of their column; each text, "missing"
  included, an input of 0 and 1. Columns that are left out are listed with the reason. Inputs, and
  numbers to predict, are scaled to mean 0 and variance 1.

for example:
  gluon-svrg compare digits --methods sgd,svrg,saga --learning-rates 0.03,0.1,0.3,1
  gluon-svrg compare houses.csv --target price --output houses --seconds 300
"""

from __future__ import annotations  # functions import the rest: --help must need no MXNet

import argparse
import json
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
ROUNDING = 1e-14  # differences of losses below it are rounding errors
DATES = r"\d{4}[-/.]\d|\d[-/.]\d{4}"
THOUSANDS = r"[-+]?\d{1,3}(?:,\d{3})*(?:\.\d+)?"  # of numbers such as 12,345


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
        "svrg-nystrom, which searches nothing; "
        "plain optimizers, as sgd, nag, adam: with -decay the rate falls to 0 like half a "
        f"cosine; lbfgs {shown}"
    )
    add(
        "--methods", type=names, default="sgd,nag-decay,lbfgs,svrg,svrg+nag,svrg-nystrom", help=text
    )
    text = "to try with each method; by default factors of about 3 until the best is no end"
    add("--learning-rates", type=numbers, help=text)
    add("--momenta", type=numbers, default="0.9,0.99", help=f"of nag, for each rate {shown}")
    for name, default, text in (
        ("--weight-decay", 0.01, "times half the squared norm of all weights is in the loss"),
        ("--passes", 30.0, "gradients that each method takes, divided by the samples"),
        ("--plain-epochs", 1, "epochs of the plain optimizer before the first full gradient"),
        ("--update-freq", 1, "epochs from one full gradient to the next"),
        ("--seeds", 3, "how many seeds"),
        ("--seed", 0, "the first seed of the order of the samples"),
    ):
        add(name, type=type(default), default=default, help=f"{text} {shown}")
    text = "samples in a minibatch (default: rows / 128, for svrg-nystrom rows / 32)"
    add("--batch-size", type=int, help=text)
    add("--seconds", type=float, help="when to end with what there is")
    add("--output", type=Path, default=Path("results"), help=f"the folder for the files {shown}")


def names(text: str) -> list[str]:
    """Names, separated by commas."""
    return text.lower().replace(" ", "").split(",")


def numbers(text: str) -> list[float]:
    """Numbers, separated by commas."""
    return [float(part) for part in text.split(",")]


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Compare the methods, print the table and the verdict, and write the files."""
    # Before MXNet is imported: with small minibatches, threads wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        _require_mxnet()
        for name in ("matplotlib", "pandas", "scipy", "sklearn", "tqdm"):
            if find_spec(name) is None:
                raise ImportError(f"{name} is not installed: pip install '.[compare]' in a clone")
        found, problem = _compared(options)
    except (ImportError, OSError, TypeError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    record, figure = options.output / "results.json", options.output / "curves.png"
    settings = {key: value for key, value in vars(options).items() if key != "run"}
    results = {
        "settings": settings,
        "versions": {"gluon_svrg": __version__, "mxnet": sys.modules["mxnet"].__version__},
        "verdict": found.verdict,
        "table": json.loads(found.table().to_json(orient="index")),
        "runs": json.loads(found.runs.to_json(orient="records")),  # null is infinite or unknown
    }
    record.write_text(json.dumps(results, indent=1, allow_nan=False, default=str) + "\n")
    plot = found.plot()
    text = f"{Path(options.data).name}: {problem.kind}, weight decay {options.weight_decay:g}"
    plot.suptitle(text)
    plot.savefig(figure, dpi=150)
    print(f"loss: the mean over all samples plus half the weight decay times |w|^2\n{found}")
    print(f"\nwritten: {figure}, {record}")
    return 130 if found.interrupted and not options.seconds else 0


def _compared(options: argparse.Namespace) -> tuple[Any, Any]:
    """The comparison, and its problem."""
    from ..compare import compare

    problem = Problem(options)
    options.output.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=options.output).close()  # so files can be written there
    minimum, own = problem.minimum(), {}
    if any("nag" in name for name in options.methods):
        own["nag"] = [{"momentum": momentum} for momentum in options.momenta]
    solver = f"scikit-learn {minimum.pop('solver')}"
    return compare(
        problem.new_net,
        problem.loss_of,
        (problem.X, problem.y),
        methods=options.methods,
        passes=options.passes,
        batch_size=options.batch_size,
        seeds=range(options.seed, options.seed + options.seeds),
        measure={"training accuracy": problem.accuracy} if problem.classes else {},
        minimum=minimum["loss"],
        l2=options.weight_decay,
        learning_rates=options.learning_rates,
        optimizer_params=own,
        plain_epochs=options.plain_epochs,
        refresh_every=options.update_freq,
        seconds=options.seconds,
        rivals={solver: minimum} if minimum["seconds"] else {},
    ), problem


def as_numbers(cells: Any, separator: str) -> Any:
    """Texts as numbers, if all are, with commas in them too, or dates; else as they are."""
    import pandas as pd

    texts = cells.dropna().astype(str)
    is_decimal = separator != "," or not texts.str.fullmatch(THOUSANDS).all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that dates are not all of one form
        numbers = texts.str.replace(",", "." if is_decimal else "")
        values = pd.to_numeric(numbers, errors="coerce")
        if values.hasnans and texts.str.contains(DATES).all():
            dates = pd.to_datetime(texts, errors="coerce")
            values = (dates - dates.min()) / pd.Timedelta(days=1)
    return cells if values.hasnans else values.reindex(cells.index)


def read(path: Path, target: str | None) -> tuple[Any, Any, int]:
    """Read inputs, targets, and the number of classes (0 for a regression) from a file."""
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
    except (EOFError, OSError, ValueError, pd.errors.ParserWarning) as error:
        raise ValueError(f"cannot read {path} as UTF-8 text: {str(error).strip()}") from error
    if frame.shape[1] == 1:
        raise ValueError(f"{path} has only one column, {frame.columns[0]!r}")
    if target not in frame:
        lacks = "needs a --target" if target is None else f"has no column {target!r}"
        raise ValueError(f"{path} {lacks}: choose one from {', '.join(map(repr, frame))}")
    rows = frame.dropna(subset=[target])
    texts = rows.select_dtypes(exclude="number")
    rows = rows.assign(**{name: as_numbers(cells, separator) for name, cells in texts.items()})
    y, columns, left_out = rows.pop(target), {}, []
    for name, cells in rows.items():
        labels, is_text = cells.nunique(), not pd.api.types.is_numeric_dtype(cells.dtype)
        if str(name).startswith("Unnamed: ") or not labels:
            left_out.append(f"{name!r} ({'no name' if labels else 'empty'})")
        elif is_text and labels > min(200, cells.count() // 2):
            left_out.append(f"{name!r} ({labels} texts in {cells.count()} rows)")
        else:
            coded = pd.get_dummies(cells, dummy_na=cells.hasnans) if is_text else cells
            columns[name] = coded.fillna(coded.mean())
    labels, most, is_text = y.nunique(), len(y) // 2, not pd.api.types.is_numeric_dtype(y.dtype)
    is_class = is_text or (labels <= min(20, most) and (y % 1 == 0).all())
    if labels < 2 or (is_class and labels > most):
        found = "constant" if labels < 2 else f"text with {labels} values in {len(y)} rows"
        raise ValueError(f"{path} has a target {target!r} that nothing can learn: it is {found}")
    if not columns:
        text = f"no numbers and no categories to learn {target!r} from; left out: "
        raise ValueError(f"{path} has {text}{'; '.join(left_out)}")
    X = pd.concat(columns, axis=1).to_numpy(float)
    text = f"{len(y)} of {len(frame)} rows, {X.shape[1]} inputs, {labels if is_class else 'no'} "
    text += f"classes, {rows[[*columns]].isna().sum().sum()} missing cells"
    print(f"{path}: {text}; left out: {'; '.join(left_out) or 'no column'}", file=sys.stderr)
    return (X, pd.factorize(y, sort=True)[0], labels) if is_class else (X, y.to_numpy(float), 0)


class Problem:
    """A linear model on a data set; its penalty is an argument of `compare`."""

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
        self.decay = options.weight_decay
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
        """The loss of each sample; those of Gluon are float32 with MXNet 2.0."""
        import mxnet as mx

        outputs = net(X)
        if self.classes > 2:
            functions = mx.npx if mx.util.is_np_array() else mx.nd
            return -functions.pick(functions.log_softmax(outputs), y)
        outputs = outputs.reshape(-1)
        return self.softplus(outputs * (1 - 2 * y)) if self.classes else (outputs - y) ** 2 / 2

    def accuracy(self, net: Any) -> float:
        """The part of the samples whose class is the most probable one."""
        outputs = self.X @ net.weight.data().asnumpy().T
        guesses = outputs.argmax(axis=1) if self.classes > 2 else outputs[:, 0] > 0
        return float((guesses == self.y).mean())

    def minimum(self) -> dict[str, Any]:
        """The lowest loss if it is known, and scikit-learn's solver, its seconds and its code."""
        from sklearn.linear_model import LogisticRegression, Ridge

        from ..compare.data import Data
        from ..compare.training import mean_gradient

        solvers = ["newton-cholesky", "newton-cg"] if self.classes else ["cholesky", "svd"]
        if not self.decay:  # a minimum of classes may be infinitely far
            solvers = [] if self.classes else ["svd"]
        net, data = self.new_net(), Data((self.X, self.y), 1, 0)
        data.put_on(net)
        for solver in solvers:
            model: Any = Ridge(self.decay * len(self.X), fit_intercept=False, solver=solver)
            if self.classes:
                exact = {"solver": solver, "tol": 1e-12, "max_iter": 1000}
                model = LogisticRegression(C=1 / model.alpha, fit_intercept=False, **exact)
            start = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the gradient shows whether it has converged
                weights = model.fit(self.X, self.y).coef_.ravel()
            found = {"solver": solver, "seconds": time.perf_counter() - start}
            net.weight.data()[:] = weights.reshape(net.weight.shape)
            loss, gradient = mean_gradient(partial(self.loss_of, net), [net.weight], data)
            gradient += self.decay * weights
            # The loss is strongly convex: this bounds its distance to the minimum.
            if gradient @ gradient <= 2 * self.decay * ROUNDING or not self.decay:
                loss += self.decay / 2 * weights @ weights
                return {**found, "loss": loss, "code": f"{' '.join(str(model).split())}.fit(X, y)"}
        return {"loss": None, "solver": None, "seconds": None}
