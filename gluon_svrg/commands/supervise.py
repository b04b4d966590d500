"""What watches over a job: one death ends all, wherever they run."""

from __future__ import annotations

import math
import time
from typing import Callable, Iterator, NamedTuple, Sequence, Union

from .local import LocalProcesses
from .process import State, ending
from .remote import RemoteProcesses
from .roles import Role, is_worker
from .signals import Interruptible

#: Once a worker has ended well, MXNet lets it wait for the others. If these do nothing for so many
#: seconds, they wait for it.
STALLED = 5.0
#: Less than this share of a processor is nothing.
_IDLE = 0.05
_INTERVAL = 0.05
_SETTLE = 0.3
#: Seconds in which another machine ends its processes.
_PATIENCE = 10.0

Machine = Union[LocalProcesses, RemoteProcesses]


class Death(NamedTuple):
    """What ended a job that did not end well."""

    who: str
    reason: str
    status: int  # for the shell


def supervise(
    machines: Sequence[Machine],
    place: Callable[[Sequence[Machine]], Sequence[Sequence[Role]]],
    *,
    title: str,
    say: Callable[[str], None],
    interrupted: Interruptible,
    timeout: float,
    restarts: int = 0,
    at_once: bool = False,
) -> int:
    """Run a job until all its processes have ended well, or one has not.

    Parameters
    ----------
    machines : sequence
        Where processes can run.
    place : callable
        Gets the machines that are left and gives the roles for each. Raises LaunchError where
        these machines are not enough.
    title : str
        What messages begin with.
    say : callable
        Gets the messages.
    interrupted : Interruptible
        Notices signals.
    timeout : float
        Seconds after which a process that is stopped counts as dead; 0 for never.
    restarts : int
        How often the job is started again after a death.
    at_once : bool
        Whether a death is reported before the others are ended, and not after it: the manager of a
        cluster may end this process in between.

    Returns
    -------
    int
        An exit status: 0 if all workers have ended with 0.
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
                say(f"{title}: {death.who} {death.reason}; all others {done}{again}")

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
        """Wait until all have ended well, or one has not."""
        while not self._interrupted.signal:
            if self._death() is not None:
                time.sleep(_SETTLE)  # what has died first may be known last
                return self._death()
            if self._has_ended_well():
                return None
            time.sleep(_INTERVAL)
        # a manager that ends all because one has died may be faster than the news of it
        time.sleep(_SETTLE)
        number = self._interrupted.signal
        signalled = Death("the launcher", f"was ended by {self._interrupted.name}", 128 + number)
        return self._death() or signalled

    def _has_ended_well(self) -> bool:
        running = [state for _, state in self._states() if state.code is None]
        if any(is_worker(state.role) for state in running):
            return False
        # scheduler and servers wait forever for workers that have never joined them
        return not running or self._stall.lasts(sum(state.seconds for state in running))

    def _states(self) -> Iterator[tuple[Machine, State]]:
        for machine in self._machines:
            for state in machine.states():
                yield machine, state

    def _name(self, machine: Machine, state: State) -> str:
        return f"{state.name} on {machine.name}" if machine.name else state.name

    def _death(self) -> Death | None:
        """What has gone wrong, if anything has."""
        for machine in self._machines:
            if machine.problem:
                return Death(machine.label, machine.problem, 1)
        states = list(self._states())
        for _, state in states:
            if state.code and state.lost:
                who = " and ".join(map(self._find, state.lost["nodes"]))
                return Death(who, f"did not answer for {state.lost['seconds']:g} s", 1)
        for machine, state in states:
            if 0 < self._timeout < state.stopped:
                reason = f"did not answer for {self._timeout:g} s: a signal has stopped it"
                return Death(self._name(machine, state), reason, 1)
        failed = [(machine, state) for machine, state in states if state.code]
        if failed:
            machine, state = min(failed, key=lambda item: item[1].ended)
            return self._failure(machine, state)
        return self._early_exit([(m, s) for m, s in states if is_worker(s.role)])

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
        """The name here of what MXNet numbers its own way."""
        kind, _, rank = node.partition(" ")
        known: dict[str | None, list[str]] = {}
        for machine, state in self._states():
            if state.role.startswith(kind):
                known.setdefault(state.rank, []).append(self._name(machine, state))
        found = known.get(rank) or known.get(None, [])  # one that has not told its rank yet
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
        first = next(self._name(m, s) for m, s in workers if s.role == self._first)
        names = " and ".join(self._name(m, s) for m, s in others)
        verb = "waits" if len(others) == 1 else "wait"
        return Death(first, f"exited early, with code 0, while {names} still {verb} for it", 1)


class _Stall:
    """Notices when processes do nothing for a while."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._used = math.inf

    def lasts(self, used: float) -> bool:
        """Whether they have done nothing for long enough, by the processor time that they used."""
        now = time.monotonic()
        if not 0 <= used - self._used <= _IDLE * (now - self._since + 1):
            self._since, self._used = now, used
        return now - self._since > STALLED
