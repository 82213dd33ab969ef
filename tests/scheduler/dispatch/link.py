"""A desk's end of a link in memory (`scheduler.links.sockets.Link`), and what a worker says through it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any


class Link:
    def __init__(self) -> None:
        self._said: asyncio.Queue[Any] = asyncio.Queue()
        self._sent: asyncio.Queue[Any] = asyncio.Queue()

    def send(self, message: Any) -> None:
        self._sent.put_nowait(message)

    async def messages(self) -> AsyncIterator[Any]:
        while (message := await self._said.get()) is not None:
            yield message

    def say(self, message: Any) -> None:
        self._said.put_nowait(message)

    async def ask(self, message: Any) -> Any:
        self.say(message)
        return await asyncio.wait_for(self._sent.get(), 5)

    def close(self) -> None:
        self._said.put_nowait(None)
