"""Train a linear model by several methods, and name the fastest in seconds and in passes.

All methods start near zero, and compute equally many gradients, full ones too (L-BFGS: more). Each
that needs a learning rate tries some in factors of about 3, and trains with all seeds at the best.

a .csv or .tsv file, or one of them as .gz:
  UTF-8 text whose first line names the columns, separated by commas, semicolons, tabs or |. Rows
  without a target are left out. A text, or up to 20 whole numbers that repeat, are classes. ISO
  dates (2024-12-31) become days. Numbers (True is 1, if none is missing), also those to predict,
  are scaled to mean 0 and variance 1, and missing ones become the mean of their column. All else is
  text: each value, "missing" included, becomes an input of 0 and 1. The command lists the columns
  that it leaves out, and why.

for example:
  gluon-svrg compare digits --methods sgd,svrg,saga --learning-rates 0.03,0.1,0.3,1
  gluon-svrg compare houses.csv --target price --output houses --seconds 300
"""

from __future__ import annotations  # functions import the rest: --help must need no MXNet

import argparse
import json
import os
import re
import sys
import time
import warnings
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

from .. import __version__, _arguments, _require_mxnet

BUNDLED = ("digits", "breast_cancer", "diabetes", "wine")
MOST_WEIGHTS = 1000  # for newton-cholesky: with 4,000 it takes 10 s, and newton-cg 0.01 s
LIMIT, SHARE = 60.0, 0.2  # seconds for scikit-learn, or its part of --seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add, shown = parser.add_argument, "(default: %(default)s)"
    add("data", metavar="DATA", help=f"{', '.join(BUNDLED)}, or a file")
    add("--target", help="the column of the file to predict")
    add("--decimal", default=".", help=f"the decimal point of the file, as ',' {shown}")
    text = (
        "trainers, as svrg, svrg-stored, saga, mars, alone or with an optimizer, as svrg+nag; "
        "svrg-nystrom, which searches nothing; plain optimizers, as sgd, nag, adam: with -decay "
        f"the rate falls to 0 like half a cosine; lbfgs {shown}"
    )
    some = "sgd,nag-decay,lbfgs,svrg,svrg+nag,svrg-nystrom"
    add("--methods", type=names, default=some, help=text)
    text = "rates to try; by default, factors of about 3 until the best one is not at an end"
    add("--learning-rates", type=numbers, help=text)
    add("--momenta", type=numbers, default="0.9,0.99", help=f"of nag, for each rate {shown}")
    for name, default, text in (
        ("--weight-decay", 0.01, "times half the squared norm of the weight is in the loss"),
        ("--l1", 0.0, "times the sum of all absolute weights but the bias is in the loss"),
        ("--passes", 30.0, "gradients that each method takes, divided by the samples"),
        ("--plain-epochs", 1, "epochs of the plain optimizer before the first full gradient"),
        ("--update-freq", 1, "epochs from one full gradient to the next"),
        ("--seeds", 3, "how many seeds"),
        ("--seed", 0, "the first seed, of weights and the order of the samples"),
    ):
        add(name, type=type(default), default=default, help=f"{text} {shown}")
    text = "samples in a mini-batch (default: 32 to 1024, with svrg-nystrom about rows / 32)"
    add("--batch-size", type=int, help=text)
    add("--seconds", type=float, help="stop after this time, with partial results")
    add("--output", type=Path, default=Path("results"), help=f"the folder for the files {shown}")


def names(text: str) -> list[str]:
    """Names, separated by commas."""
    return text.lower().replace(" ", "").split(",")


def numbers(text: str) -> list[float]:
    """Numbers, separated by commas."""
    return [float(part) for part in text.split(",")]


def run(options: argparse.Namespace) -> int:
    """Compare the methods, print the table and the verdict, and write the files."""
    # Before MXNet is imported: with small mini-batches, threads wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _require_mxnet()
    for name in ("matplotlib", "pandas", "scipy", "sklearn", "tqdm"):
        if find_spec(name) is None:
            raise ImportError(f"{name} is not installed: pip install '.[compare]' in a clone")
    for name in ("weight-decay", "l1", "seconds"):
        _arguments.number(vars(options)[name.replace("-", "_")] or 0, f"--{name}")
    model = Problem(options)
    options.output.mkdir(parents=True, exist_ok=True)
    comparison = model.compare(options)
    penalties = f"weight decay {options.weight_decay:g}, L1 {options.l1:g}"
    print(f"loss: the mean over all samples, with its penalties ({penalties})\n{comparison}")
    record, figure = options.output / "results.json", options.output / "curves.png"
    results = {
        "settings": {key: value for key, value in vars(options).items() if key != "run"},
        "versions": {"gluon_svrg": __version__, "mxnet": sys.modules["mxnet"].__version__},
        "verdict": comparison.verdict,
        "table": json.loads(comparison.table().to_json(orient="index")),
        # null stands for infinite or unknown numbers
        "runs": json.loads(comparison.runs.to_json(orient="records")),
    }
    record.write_text(json.dumps(results, indent=1, allow_nan=False, default=str) + "\n")
    plot = comparison.plot()
    plot.suptitle(f"{Path(options.data).name}: {penalties}")
    plot.savefig(figure, dpi=150)
    print(f"\nwritten: {figure}, {record}")
    return 130 if isinstance(comparison._search.ended, KeyboardInterrupt) else 0


