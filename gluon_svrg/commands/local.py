"""The processes of a job on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Callable, Mapping, Sequence

from .process import Process, State, print_line
from .roles import LaunchError, Role

#: Seconds for processes to end by themselves before they are killed.
PATIENCE = 3.0
_INTERVAL = 0.05

# Reads process groups and files, one per line. When the process that wrote them has died, for any
# reason, it kills the groups and removes the files. A minus withdraws one.
_WARDEN = """
import os, shutil, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
lines = {}
for line in map(str.rstrip, sys.stdin):
    lines.pop(line[1:], None) if line[0] == "-" else lines.setdefault(line)
for line in lines:
    if line.isdigit():
        try:
            os.killpg(int(line), signal.SIGKILL)
        except ProcessLookupError:
            pass
for line in lines:
    if not line.isdigit():
        shutil.rmtree(line) if os.path.isdir(line) else os.path.exists(line) and os.unlink(line)
"""


class LocalProcesses:
    """The processes of a job on this machine, which die with this process.

    Parameters
    ----------
    script : sequence of str
        The command of workers.
    environment : dict of str, optional
        The variables of all processes; by default, those of this process.
    say : callable
        Called with each line of their output.
    """

    name = ""  # of the machine, if it is another one
    label = "this machine"
    problem: str | None = None  # why they are out of reach
    slots: int | None = None  # the most workers that may run here

    def __init__(
        self,
        script: Sequence[str],
        environment: Mapping[str, str] | None = None,
        say: Callable[[str], None] = print_line,
        address: str = "127.0.0.1",
    ) -> None:
        self.address = address
        self._script, self._say = script, say
        self._environment = dict(os.environ if environment is None else environment)
        self._processes: list[Process] = []
        self._folder: Path | None = None
        self._warden = subprocess.Popen(
            [sys.executable, "-S", "-c", _WARDEN],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def clean_up(self, what: object, forget: bool = False) -> None:
        """Kill a process group, or remove a file or folder, when this process dies."""
        with suppress(BrokenPipeError):
            self._warden.stdin.write(f"{'-' * forget}{what}\n")  # type: ignore[union-attr]
            self._warden.stdin.flush()  # type: ignore[union-attr]

    def start(self, roles: Sequence[Role]) -> None:
        """Start processes.

        Raises
        ------
        LaunchError
            If one cannot be started. Those before it keep running.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="gluon-svrg-"))
        self.clean_up(self._folder)
        for role in roles:
            command = role.command(self._script)
            environment = {**self._environment, **role.variables}
            try:
                process = Process(role.name, command, environment, self._folder, self._say)
            except OSError as error:
                raise LaunchError(f"cannot start {command[0]}: {error.strerror}") from error
            self._processes.append(process)
            self.clean_up(process.id)

    def states(self) -> list[State]:
        """The state of each process."""
        return [process.state() for process in self._processes]

    def free_port(self) -> int:
        """A port that nothing listens on."""
        return usable_port(None)

    def end(self) -> None:
        """End all running processes, with everything that they have started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes:
                process.signal(number)
                process.signal(signal.SIGCONT)  # a stopped process gets the signal only then
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline and any(p.is_running for p in self._processes):
                time.sleep(_INTERVAL)
        for process in self._processes:
            process.finish()
            self.clean_up(process.id, forget=True)
        self._processes = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self.clean_up(self._folder, forget=True)
            self._folder = None

    def has_ended(self, seconds: float) -> bool:
        """Whether all have ended; `end` has already waited for that."""
        return not self._processes

    def close(self, status: int) -> None:
        """End the process that watches over them."""
        self.end()
        self._warden.stdin.close()  # type: ignore[union-attr]
        self._warden.wait()


def usable_port(port: int | None, address: str = "") -> int:
    """Find a usable port: the given one, or any.

    Raises
    ------
    LaunchError
        If it cannot be used.
    """
    with socket.socket() as probe:
        try:
            probe.bind((address, port or 0))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or "expected a number from 1 to 65535"
            raise LaunchError(f"cannot use port {port}: {reason}") from error
        return int(probe.getsockname()[1])
