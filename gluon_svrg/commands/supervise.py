"""Supervision of a job: when one process dies, all end, on all machines."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Callable, Iterator, NamedTuple, Sequence, Union

from ..stores.calls import Calls
from ..stores.launcher import allowed_silence
from .local import LocalProcesses
from .output import print_last_line
from .process import State, ending
from .roles import Role, is_worker
from .signals import Interruptible

#: When a worker has succeeded, MXNet makes it wait for the others. If these do nothing for this
#: many seconds, they wait for it.
STALLED = 5.0
#: A process that uses less than this share of a processor does nothing.
_IDLE = 0.05
_INTERVAL = 0.05
_SETTLE = 0.3
#: Seconds that another machine has to end its processes.
_PATIENCE = 10.0

if TYPE_CHECKING:
    from .remote import RemoteProcesses
Machine = Union[LocalProcesses, "RemoteProcesses"]


class Death(NamedTuple):
    """The cause of a job's failure."""

    who: str
    reason: str
    status: int  # for the shell
    before: Sequence[str] = ()  # lines that explain it


def supervise(
    machines: Sequence[Machine],
    place: Callable[[Sequence[Machine]], Sequence[Sequence[Role]]],
    *,
    title: str,
    interrupted: Interruptible,
    timeout: float,
    restarts: int = 0,
    at_once: bool = False,
) -> int:
    """Run a job until all its processes have succeeded, or one has failed.

    Parameters
    ----------
    machines : sequence
        The machines that can run processes.
    place : callable
        Takes the remaining machines and returns the roles of each. Raises LaunchError if there are
        too few machines.
    title : str
        The beginning of messages.
    interrupted : Interruptible
        Notices signals.
    timeout : float
        Seconds within which a stopped process ends the job; 0 for never.
    restarts : int
        How often to restart the job after a death.
    at_once : bool
        Whether to report a death before ending the other processes, rather than after: the manager
        of a cluster may end this process in between.

    Returns
    -------
    int
        The exit status: 0 if all workers have ended with 0.
    """
    status = 1
    try:
        for attempt in range(1, restarts + 2):
            job = _Job(machines, place(machines), interrupted, timeout)
            again = ""
            if attempt <= restarts:
                again = f"; starting again ({attempt} of {restarts})"

            def report(death: Death, done: str, again: str = again) -> None:
                again = "" if interrupted.signal else again
                for line in death.before:
                    print_last_line(f"{title}: {line}")
                rest = "all" if death.before else "all others"
                print_last_line(f"{title}: {death.who} {death.reason}; {rest} {done}{again}")

            death = job.run(lambda death: report(death, "are ended") if at_once else None)
            if death is None:
                status = 0
                break
            if not at_once:
                report(death, "were ended")
            status = death.status
            left = [machine for machine in machines if not machine.problem]
            for machine in machines:
                if machine not in left:
                    machine.close(status)
            machines = left
            if interrupted.signal:
                break
        return status
    finally:
        for machine in machines:
            machine.close(status)


