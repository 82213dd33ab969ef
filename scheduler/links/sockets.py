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
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from scheduler.links.configs import WorkerConfig
from scheduler.links.messages import FromGenerator, FromTrainer, PassOver, ToGenerator, ToTrainer

#: Read at most this much at once: as much as a socket pair holds.
RECV_BYTES = 1 << 18

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(WorkerConfig | ToTrainer | ToGenerator)
_to_server = msgspec.msgpack.Decoder(FromTrainer | FromGenerator)


def frame(message: msgspec.Struct) -> bytes:
    """A message in its length-prefixed frame."""
    payload = _encoder.encode(message)
    return _LENGTH.pack(len(payload)) + payload


class WorkerLink:
    """The worker's end, on an inherited file descriptor. The first message is a WorkerConfig."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._frames = _Frames(_to_worker)
        self._unsent = b""

    def send(self, *messages: msgspec.Struct) -> None:
        """Send messages in one system call, which wakes the server once. The end of a pass is held back until the next
        message: mostly the next pull."""
        self._unsent += b"".join(map(frame, messages))
        if isinstance(messages[-1], PassOver):
            return
        unsent, self._unsent = self._unsent, b""
        try:
            self._socket.sendall(unsent)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError("the server is gone") from error

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Close this process's descriptor only: another process that has it goes on."""
        self._socket.close()

    def recv(self, timeout_s: float | None = None) -> Any:
        """The next message, or None if none came in `timeout_s` (None waits for ever, 0 only looks).

        Raises EOFError if the server is gone."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            message = self._frames.take()
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
            self._frames.add(chunk)


class Link(Protocol):
    """The server's end of a worker's link, over any carrier."""

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message. If the worker is gone it is lost without an error, and the loop over `messages` ends."""

    def messages(self) -> AsyncIterator[Any]:
        """The messages of the worker, until the worker is gone."""

    def hang_up(self) -> None:
        """Make `messages` end: the worker is given up."""

    def close(self) -> None: ...


class ServerLink:
    """The server's end over a socket pair, in the event loop. The two directions are independent: a failed write means
    that the worker no longer reads, but messages that it had already sent are still received."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._socket = sock
        self._unsent = bytearray()
        self._deaf = False  # the worker no longer reads
        self._closed = False

    def send(self, message: msgspec.Struct) -> None:
        if self._deaf:
            return
        waits = bool(self._unsent)
        self._unsent += frame(message)
        if not waits:
            self._write()

    def _write(self) -> None:
        """Send as much as the socket takes now, and the rest when it takes more."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._write_on)
        except OSError:
            self._deaf = True
            self._unsent.clear()

    def _write_on(self) -> None:
        self._loop.remove_writer(self._socket)
        self._write()

    async def messages(self) -> AsyncIterator[Any]:
        frames = _Frames(_to_server)
        while not self._closed:
            try:
                chunk = await self._loop.sock_recv(self._socket, RECV_BYTES)
            except OSError:  # the kernel reports this after the last byte that the worker has sent
                return
            if not chunk:
                return
            frames.add(chunk)
            while (message := frames.take()) is not None:
                yield message

    def hang_up(self) -> None:
        with suppress(OSError):  # the worker is gone already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = self._deaf = True
        self._loop.remove_writer(self._socket)
        self._socket.close()


class _Frames:
    """Cuts received bytes into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def add(self, chunk: bytes) -> None:
        self._buffer += chunk

    def take(self) -> Any:
        """The next whole message, or None."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._buffer)
        end = _LENGTH.size + size
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return self._decoder.decode(payload)
