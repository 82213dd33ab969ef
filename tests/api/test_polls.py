"""How many of everybody's connections one organisation may hold open with waiting requests."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from api.doctor.machine import open_files
from api.errors import RateLimited
from api.state.polls import LongPolls, most_connections
from store.settings import FrontSettings, Settings, SettingsError
from tests.api.conftest import MODEL, World
from tests.api.test_completions import finished, poll, submit
from tests.api.test_sampling import sampler

ORGANISATIONS = "first", "second", "third"


def test_there_is_room_for_who_comes_next_however_many_there_are() -> None:
    async def go() -> list[int]:
        polls, over = LongPolls(most=1000), asyncio.Event()
        waiting, held = [], []
        for org_id in ORGANISATIONS:
            held.append(0)
            while not polls.full(org_id):
                waiting.append(asyncio.ensure_future(polls.hold(org_id, over.wait(), False)))
                await asyncio.sleep(0)
                held[-1] += 1
            with pytest.raises(RateLimited, match=rf"{held[-1]} requests .* 1000 connections"):
                polls.check(org_id)
        assert not polls.full("fourth")
        over.set()
        await asyncio.gather(*waiting)
        assert [org_id for org_id in ORGANISATIONS if polls.full(org_id)] == []
        return held

    first, second, third = asyncio.run(go())
    assert (first, second, third) == (250, 188, 141)  # a quarter of what was free


def test_who_waits_is_told_otherwise_when_the_server_stops_and_so_is_who_comes_then() -> None:
    async def go() -> None:
        polls, over = LongPolls(most=1000), asyncio.Event()
        leaves, waits = (asyncio.ensure_future(polls.hold("a", over.wait(), False)) for _ in range(2))
        await asyncio.sleep(0)
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves
        assert not polls.released
        polls.release()
        assert polls.released
        await asyncio.sleep(0)
        assert waits.result() is False
        assert await polls.hold("a", over.wait(), False) is False

    asyncio.run(go())


INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "asked", "most"),
    [
        (1024, 4096, [4096], 3840),
        (1024, INFINITE, [65_536], 8192),
        (4096, 4096, [], 3840),
        (INFINITE, INFINITE, [], 8192),
        (1024, 1 << 20, [65_536], 8192),
        (257, 257, [], 1),
    ],
)
def test_as_many_connections_as_asked_for_or_as_there_can_be_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, soft: int, hard: int, asked: list[int], most: int
) -> None:
    """And doctor says so."""
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _what, wanted: limits.append(wanted))
    assert most_connections(FrontSettings()) == most
    assert most_connections(FrontSettings(max_connections=1 << 20)) == (most if most < 8192 else 65_280)
    assert limits == [(files, hard) for files in asked] * 2
    (finding,) = open_files(Settings(data_dir=tmp_path))
    assert (finding.state, f"{most} connections" in finding.says) == ("ok" if most == 8192 else "warning", True)


@pytest.mark.parametrize("files", [256, 100])
def test_a_process_that_may_have_no_connection_does_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: int
) -> None:
    """It refused every client with "its most of 0 connections", and asked it to come again in a moment."""
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (files, files))
    with pytest.raises(SettingsError, match=rf"may open {files} files here, .* ulimit -n 8448"):
        most_connections(FrontSettings())
    (finding,) = open_files(Settings(data_dir=tmp_path))
    assert (finding.state, finding.remedy[:14]) == ("wrong", "ulimit -n 8448")


@contextmanager
def held(world: World, count: int) -> Iterator[None]:
    """So many requests of acme's are waiting."""
    with world.database.read() as session:
        org_id = session.connection().exec_driver_sql("SELECT id FROM organisations WHERE name = 'acme'").scalar_one()
    over: Future[asyncio.Event] = Future()

    async def wait() -> None:
        event = asyncio.Event()
        waiting = [asyncio.ensure_future(world.service.polls.hold(org_id, event.wait(), False)) for _ in range(count)]
        await asyncio.sleep(0)
        over.set_result(event)
        await asyncio.gather(*waiting)

    portal: Any = world.http.portal
    waiting = portal.start_task_soon(wait)
    try:
        yield
    finally:
        portal.call(over.result().set)
        waiting.result()


def test_who_holds_their_share_is_told_what_is_there_and_no_more(world: World) -> None:
    object.__setattr__(world.service, "polls", LongPolls(most=8))
    sampler_id = sampler(world, world.session())
    poll(world, sampler_id)
    ended, waits = submit(world, sampler_id, 0), submit(world, sampler_id, 1)
    world.finish(ended, b"x", sample=1)
    target = {"type": "sampling_session", "sampling_session_id": sampler_id}
    with held(world, 2):
        assert world.outcome(ended).content == b"x"
        answer = poll(world, sampler_id, timeout=None)
        assert answer["completions"] == [finished(ended, 1)]
        assert poll(world, sampler_id, answer["cursor"])["completions"] == []  # it does not wait
        submit(world, sampler_id, 2)
        doors = ("retrieve_future", {"request_id": waits}), ("stream_future", {"request_id": waits}), (
            "retrieve_futures", {"target": target, "prev_cursor": answer["cursor"]}
        )  # fmt: skip
        for path, body in doors:
            refused = world.call("POST", path, json=body)
            assert (refused.status_code, refused.json()["code"]) == (429, "rate_limited")
            assert (refused.headers["x-weft-limit-scope"], refused.headers["retry-after"]) == ("organisation", "5")
        asked = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 1}
        refused = world.http.post("/v1/completions", json=asked, headers={"x-api-key": world.key})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")
        foreign = world.call("POST", "retrieve_future", json={"request_id": waits}, key=world.other_key)
        assert foreign.status_code == 404
    assert world.outcome(waits).status_code == 408
