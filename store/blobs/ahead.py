"""Blobs that are about to be read one after the other, fetched beside each other where each takes a network's time."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future

from store.blobs.contract import Blobs


class Ahead:
    """Used by one thread. Where blobs lie on this machine (`Blobs.threads` is None) they are read when they are asked
    for."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._coming: dict[tuple[str, str], Future[bytes]] = {}

    def fetch(self, wanted: Iterable[tuple[str, str]]) -> None:
        """These (ref, SHA-256) are asked for next; what was fetched before and not asked for is dropped."""
        for coming in self._coming.values():
            coming.cancel()
        threads = self._blobs.threads
        names = set(wanted) if threads is not None else set()
        self._coming = {name: threads.submit(self._blobs.get, *name) for name in names if threads is not None}

    def get(self, ref: str, sha256: str) -> bytes:
        """As `Blobs.get`. Who asks again reads again."""
        coming = self._coming.pop((ref, sha256), None)
        return self._blobs.get(ref, sha256) if coming is None else coming.result()
