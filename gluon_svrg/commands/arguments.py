"""The types of the commands' arguments, and their error messages."""

from __future__ import annotations

import argparse
import math
from typing import Callable, Sequence

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
