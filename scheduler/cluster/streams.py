"""Streamed samples on a replica: it hears what all generators draw (`scheduler.links.broadcasts`), keeps what somebody
reads here, and reads what it has missed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

from scheduler.journal.samples.streams import TokenStream
from scheduler.links.messages import Drawn


class SharedStreams:
    """`before` reads what an operation has drawn so far; it returns None while Redis is unreachable."""

    def __init__(self, before: Callable[[str], Awaitable[list[Drawn] | None]]) -> None:
        self._before = before
        self._streams: WeakValueDictionary[str, TokenStream] = WeakValueDictionary()
        self._reading: set[asyncio.Task[None]] = set()

    async def follow(self, op_id: str) -> TokenStream:
        stream = self._streams.setdefault(op_id, TokenStream())
        await self._read(op_id)
        return stream

    def heard(self, drawn: Drawn) -> None:
        stream = self._streams.get(drawn.op_id)
        if stream is not None:
            stream.hear(drawn.parts)

    def missed(self) -> None:
        """Read all followed streams again: messages may have been missed."""
        for op_id in list(self._streams):
            task = asyncio.ensure_future(self._read(op_id))
            self._reading.add(task)
            task.add_done_callback(self._reading.discard)

    async def _read(self, op_id: str) -> None:
        for drawn in await self._before(op_id) or []:
            self.heard(drawn)
