"""The command line and its commands, whose help needs no MXNet."""

from __future__ import annotations

import argparse
from typing import Sequence

from .. import __version__
from . import compare, join, launch

_DESCRIPTION = """\
Variance-reduced training with MXNet Gluon.

`gluon-svrg COMMAND --help` explains a command."""

_EPILOG = """\
examples:
  gluon-svrg compare digits
  gluon-svrg launch -n 2 -- python train.py
  mpirun -np 4 gluon-svrg join -n 2 -- python train.py"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    options = parser().parse_args(arguments)
    return int(options.run(options))


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="gluon-svrg",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (compare, launch, join):
        module.add_to(commands)
    return parser
