"""Run a training script on several workers, on this machine.

This starts a scheduler, servers and workers of MXNet's distributed kvstores. When one of them
fails, all others are ended, and the last line names the first one.

example:
  gluon-svrg launch -n 4 -s 2 -- python train.py --epochs 10
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any, NoReturn

from . import roles

_HOST = "127.0.0.1"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # that end the job
_PATIENCE = 3  # seconds for processes to end by themselves


add_arguments = roles.add_arguments


def run(options: argparse.Namespace) -> int:
    """Run the job; return the exit status of the process that failed first, or 0."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port = probe.getsockname()[1]
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end the job if nobody reads its output
    job = _Job()
    try:
        for name in roles.names(options):
            variables = roles.variables(name, options, _HOST, port, _HOST)
            command = roles.command(name, options)
            job.start(name, command, {"OMP_NUM_THREADS": "1", **variables})
        name, code = job.wait()
    except KeyboardInterrupt as interrupt:
        name, code = "the launcher", -interrupt.args[0]
    finally:
        job.end()
    if code:
        signalled = code < 0 and f"was ended by signal {-code} ({signal.strsignal(-code)})"
        how = signalled or f"exited with code {code}"
        print(f"gluon-svrg launch: {name} {how}; all others were ended", file=sys.stderr)
    return code if code >= 0 else 128 - code


def _interrupt(number: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt(number)


class _Job:
    """The processes of all roles. Each has a process group, so that its children end with it."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}  # by process id
        self._readers: list[threading.Thread] = []

    def start(self, name: str, command: list[str], variables: dict[str, str]) -> None:
        """Start a role."""
        launcher = os.getpid()
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: roles.die_with(launcher),
        )
        self._running[process.pid] = name, process

    def wait(self) -> tuple[str, int]:
        """Show all output until all workers end or a process fails; return its name and code."""
        for name, process in self._running.values():
            reader = threading.Thread(target=_show, args=(name, process.stdout), daemon=True)
            reader.start()
            self._readers.append(reader)
        while any(name.startswith("worker") for name, _ in self._running.values()):
            ended: Any = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            if ended.si_pid not in self._running:  # an orphan: this is the init of a container
                os.waitpid(ended.si_pid, 0)
                continue
            name, code = self._end(ended.si_pid)
            if code:
                return name, code
        return "", 0

    def _end(self, process: int) -> tuple[str, int]:
        """End a process and its children; return its name and exit code."""
        os.killpg(process, signal.SIGKILL)
        name, ended = self._running.pop(process)
        return name, ended.wait()

    def end(self) -> None:
        """End all remaining processes."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        for process in self._running:
            os.killpg(process, signal.SIGTERM)
            os.killpg(process, signal.SIGCONT)  # a stopped process ends, too
        deadline = time.monotonic() + _PATIENCE
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        for process in self._running:
            while time.monotonic() < deadline and not os.waitid(os.P_PID, process, look):
                time.sleep(0.02)
        for process in list(self._running):
            self._end(process)
        for reader in self._readers:
            reader.join(1)


def _show(name: str, stream: Any) -> None:
    for line in stream:  # in one write: the buffer has a lock, so that lines do not mix
        sys.stdout.buffer.write(f"[{name}] ".encode() + line.rstrip() + b"\n")
        sys.stdout.buffer.flush()
