"""Opens the blobs that the settings name: beside the database's folder, or in a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from store.blobs.contract import Blobs
from store.blobs.folder import FolderBlobs

if TYPE_CHECKING:  # workers get a config instead of settings
    from store.settings import Settings


def open_blobs(
    data_dir: Path, *, durable: bool = False, url: str = "", cache_bytes: int = 0, links: bool = False
) -> Blobs:
    """Blobs in a folder in `data_dir`; or with `url` in that bucket, with up to `cache_bytes` of copies in `data_dir`.
    `links`: downloads go to the store by signed links. Raises SettingsError if the bucket cannot be named."""
    if not url:
        return FolderBlobs(data_dir / "blobs", durable=durable)
    from store.blobs.bucket import Bucket
    from store.blobs.objects import ObjectBlobs

    return ObjectBlobs(Bucket(url), data_dir / "cache", cache_bytes, links=links)


def blobs_of(settings: Settings) -> Blobs:
    return open_blobs(
        settings.data_dir,
        durable=settings.durable,
        url=settings.blob_url,
        cache_bytes=settings.blob_cache_bytes,
        links=settings.blob_links,
    )


def check_blobs(settings: Settings) -> None:
    """Raise SettingsError, with what to set, unless the bucket of the settings can be used."""
    if settings.blob_url:
        from store.blobs.bucket import Bucket

        Bucket(settings.blob_url).check()
