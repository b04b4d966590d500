"""A separate network for a command: every byte on it belongs to the command."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

_LOOPBACK = b"lo"
_SET_FLAGS, _UP = 0x8914, 0x1  # SIOCSIFFLAGS and IFF_UP of Linux


def missing() -> str | None:
    """Why there can be no such network here, or None."""
    if shutil.which("unshare") is None:
        return "a separate network needs Linux and unshare, of util-linux"
    tried = subprocess.run([*_unshare(), "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"a separate network needs root or user namespaces: {tried.stderr.strip()}"
    return None


def alone(command: list[str]) -> list[str]:
    """The words that run a command with no network but its own loopback interface.

    The folder above this package must be the working folder.
    """
    return [*_unshare(), sys.executable, "-m", "benchmarks.network", *command]


def _unshare() -> list[str]:
    return ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--net", "--uts"]


def transferred() -> int:
    """Bytes that have gone over the loopback of this network, TCP's headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip().encode() == _LOOPBACK:
            return int(counts.split()[0])  # what is received here was sent here
    raise RuntimeError("this network has no loopback: /proc/self/net/dev does not name 'lo'")


def main() -> None:
    """Bring the loopback up, and become the command."""
    socket.sethostname("localhost")  # Horovod's workers look each other up by the host's name
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh", _LOOPBACK, _UP) + bytes(22))
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