def read(path: Path, target: str | None, decimal: str) -> tuple[Any, Any, int]:
    """Read inputs, targets, and the number of classes (0 for a regression) from a file."""
    import numpy as np
    import pandas as pd
    from sklearn.compose import make_column_transformer
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    if not path.exists():
        raise ValueError(f"there is no file {path}; bundled data are {', '.join(BUNDLED)}")
    try:
        widths = {mark: pd.read_csv(path, sep=mark, nrows=0).shape[1] for mark in ",;\t|"}
        settings: Any = {"sep": max(widths, key=lambda mark: widths[mark]), "decimal": decimal}
        settings.update(index_col=False, skipinitialspace=True, na_values="?", low_memory=False)
        frame = pd.read_csv(path, **settings)
        if target in frame and frame[target].dtype == object:  # there, None and NA may be classes
            settings.update(usecols=[target], dtype=str, keep_default_na=False, na_values=["", "?"])
            frame[target] = pd.read_csv(path, **settings)[target]
    except (EOFError, OSError, ValueError) as error:
        raise ValueError(f"cannot read {path} as UTF-8 text with a first line: {error}") from error
    if target not in frame:
        lacks = "needs a --target" if target is None else f"has no column {target!r}"
        raise ValueError(f"{path} {lacks}: choose one from {', '.join(map(repr, frame))}")
    for name in frame.select_dtypes(object):
        dates = pd.to_datetime(frame[name], format="ISO8601", utc=True, errors="coerce")
        if dates.count() == frame[name].count():
            frame[name] = (dates - dates.min()) / pd.Timedelta(days=1)
    rows = frame.dropna(subset=[target])
    infinite = [name for name in rows.select_dtypes("number") if rows[name].abs().max() == inf]
    if infinite:
        raise ValueError(f"{path} has infinite numbers in {', '.join(map(repr, infinite))}")
    y = rows.pop(target)
    texts = rows.select_dtypes(object)
    many = texts.columns[texts.nunique() > (texts.count() // 2).clip(upper=200)]
    unnamed = rows.columns[rows.columns.str.startswith("Unnamed: ")]  # as an index has no name
    useless = [*rows.columns[rows.count() == 0].union(many).union(unnamed)]
    left_out = "; ".join(f"{name!r} ({described(rows[name])})" for name in useless) or "no column"
    rows = rows.drop(columns=useless)
    texts = rows.select_dtypes(object).columns
    if rows.empty:
        raise ValueError(f"{path} has nothing to learn {target!r} from; left out: {left_out}")
    labels, most, is_text = y.nunique(), len(y) // 2, y.dtype == object
    if labels < 2 or (is_text and labels > most):
        raise ValueError(f"{path} has a target {target!r} that cannot be learned: {described(y)}")
    is_class = is_text or (labels <= min(20, most) and (y % 1 == 0).all())
    encoded = OneHotEncoder(), [*texts]
    scaler = make_column_transformer(encoded, remainder=StandardScaler(), sparse_threshold=0)
    X = np.nan_to_num(scaler.fit_transform(rows))  # a missing number becomes the mean, 0
    kind = f"{labels if is_class else 'no'} classes; categories: {', '.join(texts) or 'none'}"
    print(f"{path}: {len(y)} of {len(frame)} rows, {kind}; left out: {left_out}", file=sys.stderr)
    return (X, pd.factorize(y, sort=True)[0], labels) if is_class else (X, y.to_numpy(float), 0)


def described(cells: Any) -> str:
    """How many values a column has, and the first ones."""
    first = ", ".join(map(repr, cells.dropna()[:2]))
    hint = "; decimal commas need --decimal ','" * bool(re.match(r"'-?[\d.]*,\d+'", first))
    return f"{cells.nunique()} different values in {cells.count()} rows: {first}{hint}"


class Problem:
    """A linear model on a data set; its penalty is an argument of `compare`."""

    def __init__(self, options: argparse.Namespace) -> None:
        import numpy as np
        import sklearn.datasets
        from mxnet import gluon
        from sklearn.preprocessing import StandardScaler

        scaled = StandardScaler().fit_transform
        if options.data in BUNDLED:
            if options.target is not None:
                raise ValueError(f"--target is for files; {options.data} has a target of its own")
            X, y = getattr(sklearn.datasets, f"load_{options.data}")(return_X_y=True)
            self.classes = 0 if options.data == "diabetes" else len(set(y))
            X = X / 16 if options.data == "digits" else scaled(X)
        else:
            X, y, self.classes = read(Path(options.data), options.target, options.decimal)
        self.decay, self.l1 = options.weight_decay, options.l1
        # A column of ones makes the bias a weight, with weight decay. With L1 the layer has one.
        self.X = np.ascontiguousarray(X if self.l1 else np.c_[X, np.ones(len(X))])
        self.y = y if self.classes else scaled(y[:, None])[:, 0]
        self.outputs = self.classes if self.classes > 2 else 1
        self.softplus = gluon.nn.Activation("softrelu")

    def new_net(self) -> Any:
        """The linear network, with all weights zero."""
        from mxnet import gluon, init

        settings = {"in_units": self.X.shape[1], "use_bias": bool(self.l1), "dtype": "float64"}
        net = gluon.nn.Dense(self.outputs, **settings)
        net.initialize(init.Zero())
        if self.l1:
            net.bias.wd_mult = 0.0
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
        """The fraction of samples whose class is the most probable one."""
        outputs = self.X @ net.weight.data().asnumpy().T
        outputs += net.bias.data().asnumpy() if self.l1 else 0
        guesses = outputs.argmax(axis=1) if self.classes > 2 else outputs[:, 0] > 0
        return float((guesses == self.y).mean())

    def compare(self, options: argparse.Namespace) -> Any:
        """Compare all methods, and a solver of scikit-learn."""
        from ..compare import compare
        from ..prox import L1

        start, seconds = time.perf_counter(), options.seconds
        minimum, rivals = self.minimum(SHARE * seconds if seconds else LIMIT)
        momenta = {"nag": [{"momentum": momentum} for momentum in options.momenta]}
        uses_nag = any("nag" in name and "nystrom" not in name for name in options.methods)
        return compare(
            self.new_net,
            self.loss_of,
            (self.X, self.y),
            methods=options.methods,
            passes=options.passes,
            batch_size=options.batch_size,
            seeds=range(options.seed, options.seed + options.seeds),
            measure={"training accuracy": self.accuracy} if self.classes else {},
            minimum=minimum,
            l2=self.decay,
            prox={".*weight": L1(self.l1)} if self.l1 else None,
            learning_rates=options.learning_rates,
            optimizer_params=momenta if uses_nag else {},
            plain_epochs=options.plain_epochs,
            refresh_every=options.update_freq,
            seconds=seconds and max(1e-9, seconds + start - time.perf_counter()),
            rivals=rivals,
        )

    def minimum(self, limit: float = LIMIT) -> tuple[float | None, dict[str, Any]]:
        """The minimum if scikit-learn converges within so many seconds, and its result."""
        import numpy as np
        from scipy.sparse import csr_matrix

        if self.classes and not self.decay + self.l1:  # then there may be no minimum
            return None, {}
        (solver, model), X, end = self.solver(), self.X, time.perf_counter() + limit
        if (X == 0).mean() > 0.5 and solver != "svd":
            solver, X = f"{solver}, sparse", csr_matrix(X)
        for iterations in 2 ** np.arange(2, 14):  # each time from the start
            start = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # `has_converged` replaces its warning
                model.set_params(max_iter=iterations).fit(X, self.y)
            seconds = time.perf_counter() - start
            has_converged = (np.max(model.n_iter_) or 0) < iterations  # a direct solver has none
            if has_converged or time.perf_counter() + 2 * seconds > end:
                break
        if not has_converged:
            text = f"scikit-learn {solver} has not converged in {seconds:.3g} s"
            print(f"{text}: losses are compared, as the minimum is not known", file=sys.stderr)
        loss = self.loss_at(model)
        rivals = {f"scikit-learn {solver}": {"loss": loss, "seconds": seconds}}
        return loss if has_converged else None, rivals

    def solver(self) -> tuple[str, Any]:
        """The solver of scikit-learn that is best for this problem."""
        from sklearn.linear_model import ElasticNet, LogisticRegression, Ridge

        n, strength = len(self.X), self.decay + self.l1
        settings: Any = {"tol": 1e-12, "fit_intercept": bool(self.l1)}
        if self.l1:
            settings["l1_ratio"] = self.l1 / strength
        if self.classes:
            # With several classes newton-cg is faster; before scikit-learn 1.6, newton-cholesky
            # minimizes another loss there.
            is_large = self.outputs > 1 or self.X.shape[1] > MOST_WEIGHTS
            solver = "saga" if self.l1 else "newton-cg" if is_large else "newton-cholesky"
            settings.update(C=1 / strength / n, penalty="elasticnet" if self.l1 else "l2")
            return solver, LogisticRegression(solver=solver, random_state=0, **settings)
        if self.l1:
            return "coordinate descent", ElasticNet(alpha=strength, **settings)
        solver = "cholesky" if self.decay else "svd"
        return solver, Ridge(strength * n, solver=solver, **settings)

    def loss_at(self, model: Any) -> float:
        """The loss, with its penalties, at the weights of a model of scikit-learn."""
        from sklearn.metrics import log_loss, mean_squared_error

        if self.classes:
            loss = log_loss(self.y, model.predict_proba(self.X))
        else:
            loss = mean_squared_error(self.y, model.predict(self.X)) / 2
        w = model.coef_
        return float(loss + self.decay / 2 * (w**2).sum() + self.l1 * abs(w).sum())
