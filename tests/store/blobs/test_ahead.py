"""Blobs that are about to be read are fetched together from a distant store, and each error comes with its blob; from
a local folder each is read when it is asked for."""

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
    """A distant store: each read ends only when all others have begun."""

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
    assert ahead.get(*NAMES[0]) == b"ops/0/body"  # asked for again, so read again
    ahead.fetch([("ops/none/body", ""), ("ops/1/body", "0" * 64)])
    with pytest.raises(FileNotFoundError):
        ahead.get("ops/none/body", "")
    with pytest.raises(Damaged):
        ahead.get("ops/1/body", "0" * 64)
    blobs.put("ops/none/body", b"now")
    assert ahead.get("ops/none/body", "") == b"now"
    blobs.threads.shutdown()


def test_a_blob_in_a_local_folder_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    ahead = Ahead(blobs)
    ahead.fetch(NAMES)
    blobs.put("ops/0/body", b"later")
    assert ahead.get(*NAMES[0]) == b"later"


def test_a_body_that_came_in_a_message_is_not_read_and_must_have_its_hash(tmp_path: Path) -> None:
    ahead, digest = Ahead(FarBlobs(tmp_path, 1)), hashlib.sha256(b"body").hexdigest()
    ahead.fetch([("", digest)])
    assert ahead.get("", digest, b"body") == b"body"
    with pytest.raises(Damaged, match="not the one that was accepted"):
        ahead.get("", digest, b"bodi")


class SlowBlobs(FolderBlobs):
    """A distant store with one thread: a read ends when the test lets it (`may`)."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.threads = ThreadPoolExecutor(1)
        self.may = {ref: threading.Event() for ref, _ in NAMES}
        self.read: list[str] = []

    def get(self, ref: str, sha256: str = "") -> bytes:
        self.read.append(ref)
        assert self.may[ref].wait(30)
        return super().get(ref, sha256)


def test_a_waiting_reader_sees_which_blobs_came_and_unwanted_reads_are_dropped(tmp_path: Path) -> None:
    blobs = SlowBlobs(tmp_path)
    for ref, _ in NAMES:
        blobs.put(ref, ref.encode())
    first, second, third = NAMES[:3]
    ahead = Ahead(blobs)
    ahead.fetch([first, second, third, ("", "")])
    assert [ahead.has(*name) for name in (first, second, NAMES[3])] == [False, False, True]
    blobs.may[first[0]].set()
    ahead.wait(30)
    assert [ahead.has(*name) for name in (first, second)] == [True, False]
    ahead.fetch([first, second, NAMES[3]])  # no longer the third, whose read has not begun
    for ref, _ in NAMES:
        blobs.may[ref].set()
    assert ahead.get(*NAMES[3]) == NAMES[3][0].encode()
    assert [ahead.get(*name) for name in (first, second)] == [first[0].encode(), second[0].encode()]
    assert blobs.read == [first[0], second[0], NAMES[3][0]]
    assert blobs.threads is not None
    blobs.threads.shutdown()


def test_a_blob_that_could_not_be_read_is_read_again_when_asked_for_again(tmp_path: Path) -> None:
    blobs = FarBlobs(tmp_path, 1)
    ahead = Ahead(blobs)
    ahead.fetch(NAMES[:1])
    ahead.wait(30)
    blobs.put(NAMES[0][0], b"now")
    ahead.fetch(NAMES[:1])
    assert ahead.get(*NAMES[0]) == b"now"
    assert blobs.threads is not None
    blobs.threads.shutdown()
