"""A program that starts the processes of a job on one machine, and ends all that it has started.

`LocalProcesses` runs this file with ``python -I -S``, which takes few milliseconds. The first line
of its input says what to start; each further line is the number of a signal for all. When the input
ends, because the job is over or the launcher has died in whatever way, it kills all of them.

It is the parent of all processes, and Linux makes it the parent of those that theirs leave behind.
So a process cannot exist before its end is certain, and a session of its own does not save it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_AGAIN = 0.02  # seconds


class Warden:
    """The processes, from their start to the end of all."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._me = os.getpid()
        self._processes: list[subprocess.Popen] = []  # in the order of their roles
        self._is_over = threading.Event()

    def run(self, job: dict) -> None:
        """Start processes, and report their ends, until all have ended and the input has."""
        for path in job["folders"]:
            os.mkdir(path, 0o700)
        self._start(job)
        threading.Thread(target=self._obey, daemon=True).start()
        while self._report_an_end():
            pass
        self._is_over.wait()
        _remove(job["folders"] + job["files"])

    def _start(self, job: dict) -> None:
        for command, variables, output in job["processes"]:
            try:
                process = subprocess.Popen(
                    command,
                    env={**job["environment"], **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=self._die_with_me,
                )
            except OSError as error:
                return _tell(refusal=f"cannot start {command[0]}: {error.strerror}")
            finally:
                os.close(output)
            self._processes.append(process)
        _tell(started=[process.pid for process in self._processes])

    def _die_with_me(self) -> None:
        """In a new process: get killed if this program is killed."""
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._me:
            os._exit(1)

    def _report_an_end(self) -> bool:
        """Wait for the end of any process; False if there is none."""
        try:
            process, status = os.wait()
        except ChildProcessError:
            return False
        now = time.time()
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        for number, known in enumerate(self._processes):
            if known.pid == process:
                _tell(number=number, code=code, ended=now)
        return True

    def _obey(self) -> None:
        for line in sys.stdin:
            self._signal_all(int(line))
            self._signal_all(signal.SIGCONT)  # a stopped process gets the signal only then
        self._is_over.set()
        while True:  # until the main thread ends this program
            self._signal_all(signal.SIGKILL)
            time.sleep(_AGAIN)

    def _signal_all(self, number: int) -> None:
        for process in _descendants(self._me):
            try:
                os.kill(process, number)
            except (ProcessLookupError, PermissionError):
                continue


def _descendants(process: int) -> list[int]:
    """The children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:  # it has just ended
            continue
        children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    left = [process]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


def _remove(paths: list[str]) -> None:
    import shutil  # here, so that the processes start earlier

    for path in paths:
        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        elif os.path.exists(path):
            os.unlink(path)


def _tell(**message: object) -> None:
    try:
        print(json.dumps(message), flush=True)
    except OSError:  # the launcher has died
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def main() -> None:
    """Run a job, unless the launcher has died before it has said which."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # which the processes would inherit
            signal.signal(number, lambda *_: None)
    line = sys.stdin.readline()
    if line.endswith("\n"):
        Warden().run(json.loads(line))
    os._exit(0)  # a thread waits for the input


if __name__ == "__main__":
    main()
