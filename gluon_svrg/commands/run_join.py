"""`gluon-svrg join`: its options, and the run."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from .._installed import find_mxnet
from .arguments import Help, UserError, add_job_options, command_of, natural, not_negative, positive
from .ranks import find
from .roles import LaunchError

_DESCRIPTION = """\
Take part in a job that a cluster's launcher starts: mpirun, srun, an Indexed Job of Kubernetes.

Every process of the job is a worker; rank 0 is also the scheduler, and the first ranks are servers.
With -n, each process has one role: the scheduler, then the servers, then the workers. The processes
supervise each other: when one of them dies, all end, and a line names the first one that died."""

_EPILOG = """\
examples:
  mpirun -np 4 gluon-svrg join -s 2 -- python train.py
  srun -n 4 gluon-svrg join -- python train.py
  mpirun -np 5 gluon-svrg join -n 2 -s 2 -- python train.py
  gluon-svrg join --size 4 --scheduler train-0.train:9000 --token-file /etc/job -- python train.py
  mpirun -np 2 gluon-svrg join --horovod -- python train.py"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "join",
        help="Take part in a job that mpirun, srun or Kubernetes starts.",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        usage="%(prog)s [OPTIONS] -- COMMAND ...",
        formatter_class=Help,
    )
    add = parser.add_argument
    add("-n", "--workers", metavar="WORKERS", type=positive, help="Give each process one role.")
    add("--horovod", action="store_true", help="Start Horovod workers instead.")
    add(
        "--scheduler",
        metavar="NAME:PORT",
        type=_address,
        help="Where rank 0 listens. By default, rank 0 writes its address to a file.",
    )
    add(
        "--folder",
        metavar="DIR",
        type=Path,
        default=Path(),
        help="A folder that all processes see, for this file.",
    )
    add(
        "--token-file",
        metavar="PATH",
        type=Path,
        help="A file with a secret that all processes of the job share, and nobody else knows.",
    )
    add(
        "--no-authentication",
        action="store_true",
        help="Let whoever reaches --scheduler take part, on a network where all are trusted.",
    )
    add("--rank", metavar="N", type=natural, help="The rank, if no launcher sets it.")
    add("--size", metavar="N", type=positive, help="The number of processes.")
    add(
        "--wait",
        metavar="SECONDS",
        type=not_negative,
        default=600.0,
        help="How long the processes wait for each other at the start.",
    )
    add_job_options(parser)
    parser.set_defaults(run=run)


def _address(text: str) -> str:
    name, _, port = text.rpartition(":")
    if not name or not port.isdigit() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"expected NAME:PORT, got {text!r}")
    return text


def run(options: argparse.Namespace) -> int:
    """Join the job."""
    from .join import Settings, join  # here, so that other commands start faster

    settings = Settings(
        command=command_of(options.script),
        workers=options.workers,
        servers=options.servers,
        horovod=options.horovod,
        scheduler=options.scheduler,
        folder=options.folder,
        token_file=options.token_file,
        no_authentication=options.no_authentication,
        timeout=options.timeout,
        wait=options.wait,
        restarts=options.restart,
    )
    try:
        find_mxnet()
        return join(find(os.environ, options.rank, options.size), settings)
    except (ImportError, LaunchError) as error:
        raise UserError(str(error)) from error
