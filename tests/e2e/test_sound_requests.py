"""Every route is answered with success when it is asked rightly, and near misses of that are the client's mistakes: the
server says so, as its description does, and goes on serving. What is random altogether: test_api_fuzz.py."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from api.server.app import front
from api.server.openapi import document
from tests.e2e.conftest import Weftd
from tests.e2e.sound import NEVER, Sound, Things, near_miss, sound
from tests.search import SOAKING, examples

pytestmark = pytest.mark.server

#: Near misses of each request.
MISSES = 12


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    paths: dict[str, Any] = document(front())["paths"]
    return {f"{method.upper()} {path}": found for path, of in paths.items() for method, found in of.items()}


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Things]:
    server = Weftd(tmp_path_factory.mktemp("sound")).start()
    yield Things(server)
    assert server.stop() == 0
    assert "internal error" not in server.log()


def ask(things: Things, route: str, request: Sound) -> httpx.Response:
    method, path = route.split()
    address = path.format(**{name: quote(value, safe="") for name, value in request.path.items()})
    return things.client.http.request(
        method,
        things.server.url + address,
        params=request.query,
        json=request.body,
        headers={"X-API-Key": things.server.key(request.organisation)},
    )


@pytest.mark.search
def test_a_sound_request_and_its_near_misses(
    things: Things, described: dict[str, Any], subtests: pytest.Subtests
) -> None:
    chance = random.Random() if SOAKING else random.Random(7)
    for route, operation in described.items():
        with subtests.test(route):
            method, path = route.split()
            things.missing = False
            if route not in NEVER:
                reply = ask(things, route, sound(things, method, path))
                assert reply.is_success or reply.is_redirect, f"{route}: {reply.status_code} {reply.text}"
                assert str(reply.status_code) in operation["responses"], f"{route}: {reply.status_code}"
            things.missing = True
            for _ in range(examples(MISSES)):
                right = sound(things, method, path)
                missed = near_miss(right, chance)
                if missed is None:
                    break
                reply = ask(things, route, missed)
                what = f"{route}: {missed} {reply.status_code} {reply.text}"
                assert reply.status_code < 500, what
                if missed.path == right.path:  # another path may be another route's
                    assert str(reply.status_code) in operation["responses"], what
