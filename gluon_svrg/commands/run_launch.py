"""`gluon-svrg launch`: its options, and the run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .._installed import find_mxnet
from .arguments import Help, UserError, add_job_options, command_of, positive
from .roles import LaunchError

if TYPE_CHECKING:
    from .ssh import Host

_DESCRIPTION = """\
Start a scheduler, servers and workers of MXNet's distributed kvstores, on this machine or on those
that -H names. When one of them dies, the launcher ends all, and its last line names that one.

ssh must reach other machines without a password. Workers there run in this working folder, with
these environment variables. The folder, Python and the script must exist there under the same
path."""

_EPILOG = """\
examples:
  gluon-svrg launch -n 4 -s 2 --restart 3 -- python train.py --epochs 10
  gluon-svrg launch -H node1,node2 -n 2 -s 2 -- python train.py
  gluon-svrg launch -H node1:4,node2:4 -n 4 --restart 1 --ssh "ssh -p 2222" -- python train.py"""


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
        "-H",
        "--hosts",
        metavar="HOSTS",
        type=_hosts,
        help="Machines, separated by commas. HOST:SLOTS limits the workers on one.",
    )
    add(
        "--ssh",
        metavar="COMMAND",
        default="ssh",
        help="The command that reaches a machine, with its options.",
    )
    add(
        "--port",
        metavar="P",
        type=positive,
        help="The port of the scheduler. By default, a free one.",
    )
    add_job_options(parser)
    parser.set_defaults(run=run)


def _hosts(text: str) -> list[Host]:
    from .ssh import Host

    try:
        hosts = [Host.parse(word.strip()) for word in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if len({host.name for host in hosts}) < len(hosts):
        raise argparse.ArgumentTypeError(f"a machine is named twice in {text!r}: use HOST:SLOTS")
    return hosts


def run(options: argparse.Namespace) -> int:
    """Launch the job."""
    command = command_of(options.script)
    settings = {
        "restarts": options.restart,
        "port": options.port,
        "timeout": options.timeout,
    }
    try:
        if options.hosts:
            from .ssh import launch_on

            settings["shell"] = options.ssh
            return launch_on(options.hosts, command, options.workers, options.servers, **settings)
        from .launch import launch

        find_mxnet()
        return launch(command, options.workers, options.servers, **settings)
    except (ImportError, LaunchError) as error:
        raise UserError(str(error)) from error
