"""What is about to be read comes beside each other, with all that is wrong with it; and alone where it is near."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from store.blobs.ahead import Ahead
from store.blobs.contract import Damaged
from store.blobs.folder import FolderBlobs

NAMES = [(f"ops/{number}/body", "") for number in range(8)]


class FarBlobs(FolderBlobs):
    """A read ends when all others have begun."""

    def __init__(self, root: Path, together: int) -> None:
        super().__init__(root)
        self.threads = ThreadPoolExecutor(together)
        self.met = threading.Barrier(together)

    def get(self, ref: str, sha256: str = "") -> bytes:
        self.met.wait(30)
        return super().get(ref, sha256)


def test_reads_that_take_long_are_made_at_once(tmp_path: Path) -> None:
    blobs = FarBlobs(tmp_path, len(NAMES))
    for ref, _ in NAMES:
        blobs.put(ref, ref.encode())
    ahead = Ahead(blobs)
    ahead.fetch([*NAMES, *NAMES])
    assert [ahead.get(*name) for name in NAMES] == [ref.encode() for ref, _ in NAMES]
    blobs.met = threading.Barrier(1)
    assert ahead.get(*NAMES[0]) == b"ops/0/body"  # again, and read again
    ahead.fetch([("ops/none/body", ""), ("ops/1/body", "0" * 64)])
    with pytest.raises(FileNotFoundError):
        ahead.get("ops/none/body", "")
    with pytest.raises(Damaged):
        ahead.get("ops/1/body", "0" * 64)
    blobs.put("ops/none/body", b"now")
    assert ahead.get("ops/none/body", "") == b"now"
    blobs.threads.shutdown()


def test_what_is_near_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    ahead = Ahead(blobs)
    ahead.fetch(NAMES)
    blobs.put("ops/0/body", b"later")
    assert ahead.get(*NAMES[0]) == b"later"


def test_what_a_message_has_brought_is_not_read_and_is_what_was_accepted(tmp_path: Path) -> None:
    ahead, digest = Ahead(FarBlobs(tmp_path, 1)), hashlib.sha256(b"body").hexdigest()
    ahead.fetch([("", digest)])
    assert ahead.get("", digest, b"body") == b"body"
    with pytest.raises(Damaged, match="not the one that was accepted"):
        ahead.get("", digest, b"bodi")
