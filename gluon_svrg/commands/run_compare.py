"""`gluon-svrg compare`: its options, and the run."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Sequence

from .arguments import (
    Help,
    UserError,
    learning_rates,
    natural,
    not_negative,
    one_or_more_of,
    positive,
    seed,
)
from .settings import (
    DEFAULT_METHODS,
    FIRST_ALPHA,
    LEARNING_RATES,
    METHODS,
    RULES,
    WEIGHT_DECAY,
    Settings,
)

_DESCRIPTION = """\
Train one model with a plain optimizer, SVRG and other methods, with the same learning rates and the
same number of data passes. Print a table of the best run of each method, and write curves.png and
results.json."""

_EPILOG = f"""\
{RULES}

examples:
  gluon-svrg compare digits --model mlp --epochs 30
  gluon-svrg compare digits --methods sgd,svrg,saga --learning-rates 0.03,0.1,0.3,1
  gluon-svrg compare diabetes --methods sgd,mars --optimizer adam --weight-decay 0.001
  gluon-svrg compare houses.csv --target price --output houses"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "compare",
        help="Train one model with a plain optimizer, SVRG and other methods.",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=Help,
    )
    add = parser.add_argument
    add("data", metavar="DATA", help="digits, breast_cancer, diabetes, or a .csv or .tsv file.")
    add("--target", metavar="COLUMN", help="The column of the file to predict.")
    add(
        "--task",
        choices=("classification", "regression"),
        help="How to treat the target. By default, text and whole numbers with few values are "
        "classes.",
    )
    add("--model", choices=("linear", "mlp"), default="linear", help="The network.")
    add("--optimizer", metavar="NAME", default="sgd", help="The name of any optimizer of MXNet.")
    add(
        "--methods",
        metavar="NAMES",
        default=",".join(DEFAULT_METHODS),
        help=f"The methods to compare, separated by commas: {', '.join(METHODS)}. Here sgd means "
        "the plain --optimizer, whose own name works too, and sgd-decay the same with a learning "
        "rate that falls to 0 like half a cosine. The coefficient of alpha-svrg falls linearly "
        f"from {FIRST_ALPHA:g} to 0. SAGA and SAG train on fixed minibatches.",
    )
    add(
        "--learning-rates",
        metavar="RATES",
        type=learning_rates,
        help="The learning rates to try with each method, separated by commas, as in 0.01,0.1,1. "
        f"By default, these are {', '.join(f'{rate:g}' for rate in LEARNING_RATES)}, and lower or "
        "higher ones for a method that is best at the lowest or highest.",
    )
    add(
        "--weight-decay",
        metavar="LAMBDA",
        type=not_negative,
        default=WEIGHT_DECAY,
        help="The L2 penalty that is added to the loss: LAMBDA / 2 times the squared norm of all "
        "weights and biases.",
    )
    add(
        "--epochs",
        metavar="N",
        type=positive,
        default=20,
        help="How many epochs SVRG trains. All other methods make as many data passes as SVRG, "
        "including its full gradients and --plain-epochs.",
    )
    add(
        "--plain-epochs",
        metavar="N",
        type=natural,
        default=1,
        help="Epochs of the plain optimizer before the first full gradient, of SVRG, alpha-SVRG "
        "and SARAH, in addition to --epochs.",
    )
    add("--batch-size", metavar="N", type=positive, default=16, help="Samples in a minibatch.")
    add(
        "--update-freq",
        metavar="N",
        type=positive,
        default=2,
        help="Epochs from one full gradient to the next, of SVRG, alpha-SVRG and SARAH.",
    )
    add(
        "--coefficient",
        metavar="ALPHA",
        type=not_negative,
        default=1.0,
        help="How much of its correction SVRG uses: 1 is all, 0 the plain optimizer.",
    )
    add(
        "--seed",
        metavar="N",
        type=seed,
        default=0,
        help="Decides the initial weights and the order of the samples. All rates are tried with "
        "it.",
    )
    add(
        "--seeds",
        metavar="N",
        type=positive,
        default=3,
        help="With how many seeds to train at the best rate, from --seed on.",
    )
    add(
        "--output",
        metavar="DIR",
        type=Path,
        default=Path("results"),
        help="The folder that the files are written to.",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compare the methods, and report the results."""
    _check_installed()
    import mxnet as mx
    from tqdm import tqdm

    from . import datasets, report
    from .compare import compare
    from .model import precision_of

    optimizers = sorted(mx.optimizer.Optimizer.opt_registry)
    if options.optimizer.lower() not in optimizers:
        raise UserError(
            f"unknown optimizer {options.optimizer!r}: MXNet {mx.__version__} has "
            f"{', '.join(optimizers)}"
        )
    options.methods = _methods_of(options)
    try:
        dataset = datasets.load(options.data, options.target, options.task)
        precision_of(options.optimizer)
    except ValueError as error:
        raise UserError(str(error)) from error
    _check_writable(options.output, (report.FIGURE, report.RECORD))
    for note in dataset.notes:
        print(f"{options.data}: {note}", file=sys.stderr)
    if options.data not in datasets.BUNDLED:
        print(f"{options.data}: {_in_words(dataset)}", file=sys.stderr)
    settings = Settings(**{name: getattr(options, name) for name in Settings._fields})
    with tqdm(unit="pass", disable=None) as bar:

        def show(what: str, done: float, planned: int) -> None:
            bar.set_description(what, refresh=False)
            bar.n, bar.total = int(done), planned
            bar.refresh()

        results = compare(dataset, settings, show)
    report.write(results, options.output)
    print(report.table(results))
    print(f"\nwritten: {options.output / report.FIGURE}, {options.output / report.RECORD}")
    return 0


def _in_words(dataset: Any) -> str:
    """The size and the task of a data set."""
    rows, inputs = dataset.X.shape
    classes = f" with {dataset.classes} classes" if dataset.classes else ""
    return f"{rows} rows, {inputs} inputs, {dataset.task}{classes} (--task)"


def _methods_of(options: argparse.Namespace) -> tuple[str, ...]:
    """The methods that were named; the plain ones go by the name of the optimizer, too."""
    plain = {name: name.replace("sgd", options.optimizer.lower()) for name in ("sgd", "sgd-decay")}
    typed = [word.strip().lower() for word in options.methods.split(",")]
    names = [next((own for own in plain if plain[own] == name), name) for name in typed]
    try:
        return one_or_more_of(list(METHODS), "method")(",".join(names))
    except argparse.ArgumentTypeError as error:
        raise UserError(f"argument --methods: {error}") from error


def _check_installed() -> None:
    from .._installed import require_mxnet

    try:
        require_mxnet()
    except ImportError as error:
        raise UserError(str(error)) from error
    for name in ("matplotlib", "pandas", "sklearn", "tqdm"):
        if find_spec(name) is None:
            raise UserError(
                f"{name} is not installed: pip install '.[compare]' in a clone of this package"
            )


def _check_writable(folder: Path, names: Sequence[str]) -> None:
    """Raise before the training if the files cannot be written."""
    place = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        for place in (folder / name for name in names):
            if place.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise UserError(f"cannot write to {place}: {reason}") from error