class _Job:
    """One run of all processes."""

    def __init__(
        self,
        machines: Sequence[Machine],
        roles: Sequence[Sequence[Role]],
        interrupted: Interruptible,
        timeout: float,
    ) -> None:
        self._machines, self._roles = machines, roles
        self._interrupted, self._timeout = interrupted, timeout
        self._stall = _Stall()
        self._first: str | None = None  # the worker that has finished first
        self._calls: dict[str, Calls] = {}  # what the workers do, by their roles
        self._since = time.monotonic()  # when that has changed

    def run(self, on_death: Callable[[Death], None]) -> Death | None:
        """Start all, watch them, end all."""
        try:
            for machine, roles in zip(self._machines, self._roles):
                machine.start(roles)
            death = self._watch()
            if death is not None:
                on_death(death)
        finally:
            for machine in sorted(self._machines, key=lambda m: isinstance(m, LocalProcesses)):
                machine.end()  # the remote ones first, for the others wait
            deadline = time.monotonic() + _PATIENCE
            for machine in self._machines:
                machine.has_ended(deadline - time.monotonic())
        return death

    def _watch(self) -> Death | None:
        """Wait until all have succeeded, or one has failed."""
        while True:
            if self._death() is not None:
                time.sleep(_SETTLE)  # the first death may be the last to be known
                return self._death()
            if self._has_ended_well():
                return None
            if self._interrupted.signal:
                break
            time.sleep(_INTERVAL)
        # A manager that ends all because one has died may be faster than the news of that death.
        time.sleep(_SETTLE)
        number = self._interrupted.signal
        signalled = Death("the launcher", f"was ended by {self._interrupted.name}", 128 + number)
        return self._death() or signalled

    def _has_ended_well(self) -> bool:
        running = [state for _, state in self._states() if state.code is None]
        if any(is_worker(state.role) for state in running):
            return False
        # Scheduler and servers wait forever for workers that have never joined them.
        return not running or self._stall.lasts(sum(state.seconds for state in running))

    def _states(self) -> Iterator[tuple[Machine, State]]:
        for machine in self._machines:
            for state in machine.states():
                yield machine, state

    def _name(self, machine: Machine, state: State) -> str:
        return f"{state.name} on {machine.name}" if machine.name else state.name

    def _death(self) -> Death | None:
        """The failure, if there is one."""
        for machine in self._machines:
            if machine.problem:
                return Death(machine.label, machine.problem, 1)
        states = list(self._states())
        for _, state in states:
            if state.code and state.lost:
                who = " and ".join(map(self._find, state.lost["nodes"]))
                return Death(who, f"did not answer for {state.lost['seconds']:g} s", 1)
        for machine, state in states:
            if self._timeout and state.stopped > allowed_silence(self._timeout):
                reason = f"did not answer for {self._timeout:g} s: a signal has stopped it"
                return Death(self._name(machine, state), reason, 1)
        failed = [(machine, state) for machine, state in states if state.code]
        if failed:
            machine, state = min(failed, key=lambda item: item[1].ended)
            return self._failure(machine, state)
        workers = [(m, s) for m, s in states if is_worker(s.role)]
        return self._early_exit(workers) or self._different_calls(workers)

    def _failure(self, machine: Machine, state: State) -> Death:
        code: int = state.code  # type: ignore[assignment]
        before = [
            self._name(m, s)
            for m, s in self._states()
            if is_worker(s.role) and not s.code and s.finished < state.ended
        ]
        reason = ending(code)
        if before:
            reason += f", after {' and '.join(before)} had ended with code 0"
        return Death(self._name(machine, state), reason, code if code > 0 else 128 - code)

    def _find(self, node: str) -> str:
        """The name of a process that MXNet knows by its own number."""
        kind, _, rank = node.partition(" ")
        known: dict[str | None, list[str]] = {}
        for machine, state in self._states():
            if state.role.startswith(kind):
                known.setdefault(state.rank, []).append(self._name(machine, state))
        found = known.get(rank) or known.get(None, [])  # one that has not reported its rank yet
        if len(found) == 1:
            return found[0]
        return node if node.startswith("the ") else f"{kind} of rank {rank}"

    def _early_exit(self, workers: list[tuple[Machine, State]]) -> Death | None:
        finished = [state.role for _, state in workers if state.has_finished]
        self._first = self._first or next(iter(finished), None)
        others = [(m, s) for m, s in workers if s.code is None and s.role != self._first]
        if self._first is None or not others:
            return None
        if not self._stall.lasts(sum(state.seconds for _, state in others)):
            return None
        machine, state = next((m, s) for m, s in workers if s.role == self._first)
        first = self._name(machine, state)
        names = " and ".join(self._name(m, s) for m, s in others)
        verb = "waits" if len(others) == 1 else "wait"
        # MXNet may keep a process whose program has ended: its code is not known then.
        code = "" if state.code is None else f", with code {state.code}"
        return Death(first, f"exited early{code}, while {names} still {verb} for it", 1)

    def _different_calls(self, workers: list[tuple[Machine, State]]) -> Death | None:
        """Find workers that wait for one another in different calls, and so forever."""
        found = {s.role: Calls(*s.calls) for _, s in workers if s.calls is not None}
        now = time.monotonic()
        if found != self._calls:
            self._calls, self._since = found, now
        if not self._timeout or now - self._since < allowed_silence(self._timeout):
            return None
        if all(one.can_become(other) for one in found.values() for other in found.values()):
            return None
        lines = [f"{self._name(m, s)} waits in {found[s.role]}" for m, s in workers if s.calls]
        reason = (
            f"waited for one another in different calls for {self._timeout:g} s: "
            "workers must make the same calls"
        )
        return Death("the workers", reason, 1, lines)


class _Stall:
    """Notices when processes do nothing for a while."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._used = math.inf

    def lasts(self, used: float) -> bool:
        """Whether they have done nothing for long enough, judged by their processor time."""
        now = time.monotonic()
        if not 0 <= used - self._used <= _IDLE * (now - self._since + 1):
            self._since, self._used = now, used
        return now - self._since > STALLED
