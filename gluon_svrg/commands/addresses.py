"""The addresses of this machine."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress

_SIOCGIFADDR = 0x8915


def route_to(target: str) -> str:
    """The address of this machine as another machine sees it. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))
        return str(probe.getsockname()[0])


def interfaces() -> dict[str, str]:
    """The address of each network interface, by its name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface has no address
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def interface_of(address: str) -> str | None:
    """The name of the network interface that has an address."""
    return next((name for name, has in interfaces().items() if has == address), None)


def candidates(starter: str | None) -> list[str]:
    """Addresses at which other machines may reach this one, the most likely first.

    Parameters
    ----------
    starter : str or None
        An address of the machine that has started the job, which the others can reach.
    """
    likely = []
    for target in filter(None, (starter, socket.gethostname())):
        with suppress(OSError):
            likely.append(route_to(target))
    everything = [*likely, *interfaces().values()]
    outer = [address for address in everything if not address.startswith("127.")]
    return list(dict.fromkeys(outer)) or ["127.0.0.1"]
