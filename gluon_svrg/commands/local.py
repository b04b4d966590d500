"""The processes of a job on this machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

from ..stores.launcher import PLACE, TIMEOUT_VARIABLE
from . import warden
from .output import print_line
from .process import Process, State
from .roles import TOKEN, LaunchError, Role

#: Seconds for processes to end by themselves before they are killed.
PATIENCE = 3.0
_INTERVAL = 0.05


class Warden:
    """The program that starts processes, and that ends all of them when this one dies.

    Parameters
    ----------
    processes : sequence of tuple
        The command, the variables and the file descriptor for the output of each.
    environment : dict of str
        The variables of all processes.
    folders : sequence of Path
        Folders to make, and to remove with all that they contain at the end.
    files : sequence of Path
        Files to remove at the end.

    Raises
    ------
    LaunchError
        If a process cannot be started.
    """

    def __init__(
        self,
        processes: Sequence[tuple[Sequence[str], Mapping[str, str], int]] = (),
        environment: Mapping[str, str] = {},
        folders: Sequence[Path] = (),
        files: Sequence[Path] = (),
    ) -> None:
        job = {
            "processes": processes,
            "environment": dict(environment),
            "folders": [str(path) for path in folders],
            "files": [str(path) for path in files],
        }
        outputs = [output for _, _, output in processes]
        self._program = subprocess.Popen(
            [sys.executable, "-I", "-S", warden.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=outputs,
            start_new_session=True,
        )
        for output in outputs:
            os.close(output)
        assert self._program.stdin and self._program.stdout
        self._write(json.dumps(job))
        self.reports = map(json.loads, self._program.stdout)
        started: dict[str, Any] = next(self.reports, {"refusal": "cannot start any process"})
        if "refusal" in started:
            self.close()
            raise LaunchError(started["refusal"])
        self.started: list[int] = started["started"]

    def _write(self, line: str) -> None:
        with suppress(OSError, ValueError):
            self._program.stdin.write(f"{line}\n")  # type: ignore[union-attr]
            self._program.stdin.flush()  # type: ignore[union-attr]

    def signal(self, number: int) -> None:
        """Send a signal to all processes, with everything that they have started."""
        self._write(str(int(number)))

    def close(self) -> None:
        """Kill all that is left."""
        with suppress(OSError):
            self._program.stdin.close()  # type: ignore[union-attr]
        with suppress(subprocess.TimeoutExpired):  # a process that waits for a device cannot die
            self._program.wait(PATIENCE)


class LocalProcesses:
    """The processes of a job on this machine, which die with this process.

    Parameters
    ----------
    script : sequence of str
        The command of workers.
    timeout : float
        Seconds within which a silent process ends the job; 0 for never.
    environment : dict of str, optional
        The variables of all processes; by default, those of this process.
    show_line : callable
        Called with each line of their output.
    """

    name = ""  # of the machine, if it is another one
    label = "this machine"
    problem: str | None = None  # why they are out of reach
    slots: int | None = None  # the most workers that may run here

    def __init__(
        self,
        script: Sequence[str],
        timeout: float,
        environment: Mapping[str, str] | None = None,
        show_line: Callable[[str], None] = print_line,
        address: str = "127.0.0.1",
    ) -> None:
        self.address = address
        self._script, self._show_line = script, show_line
        self._environment = {
            "OMP_NUM_THREADS": "1",
            **(os.environ if environment is None else environment),
            "PYTHONUNBUFFERED": "1",
            TIMEOUT_VARIABLE: f"{timeout:g}",
        }
        if timeout:
            self._environment["PS_HEARTBEAT_INTERVAL"] = "1"
        self._environment.pop(TOKEN, None)  # programs like to print their variables
        self._processes: list[Process] = []
        self._warden: Warden | None = None

    def start(self, roles: Sequence[Role]) -> None:
        """Start processes.

        Raises
        ------
        LaunchError
            If one cannot be started. None is left then.
        """
        folder = Path(tempfile.gettempdir(), f"gluon-svrg-{os.urandom(8).hex()}")
        outputs, commands = [], []
        for role in roles:
            reader, writer = os.pipe()
            outputs.append(reader)
            variables = {**role.variables, PLACE: str(folder / role.name)}
            commands.append((role.command(self._script), variables, writer))
        self._warden = Warden(commands, self._environment, [folder])
        self._processes = [
            Process(role.name, process, output, folder / role.name, self._show_line)
            for role, process, output in zip(roles, self._warden.started, outputs)
        ]
        arguments = (self._warden, self._processes)
        threading.Thread(target=_note_ends, args=arguments, daemon=True).start()

    def states(self) -> list[State]:
        """The state of each process."""
        return [process.state() for process in self._processes]

    def free_port(self, port: int | None = None) -> int:
        """A port that nothing listens on: this one, or any."""
        return usable_port(port)

    def end(self) -> None:
        """End all running processes, with everything that they have started."""
        if self._warden is None:
            return
        self._warden.signal(signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and any(p.code is None for p in self._processes):
            time.sleep(_INTERVAL)
        self._warden.close()
        for process in self._processes:
            process.finish()
        self._processes, self._warden = [], None

    def has_ended(self, seconds: float) -> bool:
        """Whether all have ended; `end` has already waited for that."""
        return not self._processes

    def close(self, status: int) -> None:
        """End all processes."""
        self.end()


def _note_ends(program: Warden, processes: Sequence[Process]) -> None:
    """Note when processes end: others may die of that within milliseconds."""
    for report in program.reports:
        process = processes[report["number"]]
        process.ended, process.code = report["ended"], report["code"]
    for process in processes:
        if process.code is None:  # the warden was killed, and they with it
            process.ended, process.code = time.time(), -signal.SIGKILL
            with suppress(ProcessLookupError):
                os.killpg(process.id, signal.SIGKILL)  # what they have started


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
