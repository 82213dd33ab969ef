"""How many connections there may be, from where, and for how long; with a real listener."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, ClassVar

import httpx
import pytest

from api.server import gate
from api.server.gate import Gate
from store.settings import FrontSettings
from tests.api.listening import GET, LARGE_BYTES, Listening, answer


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
