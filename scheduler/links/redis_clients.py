"""Clients of Redis, with timeouts of their own: redis-py's defaults raise when a pool is empty and retry a dead
connection for a minute (docs/production.md)."""

from __future__ import annotations

from typing import Any

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

Client = redis.Redis

#: A command that takes longer has lost its connection: scripts here take milliseconds at most.
COMMAND_S = 2.0
#: Connections of one process; a command that finds none free waits for one.
CONNECTIONS = 32
#: The longest that a blocking reader waits in one call.
LONGEST_BLOCK_S = 5.0


def pooled(url: str) -> Client:
    """For short commands, from any number of threads."""
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
    """For one reader that waits inside a command, up to LONGEST_BLOCK_S: one connection, no hidden retries."""
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
    """One connection that is kept open: while Redis has it, the process at its other end is there, however busy. It is
    made by the first command: a client of redis-py's own kind with one connection needs a Redis to be made itself."""
    return redis.Redis.from_url(
        url,
        socket_timeout=COMMAND_S,
        socket_connect_timeout=COMMAND_S,
        socket_keepalive=True,
        max_connections=1,
        retry=Retry(ExponentialBackoff(cap=0.1, base=0.01), 0),
    )


def entries_of(found: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """What was read from one stream: each entry's id and its fields."""
    batches: Any = found.values() if isinstance(found, dict) else [entries for _, entries in found or []]
    return [entry for batch in batches for entry in _flat(batch)]


def _flat(batch: Any) -> list[Any]:
    """Entries of one stream; RESP3 nests them once more."""
    return batch[0] if batch and isinstance(batch[0], list) and batch[0] and isinstance(batch[0][0], tuple) else batch


def pop_all(client: Client, key: str, most: int, timeout_s: float) -> list[bytes]:
    """Up to `most` of what a list has, from its head; or what comes first within `timeout_s`, and nothing if nothing
    does. For a `blocking` client."""
    found: Any = client.blmpop(min(timeout_s, LONGEST_BLOCK_S), 1, key, direction="LEFT", count=most)
    return list(found[1]) if found else []
