"""A cluster of real processes on this machine, supervised.

MXNet's distributed stores (ps-lite) need a scheduler, servers and workers, and cannot tell when one
of these has died: the others wait for ever. Whoever started the processes can tell.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, Sequence

from ..stores import launcher as telling

#: Seconds for processes to end by themselves before they are killed.
PATIENCE = 3.0
#: Once a worker has ended well, MXNet lets it wait for the others. If these do nothing for so many
#: seconds, they wait for it.
STALLED = 5.0
#: Less than this share of a processor is nothing.
_IDLE = 0.05
_INTERVAL = 0.05
_ADDRESS = "127.0.0.1"

# Ends the process groups that it is told of, one per line, when whoever told it has died.
_WARDEN = """
import os, signal, sys
groups = [int(line) for line in sys.stdin]
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


class LaunchError(Exception):
    """A job that cannot be started."""


class Death(NamedTuple):
    """What ended a job that did not end well."""

    role: str
    reason: str
    status: int  # for the shell


class Member:
    """A process of the cluster, the leader of a process group of its own."""

    def __init__(
        self, role: str, command: Sequence[str], environment: dict[str, str], folder: Path
    ) -> None:
        self.role = role
        self._folder = folder
        environment = {**environment, telling.PLACE: str(folder / role)}
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._forward, daemon=True)
        self._reader.start()

    def _forward(self) -> None:
        """Pass on the output, line by line, with the role before it."""
        stream: IO[str] = self.process.stdout  # type: ignore[assignment]
        for line in stream:
            _say(f"[{self.role}] {line.rstrip()}")

    @property
    def name(self) -> str:
        """The role, with MXNet's rank where the worker has told it."""
        rank = self._told("rank")
        return self.role if rank is None else f"{self.role} (rank {rank})"

    @property
    def has_finished(self) -> bool:
        """Whether its program has ended, though MXNet may keep the process."""
        return self.process.poll() is not None or self._told("end") is not None

    def _told(self, what: str) -> str | None:
        path = self._folder / f"{self.role}.{what}"
        return path.read_text() if path.exists() else None

    def seconds(self) -> float:
        """The processor time that it has used."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def signal(self, number: int) -> None:
        """Send a signal to the process and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def finish(self) -> None:
        """Wait for the output to end."""
        self._reader.join(1)
        self.process.stdout.close() if not self._reader.is_alive() else None  # type: ignore[union-attr]


def _say(line: str) -> None:
    print(line, flush=True)


def launch(
    command: Sequence[str],
    workers: int,
    servers: int,
    *,
    restarts: int = 0,
    port: int | None = None,
) -> int:
    """Run a command on several workers until all have ended well, or one of all roles has not.

    Parameters
    ----------
    command : sequence of str
        What each worker runs.
    workers, servers : int
        How many there are. One scheduler is added.
    restarts : int
        How often the whole job is started again after a death.
    port : int, optional
        Of the scheduler; by default, a free one.

    Returns
    -------
    int
        An exit status: 0 if all workers have ended with 0.

    Raises
    ------
    LaunchError
        If the command or the port cannot be used.
    """
    with _Interruptible() as interrupted:
        for attempt in range(restarts + 1):
            death = _Job(command, workers, servers, port).run(interrupted)
            if death is None:
                return 0
            again = attempt < restarts and not interrupted.signal
            _say(
                f"gluon-svrg launch: {death.role} {death.reason}; all others were ended"
                + (f"; starting again ({attempt + 1} of {restarts})" if again else "")
            )
            if not again:
                return death.status
    return 0


