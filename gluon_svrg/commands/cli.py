"""Variance-reduced training with MXNet Gluon.

`gluon-svrg COMMAND --help` explains a command.

for example:
  gluon-svrg compare digits
  gluon-svrg launch -n 2 -- python train.py
  mpirun -np 4 gluon-svrg join -n 2 -- python train.py
"""

from __future__ import annotations  # what is imported here needs no MXNet

import argparse
import sys
from typing import Sequence

from .. import __version__
from . import compare, join, launch


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status. An interrupt or an expected error is one line."""
    options = parser().parse_args(arguments)
    name = f"gluon-svrg {options.command}"
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        print(f"{name}: ended by SIGINT", file=sys.stderr)
        return 130
    except (EOFError, ImportError, OSError, TypeError, ValueError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("gluon-svrg", description=__doc__, formatter_class=form)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (compare, launch, join):
        name, text = module.__name__.rpartition(".")[2], str(module.__doc__)
        first_line = text.partition("\n")[0]
        command = commands.add_parser(name, help=first_line, description=text, formatter_class=form)
        command.set_defaults(run=module.run)
        module.add_arguments(command)
    return parser
