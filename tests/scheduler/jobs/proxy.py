"""A TCP proxy that can swallow all that passes, both ways, while connections stay open, like a NAT that has forgotten
them. It can also lose a reply with its connection, after the server has done what was asked."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Proxy:
    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.swallowing = False
        self.swallowed_bytes = 0
        self.losing = b""  # the next reply that contains, or answers, these bytes is lost
        self.then_gone = False  # and the server is cut off with it
        self._closed = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        loses = False
        with near, suppress(OSError):
            while self.swallowing and not self._closed.wait(0.05):
                pass  # nobody accepts a new connection
            with socket.create_connection(("127.0.0.1", self._target)) as far:
                while not self._closed.is_set():
                    for side in select.select([near, far], [], [], 0.2)[0]:
                        data = side.recv(65536)
                        if not data:
                            return
                        loses = loses or (self.losing != b"" and self.losing in data)
                        if loses and side is far:
                            self.losing = b""
                            if self.then_gone:
                                self.close()
                            return
                        if self.swallowing:
                            self.swallowed_bytes += len(data)
                        else:
                            (far if side is near else near).sendall(data)


@contextmanager
def proxy(port: int) -> Iterator[Proxy]:
    made = Proxy(port)
    try:
        yield made
    finally:
        made.close()
