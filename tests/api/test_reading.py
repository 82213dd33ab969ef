"""How fast bodies are read and answers are written, and by whom."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from api.server import serve
from api.server.connections import MAX_HEADERS_BYTES, READ_UNASKED_BYTES, Connection
from api.server.gate import BODY_BYTES_PER_S, READS_EACH_TURN, Gate
from api.server.transports import MAX_HELD_BYTES, MAX_JOINED_BYTES, Joining
from store.settings import FrontSettings
from tests.api.listening import GET, LARGE_BYTES, Listening, read_until
from tests.waiting import until


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
        until(lambda: not (here.server.server_state.connections or here.server.server_state.tasks), 5)
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
                read_until(connection, b"url")
            if before == "a request":
                line = b"GET /watching HTTP/1.1\r\nHost: x\r\n\r\n" + line
            head = line + b" HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size_bytes
            connection.sendall(head + bytes(begins))
        rests = [threading.Thread(target=each.sendall, args=(bytes(size_bytes - sent),)) for each, _, sent in asking]
        for rest in rests:
            rest.start()
        read_until(asking[-1][0], b"400000")
        waiting = [each for each in here.server.server_state.connections if each.cycle.scope["path"] == "/slow"]
        assert len(waiting) == 3
        # What watches for its client's leaving has twice read on.
        assert max(each.body_bytes for each in waiting) <= READ_UNASKED_BYTES * (3 if before == "a request" else 1)
        for connection, _, _ in asking[:-1]:
            read_until(connection, b'"late"', 2 if before == "a request" else 1)
        assert not any(each.cycle.body for each in waiting)
        for connection, _, _ in asking[:-1]:
            connection.sendall(GET)  # the rest is taken, and this answered
            read_until(connection, b"url")
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
            read_until(connection, b"url")
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
