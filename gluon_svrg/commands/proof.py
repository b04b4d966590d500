"""How the processes of a job prove to each other that they belong to it.

They share a secret, which is never sent. Each side sends random bytes, and proves that it knows the
secret by the HMAC of all that was said. The HMACs of later messages have a key that only this
conversation has, and count, so none can be added, changed, left out or sent again.
"""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path

from .arguments import UserError
from .roles import TOKEN

_SHORTEST = 16


def shared_secret(file: Path | None) -> bytes | None:
    """The secret that the user has given to all processes of the job.

    Raises
    ------
    UserError
        If it cannot be read, or can be guessed.
    """
    try:
        secret = os.environb.get(TOKEN.encode()) if file is None else file.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read --token-file {file}: {error.strerror}") from error
    if secret is not None and len(secret.strip()) < _SHORTEST:
        raise UserError(
            f"the token of {TOKEN if file is None else file} is too short: expected at least "
            f"{_SHORTEST} characters, as of python -c 'import secrets; print(secrets.token_hex())'"
        )
    return None if secret is None else secret.strip()


def nonce() -> str:
    """Random bytes, so that nobody can repeat an earlier conversation."""
    return secrets.token_hex()


def proof(key: bytes, *parts: bytes) -> bytes:
    """The HMAC of some parts, of one length whatever they contain."""
    text = b"".join(b"%d:%b" % (len(part), part) for part in parts)
    return hmac.new(key, text, "sha256").hexdigest().encode()


class Seal:
    """Proves the origin and the order of messages in one direction.

    Parameters
    ----------
    key : bytes
        A key for this direction.
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def _of(self, message: bytes) -> bytes:
        self._number += 1
        return proof(self._key, b"%d" % self._number, message)

    def close(self, message: bytes) -> bytes:
        """The message with its proof."""
        return self._of(message) + b" " + message

    def open(self, sealed: bytes) -> bytes:
        """The message without its proof.

        Raises
        ------
        ValueError
            If it does not come from the other side, or others before it are missing.
        """
        found, _, message = sealed.partition(b" ")
        if not hmac.compare_digest(found, self._of(message)):
            raise ValueError("a message without proof")
        return message
