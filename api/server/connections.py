"""Connections within limits: how many there are, in all and of one address, and how long a client may take to say what
it wants, or to take the answer.

Uvicorn waits for ever for the rest of a request, and so would hold a connection for everybody who sends half of one.
Here a sweep closes, once a second, what is late: headers that are not complete after `header_timeout_s`, bodies that
come slower than a slow line brings them, answers that nobody reads, or that go slower than such a line takes them.
Waiting for a result (a long poll) is not late.

A body is read when its request asks for it, and no further than that: many requests wait before, for room or for their
turn. While nothing is read nobody hears that a client has left, so the sweep looks. Of what is answered before its body
has come the rest is taken and thrown away, also where the connection ends with it: a client that is cut off while it
sends may lose the answer.

A connection beyond the limits is answered, before anything of it is read, and closed. Where all are taken, one that no
request is under way on makes room, the one that has waited longest for its client: nobody needs a key to hold one.
Head and body of an answer go out in one packet. Who offers to go on in another protocol than HTTP/1.1 is served in this
one (RFC 9110, 7.8).
"""

from __future__ import annotations

import ipaddress
import json
import logging
import re
import select
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.http.pace import Turns
from api.server.transports import Joining, Reading
from api.state.addresses import holder
from api.state.polls import most_connections
from store.settings import FrontSettings

log = logging.getLogger(__name__)

MAX_HEADERS_BYTES = 64 * 1024
MAX_HEADERS = 128
#: Requests that wait on one connection behind the one that is being answered.
MAX_PIPELINED = 16
#: A body may take `body_timeout_s`, and a second more for each of these bytes that have come; and an answer may wait so
#: long, in all, for its client to take more.
BODY_BYTES_PER_S = 64 * 1024
#: What is read at a time of a body that is asked for; and of anything else, for with its head comes so much of a body.
READ_BYTES = 256 * 1024
READ_UNASKED_BYTES = 16 * 1024
#: Pieces that are parsed in one turn of the event loop. One may hold as many requests as may wait, which is 0.3 ms.
PIECES_EACH_TURN = 32

#: The code of each status that a connection is refused with; docs/api.md has them.
CODES = {400: "invalid_request", 429: "rate_limited", 431: "headers_too_large", 503: "too_many_connections"}
_LONG_HEADERS = f"the headers of a request have at most {MAX_HEADERS_BYTES} bytes"

#: That a client has left, where the system tells it of a connection of which nothing is read.
_GONE = getattr(select, "POLLRDHUP", 0)
_HOST = re.compile(rb"[A-Za-z0-9._-]+(:\d{1,5})?|\[[0-9A-Fa-f:.]+\](:\d{1,5})?|")


