"""What is told to all over a real Redis, and what generators have counted there."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
import redis

from scheduler.links import broadcasts as broadcast_module
from scheduler.links.broadcasts import Broadcasts, Ended, Listener, ToWorker
from scheduler.links.messages import PolicyMoved
from tests.servers import redis_server
from tests.waiting import until


def test_news_reach_every_listener_with_stamps_that_only_grow(url: str) -> None:
    heard: list[list[tuple[str, int]]] = [[], []]

    def hear(place: int, ends: Sequence[Ended], first: int) -> None:
        heard[place].extend((end.op_id, stamp) for stamp, end in enumerate(ends, first))

    listeners = [Listener.of_ends(url, partial(hear, place), lambda: None) for place in range(2)]
    for listener in listeners:
        listener.start()
        assert listener.connected.wait(10)
    broadcasts = Broadcasts(url)
    for number in range(3):
        broadcasts.ended([Ended(f"op{number}", "org", "lane", number, "sample", 1)])
    first = broadcasts.reserve(1000)
    redis.Redis.from_url(url).flushall()
    broadcasts.ended([Ended("op3", "org", "lane", 3, "sample")])
    until(lambda: all(len(found) == 4 for found in heard))
    assert heard[0] == heard[1]
    stamps = [stamp for _, stamp in heard[0]]
    assert stamps == sorted(set(stamps))
    assert stamps[2] < first
    assert first + 1000 <= stamps[3]
    for listener in listeners:
        listener.stop()
    broadcasts.close()


def test_a_listener_says_when_redis_is_away_and_that_it_may_have_missed_something() -> None:
    gaps = threading.Semaphore(0)
    with redis_server() as own:
        listener = Listener.of_ends(own, lambda ends, stamp: None, gaps.release)
        listener.start()
        assert gaps.acquire(timeout=10)
        assert listener.connected.is_set()
    until(lambda: not listener.connected.is_set())
    listener.stop()


def test_what_an_older_server_tells_is_heard_and_what_a_newer_one_tells_is_a_gap(url: str) -> None:
    heard, gaps, there = list[Any](), list[None](), redis.Redis.from_url(url)
    listener = Listener.of_workers(url, "me", heard.append, lambda: gaps.append(None), lambda: None)
    listener.start()
    assert listener.connected.wait(10)
    assert len(gaps) == 1
    moved = PolicyMoved("run", 1, "", 2)
    for channel in ("weft:workers", "weft:policies"):
        there.publish(channel, msgspec.msgpack.encode({"what": "nobody knows"}))
    there.publish("weft:workers", msgspec.msgpack.encode(ToWorker("", moved)))
    until(lambda: heard == [moved])
    assert len(gaps) == 3
    listener.stop()
    there.close()


def test_what_each_generator_has_done_is_known_beside_all(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broadcasts = Broadcasts(url)
    before = broadcasts.generators().get("steps", 0.0)
    for name, steps in (("one", 3), ("two", 4), ("one", 5)):
        broadcasts.count({"steps": steps, "busy_s": 0.5}, name)
    broadcasts.count({"lost": 1})
    assert broadcasts.generators()["steps"] == before + 12
    assert broadcasts.each_generator() == {"one": {"steps": 8, "busy_s": 1.0}, "two": {"steps": 4, "busy_s": 0.5}}
    monkeypatch.setattr(broadcast_module, "MOST_SHOWN", 1)
    assert broadcasts.each_generator().keys() == {"one"}  # the latest
    monkeypatch.setattr(broadcast_module, "SHOWN_S", -1)
    assert broadcasts.each_generator() == {}
    broadcasts.close()
