"""What lies between the event loop's transport and a connection: `Reading` limits how much is read at a time, `Joining`
joins what is written, and `left` finds the clients that left while nothing is read."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable, Iterable
from typing import Any, Protocol

#: Up to this many written bytes wait for what is written next in the same turn of the event loop.
MAX_HELD_BYTES = 2048
#: A body larger than this is sent in a packet of its own: copying it would cost more than the packet saved.
MAX_JOINED_BYTES = 65_536
#: The event of a client that has left, on systems that report it for a connection that is not read.
_LEFT = getattr(select, "POLLRDHUP", 0)


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
    """Hands `reader` what comes. All connections of an event loop share one `buffer`, as each read is handed over at
    once."""

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
    """A transport that joins two small writes in one turn of the event loop: each write costs a system call, and wakes
    the client. `close` does nothing if `stays` says so."""

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
        """Break the reference cycle with the connection."""
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


def left(transports: Iterable[Any]) -> list[Any]:
    """The transports whose client has closed the connection, or the client's sending half of it."""
    asked, by_number = select.poll(), dict[int, Any]()
    for transport in transports:
        number = transport.get_extra_info("socket").fileno()
        if number >= 0:  # else it is closed here already
            by_number[number] = transport
            asked.register(number, _LEFT)
    return [by_number[number] for number, _ in asked.poll(0)] if by_number else []
