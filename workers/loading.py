"""How a worker says that it loads its models, before it begins to."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from scheduler.links.configs import Basics


def announced(basics: Basics, role: str) -> AbstractContextManager[None]:
    """Over Redis. Whoever has started a worker over a link knows without it."""
    if not basics.redis_url:
        return nullcontext()
    from scheduler.links import loading  # with the client of Redis

    return loading.announced(basics.redis_url, role, basics.models)
