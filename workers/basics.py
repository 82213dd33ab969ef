"""A worker's log, traces and blobs, as its config describes them; and how it announces that it loads."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from scheduler.links.configs import Basics
from store import logs, tracing
from store.blobs.contract import Blobs
from store.blobs.opening import open_blobs


def say_as(basics: Basics) -> None:
    """Set up this process's log and traces."""
    role = basics.role or "worker"
    logs.configure(basics.log_format, basics.log_level, role)
    tracing.configure(f"weft-{role.partition('-')[0]}")


def blobs_of(basics: Basics) -> Blobs:
    return open_blobs(
        Path(basics.data_dir), durable=basics.durable, url=basics.blob_url, cache_bytes=basics.blob_cache_bytes
    )


def announced(basics: Basics, role: str) -> AbstractContextManager[None]:
    """In the block the worker loads its models, and says so over Redis. Over a link nothing need be said: the server
    that started the worker knows."""
    if not basics.redis_url:
        return nullcontext()
    from scheduler.links import loading  # imported with the Redis client

    return loading.announced(basics.redis_url, role, basics.models)
