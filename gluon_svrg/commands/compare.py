"""Train a linear model by several methods, and say which is first in seconds and in passes.

All start beside zero, see the samples in the same order, and take equally many gradients, full ones
included. Each tries learning rates in factors of about 3, and trains with all seeds at the best.

a .csv or .tsv file, or one of them as .gz:
  UTF-8 text whose first line names the columns, separated by commas, semicolons, tabs or |. Rows
  without a target are left out. A text, or up to 20 whole numbers, are classes. ISO dates
  (2024-12-31) become days. Numbers, also those to predict, are scaled to mean 0 and variance 1, and
  missing ones become the mean of their column. All else is text: each value, "missing" included,
  becomes an input of 0 and 1. Columns that are left out are listed with the reason.

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
MOST_WEIGHTS = 1000  # of newton-cholesky: with 4,000 it takes 10 s, and newton-cg 0.01
LIMIT, SHARE = 60.0, 0.2  # seconds for scikit-learn, or their part of what the user allows


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
    add("--decimal", default=".", help=f"the decimal point of the file, as ',' {shown}")
    text = (
        "trainers, as svrg, svrg-stored, saga, mars, alone or with an optimizer, as svrg+nag; "
        "svrg-nystrom, which searches nothing; plain optimizers, as sgd, nag, adam: with -decay "
        f"the rate falls to 0 like half a cosine; lbfgs {shown}"
    )
    some = "sgd,nag-decay,lbfgs,svrg,svrg+nag,svrg-nystrom"
    add("--methods", type=names, default=some, help=text)
    text = "to try with each method; by default factors of about 3 until the best is no end"
    add("--learning-rates", type=numbers, help=text)
    add("--momenta", type=numbers, default="0.9,0.99", help=f"of nag, for each rate {shown}")
    for name, default, text in (
        ("--weight-decay", 0.01, "times half the squared norm of all weights is in the loss"),
        ("--l1", 0.0, "times the sum of all absolute weights but the bias is in the loss"),
        ("--passes", 30.0, "gradients that each method takes, divided by the samples"),
        ("--plain-epochs", 1, "epochs of the plain optimizer before the first full gradient"),
        ("--update-freq", 1, "epochs from one full gradient to the next"),
        ("--seeds", 3, "how many seeds"),
        ("--seed", 0, "the first seed of the order of the samples"),
    ):
        add(name, type=type(default), default=default, help=f"{text} {shown}")
    text = "samples in a mini-batch (default: rows / 128, for svrg-nystrom rows / 32)"
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
    # Before MXNet is imported: with small mini-batches, threads wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        _require_mxnet()
        for name in ("matplotlib", "pandas", "scipy", "sklearn", "tqdm"):
            if find_spec(name) is None:
                raise ImportError(f"{name} is not installed: pip install '.[compare]' in a clone")
        problem = LinearModel(options)
        options.output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.output).close()  # so files can be written there
        found = problem.compare(options)
    except (EOFError, ImportError, OSError, TypeError, ValueError) as error:
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
    plot.suptitle(f"{text}, L1 {options.l1:g}" if options.l1 else text)
    plot.savefig(figure, dpi=150)
    penalty = f" plus {options.l1:g} times |w|, without the bias" if options.l1 else ""
    print(f"loss: the mean over all samples plus half the weight decay times |w|^2{penalty}")
    print(f"{found}\n\nwritten: {figure}, {record}")
    return 130 if isinstance(found._search.ended, KeyboardInterrupt) else 0


def read(path: Path, target: str | None, decimal: str) -> tuple[Any, Any, int]:
    """Read inputs, targets, and the number of classes (0 for a regression) from a file."""
    import pandas as pd
    from sklearn.compose import make_column_selector, make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    widths = {mark: pd.read_csv(path, sep=mark, nrows=0).shape[1] for mark in ",;\t|"}
    settings: Any = {"sep": max(widths, key=lambda mark: widths[mark]), "decimal": decimal}
    settings.update(index_col=False, skipinitialspace=True, na_values="?", low_memory=False)
    frame = pd.read_csv(path, **settings)
    if target not in frame:
        lacks = "needs a --target" if target is None else f"has no column {target!r}"
        raise ValueError(f"{path} {lacks}: choose one from {', '.join(map(repr, frame))}")
    for name in frame.select_dtypes(object):
        dates = pd.to_datetime(frame[name], format="ISO8601", utc=True, errors="coerce")
        if dates.count() == frame[name].count():
            frame[name] = (dates - dates.min()) / pd.Timedelta(days=1)
    rows = frame.dropna(subset=[target])
    y, left_out = rows.pop(target), {}
    for name, cells in rows.items():
        labels = cells.nunique()
        if str(name).startswith("Unnamed: ") or not labels:
            left_out[name] = "no name" if labels else "empty"
        elif cells.dtype == object and labels > min(200, cells.count() // 2):
            left_out[name] = described(cells)
    rows = rows.drop(columns=left_out)
    reasons = "; ".join(f"{name!r} ({reason})" for name, reason in left_out.items())
    if rows.empty:
        raise ValueError(f"{path} has nothing to learn {target!r} from; left out: {reasons}")
    labels, most, is_text = y.nunique(), len(y) // 2, y.dtype == object
    if is_text and labels > most:
        raise ValueError(f"{path} has a target {target!r} with too many classes: {described(y)}")
    is_class = is_text or (labels <= min(20, most) and (y % 1 == 0).all())
    texts = make_column_selector(dtype_include=object)
    X = make_column_transformer(
        (OneHotEncoder(), texts),
        remainder=make_pipeline(StandardScaler(), SimpleImputer()),
        sparse_threshold=0,
    ).fit_transform(rows)
    print(
        f"{path}: {len(y)} of {len(frame)} rows, {X.shape[1]} inputs, "
        f"{labels if is_class else 'no'} classes; categories: {', '.join(texts(rows)) or 'none'}; "
        f"left out: {reasons or 'no column'}",
        file=sys.stderr,
    )
    return (X, pd.factorize(y, sort=True)[0], labels) if is_class else (X, y.to_numpy(float), 0)


def described(cells: Any) -> str:
    """How many texts a column has, and the first one."""
    return f"{cells.nunique()} texts in {cells.count()} rows, as {cells.dropna().iloc[0]!r}"


class LinearModel:
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
        # A column of ones makes the bias a weight, which is decayed as one; L1 leaves it alone.
        self.X = np.ascontiguousarray(X if self.l1 else np.c_[X, np.ones(len(X))])
        self.y = y if self.classes else scaled(y[:, None])[:, 0]
        self.outputs = self.classes if self.classes > 2 else 1
        self.kind = {0: "ridge", 2: "logistic"}.get(self.classes, "softmax") + " regression"
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
        """The part of the samples whose class is the most probable one."""
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
            optimizer_params=momenta if "nag" in str(options.methods) else {},
            plain_epochs=options.plain_epochs,
            refresh_every=options.update_freq,
            seconds=seconds and max(1e-9, seconds + start - time.perf_counter()),
            rivals=rivals,
        )

    def minimum(self, limit: float = LIMIT) -> tuple[float | None, dict[str, Any]]:
        """The lowest loss if scikit-learn finds it in so many seconds, and what it reaches."""
        import numpy as np
        from scipy.sparse import csr_matrix

        if self.classes and not self.decay + self.l1:  # it may be infinitely far
            return None, {}
        (solver, model), X, end = self.solver(), self.X, time.perf_counter() + limit
        if (X == 0).mean() > 0.5 and solver != "svd":
            solver, X = f"{solver}, sparse", csr_matrix(X)
        for iterations in 2 ** np.arange(2, 14):  # each time from the start
            start = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the iterations show whether it has converged
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
        settings.update({"l1_ratio": self.l1 / strength} if self.l1 else {})
        if self.classes:
            is_wide = self.outputs * self.X.shape[1] > MOST_WEIGHTS
            solver = "saga" if self.l1 else "newton-cg" if is_wide else "newton-cholesky"
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
