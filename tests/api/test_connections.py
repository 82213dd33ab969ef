"""The limits on connections, with a real listener in front of a small application."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, suppress
from typing import Any, ClassVar

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from api.http.headers import Large
from api.server import gate, serve
from api.server.connections import (
    CODES,
    MAX_HEADERS,
    MAX_HEADERS_BYTES,
    MAX_PIPELINED,
    READ_UNASKED_BYTES,
    Connection,
)
from api.server.gate import BODY_BYTES_PER_S, READS_EACH_TURN, Gate
from api.server.listener import Server
from api.server.transports import MAX_HELD_BYTES, MAX_JOINED_BYTES, Joining
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


@pytest.fixture
def listening() -> Iterator[Callable[..., Listening]]:
    with ExitStack() as stack:

        def start(**settings: Any) -> Listening:
            found = Listening(FrontSettings(**settings))
            stack.callback(found.stop)
            return found

        yield start


def answer(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    parts = []
    with suppress(ConnectionError):
        while part := connection.recv(65_536):
            parts.append(part)
    return b"".join(parts)


def until(connection: socket.socket, last: bytes, times: int = 1) -> None:
    """Read until `last` has come."""
    got = b""
    while got.count(last) < times:
        part = connection.recv(65_536)
        assert part, got
        got += part


GET = b"GET /who HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /who HTTP/1.1\r\nHost: x\r\nX-A: ", b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc"],
    ids=["nothing", "half headers", "half a body"],
)
def test_half_a_request_is_not_waited_for(listening: Callable[..., Listening], sent: bytes) -> None:
    here = listening(header_timeout_s=0.5, body_timeout_s=0.5)
    with here.connect() as connection:
        connection.sendall(sent)
        assert answer(connection) == b""
    assert httpx.get(f"{here.url}/who").is_success


def test_half_a_second_request_is_not_waited_for_either(listening: Callable[..., Listening]) -> None:
    here = listening(header_timeout_s=0.5)
    for more in (b"GET /who HT", b"\r\n"):
        with here.connect() as connection:
            connection.sendall(GET)
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
            connection.sendall(more)
            assert answer(connection) == b""


def test_a_connection_that_is_idle_is_closed_and_one_that_is_used_is_not(listening: Callable[..., Listening]) -> None:
    here = listening()
    here.server.config.timeout_keep_alive = 1
    with here.connect() as used, here.connect() as idle:
        for connection in (used, idle):
            connection.sendall(GET)
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
        used.sendall(b"GET /slow?seconds=1.5 HTTP/1.1\r\nHost: x\r\n\r\n")  # longer than the limit
        assert answer(idle) == b""
        assert used.recv(65_536).startswith(b"HTTP/1.1 200")


def test_waiting_for_an_answer_is_not_late(listening: Callable[..., Listening]) -> None:
    here = listening(header_timeout_s=0.2, body_timeout_s=0.2)
    assert httpx.get(f"{here.url}/slow?seconds=0.8").json() == "late"


def test_a_slow_line_has_the_time_that_it_needs(listening: Callable[..., Listening]) -> None:
    here = listening(body_timeout_s=2)
    with here.connect() as connection:
        connection.sendall(b"POST /body HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 500000\r\n\r\n")
        for _ in range(10):
            connection.sendall(bytes(50_000))
            time.sleep(0.25)
        assert answer(connection).endswith(b"500000")


def test_an_address_has_its_most_and_others_go_on(listening: Callable[..., Listening]) -> None:
    here = listening(max_connections_per_address=20, trusted_proxies=["127.0.0.3"])
    with ExitStack() as stack:
        held = [stack.enter_context(here.connect("127.0.0.2")) for _ in range(30)]
        refused = [c for c in held[20:] if b"429" in answer(c).split(b"\r\n")[0]]
        assert len(refused) == 10
        assert httpx.get(f"{here.url}/who").is_success
        for _ in range(30):  # a proxy brings everybody
            proxied = stack.enter_context(here.connect("127.0.0.3"))
            proxied.sendall(GET)
            assert proxied.recv(65_536).startswith(b"HTTP/1.1 200")


def test_all_have_their_most(listening: Callable[..., Listening]) -> None:
    here = listening(max_connections=10)
    with ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(here.connect()).sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        while here.server._gate.count < 10 or here.server._gate._silent:
            time.sleep(0.01)
        with here.connect() as connection:
            assert answer(connection).startswith(b"HTTP/1.1 503")
    deadline = time.monotonic() + 10
    while httpx.get(f"{here.url}/who").status_code == 503:  # until the server has seen that they have left
        assert time.monotonic() < deadline


def test_who_asks_nothing_makes_room_for_who_does(listening: Callable[..., Listening]) -> None:
    """No key is needed to hold a connection open."""
    here = listening(max_connections=10)
    with ExitStack() as stack:
        held = [stack.enter_context(here.connect(f"127.0.0.{2 + number}")) for number in range(10)]
        while here.server._gate.count < 10:
            time.sleep(0.01)
        for connection in held[:5]:
            connection.sendall(GET)
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
        for left in range(9, 2, -1):
            asks = stack.enter_context(here.connect())
            asks.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
            while len(here.server._gate._silent) > left:
                time.sleep(0.01)
        assert [answer(connection) for connection in held[5:]] == [b""] * 5  # they have waited longest
        assert [answer(connection) for connection in held[:2]] == [b""] * 2
        for connection in held[2:5]:
            connection.sendall(GET)
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /who HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * (MAX_HEADERS_BYTES * 4), (b"431",)),
        (b"GET /who HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n", (b"400",)),
        (GET * 2000, (b"200",)),
        (b"GET /who HTTP/1.1\r\nHost: x/../../y\r\n\r\n", (b"400",)),
        (b"GET /who HTTP/1.1\r\nHost: x@y\r\n\r\n", (b"400",)),
        (b"GET /who HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", (b"400",)),
    ],
    ids=["long headers", "many headers", "pipelined", "a path for a host", "a user for a host", "two hosts"],
)
def test_strange_requests(listening: Callable[..., Listening], sent: bytes, status: tuple[bytes, ...]) -> None:
    here = listening(header_timeout_s=5)
    with here.connect() as connection:
        with suppress(ConnectionError):
            connection.sendall(sent)
        with suppress(ConnectionError):
            first = connection.recv(65_536)
            assert first.split(b"\r\n")[0].split()[1] in status
    assert httpx.get(f"{here.url}/who").is_success


@pytest.mark.parametrize(
    ("sent", "status", "why"),
    [
        (b"a: b\r\n" * (MAX_HEADERS + 1), 400, f"at most {MAX_HEADERS} headers"),
        (b"Host: x@y\r\n", 400, "Host"),
        (b"no header\r\n", 400, "request of HTTP"),
        (b"X-A: " + b"a" * (MAX_HEADERS_BYTES + 1) + b"\r\n", 431, f"at most {MAX_HEADERS_BYTES} bytes"),
    ],
    ids=["many", "a user for a host", "none", "long, and read at once"],
)
def test_a_refusal_says_why_in_the_form_of_the_api(
    listening: Callable[..., Listening], sent: bytes, status: int, why: str
) -> None:
    here = listening()
    with here.connect() as connection:
        connection.sendall(b"GET /who HTTP/1.1\r\n" + sent + b"\r\n")
        head, body = answer(connection).split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 %d " % status)
    refused = json.loads(body)
    assert refused["code"] == CODES[status]
    assert why in refused["detail"]


LONG = b"GET /who HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * (MAX_HEADERS_BYTES + 1)
BROKEN = b"POST /body HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n"


@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        ((GET + LONG,), [200, 431]),
        ((GET * 3, LONG), [200, 200, 200, 431]),
        ((GET + b"GET /who HTTP/1.1\r\nHost: x@y\r\n\r\n",), [200, 400]),
        ((GET + b"no request\r\n\r\n" + GET,), [200, 400]),
        ((GET * 2 + BROKEN,), [200, 200, 400]),
        ((BROKEN,), [400]),
        ((GET * (MAX_PIPELINED + 2),), [200] * (MAX_PIPELINED + 1) + [400]),
    ],
    ids=["long headers", "in pieces", "a user for a host", "no request", "a broken body", "alone", "too many"],
)
def test_a_refusal_waits_for_the_answers_before_it(
    listening: Callable[..., Listening], sent: tuple[bytes, ...], statuses: list[int]
) -> None:
    """Otherwise a client, or a proxy that shares a connection, takes it for the answer to another request."""
    here = listening()
    with here.connect() as connection:
        for part in sent:
            connection.sendall(part)
        answers = answer(connection).split(b"HTTP/1.1 ")[1:]
    assert [int(each[:3]) for each in answers] == statuses


def test_a_long_answer_is_not_cut_off_by_a_refusal_behind_it(listening: Callable[..., Listening]) -> None:
    here = listening(header_timeout_s=0.5)
    with here.connect() as connection:
        connection.sendall(b"GET /slow?seconds=1 HTTP/1.1\r\nHost: x\r\n\r\n" + LONG)
        slow, refused = answer(connection).split(b"HTTP/1.1 ")[1:]
    assert slow.startswith(b"200")
    assert slow.endswith(b'"late"')
    assert refused.startswith(b"431")


CHUNKED = b"POST /body HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n"


@pytest.mark.parametrize("beside", [b"0\r\nX-A: ", b"0\r\nX-A", b"1;"], ids=["value", "name", "chunk"])
def test_what_stands_beside_a_body_has_the_bound_of_headers(listening: Callable[..., Listening], beside: bytes) -> None:
    """The parser collects a trailer, and copies all of it again with each piece that comes."""
    here = listening()
    with here.connect() as connection:
        connection.sendall(CHUNKED + beside)
        with suppress(ConnectionError):
            for _ in range(64):
                connection.sendall(b"a" * MAX_HEADERS_BYTES)
        connection.settimeout(5)
        assert answer(connection) == b""  # cut off at once
    assert httpx.get(f"{here.url}/who").is_success


@pytest.mark.parametrize("begun", [0, 1], ids=["not begun", "begun"])
@pytest.mark.parametrize("chunked", [False, True])
def test_who_is_answered_early_may_send_the_rest(
    listening: Callable[..., Listening], chunked: bool, begun: int
) -> None:
    """Most clients read only once they have sent everything, and lose an answer whose connection is cut off before."""
    here, part = listening(), b"x" * MAX_HEADERS_BYTES
    length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % (40 * len(part))
    pieces = [b"%x\r\n%s\r\n" % (len(part), part) if chunked else part] * 40
    with here.connect() as connection:
        connection.sendall(b"POST /unread HTTP/1.1\r\nHost: x\r\n" + length + b"\r\n\r\n" + b"".join(pieces[:begun]))
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
        for piece in pieces[begun:]:
            connection.sendall(piece)
            time.sleep(0.001)  # in several rounds of the server's event loop
        connection.sendall((b"0\r\n\r\n" if chunked else b"") + GET)
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("says", [b" HTTP/1.0", b" HTTP/1.1\r\nConnection: close", b"?last=1 HTTP/1.1"])
def test_who_is_answered_early_for_the_last_time_may_send_the_rest_too(
    listening: Callable[..., Listening], says: bytes
) -> None:
    """A connection that is closed over what nobody has read is reset, and its client may lose the answer."""
    here, size_bytes = listening(header_timeout_s=60), 300_000
    request = b"POST /unread%s\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    with here.connect() as connection:
        connection.sendall(request % (says, size_bytes) + bytes(size_bytes - 9))
        head, body = connection.recv(65_536).split(b"\r\n\r\n")
        assert (head.split()[1], body) == (b"200", b'"no"')
        assert connection.recv(1) == b""  # the end, for those that read to it
        assert here.server.server_state.connections
        connection.sendall(bytes(9) + request % (says, 0))  # what is behind the last request is none
        deadline = time.monotonic() + 5
        while here.server.server_state.connections or here.server.server_state.tasks:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert here.server._app.state.unread == 1


@pytest.mark.parametrize("before", ["nothing", "an answer", "a request"])
def test_a_body_is_not_read_before_it_is_asked_for(listening: Callable[..., Listening], before: str) -> None:
    """Requests may wait in line for long, and for each as much would be kept as its client could send by then."""
    here, size_bytes = listening(), 400_000
    lines = [*((b"GET /slow?seconds=0.5", begins) for begins in (0, 10, 200_000)), (b"POST /body", 10)]
    with ExitStack() as stack:
        asking = [(stack.enter_context(here.connect()), line, begins) for line, begins in lines]
        for connection, line, begins in asking:
            if before == "an answer":
                connection.sendall(GET)
                until(connection, b"url")
            if before == "a request":
                line = b"GET /watching HTTP/1.1\r\nHost: x\r\n\r\n" + line
            head = line + b" HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size_bytes
            connection.sendall(head + bytes(begins))
        rests = [threading.Thread(target=each.sendall, args=(bytes(size_bytes - sent),)) for each, _, sent in asking]
        for rest in rests:
            rest.start()
        until(asking[-1][0], b"400000")
        waiting = [each for each in here.server.server_state.connections if each.cycle.scope["path"] == "/slow"]
        assert len(waiting) == 3
        # What watches for its client's leaving has twice read on.
        assert max(each.body_bytes for each in waiting) <= READ_UNASKED_BYTES * (3 if before == "a request" else 1)
        for connection, _, _ in asking[:-1]:
            until(connection, b'"late"', 2 if before == "a request" else 1)
        assert not any(each.cycle.body for each in waiting)
        for connection, _, _ in asking[:-1]:
            connection.sendall(GET)  # the rest is taken, and this answered
            until(connection, b"url")
        for rest in rests:
            rest.join()


def test_who_leaves_before_their_body_is_asked_for_is_noticed(listening: Callable[..., Listening]) -> None:
    here = listening()
    with ExitStack() as stack:
        for sent in (0, 10, 100_000):
            head = b"GET /slow?seconds=2 HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
            stack.enter_context(here.connect()).sendall(head + bytes(sent))
        while len(found := [each for each in here.server.server_state.connections if each.cycle]) < 3:
            time.sleep(0.01)
    while here.server.server_state.connections:
        time.sleep(0.01)
    assert [(each.cycle.disconnected, each.cycle.response_started) for each in found] == [(True, False)] * 3


def test_who_takes_a_large_answer_at_their_own_pace_has_all_of_it(listening: Callable[..., Listening]) -> None:
    """However long that takes: a reader is late who takes nothing for long, or less than a slow line would."""
    server = listening(body_timeout_s=1.0)
    with server.connect() as connection:
        connection.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        taken, began = 0, time.monotonic()
        while part := connection.recv(1 << 18, socket.MSG_WAITALL):
            taken += len(part)
            time.sleep(0.03)
        assert taken > LARGE_BYTES
        assert time.monotonic() - began > 3


def test_who_takes_a_little_now_and_then_is_late_as_who_sends_so(
    listening: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a reader never pauses for long, but an answer would be held for hours."""
    monkeypatch.setattr(gate, "BODY_BYTES_PER_S", 1 << 30)
    server = listening(body_timeout_s=0.5)
    with server.connect() as connection:
        connection.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        taken = 0
        with suppress(ConnectionError):
            while part := connection.recv(1 << 17, socket.MSG_WAITALL):
                taken += len(part)
                time.sleep(0.015)
    assert taken < LARGE_BYTES


