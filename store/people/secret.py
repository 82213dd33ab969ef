"""The server's own secret, with which it signs tokens and links, so that they remain valid after a restart.

It is one file in the data folder that only the server's user can read, unless the operator has set one for all
replicas. Each purpose derives its own key from it, so that a signature made for one purpose is invalid for another.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

FILE_NAME = "server.secret"
SECRET_BYTES = 32


def server_secret(data_dir: Path) -> bytes:
    """The secret of this data folder, made on first use. Two processes that start at once get the same one."""
    path = data_dir / FILE_NAME
    with suppress(FileNotFoundError):
        return _checked(path)
    temporary = data_dir / f".{FILE_NAME}.{secrets.token_hex(8)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(temporary, path)  # unlike a rename, this never replaces another process's secret
    finally:
        temporary.unlink()
    return _checked(path)


def secret_of(given: str) -> bytes:
    """The secret that an operator has set."""
    return hashlib.sha256(b"server_secret " + given.encode()).digest()


def digest(secret: str) -> str:
    """The SHA-256 of a secret of 256 random bits, in hexadecimal: all that is stored of the secret, and what it is
    found by."""
    return hashlib.sha256(secret.encode()).hexdigest()


def derive(secret: bytes, purpose: str) -> bytes:
    """The 32-byte key for one purpose (HMAC-SHA256 of its name)."""
    return hmac.digest(secret, purpose.encode(), hashlib.sha256)


def _checked(path: Path) -> bytes:
    secret = path.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"{path.name} holds {len(secret)} bytes instead of {SECRET_BYTES}: restore or delete it")
    return secret


def _ids() -> Iterator[str]:
    while True:
        block = os.urandom(4096).hex()
        yield from (block[start : start + 32] for start in range(0, len(block), 32))


_drawn, _drawing = _ids(), threading.Lock()


def _forked() -> None:
    """After a fork: the parent has the same block of random bits, and one of its threads may have held the lock."""
    global _drawn, _drawing
    _drawn, _drawing = _ids(), threading.Lock()


os.register_at_fork(after_in_child=_forked)


def new_id() -> str:
    """128 random bits as hex, for an operation or a request. They are drawn in blocks: each system call gives the
    interpreter to another thread, and a busy event loop would wait for it."""
    with _drawing:
        return next(_drawn)
