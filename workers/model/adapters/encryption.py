"""Files that only their recipients can read: age encryption (age-encryption.org), for exports that ask for it.

A recipient is a native `age1...` key or an SSH public key. No torch, so that the API can check recipients first.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyrage

from workers.model.adapters.writing import writing

SUFFIX = ".age"
#: The functions of pyrage that are used; it has no type stubs.
Recipient = Any


class BadRecipient(ValueError):
    """The text is not a public key that age can encrypt to."""


def parse_recipients(recipients: Sequence[str]) -> list[Recipient]:
    """Raises BadRecipient, which says which one (counted from 0) without repeating it: it may be a private key."""
    return [_parse(i, text) for i, text in enumerate(recipients)]


def _parse(index: int, text: str) -> Recipient:
    try:
        if text.startswith("ssh-"):
            return pyrage.ssh.Recipient.from_str(text)
        return pyrage.x25519.Recipient.from_str(text)
    except pyrage.RecipientError:
        raise BadRecipient(
            f"[{index}] is neither an age1... key nor an SSH public key (ssh-ed25519, ssh-rsa)"
        ) from None


def encrypt_folder(folder: Path, recipients: Sequence[Recipient]) -> None:
    """Replace every file under `folder` by one with SUFFIX that any of the recipients can read."""
    for file in [path for path in folder.rglob("*") if path.is_file()]:
        target = file.with_name(file.name + SUFFIX)
        # pyrage.encrypt_file silently drops the end of a file that it could not write.
        with writing(pyrage.EncryptError), file.open("rb") as plain, target.open("wb") as out:
            pyrage.encrypt_io(plain, out, list(recipients))
        file.unlink()
