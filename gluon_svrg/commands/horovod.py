"""Horovod workers, started as by `horovodrun` but without ssh to the other machines."""

from __future__ import annotations

from typing import Any, Sequence

from .addresses import interface_of
from .local import LocalProcesses
from .remote import RemoteProcesses
from .roles import LaunchError, Role


class HorovodWorkers:
    """The roles of Horovod's workers, and the server through which they find each other.

    Raises
    ------
    LaunchError
        If Horovod is not installed.
    """

    def __init__(self) -> None:
        self._server: Any = None
        try:
            from horovod.runner.http import http_server  # noqa: F401
        except ImportError as error:
            raise LaunchError(
                "Horovod is not installed: pip install '.[horovod]' in a clone of this package"
            ) from error

    def roles(self, machines: Sequence[LocalProcesses | RemoteProcesses]) -> list[list[Role]]:
        """Make one worker for each process of the launcher, for one start of the job.

        Parameters
        ----------
        machines : sequence
            The processes, in the order of their ranks; this one is the first.
        """
        slots = _slots([machine.address for machine in machines])
        variables = {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": machines[0].address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self._start(slots)),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        }
        found = []
        for machine, slot in zip(machines, slots):
            names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
            own = {f"HOROVOD_{name.upper()}": str(getattr(slot, name)) for name in names}
            own["HOROVOD_HOSTNAME"] = machine.address
            if isinstance(machine, LocalProcesses):
                interface = interface_of(machine.address)
            else:
                interface = machine.ask("interface", machine.address)
            if interface is not None:
                own["HOROVOD_GLOO_IFACE"] = interface
            found.append([Role(f"worker {slot.rank}", {**variables, **own})])
        return found

    def _start(self, slots: Sequence[Any]) -> int:
        """Start a server that knows nothing of earlier starts; return its port."""
        from horovod.runner.http.http_server import RendezvousServer

        if self._server is not None:
            self._server.stop()
        self._server = RendezvousServer(0)
        port = int(self._server.start())
        self._server.init(slots)
        return port


def _slots(addresses: Sequence[str]) -> list[Any]:
    """The place of each worker on its machine, and of its machine among all, for Horovod."""
    from horovod.runner.common.util.hosts import SlotInfo

    slots = []
    for rank, address in enumerate(addresses):
        local_rank = addresses[:rank].count(address)
        across = [a for a in dict.fromkeys(addresses) if addresses.count(a) > local_rank]
        slots.append(
            SlotInfo(
                hostname=address,
                rank=rank,
                local_rank=local_rank,
                cross_rank=across.index(address),
                size=len(addresses),
                local_size=addresses.count(address),
                cross_size=len(across),
            )
        )
    return slots
