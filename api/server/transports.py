"""What lies between the transport of the event loop and a connection: how much is read at a time, and what goes out
together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

#: Of what is written, so much may wait for what follows it in the same turn of the event loop.
MAX_HELD_BYTES = 2048
#: A larger body is not copied for the sake of one packet.
MAX_JOINED_BYTES = 65_536


class Reader(Protocol):
    """A protocol that says how much it takes at a time."""

    @property
    def takes_bytes(self) -> int: ...
    def connection_made(self, transport: Any) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def data_received(self, data: bytes) -> None: ...
    def eof_received(self) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class Reading(asyncio.BufferedProtocol):
    """Hands `reader` what comes. All of one event loop have one `buffer`: what was read is handed over at once."""

    def __init__(self, reader: Reader, buffer: memoryview) -> None:
        self._reader, self._buffer = reader, buffer

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[: self._reader.takes_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        self._reader.data_received(bytes(self._buffer[:nbytes]))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._reader.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._reader.connection_lost(exc)

    def eof_received(self) -> None:
        self._reader.eof_received()

    def pause_writing(self) -> None:
        self._reader.pause_writing()

    def resume_writing(self) -> None:
        self._reader.resume_writing()


class Joining:
    """A transport that sends two small writes of one turn of the event loop as one: each costs a system call, and wakes
    the client. It is not closed while it `stays`, until it is lost."""

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop, stays: Callable[[], bool]) -> None:
        self._transport, self._loop, self._stays = transport, loop, stays
        self._held = b""
        self.written_bytes = 0
        self.is_closing: Callable[[], bool] = transport.is_closing

    def write(self, data: bytes) -> None:
        self.written_bytes += len(data)
        if self._held and len(data) <= MAX_JOINED_BYTES:
            data, self._held = self._held + data, b""
        elif 0 < len(data) <= MAX_HELD_BYTES:
            self._held = data
            self._loop.call_soon(self._send)
            return
        self._send()
        self._transport.write(data)

    def lost(self) -> None:
        """Or who says whether it stays, and it, would keep each other."""
        self._stays = bool

    def write_eof(self) -> None:
        self._send()
        self._transport.write_eof()

    def close(self) -> None:
        if not self._stays():
            self._send()
            self._transport.close()

    def _send(self) -> None:
        data, self._held = self._held, b""
        if data and not self.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
