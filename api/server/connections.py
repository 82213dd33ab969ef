"""A connection of HTTP/1.1, within the limits of its gate.

A body is read only as far as its request asks for it: many requests wait first, for room or for their turn. While
nothing is read, nothing tells that a client has left, so the gate's sweep looks. When a request is answered before its
body has come, the rest is read and dropped, also if the connection ends with the answer: a client that is cut off while
it sends may lose the answer.

Head and body of an answer go out in one packet. Who offers to go on in another protocol than HTTP/1.1 is served in this
one (RFC 9110, 7.8).
"""

from __future__ import annotations

import json
import logging
import re
from typing import Any, NoReturn

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.server.gate import Gate
from api.server.transports import Joining

log = logging.getLogger(__name__)

MAX_HEADERS_BYTES = 64 * 1024
MAX_HEADERS = 128
#: How many requests may wait on one connection behind the one being answered.
MAX_PIPELINED = 16
#: How much is read at a time of a body that is asked for, and of everything else: a head may bring so much of a body.
READ_BYTES = 256 * 1024
READ_UNASKED_BYTES = 16 * 1024

#: The error code for each status with which a connection is refused; docs/api.md lists them.
CODES = {400: "invalid_request", 429: "rate_limited", 431: "headers_too_large", 503: "too_many_connections"}
_LONG_HEADERS = f"the headers of a request have at most {MAX_HEADERS_BYTES} bytes"

_HOST = re.compile(rb"[A-Za-z0-9._-]+(:\d{1,5})?|\[[0-9A-Fa-f:.]+\](:\d{1,5})?|")


