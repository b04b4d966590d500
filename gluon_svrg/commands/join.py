"""A job whose processes are started by a cluster's launcher: mpirun, srun, an Indexed Job."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Sequence

from . import rendezvous
from .addresses import candidates
from .arguments import UserError
from .horovod import HorovodWorkers
from .launch import names_of
from .local import LocalProcesses
from .process import print_line
from .ranks import Rank
from .remote import RemoteProcesses
from .rendezvous import Meeting
from .roles import LaunchError, Role, parameter_servers
from .serve import serve
from .signals import Interruptible
from .supervise import Machine, supervise

TITLE = "gluon-svrg join"


class Settings(NamedTuple):
    """The settings that all processes of the job share."""

    command: Sequence[str]
    workers: int | None = None  # if set, one role per process; otherwise all are workers
    servers: int = 1
    horovod: bool = False
    scheduler: str | None = None  # NAME:PORT where rank 0 listens
    folder: Path = Path()  # all processes see it
    timeout: float = 45.0
    wait: float = 600.0
    restarts: int = 0


def join(me: Rank, settings: Settings) -> int:
    """Take part in a job until it ends.

    Rank 0 directs the job and has its own processes; the others connect to it and obey.

    Returns
    -------
    int
        The exit status: 0 if all workers of all ranks have ended with 0.

    Raises
    ------
    UserError
        If the job cannot begin.
    """
    names_for(settings, me.size)
    with Interruptible(needs_parent=me.launcher) as interrupted:
        return (_direct if me.rank == 0 else _follow)(me, settings, interrupted)


def names_for(settings: Settings, size: int) -> list[list[str]]:
    """The roles of each process.

    Raises
    ------
    UserError
        If there are too few processes.
    """
    if settings.horovod:
        return [[f"worker {rank}"] for rank in range(size)]
    if settings.workers is None:
        if settings.servers > size:
            raise UserError(f"{settings.servers} servers need as many processes; there are {size}")
        names = [[f"worker {rank}"] for rank in range(size)]
        for number in range(settings.servers):
            names[number].insert(0, f"server {number}")
        names[0].insert(0, "scheduler")
        return names
    roles = names_of(settings.workers, settings.servers)
    if len(roles) > size:
        raise UserError(
            f"1 scheduler, {settings.servers} servers and {settings.workers} workers need "
            f"{len(roles)} processes; there are {size}"
        )
    return [[role] for role in roles] + [[]] * (size - len(roles))


def _direct(me: Rank, settings: Settings, interrupted: Interruptible) -> int:
    horovod = HorovodWorkers(settings.timeout) if settings.horovod else None
    here = LocalProcesses(settings.command)
    try:
        guests = _meet(me, settings, here, interrupted)
    except BaseException:
        here.close(1)
        raise
    outer = [guest.here for guest in guests if not guest.is_local]
    here.address = next(iter(outer or [guest.here for guest in guests]), "127.0.0.1")
    machines: list[Machine] = [here]
    for guest in guests:
        machines.append(_machine(guest, here.address, settings.timeout))

    def place(left: Sequence[Machine]) -> list[list[Role]]:
        try:
            names = names_for(settings, len(left))
        except UserError as error:
            raise LaunchError(str(error)) from error
        if settings.workers is None and len(left) < me.size:
            raise LaunchError(f"only {len(left)} of {me.size} processes are left")
        if horovod is not None:
            return horovod.roles(left)
        addresses = [machine.address for machine in left]
        return parameter_servers(names, addresses, here.free_port(), settings.timeout)

    return supervise(
        machines,
        place,
        title=TITLE,
        say=print_line,
        interrupted=interrupted,
        timeout=settings.timeout,
        restarts=settings.restarts,
        at_once=True,
    )


def _meet(
    me: Rank, settings: Settings, here: LocalProcesses, interrupted: Interruptible
) -> list[rendezvous.Guest]:
    """Wait for the others. Only meanwhile does the file with the address exist."""
    path = _path(me, settings)
    with rendezvous.listen(_port(settings.scheduler)) as listener:
        if path is None:
            return rendezvous.receive(listener, me.size, "", settings.wait, interrupted)
        earlier = Meeting.read(path)
        if earlier is not None and earlier.is_open():
            raise UserError(f"another job waits in {path}: give this one another --folder")
        port, token = listener.getsockname()[1], os.urandom(16).hex()
        here.clean_up(path)
        try:
            Meeting(candidates(me.starter), port, token).write(path)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error
        try:
            return rendezvous.receive(listener, me.size, token, settings.wait, interrupted)
        finally:
            with suppress(OSError):
                path.unlink()
            here.clean_up(path, forget=True)


def _machine(guest: rendezvous.Guest, root: str, timeout: float) -> RemoteProcesses:
    host = guest.host if guest.host != socket.gethostname() else guest.address
    channel = rendezvous.channel(guest.socket)
    machine = RemoteProcesses(channel, "" if guest.is_local else host, timeout, print_line)
    machine.label = f"rank {guest.rank}" + (f" on {machine.name}" if machine.name else "")
    machine.address = root if guest.is_local else guest.address
    channel.open(machine.receive)
    machine.prepare()
    return machine


def _follow(me: Rank, settings: Settings, interrupted: Interruptible) -> int:
    path = _path(me, settings)

    def find() -> Meeting | None:
        if path is not None:
            return Meeting.read(path)
        name, _, port = str(settings.scheduler).rpartition(":")
        try:
            return Meeting([socket.gethostbyname(name)], int(port))
        except OSError:  # a cluster's host names may appear late
            return None

    connection = rendezvous.connect(find, me.rank, me.size, settings.wait, interrupted)
    status, reason = serve(
        rendezvous.channel(connection),
        lambda _: LocalProcesses(settings.command),
        settings.timeout,
        interrupted,
    )
    if reason is not None and not interrupted.signal:
        print_line(f"{TITLE}: rank 0 {reason}; all processes of rank {me.rank} were ended")
    return status


def _path(me: Rank, settings: Settings) -> Path | None:
    """The file by which the others find rank 0 if no address is set."""
    if settings.scheduler is not None:
        return None
    return settings.folder.absolute() / f".gluon-svrg-{me.job.replace(os.sep, '-')}"


def _port(scheduler: str | None) -> int:
    return 0 if scheduler is None else int(scheduler.rpartition(":")[2])
