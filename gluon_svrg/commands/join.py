"""A job whose processes are started by a cluster's launcher: mpirun, srun, an Indexed Job."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Sequence

from ..stores.launcher import DEFAULT_TIMEOUT
from . import door, rendezvous
from .addresses import candidates
from .arguments import UserError
from .door import TITLE
from .horovod import HorovodWorkers
from .launch import names_of
from .local import LocalProcesses, Warden
from .output import print_last_line, print_line
from .proof import nonce, shared_secret
from .ranks import Rank
from .remote import RemoteProcesses
from .rendezvous import Meeting
from .roles import TOKEN, LaunchError, Role, parameter_servers
from .serve import serve
from .signals import Interruptible
from .supervise import Machine, supervise


class Settings(NamedTuple):
    """The settings that all processes of the job share."""

    command: Sequence[str]
    workers: int | None = None  # if set, one role per process; otherwise all are workers
    servers: int = 1
    horovod: bool = False
    scheduler: str | None = None  # NAME:PORT where rank 0 listens
    folder: Path = Path()  # all processes see it
    token_file: Path | None = None  # the secret of the job
    no_authentication: bool = False  # whether any process may take part
    timeout: float = DEFAULT_TIMEOUT
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
    secret = _secret(me, settings)
    with Interruptible(needs_parent=me.launcher) as interrupted:
        return (_direct if me.rank == 0 else _follow)(me, settings, secret, interrupted)


def _secret(me: Rank, settings: Settings) -> bytes:
    """What all processes of the job know, and nobody else; empty if nothing.

    Raises
    ------
    UserError
        If there is nothing, and others could take part in the job.
    """
    given = shared_secret(settings.token_file)
    secret = given or me.secret
    if settings.no_authentication:
        if given is not None or settings.scheduler is None:
            raise UserError("--no-authentication is for --scheduler without a token")
        print_line(
            f"{TITLE}: --no-authentication: whoever reaches {settings.scheduler}, or listens "
            "there, can take part in this job and choose what its workers connect to"
        )
        return b""
    if me.size > 1 and settings.scheduler is not None:
        _address_of(settings, secret or b"")  # to fail early
    return secret or b""


def _address_of(settings: Settings, secret: bytes) -> str | None:
    """The address of --scheduler; None if the name has none yet, as in a cluster.

    Raises
    ------
    UserError
        If it is on another machine, and others could take part in the job.
    """
    try:
        address = socket.gethostbyname(str(settings.scheduler).rpartition(":")[0])
    except OSError:
        address = None
    is_here = address is not None and address.startswith("127.")
    if not (secret or settings.no_authentication or is_here):
        raise UserError(
            f"--scheduler {settings.scheduler} needs a secret that all processes of the job know, "
            f"so that nobody else takes part: set --token-file or {TOKEN}. Where everybody is "
            "trusted, use --no-authentication"
        )
    return address


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


def _direct(me: Rank, settings: Settings, secret: bytes, interrupted: Interruptible) -> int:
    horovod = HorovodWorkers() if settings.horovod else None
    here = LocalProcesses(settings.command, settings.timeout)
    guests = _meet(me, settings, secret, interrupted) if me.size > 1 else []
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
        return parameter_servers(names, addresses, here.free_port())

    return supervise(
        machines,
        place,
        title=TITLE,
        interrupted=interrupted,
        timeout=settings.timeout,
        restarts=settings.restarts,
        at_once=True,
    )


def _meet(
    me: Rank, settings: Settings, secret: bytes, interrupted: Interruptible
) -> list[door.Guest]:
    """Wait for the others. Only meanwhile does the file with the address exist."""
    path = _path(me, settings)
    if path is None:
        name, _, port = str(settings.scheduler).rpartition(":")
        address = _address_of(settings, secret) or ""
        is_open = secret or settings.no_authentication
        if is_open and address.startswith("127.") and name not in ("localhost", address):
            address = ""  # other machines know this one by another address
        with door.listen(int(port), address) as listener:
            key = Meeting([], 0).key(secret)
            return door.receive(listener, me.size, key, settings.wait, interrupted)
    with door.listen(0, "127.0.0.1" if me.is_one_machine else "") as listener:
        with suppress(OSError):
            earlier = Meeting.read(path)
            if earlier is not None and earlier.is_open():
                raise UserError(f"another job waits in {path}: give this one another --folder")
        addresses = ["127.0.0.1"] if me.is_one_machine else candidates(me.starter)
        meeting = Meeting(addresses, listener.getsockname()[1], nonce())
        remover = Warden(files=[path])
        try:
            try:
                meeting.write(path)
            except OSError as error:
                raise UserError(f"cannot write {path}: {error.strerror}") from error
            key = meeting.key(secret)
            return door.receive(listener, me.size, key, settings.wait, interrupted)
        finally:
            remover.close()


def _machine(guest: door.Guest, root: str, timeout: float) -> RemoteProcesses:
    host = guest.host if guest.host != socket.gethostname() else guest.address
    channel = rendezvous.channel(guest.socket, guest.session, is_root=True)
    machine = RemoteProcesses(channel, "" if guest.is_local else host, timeout, print_line)
    machine.label = f"rank {guest.rank}" + (f" on {machine.name}" if machine.name else "")
    machine.address = root if guest.is_local else guest.address
    channel.open(machine.receive)
    return machine


def _follow(me: Rank, settings: Settings, secret: bytes, interrupted: Interruptible) -> int:
    path = _path(me, settings)

    def find() -> Meeting | None:
        if path is not None:
            return Meeting.read(path)
        address = _address_of(settings, secret)
        port = int(str(settings.scheduler).rpartition(":")[2])
        return None if address is None else Meeting([address], port)

    connection, session = rendezvous.connect(
        find, secret, me.rank, me.size, settings.wait, interrupted
    )
    status, reason = serve(
        rendezvous.channel(connection, session, is_root=False),
        settings.timeout,
        interrupted,
        LocalProcesses(settings.command, settings.timeout),
    )
    if reason is not None and not interrupted.signal:
        print_last_line(f"{TITLE}: rank 0 {reason}; all processes of rank {me.rank} were ended")
    return status


def _path(me: Rank, settings: Settings) -> Path | None:
    """The file by which the others find rank 0 if no address is set."""
    if settings.scheduler is not None:
        return None
    return settings.folder.absolute() / f".gluon-svrg-{me.job.replace(os.sep, '-')}"