class Connection(HttpToolsProtocol):
    """A connection counted by its gate. It notes since when it waits: for headers from their first byte (or the start),
    for a body from its headers, for an answer to be read from when the client stopped reading (and how long it had
    stopped before). Idle connections are closed by the sweep, too: uvicorn would set a timer for each answer, which
    takes a fiftieth of an operation's time."""

    def __init__(self, gate: Gate, **options: Any) -> None:
        super().__init__(**options)
        self._gate = gate
        self._headers_bytes = 0  # received bytes of incomplete headers
        self._read_bytes = 0  # header bytes of the request being read
        #: Whether the piece being read contained body bytes, began a request, or ended its headers.
        self._body_came = self._begun = self._headed = False
        self._came = b""  # what is to be parsed in a later turn of the event loop
        self._ends = False  # whether the connection is closed at the end of the request being read
        self._last: bytes | None = None
        self._wrong = (400, "this cannot be read as a request of HTTP")
        self._offer = b""  # the head of a request that offers another protocol, without that offer
        self.address = ""
        self.headers_since: float | None = None
        self.body_since: float | None = None
        self.unread_since: float | None = None
        self.idle_since: float | None = None
        self.body_bytes = 0
        self.unread_s = 0.0  # time in which this answer was not read, before `unread_since`

    def connection_made(self, transport: Any) -> None:
        self._out = Joining(transport, self.loop, self._stays)
        super().connection_made(self._out)  # type: ignore[arg-type]
        self.address = self.client[0] if self.client else ""
        self.headers_since = self._gate.clock()
        refusal = self._gate.enter(self.address)
        if refusal is not None:
            self._refuse(*refusal)
        else:
            self._gate.waits(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gate.asked(self)
        self._gate.leave(self.address)
        super().connection_lost(exc)
        self._out.lost()

    def data_received(self, data: bytes) -> None:
        """Parse `data` at once, or when it is the turn of its address: thousands of connections may have sent many
        requests each."""
        if not self._came and self._gate.reads.begins():
            self._read(data)
            return
        self.flow.pause_reading()
        if not self._came:
            self._gate.reads.later(self._gate.whose(self.address)).add_done_callback(self._turn)
        self._came += data

    def _turn(self, _: object) -> None:
        data, self._came = self._came, b""
        self.flow.resume_reading()
        self._read(data)

    def _read(self, data: bytes) -> None:
        if self.transport.is_closing() or self._last is not None:
            return
        in_headers, self.idle_since = self.headers_since is not None, None
        self._body_came = self._begun = self._headed = False
        self._parse(data)
        if self._unasked():
            self.flow.pause_reading()
        # not the rest of a request that was answered early
        waits = self.headers_since is None and self.body_since is None
        if waits and self.cycle is not None and self.cycle.response_complete:
            self.headers_since = self._gate.clock()  # empty lines, for which uvicorn would wait without end
        beside_body = not in_headers and self.body_since is not None and not self._body_came
        if not beside_body and (self.headers_since is None or self._body_came):
            self._headers_bytes = 0
        elif self._begun:  # it began in this piece, after the end of an earlier request
            self._headers_bytes = len(data)
        else:
            self._headers_bytes += len(data)
        # a trailer, which the parser would collect without end
        if self._headers_bytes > MAX_HEADERS_BYTES and beside_body:
            self.transport.abort()  # abort: an answer may have begun
        elif self._headers_bytes > MAX_HEADERS_BYTES:
            self._refuse(431, _LONG_HEADERS)

    def _parse(self, data: bytes) -> None:
        """Replaces uvicorn's method, which drops the bytes after an offer of another protocol: the parser stops
        there."""
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as stopped:
                data, self._offer = self._offer + data[stopped.args[0] :], b""
                self.parser = httptools.HttpRequestParser(self)
            except httptools.HttpParserError:
                self._refuse(*self._wrong)
                return
            else:
                return

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.headers_since, self._read_bytes, self._begun = self._gate.clock(), 0, True

    def on_header(self, name: bytes, value: bytes) -> None:
        self._read_bytes += len(name) + len(value) + 4
        if self._read_bytes > MAX_HEADERS_BYTES:
            self._stop(431, _LONG_HEADERS)
        if len(self.headers) >= MAX_HEADERS:
            self._stop(400, f"a request has at most {MAX_HEADERS} headers")
        name = name.lower()
        if name == b"host" and (not _HOST.fullmatch(value) or any(known == b"host" for known, _ in self.headers)):
            self._stop(400, "Host: must be one name, or address, and at most a port")  # links are made from it
        if name == b"expect":
            super().on_header(name, value)
        else:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._ends:  # a request behind the last one
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop(400, f"at most {MAX_PIPELINED} requests may wait behind one that is being answered")
        if self.parser.should_upgrade():
            self._offer = self._without_offer()
            return
        self._gate.asked(self)
        self.headers_since, self._headed = None, True
        self.body_since, self.body_bytes = self._gate.clock(), 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.body_bytes, self._body_came = self.body_bytes + len(body), True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offer:  # only the head, which is read again without its offer
            return
        self.body_since = None
        super().on_message_complete()
        if self._ends:
            self.transport.close()

    @property
    def unread(self) -> bool:
        """True while a body is left unread until its request asks for it. Then no read can show that the client has
        left."""
        return self.body_since is not None and self.flow.read_paused and not self.pipeline

    @property
    def takes_bytes(self) -> int:
        """How many bytes the next read takes at most."""
        return READ_UNASKED_BYTES if self.body_since is None or self.pipeline else READ_BYTES

    def _unasked(self) -> bool:
        """True if the rest of a body is still to come and its request does not wait for it."""
        if self.body_since is None or self.cycle is None or self.cycle.response_complete:
            return False
        return self._headed or bool(self.cycle.body)

    def _stays(self) -> bool:
        """Put the closing off until the rest of an answered request has come, and return True. A second close, or a
        close for another reason, is not put off."""
        cycle = self.cycle
        if self._ends or cycle is None or cycle.keep_alive or not cycle.response_complete or self.body_since is None:
            return False
        self._ends = True
        self._out.write_eof()
        return True

    @property
    def written_bytes(self) -> int:
        """Bytes written of this answer."""
        return self._out.written_bytes

    def pause_writing(self) -> None:
        self.unread_since = self._gate.clock()
        super().pause_writing()

    def resume_writing(self) -> None:
        if self.unread_since is not None:
            self.unread_s += self._gate.clock() - self.unread_since
        self.unread_since = None
        super().resume_writing()

    def _without_offer(self) -> bytes:
        if self.parser.get_method() == b"CONNECT":
            self._stop(400, "CONNECT: this server is no proxy")
        kept = b"".join(b"%s: %s\r\n" % each for each in self.headers if each[0] != b"upgrade")
        version = self.parser.get_http_version().encode()
        return b"%s %s HTTP/%s\r\n%s\r\n" % (self.parser.get_method(), self.url, version, kept)

    def _stop(self, status: int, why: str) -> NoReturn:
        """Stop the parser from one of its callbacks, and refuse the request."""
        self._wrong = status, why
        raise ValueError(why)

    def _refuse(self, status: int, why: str) -> None:
        if status != 400:
            self._gate.refused[status] += 1
        body = json.dumps({"detail": why, "code": CODES[status]}).encode()
        retry = b"retry-after: 1\r\n" if status in (429, 503) else b""
        head = b"HTTP/1.1 %d Refused\r\ncontent-type: application/json\r\n%s" % (status, retry)
        self._answer_last(head + b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(body), body))

    def _answer_last(self, answer: bytes) -> None:
        """Answer something that cannot be read any further, and close the connection. The answer is sent after those to
        earlier requests, or it would be taken for one of them (RFC 9112, 9.3.2). A request that was still being read
        gets this answer instead of its own."""
        if self._ends:
            self.transport.close()
            return
        if self.cycle is not None and not self.cycle.response_complete:
            if not self.cycle.more_body or self.pipeline:
                if self.cycle.more_body:
                    self.pipeline.popleft()
                self._last, self.headers_since, self.body_since = answer, None, None
                self.flow.pause_reading()
                return
            if self.cycle.response_started:
                self.transport.abort()
                return
        self.transport.write(answer)
        self.transport.close()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        self.unread_s, self._out.written_bytes = 0.0, 0
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            if self.body_since is None:  # or when the last of them asks for its body
                self.flow.resume_reading()
            return
        self.cycle.body.clear()  # that nobody has asked for
        self.flow.resume_reading()
        self.idle_since = self._gate.clock()
        self._gate.waits(self)
        if self._last is not None:
            self.transport.write(self._last)
            self.transport.close()
