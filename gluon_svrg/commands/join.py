"""Take a role in a job that mpirun, srun or Kubernetes starts.

Rank 0 becomes the scheduler of MXNet's job, the next ones become servers, and all others workers
with the command. The process stays one of mpirun, srun or Kubernetes, which watches it.

examples, each with one scheduler, two servers and four workers:
  mpirun -np 7 gluon-svrg join -n 4 -s 2 -- python train.py
  mpirun -np 7 --host a:4,b:3 gluon-svrg join -n 4 -s 2 --scheduler a -- python train.py
  srun -n 7 --kill-on-bad-exit gluon-svrg join -n 4 -s 2 -- python train.py
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
import time
import zlib
from typing import Mapping, NamedTuple, NoReturn
from urllib.parse import urlsplit

from . import roles

_PATIENCE = 300  # seconds until the scheduler's name has an address, as that of a new pod


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    roles.add_arguments(parser)
    text = "Where rank 0 runs. Not needed under srun, and under mpirun on one machine."
    parser.add_argument("--scheduler", metavar="HOST[:PORT]", type=host_and_port, help=text)


def host_and_port(text: str) -> tuple[str | None, int | None]:
    """The host and the port of HOST[:PORT]."""
    parts = urlsplit(f"//{text}")
    return parts.hostname, parts.port


def run(options: argparse.Namespace) -> NoReturn:
    """Become a role."""
    rank = find_rank(os.environ)
    role = role_of(rank, options)
    command = roles.command(role, options)
    name, given = options.scheduler or (rank.scheduler, None)
    port = given or 10000 + zlib.crc32(rank.job.encode()) % 20000
    scheduler = address_of(name)
    if rank.number == 0:
        check_is_here(name, scheduler, port)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((scheduler, port))  # sends nothing, but chooses an own address
        address = probe.getsockname()[0]
    roles.die_with(os.getppid())
    os.execvpe(command[0], command, roles.variables(role, options, scheduler, port, address))


class Rank(NamedTuple):
    """What the launcher (mpirun, srun or Kubernetes) says about a process."""

    number: int
    size: int | None = None  # of the job; None if it is unknown
    job: str = ""  # a name that no other job has; empty if it is unknown
    scheduler: str | None = None  # the machine of rank 0; None if it is unknown


#: The variables of Open MPI, MPICH and Slurm: the rank, the number of ranks, how many of them are
#: on this machine (of Slurm: on each), and the job, which MPICH does not name.
_VARIABLES = [
    "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_SIZE PMIX_NAMESPACE",
    "PMI_RANK PMI_SIZE MPI_LOCALNRANKS",
    "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_STEP_TASKS_PER_NODE SLURM_JOB_ID SLURM_STEP_ID",
]


def find_rank(variables: Mapping[str, str]) -> Rank:
    """Read the variables of Open MPI, MPICH, Slurm or an Indexed Job of Kubernetes."""
    numbers = {name: int(text) for name, text in variables.items() if text.isdecimal()}
    # Slurm may set those of MPICH, too, but not all of them
    rows = sorted(map(str.split, _VARIABLES), key=lambda names: names[2] not in variables)
    for rank, size, here, *job in rows:
        if rank in numbers and size in numbers:
            scheduler = None
            if numbers[size] == numbers.get(here):
                scheduler = "127.0.0.1"
            elif rank == "SLURM_PROCID":
                nodes = variables.get("SLURM_STEP_NODELIST", "")  # as in node[3-5,8],other
                scheduler = re.sub(r"\[(\w+)[^]]*\]", r"\1", nodes).split(",")[0]
            name = ".".join(variables.get(part, "") for part in job)
            return Rank(numbers[rank], numbers[size], name, scheduler)
    if "JOB_COMPLETION_INDEX" in numbers:
        return Rank(numbers["JOB_COMPLETION_INDEX"])
    raise ValueError(
        "this process has no rank: start it by mpirun, srun, Kubernetes, or gluon-svrg launch"
    )


def role_of(rank: Rank, options: argparse.Namespace) -> str:
    """The role of a rank; raise if, as far as is known, there are not as many ranks as roles."""
    names = roles.names(options)
    size = len(names) if rank.size is None else rank.size
    if rank.number >= len(names) or size != len(names):
        raise ValueError(
            f"1 scheduler, {options.servers} servers and {options.workers} workers are "
            f"{len(names)} ranks, and there are {max(size, rank.number + 1)}: start {len(names)}"
        )
    return names[rank.number]


def address_of(name: str | None) -> str:
    """The address of the scheduler's machine, as soon as there is one."""
    if name is None:
        raise ValueError("on several machines, name that of rank 0: --scheduler HOST")
    for second in range(_PATIENCE):
        try:
            address = socket.gethostbyname(name)
            break
        except OSError:
            if second == 0:
                print(f"gluon-svrg join: waiting until {name} has an address", file=sys.stderr)
            time.sleep(1)
    else:
        raise ValueError(f"{name} has no address: use another name in --scheduler HOST")
    if address.startswith("127.") and name not in ("localhost", address):
        raise ValueError(f"{name} is {address} here, unreachable for others: --scheduler ADDRESS")
    return address


def check_is_here(name: str | None, address: str, port: int) -> None:
    """Raise unless the scheduler can use its port on this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise ValueError(
                f"rank 0, the scheduler, cannot use port {port} of {name} ({error.strerror}): name "
                f"this machine and a free port, as in --scheduler {socket.gethostname()}:PORT"
            ) from error
