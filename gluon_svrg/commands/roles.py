"""The roles of a job's processes, and their variables."""

from __future__ import annotations

import re
import sys
from typing import Any, NamedTuple, Sequence

#: The variable that may hold the secret of a job.
TOKEN = "GLUON_SVRG_TOKEN"
_ADDRESS, _NUMBER, _PORT = r"[0-9]{1,3}(\.[0-9]{1,3}){3}", "[0-9]{1,9}", "[0-9]{1,5}"
_NAME = re.compile(r"scheduler|(server|worker) [0-9]{1,9}")
#: All variables that a machine takes from another one, and their forms.
_FORMS = {
    "DMLC_ROLE": "scheduler|server|worker",
    "DMLC_NODE_HOST": _ADDRESS,
    "DMLC_PS_ROOT_URI": _ADDRESS,
    "DMLC_PS_ROOT_PORT": _PORT,
    "DMLC_NUM_WORKER": _NUMBER,
    "DMLC_NUM_SERVER": _NUMBER,
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": _ADDRESS,
    "HOROVOD_GLOO_RENDEZVOUS_PORT": _PORT,
    "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_CPU_OPERATIONS": "gloo",
    "HOROVOD_HOSTNAME": _ADDRESS,
    "HOROVOD_GLOO_IFACE": "[A-Za-z0-9_.:@-]{1,15}",
    **{
        f"HOROVOD_{kind}{what}": _NUMBER
        for kind in ("", "LOCAL_", "CROSS_")
        for what in ("RANK", "SIZE")
    },
}


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
    """
    everything = [name for here in names for name in here]
    root = next(address for here, address in zip(names, addresses) if "scheduler" in here)
    variables = {
        "DMLC_PS_ROOT_URI": root,
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": str(sum(map(is_worker, everything))),
        "DMLC_NUM_SERVER": str(sum(name.startswith("server") for name in everything)),
    }
    return [
        [
            Role(name, {**variables, "DMLC_NODE_HOST": address, "DMLC_ROLE": name.split()[0]})
            for name in here
        ]
        for here, address in zip(names, addresses)
    ]


def is_address(text: Any) -> bool:
    """Whether something has the form of an address, as machines send them to each other."""
    return isinstance(text, str) and re.fullmatch(_ADDRESS, text) is not None


def checked(roles: Any) -> list[Role]:
    """The roles that another machine has sent.

    Raises
    ------
    ValueError, TypeError
        If there is anything but roles and variables that a job needs.
    """
    found = [Role(name, dict(variables)) for name, variables in roles]
    for role in found:
        if not _NAME.fullmatch(role.name):
            raise ValueError(f"the role {role.name!r}")
        for variable, value in role.variables.items():
            if variable not in _FORMS or not re.fullmatch(_FORMS[variable], value):
                raise ValueError(f"the variable {variable}={value!r}")
    return found
