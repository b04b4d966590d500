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
import re
import sys
import tempfile
import time
import warnings
from functools import partial
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

from .. import __version__, _require_mxnet

BUNDLED = ("digits", "breast_cancer", "diabetes", "wine")
TIGHT = 1e-10  # of a minimum, as a part of the loss: the table has gaps down to 1e-9
MOST_WEIGHTS = 1000  # of newton-cholesky: with 4,000 it takes 10 s, and newton-cg 0.01
LIMIT, SHARE = 60.0, 0.2  # seconds for scikit-learn, or their part of what the user allows
ISO_DATE = r"\d{4}-\d\d-\d\d(?:[T ].*)?"


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
    plot.suptitle(f"{text}, L1 {options.l1:g}" if options.l1 else text)
    plot.savefig(figure, dpi=150)
    penalty = f" plus {options.l1:g} times |w|, without the bias" if options.l1 else ""
    print(f"loss: the mean over all samples plus half the weight decay times |w|^2{penalty}")
    print(f"{found}\n\nwritten: {figure}, {record}")
    return 130 if isinstance(found._search.ended, KeyboardInterrupt) else 0


def read(path: Path, target: str | None, decimal: str) -> tuple[Any, Any, int]:
    """Read inputs, targets, and the number of classes (0 for a regression) from a file."""
    import pandas as pd

    if not path.exists():
        raise ValueError(f"there is no file {path}; bundled data are {', '.join(BUNDLED)}")
    settings: Any = {"encoding": "utf-8-sig", "skipinitialspace": True, "na_values": ["", "?"]}
    try:
        first = ""  # what it begins with, once that is known
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # of cells without a column
            heads = {mark: pd.read_csv(path, sep=mark, nrows=0, **settings) for mark in ",;\t|"}
            separator = max(heads, key=lambda mark: heads[mark].shape[1])
            first = f" after the first line, {separator.join(heads[separator])!r}"
            settings.update(sep=separator, index_col=False, decimal=decimal)
            frame = pd.read_csv(path, **settings)
    except (EOFError, OSError, ValueError, pd.errors.ParserWarning) as error:
        raise ValueError(
            f"cannot read {path} as UTF-8 text: {str(error).strip()}{first}"
        ) from error
    if frame.shape[1] == 1:
        raise ValueError(f"{path} has only one column, {frame.columns[0]!r}")
    if target not in frame:
        lacks = "needs a --target" if target is None else f"has no column {target!r}"
        raise ValueError(f"{path} {lacks}: choose one from {', '.join(map(repr, frame))}")
    if frame[target].dtype == object or not frame[target].count():
        # Texts such as None and NA may be classes: only empty cells and ? are none.
        settings.update(usecols=[target], dtype=str, keep_default_na=False)
        frame[target] = pd.read_csv(path, **settings)[target]
    rows = frame.dropna(subset=[target])
    rows = rows.assign(**{n: as_days(rows[n]) for n in rows.select_dtypes(exclude="number")})
    infinite = [n for n in rows.select_dtypes("number") if rows[n].isin((inf, -inf)).any()]
    if infinite:
        raise ValueError(f"{path} has infinite numbers in {', '.join(map(repr, infinite))}")
    y, columns, left_out, texts = rows.pop(target), {}, [], []
    for name, cells in rows.items():
        labels, is_text = cells.nunique(), not pd.api.types.is_numeric_dtype(cells.dtype)
        if str(name).startswith("Unnamed: ") or not labels:
            left_out.append(f"{name!r} ({'no name' if labels else 'empty'})")
        elif is_text and labels > min(200, cells.count() // 2):
            left_out.append(f"{name!r} ({described(cells)})")
        elif is_text:
            columns[name] = pd.get_dummies(cells, dummy_na=cells.hasnans)
            texts.append(repr(name))
        else:
            centred = cells.fillna(cells.mean()) - cells.mean()
            columns[name] = centred / (centred.std(ddof=0) if labels > 1 else 1)
    labels, most, is_text = y.nunique(), len(y) // 2, not pd.api.types.is_numeric_dtype(y.dtype)
    is_class = is_text or (labels <= min(20, most) and (y % 1 == 0).all())
    if labels < 2 or (is_class and labels > most):
        found = "constant" if labels < 2 else described(y)
        raise ValueError(f"{path} has a target {target!r} that nothing can learn: it is {found}")
    if not columns:
        text = f"no numbers and no categories to learn {target!r} from; left out: "
        raise ValueError(f"{path} has {text}{'; '.join(left_out)}")
    X = pd.concat(columns, axis=1).to_numpy(float)
    text = f"{len(y)} of {len(frame)} rows, {X.shape[1]} inputs, {labels if is_class else 'no'} "
    text += f"classes, {rows[[*columns]].isna().sum().sum()} missing cells; categories: "
    text += f"{', '.join(texts) or 'none'}; left out: {'; '.join(left_out) or 'no column'}"
    print(f"{path}: {text}", file=sys.stderr)
    return (X, pd.factorize(y, sort=True)[0], labels) if is_class else (X, y.to_numpy(float), 0)


def as_days(cells: Any) -> Any:
    """ISO dates as days after the first one; other texts as they are."""
    import pandas as pd

    texts = cells.dropna().astype(str)
    if not texts.str.fullmatch(ISO_DATE).all():
        return cells
    dates = pd.to_datetime(texts, format="ISO8601", utc=True, errors="coerce")
    return cells if dates.hasnans else (dates - dates.min()) / pd.Timedelta(days=1)


def described(cells: Any) -> str:
    """Why a column of texts is of no use."""
    labels, example = cells.nunique(), str(cells.dropna().iloc[0])
    hint = "; decimal commas need --decimal ','" * bool(re.fullmatch(r"-?[\d.]*,\d+", example))
    return f"{labels} texts in {cells.count()} rows, as {example!r}{hint}"


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
        minimum = self.minimum(SHARE * seconds if seconds else LIMIT)
        left = seconds and min(seconds, max(1e-9, seconds + start - time.perf_counter()))
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
            minimum=minimum["loss"],
            l2=self.decay,
            prox={".*weight": L1(self.l1)} if self.l1 else None,
            learning_rates=options.learning_rates,
            optimizer_params=momenta if "nag" in str(options.methods) else {},
            plain_epochs=options.plain_epochs,
            refresh_every=options.update_freq,
            seconds=left,
            rivals=minimum.get("rivals"),
        )

    def minimum(self, limit: float = LIMIT) -> dict[str, Any]:
        """The lowest loss if scikit-learn finds it in so many seconds, and what it reaches."""
        import numpy as np
        from scipy.sparse import csr_matrix

        if self.classes and not self.decay + self.l1:  # it may be infinitely far
            return {"loss": None, "solver": None, "seconds": None}
        (solver, model), X, end = self.solver(), self.X, time.perf_counter() + limit
        if (X == 0).mean() > 0.5 and solver != "svd":
            solver, X = f"{solver}, sparse", csr_matrix(X)
        for iterations in 2 ** np.arange(2, 14):  # each time from the start
            start = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the gradient shows whether it has converged
                model.set_params(max_iter=iterations).fit(X, self.y)
            seconds = time.perf_counter() - start
            loss, is_lowest = self.look_at(model)
            is_over = time.perf_counter() + 2 * seconds > end
            if is_lowest or is_over or (np.max(model.n_iter_) or 0) < iterations:
                break
        if not is_lowest:
            text = f"scikit-learn {solver} has not converged in {seconds:.3g} s"
            print(f"{text}: losses are compared, as the minimum is not known", file=sys.stderr)
        rivals = {f"scikit-learn {solver}": {"loss": loss, "seconds": seconds}}
        return {"loss": loss if is_lowest else None, "solver": solver, "rivals": rivals}

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

    def look_at(self, model: Any) -> tuple[float, bool]:
        """The loss of a model of scikit-learn, and whether no other is lower by TIGHT."""
        import numpy as np

        from ..compare import data, problem, training

        net, rows = self.new_net(), data.Data((self.X, self.y), 1, 0)
        rows.put_on(net)
        net.weight.data()[:] = model.coef_.reshape(net.weight.shape)
        if self.l1:
            net.bias.data()[:] = np.reshape(model.intercept_, net.bias.shape)
        w, parameters = model.coef_.ravel(), problem.trainable_of(net)
        loss, slope = training.mean_gradient(partial(self.loss_of, net), parameters, rows)
        loss += self.decay / 2 * w @ w + self.l1 * np.abs(w).sum()
        of_w = slope[: len(w)] + self.decay * w + self.l1 * np.sign(w)
        slope[: len(w)] = np.where(w, of_w, np.sign(of_w) * np.maximum(np.abs(of_w) - self.l1, 0))
        # By convexity; the weights at the minimum have at most this norm.
        most = loss / (max(self.l1, np.sqrt(self.decay * loss / 2)) or 1)
        return loss, np.linalg.norm(slope) * (np.linalg.norm(w) + most) <= TIGHT * max(1, loss)
