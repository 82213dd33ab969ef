"""A worker process as a strand: the worker's own blocking loop, which runs only when told and stops at every message.

It is a thread, but never runs at the same time as anything else, so the schedule may end it wherever it stops. Its link
carries real bytes: messages are encoded and decoded as on a socket."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import torch

from scheduler.links.sockets import _to_server, _to_worker  # the decoders of both ends

_encoder = msgspec.msgpack.Encoder()

#: Why a strand has stopped: it has sent a message, waits for one, has looked for one, its disk is slow, or it has
#: ended.
Stop = Literal["sent", "waits", "looks", "slow", "over"]


class Killed(BaseException):
    """The process that runs this is gone. Not an Exception, because no handler may survive kill -9."""


class Strand:
    """`body(strand)` is the process: it uses the strand as its link (`send`, `recv`)."""

    def __init__(self, body: Callable[[Strand], None]) -> None:
        self.sent: Any = None  # the message that it has stopped at
        self.patience_s: float | None = None  # how long it waits for a message
        self.error: BaseException | None = None
        self._body = body
        self._inbox: deque[bytes] = deque()
        self._server_gone = self._killed = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._why: Stop = "waits"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # -- for the schedule

    def resume(self) -> Stop:
        """Let it run until it stops again."""
        if self._why != "over":
            self._go.release()
            self._stopped.acquire()
        return self._why

    def give(self, message: msgspec.Struct) -> None:
        self._inbox.append(_encoder.encode(message))

    def hang_up(self) -> None:
        """The server is gone: the strand learns it at its next message."""
        self._server_gone = True

    def kill(self) -> None:
        """kill -9: it runs no further than here."""
        self._killed = True
        while self.resume() != "over":
            pass
        self._thread.join()

    # -- the worker's link

    def send(self, *messages: msgspec.Struct) -> None:
        """Send messages one by one: the strand may die between any two."""
        for message in messages:
            if self._server_gone:
                raise EOFError("the server is gone")
            self.sent = _to_server.decode(_encoder.encode(message))
            self._stop("sent")
            if self._server_gone:
                raise EOFError("the server is gone")

    def recv(self, timeout_s: float | None = None) -> Any:
        while True:
            if self._inbox:
                return _to_worker.decode(self._inbox.popleft())
            if self._server_gone:
                raise EOFError("the server is gone")
            self.patience_s = timeout_s
            self._stop("looks" if timeout_s == 0 else "waits")
            if timeout_s is not None and not self._inbox and not self._server_gone:
                return None

    # -- inside

    def check(self) -> None:
        """Whether the process still lives, for seams other than messages."""
        if self._killed:
            raise Killed

    def wait(self, seconds: float) -> None:
        """What the process touches takes that long."""
        self.patience_s = seconds
        self._stop("slow")

    def _stop(self, why: Stop) -> None:
        self._why = why
        self._stopped.release()
        self._go.acquire()
        self.check()

    def _run(self) -> None:
        self._go.acquire()
        torch.set_num_threads(1)
        try:
            self.check()
            self._body(self)
        except BaseException as error:
            self.error = error
        self._why = "over"
        self._stopped.release()
