"""The rank of a process, from the environment variables of cluster launchers."""

from __future__ import annotations

import re
from typing import Mapping, NamedTuple

from .arguments import UserError


class Rank(NamedTuple):
    """The place of a process in the job that a launcher has started."""

    rank: int
    size: int
    job: str  # distinguishes this job from others in one folder
    starter: str | None = None  # an address of the machine that has started it
    launcher: bool = False  # whether the launcher keeps running, so that its death ends the job
    secret: bytes | None = None  # what the launcher tells the processes of this job only
    is_one_machine: bool = False  # whether all of them run here


def find(environment: Mapping[str, str], rank: int | None = None, size: int | None = None) -> Rank:
    """Find out the rank.

    Parameters
    ----------
    environment : dict of str
        The variables that the launcher has set.
    rank, size : int, optional
        Override the variables.

    Raises
    ------
    UserError
        If rank or size is unknown, or they do not fit together.
    """
    found = next(filter(None, (ask(environment) for ask in _LAUNCHERS)), None)
    known_rank, known_size, job, starter, here = found or (None, None, "job", None, None)
    secret = environment.get(_OPEN_MPI_SECRET, "") if job.startswith("mpi-") else ""
    stays = found is not None and job != "kubernetes"
    rank = known_rank if rank is None else rank
    size = known_size if size is None else size
    if rank is None:
        raise UserError(
            "no launcher has told this process its rank: start it with mpirun, srun or an Indexed "
            "Job, or set --rank and --size"
        )
    if size is None:
        raise UserError(f"rank {rank} does not know how many processes there are: set --size")
    if rank >= size:
        raise UserError(f"rank {rank} does not fit a job of size {size}: ranks count from 0")
    return Rank(rank, size, job, starter, stays, secret.encode() or None, here == size)


_Found = tuple  # rank, size or None, job, starter or None, number of processes here or None
#: Random bytes that mpirun of Open MPI 4 gives to all processes of a job, and to no others.
_OPEN_MPI_SECRET = "OMPI_MCA_orte_precondition_transports"


def _open_mpi(variables: Mapping[str, str]) -> _Found | None:
    names = ("RANK", "SIZE", "LOCAL_SIZE")
    rank, size, here = (_number(variables, f"OMPI_COMM_WORLD_{name}") for name in names)
    if rank is None or size is None:
        return None
    job = variables.get("OMPI_MCA_ess_base_jobid") or variables.get("PMIX_NAMESPACE", "job")
    starter = re.search(r"tcp://([\d.]+)", variables.get("OMPI_MCA_orte_hnp_uri", ""))
    return rank, size, f"mpi-{job}", starter and starter.group(1), here


def _slurm(variables: Mapping[str, str]) -> _Found | None:
    rank = _number(variables, "SLURM_PROCID")
    if rank is None or not {"SLURM_STEP_ID", "SLURM_STEPID"} & set(variables):
        return None  # a batch script belongs to no step
    size = _number(variables, "SLURM_STEP_NUM_TASKS") or _number(variables, "SLURM_NTASKS")
    step = variables.get("SLURM_STEP_ID") or variables.get("SLURM_STEPID")
    job = f"slurm-{variables.get('SLURM_JOB_ID', 'job')}.{step}"
    here = size if variables.get("SLURM_STEP_NUM_NODES") == "1" else None
    return rank, size, job, variables.get("SLURM_LAUNCH_NODE_IPADDR"), here


def _pmi(variables: Mapping[str, str]) -> _Found | None:
    rank = _number(variables, "PMI_RANK")
    if rank is None:
        return None
    here = _number(variables, "MPI_LOCALNRANKS")
    return rank, _number(variables, "PMI_SIZE"), "pmi", None, here


def _pmix(variables: Mapping[str, str]) -> _Found | None:
    rank = _number(variables, "PMIX_RANK")
    if rank is None:
        return None
    return rank, None, f"pmix-{variables.get('PMIX_NAMESPACE', 'job')}", None, None


def _kubernetes(variables: Mapping[str, str]) -> _Found | None:
    rank = _number(variables, "JOB_COMPLETION_INDEX")
    return None if rank is None else (rank, None, "kubernetes", None, None)


# Inside a Slurm allocation, mpirun passes on Slurm's variables, which are those of its own daemon.
_LAUNCHERS = (_open_mpi, _slurm, _pmi, _pmix, _kubernetes)


def _number(variables: Mapping[str, str], name: str) -> int | None:
    text = variables.get(name, "")
    return int(text) if text.isdigit() else None
