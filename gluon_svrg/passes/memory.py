"""Checks for free memory before gradients are stored."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping

import mxnet as mx
import numpy as np

from .. import _mxnet
from .._mxnet import Arrays
from .arrays import SUMMED_IN


def bytes_of_sums(arrays: Arrays) -> dict[Any, int]:
    """The bytes of sums of arrays like these, per device; the host counts as one device."""
    taken: dict[Any, int] = {}
    for row in arrays:
        for array in row:
            device = _mxnet.device_of(array)
            where = device if device.device_type == "gpu" else mx.cpu()
            size = prod(array.shape) * np.dtype(SUMMED_IN[_mxnet.dtype_name(array)]).itemsize
            taken[where] = taken.get(where, 0) + _mxnet.allocated_bytes(size)
    return taken


#: The share of free memory that may be taken; the rest is for everything else.
SHARE = 0.9


class Budget:
    """Memory for a set of things of equal size; a complete new set replaces the old one."""

    def __init__(self, otherwise: str) -> None:
        self._otherwise = otherwise  # what else the user can do
        self._most: dict[Any, int] = {}  # bytes that were held at once, per device

    def batches(
        self, batches: Iterator[Any], count: int | None, each: Mapping[Any, int], held: int
    ) -> Iterator[Any]:
        """Iterate over batches while there is memory to store something for each.

        Parameters
        ----------
        batches : iterator
            The batches.
        count : int, optional
            The number of batches. If it is unknown, they are counted as they come.
        each : dict of int
            The bytes that are stored for one batch, per device.
        held : int
            The number of things that are already stored.

        Raises
        ------
        MemoryError
            If there is not enough memory; at once, if the number is known.
        """
        free = {device: free_bytes(device) for device in each}
        kept = {}  # freed memory that MXNet can reuse
        for device, size in each.items():
            if _mxnet.keeps_freed_memory(device):
                kept[device] = max(self._most.get(device, 0) - held * size, 0)

        def check(number: int) -> None:
            for device, size in each.items():
                needed, available = number * size - kept.get(device, 0), free[device]
                if available is not None and needed > SHARE * available:
                    raise MemoryError(
                        f"Storing the gradients of {number} minibatches needs "
                        f"{in_words(needed)} more on {device} ({in_words(size)} each), and "
                        f"{in_words(available)} are free, of which a tenth is kept in reserve. "
                        f"Use larger minibatches, which are fewer{self._otherwise}. Nothing was "
                        "changed."
                    )

        if count is not None:
            check(count)
        return self._watched(batches, check)

    def took(self, each: Mapping[Any, int], count: int) -> None:
        """Remember how many things were held at once."""
        for device, size in each.items():
            self._most[device] = max(self._most.get(device, 0), count * size)

    def _watched(self, batches: Iterator[Any], check: Callable[[int], None]) -> Iterator[Any]:
        for position, batch in enumerate(batches):
            check(position + 1)
            yield batch


class Growth:
    """Memory for things that are stored one by one."""

    _AT_ONCE = 0.05  # the share of free memory that may be taken without another check

    def __init__(self) -> None:
        self._granted: dict[Any, float] = {}

    def take(self, each: Mapping[Any, int]) -> None:
        """Take memory for one more thing, if there is enough.

        Parameters
        ----------
        each : dict of int
            The bytes that it needs, per device.

        Raises
        ------
        MemoryError
            If there is not enough memory.
        """
        for device, size in each.items():
            if self._granted.get(device, 0) < size:
                free = free_bytes(device)
                if free is not None and size > SHARE * free:
                    raise MemoryError(
                        f"Storing the gradient of one more minibatch needs {in_words(size)} on "
                        f"{device}, and {in_words(free)} are free, of which a tenth is kept in "
                        "reserve. Use larger minibatches, which are fewer. Nothing was changed."
                    )
                most = float("inf") if free is None else self._AT_ONCE * free
                self._granted[device] = max(most, size)
        for device, size in each.items():
            self._granted[device] -= size


def free_bytes(device: Any) -> int | None:
    """The bytes that arrays on a device can still take; None if this is unknown."""
    if device.device_type == "gpu":
        return _mxnet.gpu_free_bytes(device)
    return min(_of_the_host(), default=None)


def in_words(count: float) -> str:
    """A number of bytes in readable form."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _of_the_host() -> Iterator[int]:
    """Yield the free memory of the machine, and what the container and the process may take."""
    meminfo = _read("/proc/meminfo")
    if "MemAvailable:" in meminfo:
        yield 1024 * int(meminfo.split("MemAvailable:")[1].split()[0])
    for folder, limit, used, cache in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        (
            "/sys/fs/cgroup/memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        most, now = _read(f"{folder}/{limit}").strip(), _read(f"{folder}/{used}").strip()
        if most.isdigit() and now.isdigit():
            words = _read(f"{folder}/memory.stat").split()
            freed = int(words[words.index(cache) + 1]) if cache in words else 0  # when needed
            yield max(int(most) - int(now) + freed, 0)
    try:
        import resource
    except ImportError:  # not on Windows
        return
    limit_of_process, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = _read("/proc/self/statm").split()
    if limit_of_process != resource.RLIM_INFINITY and pages:
        yield max(limit_of_process - int(pages[0]) * os.sysconf("SC_PAGE_SIZE"), 0)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
