"""Blobs that will be read one after the other, fetched in parallel if each takes a network's time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait

from store.blobs.contract import Blobs, Damaged


class Ahead:
    """Reads blobs ahead. Used by one thread. If blobs lie on this machine (`Blobs.threads` is None), each is read when
    it is asked for."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._coming: dict[tuple[str, str], Future[bytes]] = {}

    def fetch(self, wanted: Iterable[tuple[str, str]]) -> None:
        """Begin to fetch these (ref, SHA-256), which will be asked for next, in this order. Earlier fetches that are
        not among them are dropped. Entries without a ref are skipped."""
        threads = self._blobs.threads
        names = dict.fromkeys(name for name in wanted if name[0]) if threads is not None else {}
        for name, coming in list(self._coming.items()):
            if name not in names or _failed(coming):
                coming.cancel()
                del self._coming[name]
        for name in names:
            if name not in self._coming:
                assert threads is not None
                self._coming[name] = threads.submit(self._blobs.get, *name)

    def has(self, ref: str, sha256: str) -> bool:
        """True if `get` would not wait for a fetch: the blob's fetch has succeeded or failed, or was never begun."""
        coming = self._coming.get((ref, sha256))
        return coming is None or coming.done()

    def wait(self, within_s: float) -> None:
        """Wait until one more of the begun fetches has ended, but at most `within_s`."""
        wait([coming for coming in self._coming.values() if not coming.done()], within_s, FIRST_COMPLETED)

    def get(self, ref: str, sha256: str, brought: bytes = b"") -> bytes:
        """As `Blobs.get`; or, if a message `brought` the blob's bytes along, these, checked. A second call reads
        again."""
        if brought:
            if hashlib.sha256(brought).hexdigest() != sha256:
                raise Damaged(f"a body came damaged: it is not the one that was accepted (SHA-256 {sha256})")
            return brought
        coming = self._coming.pop((ref, sha256), None)
        return self._blobs.get(ref, sha256) if coming is None else coming.result()


def _failed(coming: Future[bytes]) -> bool:
    return coming.done() and coming.exception() is not None
