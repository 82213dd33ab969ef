"""Where a worker finds what is stored: as it was told."""

from __future__ import annotations

from pathlib import Path

from scheduler.links.configs import Basics
from store.blobs.contract import Blobs
from store.blobs.opening import open_blobs


def blobs_of(basics: Basics) -> Blobs:
    return open_blobs(
        Path(basics.data_dir), durable=basics.durable, url=basics.blob_url, cache_bytes=basics.blob_cache_bytes
    )
