"""A job on this machine: MXNet's parameter servers and their workers, supervised."""

from __future__ import annotations

from typing import Sequence

from ..stores.launcher import DEFAULT_TIMEOUT
from .local import LocalProcesses, usable_port
from .roles import Role, parameter_servers
from .signals import Interruptible
from .supervise import Machine, supervise

_ADDRESS = "127.0.0.1"


def launch(
    command: Sequence[str],
    workers: int,
    servers: int,
    *,
    restarts: int = 0,
    port: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> int:
    """Run a command on several workers until all have succeeded, or any process has failed.

    Parameters
    ----------
    command : sequence of str
        The command of each worker.
    workers, servers : int
        Their numbers. One scheduler is added.
    restarts : int
        How often to restart the whole job after a death.
    port : int, optional
        The port of the scheduler; by default, a free one.
    timeout : float
        Seconds within which a process that does not answer ends the job; 0 for never.

    Returns
    -------
    int
        The exit status: 0 if all workers have ended with 0.

    Raises
    ------
    LaunchError
        If the command or the port cannot be used.
    """
    usable_port(port, _ADDRESS)
    names = names_of(workers, servers)

    def place(machines: Sequence[Machine]) -> list[list[Role]]:
        return parameter_servers([names], [_ADDRESS], usable_port(port, _ADDRESS))

    with Interruptible() as interrupted:
        return supervise(
            [LocalProcesses(command, timeout)],
            place,
            title="gluon-svrg launch",
            interrupted=interrupted,
            timeout=timeout,
            restarts=restarts,
        )


def names_of(workers: int, servers: int) -> list[str]:
    """All roles of a job, in the order in which they start."""
    return [
        "scheduler",
        *(f"server {n}" for n in range(servers)),
        *(f"worker {n}" for n in range(workers)),
    ]
