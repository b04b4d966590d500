"""Kvstores, where MXNet has no public names for what they do."""

from __future__ import annotations

from typing import Any

#: The command that makes a kvstore unpickle an optimizer from the text.
_SET_OPTIMIZER = 0


def barrier(kvstore: Any) -> None:
    """Wait until all workers are here."""
    kvstore._barrier()


def send_to_servers(kvstore: Any, pickled_optimizer: str) -> None:
    """Let all servers unpickle an optimizer and use it."""
    kvstore._send_command_to_servers(_SET_OPTIMIZER, pickled_optimizer)
