"""Clients of Redis, with timeouts of their own: redis-py's defaults raise when a pool is empty and retry a dead
connection for a minute (docs/production.md)."""

from __future__ import annotations

from typing import Any

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

Client = redis.Redis

#: A command that takes longer has lost its connection: scripts here take a few milliseconds at most.
COMMAND_S = 2.0
#: How many connections one process may have; a command waits for a free one.
CONNECTIONS = 32
#: The longest wait of a blocking reader in one call.
LONGEST_BLOCK_S = 5.0


def pooled(url: str) -> Client:
    """A client for short commands, from any number of threads."""
    pool = redis.BlockingConnectionPool.from_url(
        url,
        max_connections=CONNECTIONS,
        timeout=COMMAND_S,
        socket_timeout=COMMAND_S,
        socket_connect_timeout=COMMAND_S,
        socket_keepalive=True,
        health_check_interval=15,
        retry=Retry(ExponentialBackoff(cap=0.1, base=0.01), 1),
    )
    return redis.Redis(connection_pool=pool)


def blocking(url: str) -> Client:
    """A client for one reader that waits inside a command, up to LONGEST_BLOCK_S: one connection, no hidden retries."""
    return redis.Redis.from_url(
        url,
        socket_timeout=LONGEST_BLOCK_S + COMMAND_S,
        socket_connect_timeout=COMMAND_S,
        socket_keepalive=True,
        single_connection_client=False,
        max_connections=2,
        retry=Retry(ExponentialBackoff(cap=0.1, base=0.01), 0),
    )


def held(url: str) -> Client:
    """A connection that is kept open. As long as Redis has it, the process at its other end lives, however busy it is.
    The first command opens it: redis-py's own single-connection client needs Redis already when it is made."""
    return redis.Redis.from_url(
        url,
        socket_timeout=COMMAND_S,
        socket_connect_timeout=COMMAND_S,
        socket_keepalive=True,
        max_connections=1,
        retry=Retry(ExponentialBackoff(cap=0.1, base=0.01), 0),
    )


def entries_of(found: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The entries read from one stream: each one's id and fields."""
    batches: Any = found.values() if isinstance(found, dict) else [entries for _, entries in found or []]
    return [entry for batch in batches for entry in _flat(batch)]


def _flat(batch: Any) -> list[Any]:
    """The entries of one stream; RESP3 nests them one level deeper."""
    return batch[0] if batch and isinstance(batch[0], list) and batch[0] and isinstance(batch[0][0], tuple) else batch


def pop_all(client: Client, key: str, most: int, timeout_s: float) -> list[bytes]:
    """Up to `most` elements from the head of a list. If it is empty, those that come first within `timeout_s`, or none.
    For a `blocking` client."""
    found: Any = client.blmpop(min(timeout_s, LONGEST_BLOCK_S), 1, key, direction="LEFT", count=most)
    return list(found[1]) if found else []