def test_each_answer_has_a_pace_of_its_own() -> None:
    gate, now = Gate(FrontSettings(body_timeout_s=60)), 1000.0

    class Reading:
        headers_since = body_since = None
        unread_since: float | None = now - 30
        unread_s, written_bytes = 31.0, BODY_BYTES_PER_S

    assert gate.late(Reading(), now) is None
    assert gate.late(Reading(), now + 0.1) == "answer to be read"
    Reading.unread_since, Reading.unread_s = None, 61.1  # at the moment when it is being read
    assert gate.late(Reading(), now) == "answer to be read"


def test_an_answer_that_nobody_reads_is_given_up() -> None:
    now = [0.0]
    gate = Gate(FrontSettings(body_timeout_s=60), lambda: now[0])

    class Stalled:
        headers_since = body_since = None
        unread_since, body_bytes, unread_s, written_bytes = 0.0, 0, 0.0, 1 << 30

    assert gate.late(Stalled(), 59) is None
    assert gate.late(Stalled(), 61) == "answer to be read"


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8:0:9::1", "2001:db8:0:9::2", False),  # the second is a proxy
        ("", "", True),  # a Unix socket
    ],
)
def test_connections_are_counted_by_whom_an_address_stands_for(first: str, second: str, together: bool) -> None:
    """The owner of one IPv6 address has 2^64 of them, and could take all connections with those."""
    proxies = ["2001:db8:0:9::2"]
    gate = Gate(FrontSettings(max_connections_per_address=1, trusted_proxies=proxies))
    assert gate.enter(first) is None
    refused = gate.enter(second)
    assert (refused is not None and refused[0] == 429) == together
    gate.leave(first)
    gate.leave(second)
    assert gate.count == 0


