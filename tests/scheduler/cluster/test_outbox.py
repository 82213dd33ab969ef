"""Many messages are sent in one call."""

from __future__ import annotations

import asyncio
import time

import pytest

from scheduler.cluster import outbox
from scheduler.cluster.outbox import MOST, Outbox
from store.database.caller import SERVER, Caller, acting_as, caller


def test_what_comes_at_once_is_told_in_one_call_and_what_comes_meanwhile_in_the_next() -> None:
    async def main() -> list[list[int]]:
        calls: list[list[int]] = []
        told, go_on = asyncio.Event(), asyncio.Event()

        async def tell(some: list[int]) -> None:
            calls.append(some)
            told.set()
            await go_on.wait()

        out = Outbox(tell)
        first = [asyncio.create_task(out.put(number)) for number in range(3)]
        await told.wait()
        later = [asyncio.create_task(out.put(number)) for number in range(3, 5 + MOST)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in (*first, *later))
        go_on.set()
        await asyncio.gather(*first, *later)
        await out.put(-1)
        return calls

    calls = asyncio.run(main())
    assert calls == [[0, 1, 2], list(range(3, 3 + MOST)), [3 + MOST, 4 + MOST], [-1]]


def test_what_is_told_together_is_told_for_nobody_in_particular() -> None:
    """Otherwise the database would show all of them the rows of whoever came first."""

    async def main() -> list[Caller]:
        callers: list[Caller] = []

        async def tell(some: list[int]) -> None:
            callers.append(caller())

        with acting_as(Caller("org", "key:1")):
            await Outbox(tell).put(1)
        return callers

    assert asyncio.run(main()) == [SERVER]


def test_who_is_cancelled_takes_nobody_with_it() -> None:
    async def main() -> list[int]:
        told: list[int] = []

        async def tell(some: list[int]) -> None:
            told.extend(some)

        out = Outbox(tell)
        one, other = (asyncio.create_task(out.put(number)) for number in (1, 2))
        await asyncio.sleep(0)
        one.cancel()
        await other
        return told

    assert asyncio.run(main()) == [1, 2]


def test_nobody_waits_for_what_comes_after_and_what_fails_holds_nothing_up() -> None:
    async def main() -> list[list[int]]:
        calls: list[list[int]] = []
        more: list[asyncio.Task[None]] = []

        async def tell(some: list[int]) -> None:
            calls.append(some)
            if len(calls) < 5:  # something comes during each call
                more.append(asyncio.create_task(out.put(len(calls))))
            await asyncio.sleep(0)
            if len(calls) == 3:
                raise ValueError("Redis has no memory left")

        out = Outbox(tell)
        await out.put(0)
        assert len(calls) < 3
        for task in more:  # each brings the next
            await task
        return calls

    assert asyncio.run(main()) == [[0], [1], [2], [3], [4]]


def test_calls_keep_apart_and_what_comes_alone_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "APART_S", 0.2)

    async def main() -> tuple[list[list[int]], float]:
        calls: list[list[int]] = []
        began = time.monotonic()

        async def tell(some: list[int]) -> None:
            calls.append(some)

        out = Outbox(tell)
        await out.put(0)
        assert time.monotonic() - began < 0.2
        later = []
        for number in range(1, 4):
            later.append(asyncio.create_task(out.put(number)))
            await asyncio.sleep(0)
        await asyncio.gather(*later)
        return calls, time.monotonic() - began

    calls, took_s = asyncio.run(main())
    assert calls == [[0], [1, 2, 3]]
    assert took_s >= 0.2
