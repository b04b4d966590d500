"""Workers of Horovod, started as `horovodrun` does, which needs ssh to the other machines."""

from __future__ import annotations

from typing import Any, Sequence

from .addresses import interface_of
from .local import LocalProcesses
from .remote import RemoteProcesses
from .roles import LaunchError, Role, common_variables

_server: Any = None  # of the last start


def roles(machines: Sequence[LocalProcesses | RemoteProcesses], timeout: float) -> list[list[Role]]:
    """One worker for each process of the launcher, and the server through which they meet.

    Parameters
    ----------
    machines : sequence
        The processes, in the order of their ranks; the first is this one.
    timeout : float
        Seconds after which a silent process counts as dead; 0 for never.

    Raises
    ------
    LaunchError
        If Horovod is not installed.
    """
    global _server
    try:
        from horovod.runner.common.util.hosts import SlotInfo
        from horovod.runner.http.http_server import RendezvousServer
    except ImportError as error:
        raise LaunchError("Horovod is not installed: pip install 'gluon-svrg[horovod]'") from error
    hosts = list(dict.fromkeys(machine.address for machine in machines))
    local: dict[str, int] = dict.fromkeys(hosts, 0)
    slots = []
    for rank, machine in enumerate(machines):
        same = sum(other.address == machine.address for other in machines)
        slot = local[machine.address]
        across = [h for h in hosts if sum(m.address == h for m in machines) > slot]
        slots.append(
            SlotInfo(
                machine.address,
                rank,
                slot,
                across.index(machine.address),
                len(machines),
                same,
                len(across),
            )
        )
        local[machine.address] += 1
    _server = RendezvousServer(0)
    port = _server.start()
    _server.init(slots)
    variables = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": machines[0].address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        **common_variables(timeout),
    }
    found = []
    for machine, slot in zip(machines, slots):
        own = {**variables, **_of(slot)}
        interface = (
            interface_of(machine.address)
            if isinstance(machine, LocalProcesses)
            else machine.ask("interface", machine.address)
        )
        if interface:
            own["HOROVOD_GLOO_IFACE"] = interface
        found.append([Role(f"worker {slot.rank}", own)])
    return found


def _of(slot: Any) -> dict[str, str]:
    return {
        "HOROVOD_HOSTNAME": str(slot.hostname),
        "HOROVOD_RANK": str(slot.rank),
        "HOROVOD_SIZE": str(slot.size),
        "HOROVOD_LOCAL_RANK": str(slot.local_rank),
        "HOROVOD_LOCAL_SIZE": str(slot.local_size),
        "HOROVOD_CROSS_RANK": str(slot.cross_rank),
        "HOROVOD_CROSS_SIZE": str(slot.cross_size),
    }
