"""Blobs that are about to be read one after the other, fetched beside each other where each takes a network's time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait

from store.blobs.contract import Blobs, Damaged


class Ahead:
    """Used by one thread. Where blobs lie on this machine (`Blobs.threads` is None) they are read when they are asked
    for."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._coming: dict[tuple[str, str], Future[bytes]] = {}

    def fetch(self, wanted: Iterable[tuple[str, str]]) -> None:
        """These (ref, SHA-256) are asked for next, in this order; of what was fetched before and not asked for, the
        others are dropped. Without a ref there is nothing to fetch."""
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
        """Whether what is fetched has come, or why it has not: `get` waits for nothing then."""
        coming = self._coming.get((ref, sha256))
        return coming is None or coming.done()

    def wait(self, within_s: float) -> None:
        """Until something more of what is fetched has come."""
        wait([coming for coming in self._coming.values() if not coming.done()], within_s, FIRST_COMPLETED)

    def get(self, ref: str, sha256: str, brought: bytes = b"") -> bytes:
        """As `Blobs.get`, or what a message has `brought` itself. Who asks again reads again."""
        if brought:
            if hashlib.sha256(brought).hexdigest() != sha256:
                raise Damaged(f"a body came damaged: it is not the one that was accepted (SHA-256 {sha256})")
            return brought
        coming = self._coming.pop((ref, sha256), None)
        return self._blobs.get(ref, sha256) if coming is None else coming.result()


def _failed(coming: Future[bytes]) -> bool:
    return coming.done() and coming.exception() is not None
