"""Many requests at once over HTTP/1.1.

For every request httpcore looks through all connections and all waiting requests of its client, so one client with
hundreds of long polls spends its time there. Small shards, with the waiting outside of them, keep the cost flat.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

CONNECTIONS_PER_SHARD = 8


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    """Loading the certificates takes longer than anything else about a client, so all share one."""
    return httpx.create_ssl_context()


class Shard:
    """An HTTP client with a few connections, and how many requests it has, those about to be sent included."""

    def __init__(self, headers: Mapping[str, str], connections: int) -> None:
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=30)
        self.client = httpx.AsyncClient(headers=dict(headers), limits=limits, verify=_ssl_context())
        self.slots = asyncio.Semaphore(connections)
        self.load = 0


class Pool:
    """At most `connections` requests at a time; others wait. Shards are made when all others are full."""

    def __init__(self, headers: Mapping[str, str], connections: int) -> None:
        self._headers = headers
        self._most_shards = -(-connections // CONNECTIONS_PER_SHARD)
        self._size = min(connections, CONNECTIONS_PER_SHARD)
        self._shards: list[Shard] = []

    async def request(self, method: str, url: str, **options: Any) -> httpx.Response:
        """As `httpx.AsyncClient.request`, once there is a connection free."""
        shard = self._least_loaded()
        shard.load += 1
        try:
            async with shard.slots:
                return await shard.client.request(method, url, **options)
        finally:
            shard.load -= 1

    @asynccontextmanager
    async def stream(self, method: str, url: str, **options: Any) -> AsyncIterator[httpx.Response]:
        """As `httpx.AsyncClient.stream`, once there is a connection free."""
        shard = self._least_loaded()
        shard.load += 1
        try:
            async with shard.slots, shard.client.stream(method, url, **options) as response:
                yield response
        finally:
            shard.load -= 1

    def _least_loaded(self) -> Shard:
        best = min(self._shards, key=lambda shard: shard.load, default=None)
        if best is None or (best.load >= self._size and len(self._shards) < self._most_shards):
            best = Shard(self._headers, self._size)
            self._shards.append(best)
        return best

    async def close_idle(self) -> None:
        """Close the connections that no request is using. Later requests open new ones."""
        idle = [shard for shard in self._shards if not shard.load]
        self._shards = [shard for shard in self._shards if shard.load]
        for shard in idle:
            await shard.client.aclose()

    async def close(self) -> None:
        """Close all connections."""
        for shard in self._shards:
            await shard.client.aclose()
