"""The roles of a job of MXNet's parameter servers, for `launch` and `join`."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys

from .. import _find_mxnet
from ..kvstore.job import TIMEOUT, seconds

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)

#: MXNet does not initialize the flag by which servers round float64 to float32. While they start,
#: new memory is set to zero (-6 is M_PERTURB), so that the flag is off.
_SERVER = (
    "import ctypes, threading; mallopt = ctypes.CDLL(None).mallopt; mallopt(-6, 255); "
    "timer = threading.Timer(60, mallopt, (-6, 0)); timer.daemon = True; timer.start(); "
    "import mxnet"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of every job."""
    parser.usage = "%(prog)s -n WORKERS [-s SERVERS] [OPTIONS] -- COMMAND ..."
    add = parser.add_argument
    add("-n", "--workers", metavar="N", type=_positive, required=True, help="How many train.")
    add("-s", "--servers", metavar="N", type=_positive, default=1, help="Servers (default: 1).")
    given = os.environ.get(TIMEOUT) or "0"
    text = f"End the job if a worker stands still so long (default: never). {TIMEOUT} sets it, too."
    add("--timeout", metavar="SECONDS", type=seconds, default=given, help=text)
    add("words", metavar="COMMAND", nargs=argparse.REMAINDER, help="What each worker runs.")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)


def names(options: argparse.Namespace) -> list[str]:
    """All roles: the scheduler, the servers, the workers."""
    servers = [f"server {number}" for number in range(options.servers)]
    return ["scheduler", *servers, *(f"worker {number}" for number in range(options.workers))]


def command(role: str, options: argparse.Namespace) -> list[str]:
    """The program of a role and its arguments; raise if it cannot run."""
    words: list[str] = options.words[options.words[:1] == ["--"] :]
    if not words:
        raise ValueError("there is no command: end with -- python train.py ARGS")
    _find_mxnet()
    program = _SERVER if role.startswith("server") else "import mxnet"
    return words if role.startswith("worker") else [sys.executable, "-c", program]


def variables(
    role: str, options: argparse.Namespace, scheduler: str, port: int, address: str
) -> dict[str, str]:
    """The variables of a process: its role, and where it and the scheduler are."""
    variables = {
        "PYTHONUNBUFFERED": "1",
        **os.environ,
        "DMLC_ROLE": role.split()[0],
        "DMLC_NUM_WORKER": str(options.workers),
        "DMLC_NUM_SERVER": str(options.servers),
        "DMLC_PS_ROOT_URI": scheduler,
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": address,
        TIMEOUT: str(options.timeout),
    }
    if role.startswith("server"):
        variables["GLIBC_TUNABLES"] = "glibc.malloc.tcache_count=0"  # see `_SERVER`
    return variables


def die_with(parent: int) -> None:
    """End this process when its parent ends, even by SIGKILL."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it is dead already
        os._exit(1)
