"""Request bodies on their way: together they are bounded, and the sender who holds most gives up one of theirs."""

from __future__ import annotations

import asyncio

import pytest
from fastapi import Request

from api.errors import RateLimited
from api.http import bodies
from api.state.arriving import Arriving
from tests.api.conftest import World

PART = 100


class Sender:
    """A sender of one body, part by part."""

    def __init__(self, arriving: Arriving, whose: str) -> None:
        self._parts: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()
        self._request = Request({"type": "http", "headers": []}, self._receive)
        self._arriving, self._whose = arriving, whose
        self.task = asyncio.create_task(self._read())

    async def send(self, size_bytes: int = PART, more: bool = True) -> None:
        await self._parts.put((bytes(size_bytes), more))
        for _ in range(4):
            await asyncio.sleep(0)

    async def _receive(self) -> dict[str, object]:
        body, more = await self._parts.get()
        return {"type": "http.request", "body": body, "more_body": more}

    async def _read(self) -> int:
        with self._arriving.body(self._whose) as arrival:
            return len(await bodies._receive(self._request, 1 << 20, arrival))


def test_whoever_holds_most_gives_up_their_oldest_however_little_comes_of_it() -> None:
    async def scenario() -> None:
        arriving = Arriving(5 * PART)
        small, old, new = (Sender(arriving, whose) for whose in ("small", "much", "much"))
        await small.send()
        await old.send(2 * PART)
        await new.send(2 * PART)
        assert arriving.size_bytes == 5 * PART
        await small.send()  # there is no room for this one
        with pytest.raises(RateLimited, match=f"{5 * PART} bytes together"):
            await old.task
        assert arriving.size_bytes == 4 * PART
        for sender in (small, new):
            await sender.send(0, more=False)
        assert [await small.task, await new.task] == [2 * PART, 2 * PART]
        assert (arriving.size_bytes, arriving._coming, arriving._bytes_of) == (0, {}, {})

    asyncio.run(asyncio.wait_for(scenario(), 5))


def test_who_sends_too_much_gives_up_that_and_what_is_whole_is_kept() -> None:
    async def scenario() -> None:
        arriving = Arriving(5 * PART)
        with arriving.body("whole") as whole:
            whole.came(4 * PART)
            whole.whole()
            greedy = Sender(arriving, "greedy")
            await greedy.send(2 * PART)
            with pytest.raises(RateLimited):
                await greedy.task
            assert arriving.size_bytes == 4 * PART
        assert (arriving.size_bytes, arriving._coming) == (0, {})

    asyncio.run(asyncio.wait_for(scenario(), 5))


def test_who_leaves_or_is_ended_holds_nothing() -> None:
    async def scenario() -> None:
        arriving = Arriving(5 * PART)
        sender = Sender(arriving, "a")
        await sender.send()
        sender.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sender.task
        assert (arriving.size_bytes, arriving._coming) == (0, {})

    asyncio.run(asyncio.wait_for(scenario(), 5))


@pytest.mark.parametrize("path", ["forward_backward", "asample", "retrieve_futures", "telemetry", "create_session"])
def test_every_body_is_counted(world: World, path: str) -> None:
    """Whatever its class, until it has been read."""
    object.__setattr__(world.service, "arriving", Arriving(bodies.INLINE_BYTES))
    form = "application/x-protobuf" if path == "forward_backward" else "application/json"
    reply = world.call("POST", path, content=bytes(bodies.INLINE_BYTES + 1), headers={"content-type": form})
    assert (reply.status_code, reply.json()["code"]) == (429, "rate_limited")
    assert world.service.arriving.size_bytes == 0
