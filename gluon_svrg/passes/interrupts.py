"""Work that Ctrl-C, an alarm or another signal must not interrupt.

Python runs signal handlers in the main thread, between any two bytecodes. Other threads are never
interrupted.
"""

from __future__ import annotations

import _thread
import os
import queue
import threading
from typing import Any, Callable

import mxnet as mx


class _Worker:
    """One thread for all work, because MXNet may keep memory for each thread that has called it.

    With a new thread for each refresh of an MLP, this was 5 MB each time (without oneDNN).
    """

    def __init__(self) -> None:
        self._process = 0  # a fork has no threads
        self._thread = 0
        self._jobs: Any = None

    def do(self, job: Callable[[], None]) -> None:
        """Queue a job."""
        if self._process != os.getpid():
            jobs: Any = queue.SimpleQueue()
            # A signal can interrupt those of the module threading.
            self._thread = _thread.start_new_thread(_work_off, (jobs,))
            self._jobs, self._process = jobs, os.getpid()
        self._jobs.put(job)

    def is_here(self) -> bool:
        """Whether the caller is in the thread."""
        return (self._process, self._thread) == (os.getpid(), _thread.get_ident())


def _work_off(jobs: Any) -> None:
    while True:
        jobs.get()()


_worker = _Worker()


def is_uninterrupted() -> bool:
    """Whether the caller is such work."""
    return _worker.is_here()


def uninterrupted(work: Callable[[], Any]) -> None:
    """Do work in another thread and wait for it; signals are handled afterwards.

    An error in the work is raised here.
    """
    first, gate = threading.Lock(), threading.Lock()  # a signal can interrupt threading.Event
    gate.acquire()
    done: list[bool] = []
    errors: list[BaseException] = []
    has_numpy_shapes = mx.util.is_np_shape()  # MXNet keeps it per thread

    def run() -> None:
        if not first.acquire(blocking=False):
            return  # an interrupt came while this was queued, and it was queued again
        try:
            with mx.util.np_shape(has_numpy_shapes):
                work()
        except BaseException as error:
            errors.append(error)
        finally:
            done.append(True)
            gate.release()

    interrupt: BaseException | None = None
    while not done:
        try:
            if not first.locked():
                _worker.do(run)
            gate.acquire()
        except BaseException as error:
            interrupt = error
    if errors:
        raise errors.pop()  # leave it in no list that its traceback refers to
    if interrupt is not None:
        raise interrupt
