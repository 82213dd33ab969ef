"""Waiting for the samples of a request (one for each prompt), for their end or for their tokens. If the client leaves,
or one sample fails, those that have not ended are stopped (`api.routes.openai.asking`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any, TypeVar

import orjson
from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from weft.wire.binary.sample_codec import SampleResult

from api.http.headers import Large
from api.routes.openai.asking import Asked, of_prompt_at
from scheduler.links.messages import DrawnTokens
from scheduler.order.operations import Outcome

T = TypeVar("T")
Part = DrawnTokens | SampleResult
#: About how many bytes of answer each byte of results becomes.
WRITTEN_TIMES = 9


async def ended(asked: Sequence[Asked]) -> list[Outcome]:
    """The outcome of each prompt's sample. Raises ClientDisconnect if the client has left."""

    async def of(place: int, one: Asked) -> Outcome:
        with of_prompt_at(place, len(asked)):
            found = await one.waited.ended()
            if found.error is not None:
                await one.waited.read(found)  # raises the sample's error
            return found

    each = [asyncio.ensure_future(of(place, one)) for place, one in enumerate(asked)]
    try:
        return list(await _unless_gone(asked[0].request, asyncio.gather(*each)))
    except BaseException:
        for one in asked:
            one.leave()
        raise
    finally:
        for waits in each:
            waits.cancel()


async def answer(asked: Sequence[Asked], write: Callable[[list[SampleResult]], dict[str, Any]]) -> Response:
    """The results as JSON. Long ones take seconds and many megabytes: they are read and written once there is room for
    them beside those that clients are still receiving, and only while their client is connected."""
    found, service, org_id = await ended(asked), asked[0].service, asked[0].who.org_id
    size_bytes = WRITTEN_TIMES * sum(outcome.size_bytes or len(outcome.payload) for outcome in found)
    async with AsyncExitStack() as held:
        held.enter_context(service.polls.counted(org_id))

        async def written() -> bytes:
            await held.enter_async_context(service.large_answers.room(org_id, size_bytes))
            results = [await one.waited.read(outcome) for one, outcome in zip(asked, found, strict=True)]
            for one, result in zip(asked, results, strict=True):
                await one.record(result)
            return await service.work(size_bytes, lambda: orjson.dumps(write(results)))

        try:
            body = await _unless_gone(asked[0].request, written())
        except BaseException:
            for one in asked:
                one.leave()
            raise
        return Large(body, "application/json", held.pop_all())


@asynccontextmanager
async def parts(asked: Sequence[Asked]) -> AsyncIterator[AsyncIterator[tuple[int, Part]]]:
    """The tokens of each sample as they are drawn, then its result, each with its prompt's index. Leaving the block
    stops the samples even if no part was ever read: a client may leave while the first words are written."""
    gone = asyncio.ensure_future(_disconnected(asked[0].request))

    async def of(place: int, one: Asked) -> AsyncGenerator[Part, None]:
        with of_prompt_at(place, len(asked)):
            async with aclosing(one.waited.drawn(until=gone)) as parts:
                async for part in parts:
                    yield part

    each, over = merged([of(place, one) for place, one in enumerate(asked)]), set[int]()

    async def read() -> AsyncIterator[tuple[int, Part]]:
        async for place, part in each:
            if isinstance(part, SampleResult):
                over.add(place)
                await asked[place].record(part)
            yield place, part

    try:
        yield read()
    finally:
        gone.cancel()
        for place, one in enumerate(asked):
            if place not in over:
                one.leave()
        await each.aclose()


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all streams as they come, each with its stream's index. Within a stream the order is kept, and a
    stream is not read ahead of what was consumed."""
    coming = {asyncio.ensure_future(anext(stream, None)): place for place, stream in enumerate(streams)}
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=coming.__getitem__):
                place, part = coming[task], task.result()
                del coming[task]
                if part is not None:
                    yield place, part
                    coming[asyncio.ensure_future(anext(streams[place], None))] = place
    finally:
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client leaves: then ClientDisconnect is raised."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return await working
    finally:
        gone.cancel()
        working.cancel()
        # Work in a thread still uses its room, so it is waited for; and asyncio would log an exception that nobody
        # retrieves.
        await asyncio.gather(working, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    """Returns when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        continue
