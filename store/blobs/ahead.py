"""Blobs that are about to be read one after the other, fetched beside each other where each takes a network's time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import Future

from store.blobs.contract import Blobs, Damaged


class Ahead:
    """Used by one thread. Where blobs lie on this machine (`Blobs.threads` is None) they are read when they are asked
    for."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._coming: dict[tuple[str, str], Future[bytes]] = {}

    def fetch(self, wanted: Iterable[tuple[str, str]]) -> None:
        """These (ref, SHA-256) are asked for next; what was fetched before and not asked for is dropped. Without a ref
        there is nothing to fetch."""
        for coming in self._coming.values():
            coming.cancel()
        threads = self._blobs.threads
        names = {name for name in wanted if name[0]} if threads is not None else set()
        self._coming = {name: threads.submit(self._blobs.get, *name) for name in names if threads is not None}

    def get(self, ref: str, sha256: str, brought: bytes = b"") -> bytes:
        """As `Blobs.get`, or what a message has `brought` itself. Who asks again reads again."""
        if brought:
            if hashlib.sha256(brought).hexdigest() != sha256:
                raise Damaged(f"a body came damaged: it is not the one that was accepted (SHA-256 {sha256})")
            return brought
        coming = self._coming.pop((ref, sha256), None)
        return self._blobs.get(ref, sha256) if coming is None else coming.result()
