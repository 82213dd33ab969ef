"""Uvicorn around the app: it says when it is ready, keeps connections within limits, drains before it stops."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import uvicorn

from api.server.connections import READ_BYTES, Connection
from api.server.gate import Gate
from api.server.transports import Reading
from api.server.workers.supervisor import WorkerFailed
from store.settings import FrontSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger(__name__)

#: How long requests may take after a signal; long polls are answered at once.
FINISH_REQUESTS_S = 5
#: After how many of uvicorn's ticks late connections are looked for: once a second.
_SWEEP_TICKS = 10


class Server(uvicorn.Server):
    """Uvicorn that says when it is ready, has the app drain first, and exits with 0 after a signal.

    The app keeps in its state `ready`, which waits until its workers are there, and optionally `stopping`, called when
    the drain begins (to answer long polls). `failure` is why it has ended by itself."""

    def __init__(self, app: FastAPI, url: str, backlog: int, settings: FrontSettings) -> None:
        self._gate = Gate(settings)
        self._buffer = memoryview(bytearray(READ_BYTES))
        super().__init__(
            uvicorn.Config(
                app,
                http=self._connection,  # type: ignore[arg-type]
                ws="none",
                proxy_headers=True,
                forwarded_allow_ips=settings.trusted_proxies,
                access_log=False,
                log_config=None,
                server_header=False,
                lifespan="on",
                backlog=backlog,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=FINISH_REQUESTS_S,
            )
        )
        self._app = app
        app.state.gate = self._gate
        self._url = url
        self._ready: asyncio.Task[None] | None = None
        self.failure: WorkerFailed | None = None

    def _connection(self, **options: Any) -> Reading:
        return Reading(Connection(self._gate, **options), self._buffer)

    def run_until_signal(self, sock: socket.socket) -> int:
        # Uvicorn raises a signal again once it has shut down; by then it must not kill the process.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle_exit)
        with suppress(SystemExit):  # the app could not start; uvicorn has logged why
            self.run(sockets=[sock])
        return 0 if self.started else 1

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._ready = asyncio.create_task(self._say_when_ready())

    async def on_tick(self, counter: int) -> bool:
        if counter % _SWEEP_TICKS == 0:
            self._gate.sweep(each for each in self.server_state.connections if isinstance(each, Connection))
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("draining")
        if self._ready is not None:
            self._ready.cancel()
        if stopping := getattr(self._app.state, "stopping", None):
            stopping()
        await super().shutdown(sockets=sockets)

    async def _say_when_ready(self) -> None:
        try:
            await self._app.state.ready()
        except WorkerFailed as error:
            self.failure = error
            self.should_exit = True
        else:
            print(f"ready {self._url}", flush=True)
