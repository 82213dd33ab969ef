"""Feeds of completions: nothing is missed, and nothing is told twice to a client that moves its cursor on."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from itertools import count

import pytest

from scheduler.cluster.completions import SharedFeeds
from scheduler.journal.ending import completions as module
from scheduler.journal.ending.completions import CLIENT_STRIDE, Completion, FeedKey, Feeds, LocalFeeds

TARGET = FeedKey("acme", "s:sample:0", 0)


def feed(clock: int = 1000) -> LocalFeeds:
    ticks = count(clock)
    made = LocalFeeds(lambda: next(ticks))
    made.follow(TARGET)
    return made


def done(name: str) -> Completion:
    return Completion(name, 10)


def test_clients_are_told_apart_by_their_numbers() -> None:
    assert FeedKey.of("acme", "s", 5) == FeedKey("acme", "s", 0)
    assert FeedKey.of("acme", "s", 3 * CLIENT_STRIDE) == FeedKey("acme", "s", 3)
    assert [FeedKey.of("acme", "s", seq).client for seq in (999_999_999, 1_000_000_000)] == [0, 1]


async def ids(made: LocalFeeds, cursor: int, timeout_s: float = 0) -> tuple[list[str], int]:
    found, after = await made.after(TARGET, cursor, timeout_s)
    return [completion.request_id for completion in found], after


def test_events_come_until_the_cursor_has_passed_them() -> None:
    async def story() -> None:
        made = feed()
        made.publish(TARGET, done("a"))
        made.publish(TARGET, Completion("b", None))
        assert await ids(made, 0) == (["a", "b"], 1001)
        assert await ids(made, 0) == (["a", "b"], 1001)  # an answer that was lost is given again
        made.publish(TARGET, done("c"))
        assert await ids(made, 1001) == (["c"], 1002)
        assert await ids(made, 1002) == ([], 1002)

    asyncio.run(story())


def test_a_waiting_poll_wakes_by_the_event() -> None:
    async def story() -> None:
        made = feed()
        poll = asyncio.create_task(ids(made, 0, timeout_s=60))
        await asyncio.sleep(0.01)
        assert not poll.done()
        made.publish(FeedKey("acme", "s:sample:0", 1), done("of another client"))
        await asyncio.sleep(0.01)
        assert not poll.done()
        made.publish(TARGET, done("a"))
        assert await asyncio.wait_for(poll, 1) == (["a"], 1000)
        assert await ids(made, 1000, timeout_s=0.01) == ([], 1000)

    asyncio.run(story())


def test_a_poll_waits_while_there_is_nothing_and_no_longer() -> None:
    async def story() -> None:
        made = feed()
        poll = asyncio.create_task(ids(made, 0, timeout_s=1))
        await asyncio.sleep(0)
        made.publish(TARGET, done("a"))
        assert await poll == (["a"], 1000)
        assert await asyncio.wait_for(ids(made, 0, timeout_s=600), 60) == (["a"], 1000)

    asyncio.run(story())


def test_who_waits_is_told_when_all_is_forgotten() -> None:
    async def story() -> None:
        feeds = Feeds()
        feeds.follow(TARGET)
        poll = asyncio.create_task(feeds.after(TARGET, 7, 600))
        await asyncio.sleep(0)
        feeds.clear()
        assert await asyncio.wait_for(poll, 60) == ([], 7)
        assert not feeds.follows(TARGET)

    asyncio.run(story())


def test_a_cursor_is_the_time_in_microseconds() -> None:
    made = LocalFeeds()
    made.follow(TARGET)
    before = time.time_ns() // 1000
    made.publish(TARGET, done("a"))
    cursor = asyncio.run(ids(made, 0))[1]
    assert before <= cursor <= time.time_ns() // 1000
    assert type(cursor) is int


def test_cursors_grow_when_the_clock_does_not() -> None:
    made = LocalFeeds(lambda: 7)
    made.follow(TARGET)
    for name in "abc":
        made.publish(TARGET, done(name))
    assert asyncio.run(ids(made, 8)) == (["c"], 9)


def test_what_was_missed_is_added_once() -> None:
    made = feed()
    made.publish(TARGET, done("b"))
    made.add(TARGET, [done("a"), done("b")])
    assert asyncio.run(ids(made, 0))[0] == ["b", "a"]


def test_only_what_is_followed_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FEEDS", 2)
    made = feed()
    made.publish(FeedKey("acme", "other", 0), done("x"))
    assert not made.follows(FeedKey("acme", "other", 0))
    for name in ("p", "q"):
        made.follow(FeedKey("acme", name, 0))
    assert [made.follows(t) for t in (TARGET, FeedKey("acme", "p", 0), FeedKey("acme", "q", 0))] == [False, True, True]


def test_what_somebody_waits_for_is_kept_until_they_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    other, third = FeedKey("acme", "p", 0), FeedKey("acme", "q", 0)

    def kept(made: LocalFeeds) -> list[FeedKey]:
        return [key for key in (TARGET, other, third) if made.follows(key)]

    async def story() -> None:
        made = feed()
        for key in (other, third):
            made.follow(key)
        assert kept(made) == [TARGET, other, third], "there is room for more"
        monkeypatch.setattr(module, "MAX_FEEDS", 1)
        poll = asyncio.create_task(ids(made, 0, timeout_s=600))
        await asyncio.sleep(0)
        made.follow(replace(third))
        assert kept(made) == [TARGET, third]
        made.publish(TARGET, done("a"))
        assert await poll == (["a"], 1000)
        made.follow(third)
        assert kept(made) == [third]

    asyncio.run(story())


def test_an_answer_names_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_EVENTS", 2)
    made = feed()
    for name in "abc":
        made.publish(TARGET, done(name))
    assert asyncio.run(ids(made, 0)) == (["a", "b"], 1001)
    assert asyncio.run(ids(made, 1001)) == (["c"], 1002)


@pytest.mark.parametrize("made", [feed(), SharedFeeds(lambda number: number)], ids=["local", "shared"])
def test_what_is_forgotten_wakes_who_waits_and_begins_anew(made: LocalFeeds | SharedFeeds) -> None:
    async def story() -> None:
        made.follow(TARGET)
        poll = asyncio.create_task(made.after(TARGET, 0, timeout_s=60))
        await asyncio.sleep(0.01)
        made.forget(TARGET)
        assert await poll == ([], 0)
        assert not made.follows(TARGET)
        made.add(TARGET, [done("of a look that came late")])
        made.follow(TARGET)
        made.add(TARGET, [done("a")])
        found, _ = await made.after(TARGET, 0, 0)
        assert found == [done("a")]

    asyncio.run(story())
