"""The command line."""

from __future__ import annotations

import argparse
import errno
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Sequence

from .. import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except _UserError as error:
        print(f"{parser.prog} {options.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


class _UserError(Exception):
    """Something that the user can mend, in one line."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gluon-svrg", description="Variance-reduced training with MXNet Gluon."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_compare(commands)
    _add_launch(commands)
    return parser


# --- launch ------------------------------------------------------------------------------------


def _add_launch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "launch",
        help="run a training script on several workers on this machine, supervised",
        description=(
            "Start a scheduler, servers and workers of MXNet's distributed stores on this machine. "
            "When one of them dies, all are ended, and the last line says which was the first."
        ),
        usage="%(prog)s -n WORKERS -s SERVERS [--restart N] [--port P] -- COMMAND ...",
    )
    add = parser.add_argument
    add("-n", "--workers", metavar="WORKERS", type=_positive, required=True, help="processes")
    add("-s", "--servers", metavar="SERVERS", type=_positive, default=1, help="1 by default")
    add("--restart", metavar="N", type=_natural, default=0, help="start again after a death")
    add("--port", metavar="P", type=_positive, help="of the scheduler; a free one by default")
    add("script", metavar="COMMAND", nargs=argparse.REMAINDER, help="what each worker runs")
    parser.set_defaults(run=_launch)


def _launch(options: argparse.Namespace) -> int:
    from .launch import LaunchError, launch

    command = options.script[1:] if options.script[:1] == ["--"] else options.script
    if not command:
        raise _UserError("there is no command: end with -- python train.py ARGS")
    _check_script(command)
    try:
        return launch(
            command, options.workers, options.servers, restarts=options.restart, port=options.port
        )
    except LaunchError as error:
        raise _UserError(str(error)) from error


def _check_script(command: Sequence[str]) -> None:
    """Find a script that does not exist before the cluster is started."""
    script = next((word for word in command[1:] if not word.startswith("-")), "")
    is_python = "python" in Path(command[0]).name
    if is_python and script.endswith(".py") and not Path(script).is_file():
        raise _UserError(f"there is no script {script}")


def _natural(text: str) -> int:
    return 0 if text == "0" else _positive(text)


# --- compare -----------------------------------------------------------------------------------


def _add_compare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "compare",
        help="train one model with a plain optimizer and with SVRG",
        description=(
            "Train one model twice, with a plain optimizer and with SVRG, over the same learning "
            "rates and for the same number of data passes. Writes curves.png and results.json."
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("data", metavar="DATA", help="digits, breast_cancer, diabetes, or a .csv file")
    add("--target", metavar="COLUMN", help="the column of the .csv file to predict")
    add("--task", choices=("classification", "regression"), help="inferred from the target")
    add("--model", choices=("linear", "mlp"), default="linear", help="the network")
    add("--optimizer", default="sgd", help="any optimizer of MXNet")
    add("--epochs", type=_positive, default=20, help="epochs of SVRG")
    add("--batch-size", type=_positive, default=16, help="samples in a minibatch")
    add("--update-freq", type=_positive, default=2, help="epochs between full gradients")
    add("--coefficient", type=_coefficient, default=1.0, help="1 is SVRG, 0 the plain optimizer")
    add("--seed", type=_seed, default=0, help="of the initial weights and the order of samples")
    add("--output", metavar="DIR", type=Path, default=Path("results"), help="where files go")
    parser.set_defaults(run=_compare)


def _compare(options: argparse.Namespace) -> int:
    try:
        import matplotlib  # noqa: F401
        import sklearn  # noqa: F401
        from tqdm import tqdm
    except ImportError as error:
        raise _UserError(
            f"{error.name} is not installed: pip install 'gluon-svrg[compare]'"
        ) from error
    import mxnet as mx

    from . import compare, datasets, report

    optimizers = sorted(mx.optimizer.Optimizer.opt_registry)
    if options.optimizer.lower() not in optimizers:
        raise _UserError(
            f"unknown optimizer {options.optimizer!r}: MXNet {mx.__version__} has "
            f"{', '.join(optimizers)}"
        )
    try:
        dataset = datasets.load(options.data, options.target, options.task)
    except datasets.DataError as error:
        raise _UserError(str(error)) from error
    try:
        compare.precision_of(options.optimizer)
    except ValueError as error:
        raise _UserError(str(error)) from error
    _check_writable(options.output, (report.FIGURE, report.RECORD))
    settings = compare.Settings(
        **{name: getattr(options, name) for name in compare.Settings._fields}
    )
    rates = compare.LEARNING_RATES
    epochs = sum(compare.number_of_epochs(settings, method) for method in compare.METHODS)
    with tqdm(total=epochs * len(rates), unit="epoch", disable=None) as bar:

        def on_epoch(method: str, rate: float) -> None:
            bar.set_description(f"{method}, rate {rate:g}")
            bar.update()

        results = compare.compare(dataset, settings, rates, on_epoch)
    report.write(results, options.output)
    print(report.table(results))
    print(f"\nwritten: {options.output / report.FIGURE}, {options.output / report.RECORD}")
    return 0


def _check_writable(folder: Path, names: Sequence[str]) -> None:
    """Find out before the training, not after it."""
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
        raise _UserError(f"cannot write to {place}: {reason}") from error


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return value


def _seed(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 2**32-1, got {text!r}")
    return value


def _coefficient(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"expected a number that is not negative, got {text!r}")
    return value
