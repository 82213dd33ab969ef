"""What is no request is refused in the form of the API, after the answers before it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress

import httpx
import pytest

from api.server.connections import CODES, MAX_HEADERS, MAX_HEADERS_BYTES, MAX_PIPELINED
from tests.api.listening import GET, LONG, Listening, answer


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
