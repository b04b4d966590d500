"""The roles of a job's processes, and their variables."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple, Sequence


class LaunchError(Exception):
    """A job that cannot be started."""


class Role(NamedTuple):
    """The name of a job's process, and the variables that tell it its role."""

    name: str
    variables: dict[str, str]

    def command(self, script: Sequence[str]) -> list[str]:
        """The command of the process: workers run the user's script."""
        if is_worker(self.name):
            return list(script)
        return [sys.executable, "-m", "gluon_svrg.commands.idle"]


def is_worker(name: str) -> bool:
    """Whether a role is that of a worker."""
    return name.startswith("worker")


def parameter_servers(
    names: Sequence[Sequence[str]],
    addresses: Sequence[str],
    port: int,
    timeout: float,
) -> list[list[Role]]:
    """The roles of MXNet's parameter servers.

    Parameters
    ----------
    names : sequence of sequences of str
        The roles on each machine: ``"scheduler"``, ``"server 0"``, ``"worker 0"``, ...
    addresses : sequence of str
        The address of each machine, as the others reach it.
    port : int
        The port of the scheduler.
    timeout : float
        Seconds within which a silent process ends the job; 0 for never.
    """
    everything = [name for here in names for name in here]
    root = next(address for here, address in zip(names, addresses) if "scheduler" in here)
    variables = {
        "DMLC_PS_ROOT_URI": root,
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": str(sum(map(is_worker, everything))),
        "DMLC_NUM_SERVER": str(sum(name.startswith("server") for name in everything)),
        **common_variables(timeout),
    }
    if timeout:
        variables["PS_HEARTBEAT_INTERVAL"] = "1"
    return [
        [
            Role(name, {**variables, "DMLC_NODE_HOST": address, "DMLC_ROLE": name.split()[0]})
            for name in here
        ]
        for here, address in zip(names, addresses)
    ]


def common_variables(timeout: float) -> dict[str, str]:
    """The variables of all processes, whether parameter servers or Horovod."""
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONUNBUFFERED": "1",
        "GLUON_SVRG_TIMEOUT": f"{timeout:g}",
    }
