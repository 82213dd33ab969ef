"""A real listener in front of a small application."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import AsyncExitStack, suppress
from typing import Any

from fastapi import FastAPI, Request, Response

from api.http.headers import Large
from api.server.connections import MAX_HEADERS_BYTES
from api.server.listener import Server
from store.settings import FrontSettings

#: More than fits into the buffers of a connection.
LARGE_BYTES = 32 << 20


def app() -> FastAPI:
    found = FastAPI()

    async def ready() -> None: ...

    found.state.ready = ready

    @found.get("/who")
    async def who(request: Request) -> dict[str, Any]:
        return {"client": request.client.host if request.client else None, "url": str(request.base_url)}

    @found.post("/body")
    async def body(request: Request) -> int:
        return len(await request.body())

    found.state.unread = 0

    @found.post("/unread")
    async def unread(response: Response, last: bool = False) -> str:
        found.state.unread += 1
        if last:
            response.headers["connection"] = "close"
        return "no"

    @found.get("/watching")
    async def watching(request: Request) -> str:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                while (await request.receive())["type"] != "http.disconnect":
                    continue
        return "late"

    @found.get("/slow")
    async def slow(seconds: float = 2.5) -> str:
        await asyncio.sleep(seconds)
        return "late"

    @found.get("/large")
    async def large() -> Large:
        return Large(bytes(LARGE_BYTES), "application/octet-stream", AsyncExitStack())

    return found


class Listening:
    """A server in a thread, until the end of the test."""

    def __init__(self, settings: FrontSettings, host: str = "127.0.0.1") -> None:
        self._sock = socket.create_server((host, 0))
        self.address = self._sock.getsockname()
        self.url = f"http://{host}:{self.address[1]}"
        self.server = Server(app(), self.url, 100, settings)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._sock]})
        self._thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join()
        self._sock.close()

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection(self.address, timeout=10, source_address=(source, 0))


def answer(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    parts = []
    with suppress(ConnectionError):
        while part := connection.recv(65_536):
            parts.append(part)
    return b"".join(parts)


def read_until(connection: socket.socket, last: bytes, times: int = 1) -> None:
    """Read until `last` has come."""
    got = b""
    while got.count(last) < times:
        part = connection.recv(65_536)
        assert part, got
        got += part


GET = b"GET /who HTTP/1.1\r\nHost: x\r\n\r\n"


LONG = b"GET /who HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * (MAX_HEADERS_BYTES + 1)
