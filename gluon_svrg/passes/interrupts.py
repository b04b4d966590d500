"""Work that Ctrl-C, an alarm or another signal must not cut in two.

Python runs the handlers of signals in the main thread, between any two bytecodes. What runs in
another thread is never interrupted.
"""

from __future__ import annotations

import _thread
import threading
from typing import Any, Callable

import mxnet as mx


def uninterrupted(work: Callable[[], Any]) -> None:
    """Do work in a thread of its own and wait for it; a signal is handled when it is done.

    An error of the work is raised here.
    """
    first, gate = threading.Lock(), threading.Lock()  # threading.Event can be cut in two
    gate.acquire()
    done: list[bool] = []
    errors: list[BaseException] = []
    has_numpy_shapes = mx.util.is_np_shape()  # MXNet keeps it per thread

    def run() -> None:
        if not first.acquire(blocking=False):
            return  # an interrupt came while this was started, and it was started again
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
                _thread.start_new_thread(run, ())  # threading's can be cut in two
            gate.acquire()
        except BaseException as error:
            interrupt = error
    if errors:
        raise errors.pop()  # in no list that its traceback holds
    if interrupt is not None:
        raise interrupt
