"""The types of the commands' arguments, and their error messages."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Callable, Sequence

from ..stores.launcher import DEFAULT_TIMEOUT

#: MXNet takes learning rates in float32, whose range ends here.
_LARGEST = 2.0**128


class UserError(Exception):
    """A problem that the user can fix, described in one line."""

    status = 2  # of the command


class Help(argparse.RawDescriptionHelpFormatter):
    """Shows the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        if default is None or default is argparse.SUPPRESS or isinstance(default, (bool, list)):
            return text
        return f"{text} (default: %(default)s)"


def positive(text: str) -> int:
    """Parse a whole number from 1."""
    value = _whole(text)
    if value is None or value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return value


def natural(text: str) -> int:
    """Parse a whole number from 0."""
    value = _whole(text)
    if value is None or value < 0:
        raise argparse.ArgumentTypeError(f"expected 0 or a positive whole number, got {text!r}")
    return value


def seed(text: str) -> int:
    """Parse the seed of a random number generator."""
    value = _whole(text)
    if value is None or not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 2**32-1, got {text!r}")
    return value


def not_negative(text: str) -> float:
    """Parse a finite number that is not negative."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"expected a number that is not negative, got {text!r}")
    return value


def learning_rates(text: str) -> tuple[float, ...]:
    """Parse positive float32 numbers separated by commas, each once; return them in order."""
    try:
        rates = sorted(float(word) for word in text.split(","))
    except ValueError:
        rates = [math.nan]
    if not all(0 < rate < _LARGEST for rate in rates):
        raise argparse.ArgumentTypeError(
            f"expected positive numbers separated by commas, as in 0.01,0.1,1, got {text!r}"
        )
    for rate, following in zip(rates, rates[1:]):
        if rate == following:
            raise argparse.ArgumentTypeError(f"{rate:g} appears twice in {text!r}")
    return tuple(rates)


def one_or_more_of(choices: Sequence[str], what: str) -> Callable[[str], tuple[str, ...]]:
    """Make a parser of names separated by commas, each once.

    Parameters
    ----------
    choices : sequence of str
        The names that are accepted, in any case.
    what : str
        The kind of thing that they name.

    Returns
    -------
    callable
        A type for `argparse` that returns the names in their order.
    """

    def names_of(text: str) -> tuple[str, ...]:
        names = [word.strip().lower() for word in text.split(",")]
        for name in names:
            if name not in choices:
                raise argparse.ArgumentTypeError(
                    f"unknown {what} {name!r}, choose from {', '.join(choices)}"
                )
            if names.count(name) > 1:
                raise argparse.ArgumentTypeError(
                    f"{name!r} appears twice, name each {what} once, from {', '.join(choices)}"
                )
        return tuple(names)

    return names_of


def _whole(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _timeout(text: str) -> float:
    value = not_negative(text)
    if 0 < value < 5:
        raise argparse.ArgumentTypeError(f"expected 0 or at least 5 seconds, got {text!r}")
    return value


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every job, and the command of its workers."""
    parser.add_argument(
        "-s",
        "--servers",
        metavar="SERVERS",
        type=positive,
        default=1,
        help="How many processes sum the gradients.",
    )
    parser.add_argument(
        "--restart",
        metavar="N",
        type=natural,
        default=0,
        help="How often to restart the job after a death.",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=_timeout,
        default=DEFAULT_TIMEOUT,
        help="End the job within so many seconds when a process or machine is silent; 0 for never.",
    )
    parser.add_argument(
        "script",
        metavar="COMMAND",
        nargs=argparse.REMAINDER,
        help="The command of each worker.",
    )


def command_of(words: Sequence[str]) -> list[str]:
    """The user's command, which follows ``--``.

    Raises
    ------
    UserError
        If there is no command, or its Python script does not exist.
    """
    command = list(words[1:] if words[:1] == ["--"] else words)
    if not command:
        raise UserError("there is no command: end with -- python train.py ARGS")
    script = next((word for word in command[1:] if not word.startswith("-")), "")
    is_python = "python" in Path(command[0]).name
    if is_python and script.endswith(".py") and not Path(script).is_file():
        raise UserError(f"there is no script {script}")
    return command