class TestProxies:
    """X-Forwarded-For and -Proto count only if a trusted proxy sends them."""

    HEADERS: ClassVar = {"x-forwarded-for": "203.0.113.9", "x-forwarded-proto": "https", "host": "weft.example"}

    def ask(self, here: Listening, source: str, headers: dict[str, str] | None = None) -> Any:
        transport = httpx.HTTPTransport(local_address=source)
        with httpx.Client(transport=transport, base_url=here.url) as http:
            return http.get("/who", headers=self.HEADERS if headers is None else headers).json()

    @pytest.mark.parametrize("trusted", ["127.0.0.2", "127.0.0.0/30"])
    def test_a_trusted_proxy_says_who_asks_and_how(self, listening: Callable[..., Listening], trusted: str) -> None:
        here = listening(trusted_proxies=[trusted])
        assert self.ask(here, "127.0.0.2") == {"client": "203.0.113.9", "url": "https://weft.example/"}

    def test_nobody_else_does(self, listening: Callable[..., Listening]) -> None:
        here = listening(trusted_proxies=["127.0.0.2"])
        assert self.ask(here, "127.0.0.3") == {"client": "127.0.0.3", "url": "http://weft.example/"}
        assert self.ask(listening(trusted_proxies=[]), "127.0.0.1")["client"] == "127.0.0.1"

    def test_what_a_client_has_put_before_it_is_not_believed(self, listening: Callable[..., Listening]) -> None:
        here = listening(trusted_proxies=["127.0.0.2"])
        spoofed = {"x-forwarded-for": "127.0.0.1, 198.51.100.1, 203.0.113.9"}
        assert self.ask(here, "127.0.0.2", spoofed)["client"] == "203.0.113.9"

    def test_the_environment_makes_no_proxy_trusted(
        self, listening: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
        assert self.ask(listening(), "127.0.0.3")["client"] == "127.0.0.3"


def test_of_many_that_send_at_once_a_few_are_parsed_in_each_turn(
    listening: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them in one turn would hold up whatever else is ready, the probes of others too."""
    here, turns, parsed, read = listening(), [0], list[int](), Connection._read

    def reading(connection: Connection, data: bytes) -> None:
        parsed.append(turns[0])
        read(connection, data)

    def count() -> None:
        turns[0] += 1
        if len(parsed) < 100:
            loop.call_soon(count)

    monkeypatch.setattr(Connection, "_read", reading)
    with ExitStack() as stack:
        asking = [stack.enter_context(here.connect()) for _ in range(100)]
        while here.server._gate.count < 100:
            time.sleep(0.01)
        loop = next(iter(here.server.server_state.connections)).loop
        loop.call_soon_threadsafe(count)
        loop.call_soon_threadsafe(time.sleep, 0.2)  # so that most have come when it goes on
        for connection in asking:
            connection.sendall(GET)
        for connection in asking:
            until(connection, b"url")
    assert max(Counter(parsed).values()) <= READS_EACH_TURN


class Sending:
    """A transport that notes what is sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.sent.append(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close


def test_head_and_body_of_an_answer_go_out_together() -> None:
    async def scenario() -> None:
        wire = Sending()
        joining = Joining(wire, asyncio.get_running_loop(), lambda: False)
        joining.write(b"head ")
        joining.write(b"body")
        assert wire.sent == [b"head body"]
        joining.write(b"alone")
        assert wire.sent == [b"head body"]
        await asyncio.sleep(0)
        assert wire.sent == [b"head body", b"alone"]
        joining.write(large := b"x" * (MAX_HELD_BYTES + 1))
        assert wire.sent[2:] == [large]  # a slow reader is noticed at once
        joining.write(b"head")
        joining.write(body := b"x" * (MAX_JOINED_BYTES + 1))
        assert wire.sent[3:] == [b"head", body]  # not copied
        joining.write(b"last")
        joining.close()
        assert (wire.sent[5:], wire.closed) == ([b"last"], True)

    asyncio.run(scenario())


def test_what_is_held_of_a_connection_that_is_cut_off_is_not_sent() -> None:
    async def scenario() -> None:
        wire = Sending()
        joining = Joining(wire, asyncio.get_running_loop(), lambda: False)
        joining.write(b"head")
        joining.abort()
        await asyncio.sleep(0)
        assert wire.sent == []

    asyncio.run(scenario())


def test_a_client_whose_network_is_gone_is_noticed_within_a_minute() -> None:
    """Then no more of its requests are computed; the kernel asks whether the client is still there."""
    with serve.listening("127.0.0.1", 0) as sock, socket.create_connection(sock.getsockname()):
        connection, _ = sock.accept()
        with connection:
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            idle_s, each_s, times = (connection.getsockopt(socket.IPPROTO_TCP, option) for option in options)
            assert idle_s + each_s * times <= 60
