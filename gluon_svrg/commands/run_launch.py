"""`gluon-svrg launch`: its options, and what it does with them."""

from __future__ import annotations

import argparse

from .arguments import Help, UserError, command_of, natural, positive

_DESCRIPTION = """\
Start a scheduler, servers and workers of MXNet's distributed kvstores on this machine. When one of
them dies, all are ended, and the last line names the first that did."""

_EPILOG = """\
example:
  gluon-svrg launch -n 4 -s 2 --restart 3 -- python train.py --epochs 10"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "launch",
        help="Run a training script on several workers, supervised.",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        usage="%(prog)s -n WORKERS [OPTIONS] -- COMMAND ...",
        formatter_class=Help,
    )
    add = parser.add_argument
    add(
        "-n",
        "--workers",
        metavar="WORKERS",
        type=positive,
        required=True,
        help="How many processes train.",
    )
    add(
        "-s",
        "--servers",
        metavar="SERVERS",
        type=positive,
        default=1,
        help="How many processes sum the gradients.",
    )
    add(
        "--restart",
        metavar="N",
        type=natural,
        default=0,
        help="How often the job starts again after a death.",
    )
    add(
        "--port",
        metavar="P",
        type=positive,
        help="The port of the scheduler. Left out, a free one is taken.",
    )
    add("script", metavar="COMMAND", nargs=argparse.REMAINDER, help="What each worker runs.")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Launch the job."""
    from .._installed import find_mxnet
    from .launch import LaunchError, launch

    command = command_of(options.script)
    try:
        find_mxnet()
        return launch(
            command, options.workers, options.servers, restarts=options.restart, port=options.port
        )
    except (ImportError, LaunchError) as error:
        raise UserError(str(error)) from error
