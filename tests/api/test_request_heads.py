"""How the server reads the heads of requests: which protocols they may offer, and how long they may be."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from api.server.connections import MAX_HEADERS_BYTES
from tests.api.listening import GET, LONG, Listening, answer

UPGRADE = b"HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAQCAAAA\r\n"


HELLO = (
    b"Content-Length: 5\r\n\r\nhello",
    b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
)


@pytest.mark.parametrize("length", HELLO, ids=["length", "chunked"])
@pytest.mark.parametrize("whole", [True, False])
def test_who_offers_another_protocol_is_served_in_this_one(
    listening: Callable[..., Listening], length: bytes, whole: bool
) -> None:
    """Java's HTTP client offers HTTP/2 with each request, and the parser takes the rest for that protocol."""
    post, get = b"POST /body " + UPGRADE + length, b"GET /who " + UPGRADE + b"\r\n"
    with listening().connect() as connection:
        for _ in range(2):
            head, end = (post, b"") if whole else (post[:-9], post[-9:])
            connection.sendall(head)
            if end:
                time.sleep(0.05)
                connection.sendall(end)
            assert connection.recv(65_536).endswith(b"\r\n\r\n5")
        connection.sendall(get + GET + post + b"GET /who HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answers = answer(connection).split(b"HTTP/1.1 ")[1:]
    assert [int(each[:3]) for each in answers] == [200] * 4
    assert answers[2].endswith(b"\r\n\r\n5")


@pytest.mark.parametrize("target", [b"elsewhere:80", b"/who"])
def test_the_server_refuses_to_be_used_as_a_proxy(listening: Callable[..., Listening], target: bytes) -> None:
    with listening().connect() as connection:
        connection.sendall(b"CONNECT " + target + b" " + UPGRADE + b"\r\n" + GET)
        assert [each[:3] for each in answer(connection).split(b"HTTP/1.1 ")[1:]] == [b"400"]


def test_headers_are_bounded_whichever_request_of_a_connection_has_them(listening: Callable[..., Listening]) -> None:
    with listening(header_timeout_s=60).connect() as connection:
        for _ in range(2):
            connection.sendall(GET)
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
        connection.sendall(LONG)
        assert answer(connection).startswith(b"HTTP/1.1 431")


def test_a_client_that_never_stops_between_two_requests_is_read_on(listening: Callable[..., Listening]) -> None:
    """Each piece of data ends within headers, and only the headers of one request are bounded."""
    many, read = 3 * MAX_HEADERS_BYTES // len(GET), b""
    with listening().connect() as connection:
        connection.sendall(GET[:9])
        for _ in range(many):
            connection.sendall(GET[9:] + GET[:9])
            while not read.endswith(b"}"):
                read += connection.recv(65_536) or b"cut off}"
            assert read.startswith(b"HTTP/1.1 200")
            assert not read.endswith(b"cut off}")
            read = b""
