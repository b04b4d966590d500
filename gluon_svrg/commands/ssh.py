"""A job on several machines that ssh reaches."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Mapping, NamedTuple, Sequence

from ..stores.launcher import DEFAULT_TIMEOUT
from .channel import Channel
from .output import print_line
from .remote import RemoteProcesses
from .roles import LaunchError, Role, parameter_servers
from .signals import Interruptible
from .supervise import Machine, supervise

#: Seconds for a machine to answer at the start.
CONNECT = 60.0

#: Variables that belong to a machine or a login, and are not sent to other machines.
_OWN = re.compile(
    r"HOME|USER|LOGNAME|SHELL|SHLVL|PWD|OLDPWD|HOSTNAME|HOST|MAIL|TERM|DISPLAY|TMPDIR|TMP|TEMP|_"
    r"|TTY|XAUTHORITY|(SSH|XDG|DBUS|BASH_FUNC|SLURM|OMPI|PMIX|PMI)_.*"
)


class Host(NamedTuple):
    """A machine's name for ssh, and the most workers that it may run."""

    name: str
    slots: int | None

    @classmethod
    def parse(cls, text: str) -> Host:
        """Read ``host``, ``user@host`` or ``host:slots``."""
        name, _, slots = text.partition(":")
        if not name or name.startswith("-") or (":" in text and not slots.isdigit()):
            raise ValueError(f"expected HOST or HOST:SLOTS, got {text!r}")
        return cls(name, int(slots) if slots else None)


def launch_on(
    hosts: Sequence[Host],
    command: Sequence[str],
    workers: int,
    servers: int,
    *,
    restarts: int = 0,
    port: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    shell: str = "ssh",
) -> int:
    """Run a command on several workers on several machines, as `launch` does on one.

    Parameters
    ----------
    hosts : sequence of Host
        The first one runs the scheduler. Workers and servers are assigned in turn.
    command : sequence of str
        The command of each worker, run in this working folder with these variables.
    workers, servers, restarts, port, timeout
        As for `launch`. A restart uses the remaining machines.
    shell : str
        The program that reaches a machine, with its options.

    Returns
    -------
    int
        The exit status: 0 if all workers have ended with 0.

    Raises
    ------
    LaunchError
        If a machine cannot be reached, or the job cannot be started there.
    """

    def place(machines: Sequence[Machine]) -> list[list[Role]]:
        names = shares(workers, servers, [machine.slots for machine in machines])
        used = [(machine, here) for machine, here in zip(machines, names) if here]
        root = used[0][0]
        _find_addresses([machine for machine, _ in used])
        at = root.free_port(port)
        addresses = [machine.address for machine, _ in used]
        roles = iter(parameter_servers([here for _, here in used], addresses, at))
        return [next(roles) if here else [] for here in names]

    shares(workers, servers, [host.slots for host in hosts])  # before anything is started
    settings = {
        "script": list(command),
        "folder": os.getcwd(),
        "variables": {k: v for k, v in os.environ.items() if not _OWN.fullmatch(k)},
        "timeout": timeout,
    }
    with Interruptible() as interrupted:
        machines: list[Machine] = []
        try:
            for host in hosts:
                machines.append(_connect(host, shell, timeout))
            _prepare(machines, settings, interrupted)
        except BaseException:
            for machine in machines:
                machine.close(1)
            raise
        return supervise(
            machines,
            place,
            title="gluon-svrg launch",
            interrupted=interrupted,
            timeout=timeout,
            restarts=restarts,
        )


def shares(workers: int, servers: int, slots: Sequence[int | None]) -> list[list[str]]:
    """Assign roles to the machines.

    Raises
    ------
    LaunchError
        If the machines have too few slots for the workers.
    """
    if None not in slots and sum(slots) < workers:  # type: ignore[arg-type]
        raise LaunchError(
            f"{workers} workers need as many slots, and the machines have "
            f"{' + '.join(map(str, slots)) or 'none'}"
        )
    names: list[list[str]] = [[] for _ in slots]
    names[0].append("scheduler")
    for number in range(servers):
        names[number % len(names)].append(f"server {number}")
    number, free = 0, list(slots)
    while number < workers:
        for here, left in enumerate(free):
            if number < workers and left != 0:
                names[here].append(f"worker {number}")
                free[here] = None if left is None else left - 1
                number += 1
    return names


def _connect(host: Host, shell: str, timeout: float) -> RemoteProcesses:
    """Start `gluon_svrg.commands.agent` on a machine. The channel sends it everything else."""
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), package]))
    words = ["exec", "env", f"PYTHONPATH={path}", sys.executable, "-m", "gluon_svrg.commands.agent"]
    options = ["-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20"]
    try:
        process = subprocess.Popen(
            [*shlex.split(shell), *options, host.name, " ".join(map(shlex.quote, words))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is ours: the other side ends in an orderly way
        )
    except OSError as error:
        raise LaunchError(f"cannot start {shell}: {error.strerror}") from error
    assert process.stdin and process.stdout and process.stderr

    def tell_errors() -> None:
        for line in process.stderr:  # type: ignore[union-attr]
            print_line(f"[{host.name}] {line.decode(errors='replace').rstrip()}")

    threading.Thread(target=tell_errors, daemon=True).start()

    def close(lost: bool) -> None:
        deadline = time.monotonic() + (0 if lost else 5)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.kill()
        process.wait()

    channel = Channel(process.stdout, process.stdin, close)  # type: ignore[arg-type]
    machine = RemoteProcesses(channel, host.name, timeout, print_line, host.slots)
    channel.open(machine.receive)
    return machine


def _prepare(
    machines: Sequence[Machine], settings: Mapping[str, object], interrupted: Interruptible
) -> None:
    """Send the common settings, and check that all machines answer."""
    for machine in machines:
        assert isinstance(machine, RemoteProcesses)
        machine.prepare(**settings)
    for machine in machines:
        assert isinstance(machine, RemoteProcesses)
        machine.ask("port", seconds=CONNECT, interrupted=interrupted)
        machine.states()


def _find_addresses(machines: Sequence[Machine]) -> None:
    """Find the address by which the other machines reach each machine."""
    remote = [machine for machine in machines if isinstance(machine, RemoteProcesses)]
    reached = [str(machine.ask("reached")) for machine in remote]
    others = [address for address in reached[1:] if not address.startswith("127.")]
    if not others:  # all on one machine
        for machine, address in zip(remote, reached):
            machine.address = address
        return
    root = reached[0] if not reached[0].startswith("127.") else remote[0].ask("route", others[0])
    remote[0].address = root
    for machine in remote[1:]:
        machine.address = str(machine.ask("route", root))
