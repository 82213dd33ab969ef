"""Several prompts in one request: all are accepted or none, within the limit on samples in flight; their streams come
side by side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.routes.openai.waiting import merged
from store import tables
from tests.api.conftest import MODEL, World


@pytest.fixture
def key_id(world: World) -> str:
    """The id of a key that may have three samples in flight. Accepted samples are told that the server stops."""

    def limit(session: Session) -> str:
        key = session.scalars(select(tables.ApiKey).order_by(tables.ApiKey.id)).first()
        assert key is not None
        key.max_in_flight = 3
        return str(key.id)

    world.service.polls.release()
    return world.database.write_now(limit)


def ask(world: World, prompts: int, **headers: str) -> tuple[int, str]:
    body = {"model": MODEL, "prompt": [[1 + place] for place in range(prompts)], "max_tokens": 1}
    reply = world.http.post("/v1/completions", headers={"x-api-key": world.key, **headers}, json=body)
    return reply.status_code, reply.json()["error"]["message"]


def test_where_one_has_no_place_those_that_had_are_stopped(
    world: World, key_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = set[str]()

    async def cancel(_org_id: str, request_id: str) -> bool:
        stopped.add(request_id)
        return True

    monkeypatch.setattr(world.journal, "cancel", cancel)
    assert ask(world, 2, **{"idempotency-key": "kept"})[0] == 503
    status, says = ask(world, 2)
    assert (status, says.startswith("prompt[1]: 3 samples and runs of this key are in flight")) == (429, True)
    end = time.monotonic() + 10
    while not stopped and time.monotonic() < end:
        time.sleep(0.01)
    assert len(stopped) == 1
    assert world.journal.in_flight.count("key", key_id) == 3


def test_more_than_may_ever_be_in_flight_is_no_refusal_that_a_client_would_wait_on(world: World, key_id: str) -> None:
    says = "prompt: 4 prompts, max_in_flight of this key is 3: send fewer in each request"
    assert ask(world, 4) == (400, says)
    assert world.journal.in_flight.count("key", key_id) == 0


async def numbers(*found: int) -> AsyncGenerator[int, None]:
    for each in found:
        await asyncio.sleep(0)
        yield each


def test_streams_come_side_by_side_each_in_its_order() -> None:
    async def go() -> None:
        came = [part async for part in merged([numbers(1, 2, 3), numbers(), numbers(4, 5)])]
        assert [part for place, part in came if place == 0] == [1, 2, 3]
        assert [part for place, part in came if place == 2] == [4, 5]
        assert came[:2] == [(0, 1), (2, 4)]

    asyncio.run(go())


@pytest.mark.parametrize("leaves", [False, True])
def test_all_streams_end_with_one_that_fails_and_with_their_reader(leaves: bool) -> None:
    ended = list[str]()

    async def waits() -> AsyncGenerator[int, None]:
        try:
            await asyncio.Event().wait()
            yield 0
        finally:
            ended.append("waits")

    async def fails() -> AsyncGenerator[int, None]:
        try:
            yield 1
            raise OSError("gone")
        finally:
            ended.append("fails")

    async def go() -> None:
        both = merged([waits(), fails()])
        assert await anext(both) == (1, 1)
        if leaves:
            await both.aclose()
        else:
            with pytest.raises(OSError, match="gone"):
                await anext(both)
        assert sorted(ended) == ["fails", "waits"]

    asyncio.run(go())