class Gate:
    """Counts connections, and knows which of them are late."""

    def __init__(self, settings: FrontSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._trusted = [ipaddress.ip_network(proxy, strict=False) for proxy in settings.trusted_proxies]
        self._most = most_connections(settings)
        self.clock = clock
        self._open: Counter[str] = Counter()
        self._silent: dict[Connection, None] = {}  # that wait for a request, since longest first
        self._swept = clock()
        self.pieces = Turns(PIECES_EACH_TURN)
        self._buffer = memoryview(bytearray(READ_BYTES))
        self.refused: Counter[int] = Counter()  # connections, by the status that they were turned away with

    def connection(self, **options: Any) -> Reading:
        """A new one, as uvicorn makes its own."""
        return Reading(Connection(self, **options), self._buffer)

    @property
    def count(self) -> int:
        """Connections that are open."""
        return self._open.total()

    def enter(self, address: str) -> tuple[int, str] | None:
        """Count a connection. Where there is no room for it: the status and the text to refuse it with."""
        whose = self.whose(address)
        self._open[whose] += 1
        if self._open.total() > self._most and not self._make_room():
            return 503, f"the server has its most of {self._most} connections open: come again in a moment"
        most = self._settings.max_connections_per_address
        if self._open[whose] > most and not self._is_proxy(address):
            return 429, f"your address has its most of {most} connections open: use those, or fewer at the same moment"
        return None

    def leave(self, address: str) -> None:
        whose = self.whose(address)
        self._open[whose] -= 1
        if self._open[whose] <= 0:
            del self._open[whose]

    def waits(self, connection: Connection) -> None:
        """For a request of its client, from now on."""
        self.asked(connection)
        self._silent[connection] = None

    def asked(self, connection: Connection) -> None:
        self._silent.pop(connection, None)

    def _make_room(self) -> bool:
        for connection in self._silent:
            self.asked(connection)
            connection.transport.close()  # behind what is left of its last answer
            return True
        return False

    def late(self, connection: Connection, now: float) -> str | None:
        """What `connection` has been waited for too long."""
        settings = self._settings
        if connection.headers_since is not None and now - connection.headers_since > settings.header_timeout_s:
            return "headers"
        if connection.body_since is not None:
            allowed = settings.body_timeout_s + connection.body_bytes / BODY_BYTES_PER_S
            if now - connection.body_since > allowed:
                return "body"
        unread_s = 0.0 if connection.unread_since is None else now - connection.unread_since
        allowed = settings.body_timeout_s + connection.written_bytes / BODY_BYTES_PER_S
        if unread_s > settings.body_timeout_s or connection.unread_s + unread_s > allowed:
            return "answer to be read"
        return None

    def sweep(self, connections: Iterable[Any]) -> None:
        """Close those that are late. While the server does not read on, a body is not, but a client may leave."""
        now = self.clock()
        since_last, self._swept = now - self._swept, now
        found = [each for each in connections if isinstance(each, Connection)]
        for connection in _gone(found):
            connection.transport.abort()
        for connection in found:
            if connection.idle_since is not None and now - connection.idle_since > connection.timeout_keep_alive:
                connection.transport.close()
                continue
            if connection.body_since is not None and connection.flow.read_paused:
                connection.body_since += since_last
            if (what := self.late(connection, now)) is not None:
                log.info("closed a connection of %s: waited too long for its %s", connection.address, what)
                connection.transport.abort()

    def whose(self, address: str) -> str:
        """By what it is counted: a proxy not with what else is in its network."""
        return address if self._is_proxy(address) else holder(address)

    def _is_proxy(self, address: str) -> bool:
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(found in network for network in self._trusted)


def _gone(connections: Iterable[Connection]) -> list[Connection]:
    """Of those whose body waits until it is asked for."""
    asked, waiting = select.poll(), dict[int, Connection]()
    for connection in connections:
        if connection.body_since is not None and connection.flow.read_paused and not connection.pipeline:
            number = connection.transport.get_extra_info("socket").fileno()
            if number >= 0:  # or it is closed already
                waiting[number] = connection
                asked.register(number, _GONE)
    return [waiting[number] for number, _ in asked.poll(0)] if waiting else []


class Connection(HttpToolsProtocol):
    """A connection that its gate has counted. What is waited for, and since when: headers from the first byte (or from
    the start), a body from its headers, an answer from when the client stopped reading it, and how long it did so
    before. An idle one is closed by the sweep, too: uvicorn has a timer for each answer, which takes a fiftieth of an
    operation."""

    def __init__(self, gate: Gate, **options: Any) -> None:
        super().__init__(**options)
        self._gate = gate
        self._headers_bytes = 0  # that have come, of headers that are not complete
        self._read_bytes = 0  # of the headers of the request that is being read
        self._body_came = self._begun = self._headed = False  # in the piece that is being read
        self._came = b""  # and is to be parsed in a later turn
        self._ends = False  # with the rest of the request that was answered
        self._last: bytes | None = None
        self._wrong = (400, "this cannot be read as a request of HTTP")
        self._offer = b""  # the head of a request for another protocol, without that
        self.address = ""
        self.headers_since: float | None = None
        self.body_since: float | None = None
        self.unread_since: float | None = None
        self.idle_since: float | None = None
        self.body_bytes = 0
        self.unread_s = 0.0  # of this answer, before `unread_since`

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
        """At once, or when it is the turn of its address: thousands of connections may have sent many requests each."""
        if not self._came and self._gate.pieces.begins():
            self._read(data)
            return
        self.flow.pause_reading()
        if not self._came:
            self._gate.pieces.come(self._gate.whose(self.address)).add_done_callback(self._turn)
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
        waits = self.headers_since is None and self.body_since is None  # for no rest of what was answered early
        if waits and self.cycle is not None and self.cycle.response_complete:
            self.headers_since = self._gate.clock()  # empty lines: uvicorn waits on without an end
        beside_body = not in_headers and self.body_since is not None and not self._body_came
        if not beside_body and (self.headers_since is None or self._body_came):
            self._headers_bytes = 0
        elif self._begun:  # in this piece, behind the ends of others, if any
            self._headers_bytes = len(data)
        else:
            self._headers_bytes += len(data)
        if self._headers_bytes > MAX_HEADERS_BYTES and beside_body:  # a trailer, which the parser would collect
            self.transport.abort()  # an answer may have begun
        elif self._headers_bytes > MAX_HEADERS_BYTES:
            self._refuse(431, _LONG_HEADERS)

    def _parse(self, data: bytes) -> None:
        """In place of uvicorn's, which leaves out what follows an offer of another protocol: there the parser stops."""
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
        if self._offer:  # of a head alone, that is read again
            return
        self.body_since = None
        super().on_message_complete()
        if self._ends:
            self.transport.close()

    @property
    def takes_bytes(self) -> int:
        """Of what comes next, at a time."""
        return READ_UNASKED_BYTES if self.body_since is None or self.pipeline else READ_BYTES

    def _unasked(self) -> bool:
        """Whether a body is to come of which nobody waits for more at the moment."""
        if self.body_since is None or self.cycle is None or self.cycle.response_complete:
            return False
        return self._headed or bool(self.cycle.body)

    def _stays(self) -> bool:
        """Whether a connection that ends with its answer takes the rest of the request before: whoever closes it for
        another reason, or once more, ends it."""
        cycle = self.cycle
        if self._ends or cycle is None or cycle.keep_alive or not cycle.response_complete or self.body_since is None:
            return False
        self._ends = True
        self._out.write_eof()
        return True

    @property
    def written_bytes(self) -> int:
        """Of this answer."""
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
        """From a callback of the parser, which then reads no further."""
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
        """To what cannot be read on, and end the connection; after the answers to the requests before it, or it would
        be taken for one of those (RFC 9112, 9.3.2). A request that was being read, and is under way, has none to come:
        it is what cannot be read on."""
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
