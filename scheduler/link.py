"""The wire between the API process and a worker: msgpack messages in length-prefixed frames over a socket pair.

The server side is asyncio; the worker side blocks, as a worker's own loop does. A closed link means that the other
process is gone: the worker gets EOFError and exits, the server hands the worker's work to the next one.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from scheduler.messages import FromGenerator, FromTrainer, ToGenerator, ToTrainer

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToTrainer | ToGenerator)
_to_server = msgspec.msgpack.Decoder(FromTrainer | FromGenerator)


def _frame(message: msgspec.Struct) -> bytes:
    payload = _encoder.encode(message)
    return _LENGTH.pack(len(payload)) + payload


class WorkerLink:
    """The worker's end, on an inherited file descriptor."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._buffer = bytearray()

    def send(self, message: msgspec.Struct) -> None:
        try:
            self._socket.sendall(_frame(message))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError("the server is gone") from error

    def recv(self, timeout_s: float | None = None) -> Any:
        """The next message, or None when none came in `timeout_s` (None waits for ever, 0 only looks).

        Raises EOFError when the server is gone."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            message = self._take()
            if message is not None:
                return message
            wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._socket], [], [], wait_s)[0]:
                return None
            try:
                chunk = self._socket.recv(1 << 16)
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                raise EOFError("the server is gone")
            self._buffer += chunk

    def _take(self) -> Any:
        if len(self._buffer) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._buffer)
        end = _LENGTH.size + size
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return _to_worker.decode(payload)


class ServerLink:
    """The server's end, in the event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, sock: socket.socket) -> ServerLink:
        sock.setblocking(False)
        return cls(*await asyncio.open_connection(sock=sock, limit=1 << 20))

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message. Lost silently when the worker is gone; the loop over `messages` then ends."""
        if not self._writer.is_closing():
            self._writer.write(_frame(message))

    async def messages(self) -> AsyncIterator[Any]:
        """What the worker sends, until it is gone."""
        try:
            while True:
                (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                yield _to_server.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionResetError):
            return

    def close(self) -> None:
        self._writer.close()