class _Job:
    """One run of the whole cluster."""

    def __init__(
        self, command: Sequence[str], workers: int, servers: int, port: int | None
    ) -> None:
        self._members: list[Member] = []
        environment = {
            "DMLC_PS_ROOT_URI": _ADDRESS,
            "DMLC_PS_ROOT_PORT": str(_usable_port(port)),
            "DMLC_NODE_HOST": _ADDRESS,
            "DMLC_NUM_WORKER": str(workers),
            "DMLC_NUM_SERVER": str(servers),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PYTHONUNBUFFERED": "1",
        }
        idle = [sys.executable, "-c", "import mxnet"]  # which does not return in these roles
        self._plan = [("scheduler", idle, {"DMLC_ROLE": "scheduler"})]
        self._plan += [(f"server {n}", idle, {"DMLC_ROLE": "server"}) for n in range(servers)]
        self._plan += [
            (f"worker {n}", list(command), {"DMLC_ROLE": "worker"}) for n in range(workers)
        ]
        self._environment = environment
        self._folder = Path(tempfile.mkdtemp(prefix="gluon-svrg-"))

    def run(self, interrupted: _Interruptible) -> Death | None:
        """Start all, watch them, end all."""
        warden = subprocess.Popen(
            [sys.executable, "-c", _WARDEN],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        death = None
        try:
            for role, command, variables in self._plan:
                member = self._start(role, command, variables)
                warden.stdin.write(f"{member.process.pid}\n")  # type: ignore[union-attr]
                warden.stdin.flush()  # type: ignore[union-attr]
            death = self._watch(interrupted)
        finally:
            self._end()
            warden.stdin.close()  # type: ignore[union-attr]
            warden.wait()
        return death

    def _start(self, role: str, command: list[str], variables: dict[str, str]) -> Member:
        try:
            member = Member(role, command, {**self._environment, **variables}, self._folder)
        except OSError as error:
            raise LaunchError(f"cannot start {command[0]}: {error.strerror}") from error
        self._members.append(member)
        return member

    def _watch(self, interrupted: _Interruptible) -> Death | None:
        """Wait until all have ended well, or one has not."""
        stall, first = _Stall(), None
        while True:
            if interrupted.signal:
                name = signal.Signals(interrupted.signal).name
                return Death("the launcher", f"was ended by {name}", 128 + interrupted.signal)
            ended = [(m, m.process.poll()) for m in self._members]
            for member, code in ended:
                if code:
                    return Death(member.name, _ending(code), code if code > 0 else 128 - code)
            if all(code is not None for _, code in ended):
                return None
            workers = [m for m in self._members if m.role.startswith("worker")]
            first = first or next((m for m in workers if m.has_finished), None)
            others = [m for m in workers if m is not first and _is_running(m)]
            if first and others and stall.lasts(others):
                names = " and ".join(m.name for m in others)
                verb = "waits" if len(others) == 1 else "wait"
                reason = f"exited early, with code 0, while {names} still {verb} for it"
                return Death(first.name, reason, 1)
            time.sleep(_INTERVAL)

    def _end(self) -> None:
        """End all that still runs, with all that it has started."""
        for number, patience in ((signal.SIGTERM, PATIENCE), (signal.SIGKILL, PATIENCE)):
            for member in self._members:
                member.signal(number)
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline and any(map(_is_running, self._members)):
                time.sleep(_INTERVAL)
        for member in self._members:
            member.process.wait()
            member.finish()
        shutil.rmtree(self._folder, ignore_errors=True)


class _Stall:
    """Notices when processes do nothing for a while."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._used = math.inf

    def lasts(self, members: Sequence[Member]) -> bool:
        """Whether they have done nothing for long enough."""
        now, used = time.monotonic(), sum(member.seconds() for member in members)
        if not 0 <= used - self._used <= _IDLE * (now - self._since + 1):
            self._since, self._used = now, used
        return now - self._since > STALLED


class _Interruptible:
    """Notice Ctrl-C and SIGTERM instead of dying of them, so that no process is left behind."""

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Interruptible:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._notice)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _notice(self, number: int, frame: object) -> None:
        self.signal = number


def _is_running(member: Member) -> bool:
    return member.process.poll() is None


def _ending(code: int) -> str:
    if code > 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _usable_port(port: int | None) -> int:
    with socket.socket() as probe:
        try:
            probe.bind((_ADDRESS, port or 0))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or "expected a number from 1 to 65535"
            raise LaunchError(f"cannot use port {port}: {reason}") from error
        return int(probe.getsockname()[1])
