"""Kvstores, where MXNet has no public names for what they do."""

from __future__ import annotations

from typing import Any

import mxnet as mx

#: The command that makes a kvstore unpickle an optimizer from the text.
_SET_OPTIMIZER = 0


def is_native(kvstore: Any) -> bool:
    """Whether a kvstore is one of MXNet's C++ library, rather than a class in Python."""
    return isinstance(kvstore, mx.kvstore.KVStore)


def registered_kvstores() -> list[str]:
    """The names of the classes of kvstores that are registered with MXNet."""
    return sorted(mx.kvstore.KVStoreBase.kv_registry)


def barrier(kvstore: Any) -> None:
    """Wait until all workers are here."""
    kvstore._barrier()


def send_to_servers(kvstore: Any, pickled_optimizer: str) -> None:
    """Let all servers unpickle an optimizer and use it."""
    kvstore._send_command_to_servers(_SET_OPTIMIZER, pickled_optimizer)
