"""One poll for all requests of one sampler's client."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError
from weft.wire import FuturesRetrieveResponse

from scheduler.cluster.completions import SharedFeeds
from scheduler.journal.ending.completions import CLIENT_STRIDE, Completion, FeedKey, LocalFeeds
from scheduler.links.messages import Done, Failure
from store.blobs.contract import StoreAway
from tests.api.conftest import World
from tests.api.test_sampling import sample, sampler


def submit(world: World, sampler_id: str, seq: int = 0) -> str:
    return str(world.post("asample", sample(sampler_id, seq))["request_id"])


def poll(world: World, sampler_id: str, cursor: int = 0, client: int = 0, **more: Any) -> Any:
    target = {"type": "sampling_session", "sampling_session_id": sampler_id, "cloned_sampler_id": client}
    return world.post("retrieve_futures", {"target": target, "prev_cursor": cursor, "timeout": 0} | more)


def fail(world: World, request_id: str, why: str) -> None:
    async def settle() -> None:
        world.journal.finish(Done(request_id, failure=Failure(why, "user")))
        await world.journal.flush()

    world.http.portal.call(settle)  # type: ignore[union-attr]


def finished(request_id: str, size: int) -> dict[str, Any]:
    return {"state": "finished", "request_id": request_id, "response_payload_uncompressed_size": size}


def test_the_answer_is_what_its_wire_class_would_say(world: World) -> None:
    sampler_id = sampler(world, world.session())
    done, failed = submit(world, sampler_id, 0), submit(world, sampler_id, 1)
    world.finish(done, b"12345")
    fail(world, failed, "no")
    target = {"type": "sampling_session", "sampling_session_id": sampler_id}
    reply = world.call("POST", "retrieve_futures", json={"target": target, "prev_cursor": 0, "timeout": 0})
    told = FuturesRetrieveResponse.model_validate_json(reply.content)
    assert [completion.state for completion in told.completions] == ["finished", "failed"]
    assert told.model_dump_json().encode() == reply.content
    assert reply.headers["content-type"] == "application/json"


def test_what_ended_before_and_after_the_first_poll(world: World) -> None:
    sampler_id = sampler(world, world.session())
    first, second, third = (submit(world, sampler_id, seq) for seq in range(3))
    world.finish(first, b"12345", prefill=3, sample=4)
    answer = poll(world, sampler_id)
    assert answer["completions"] == [finished(first, 5)]
    world.finish(second, b"1", prefill=3, sample=4)
    later = poll(world, sampler_id, answer["cursor"])
    assert later["completions"] == [finished(second, 1)]
    assert later["cursor"] > answer["cursor"]
    world.post("cancel_future", {"request_id": third})
    assert poll(world, sampler_id, later["cursor"]) == {"completions": [], "cursor": later["cursor"]}


def test_failures_are_told_and_their_error_is_fetched(world: World) -> None:
    sampler_id = sampler(world, world.session())
    request_id = submit(world, sampler_id)
    poll(world, sampler_id)
    fail(world, request_id, "out of luck")
    assert poll(world, sampler_id)["completions"] == [{"state": "failed", "request_id": request_id}]
    assert world.error(request_id) == "out of luck"


def test_clones_have_feeds_of_their_own(world: World) -> None:
    sampler_id = sampler(world, world.session())
    counters = [
        world.post("join_sampling_session", {"sampling_session_id": sampler_id})["client_counter"] for _ in "ab"
    ]
    assert counters == [1, 2]
    request_id = submit(world, sampler_id, seq=2 * CLIENT_STRIDE + 7)
    world.finish(request_id, b"1", sample=1)
    found = [poll(world, sampler_id, client=client)["completions"] for client in (0, 1, 2)]
    assert found == [[], [], [finished(request_id, 1)]]


def test_a_poll_waits_for_the_event_and_no_longer_than_it_may(world: World) -> None:
    sampler_id = sampler(world, world.session())
    request_id = submit(world, sampler_id)
    began = time.monotonic()
    assert poll(world, sampler_id, timeout=None)["completions"] == []
    assert 0.15 < time.monotonic() - began < 5  # the settings of these tests hold a poll for 0.2 s
    threading.Timer(0.05, world.finish, (request_id, b"1")).start()
    assert poll(world, sampler_id, timeout=None)["completions"] == [finished(request_id, 1)]


def test_results_that_were_fetched_are_dropped(world: World) -> None:
    sampler_id = sampler(world, world.session())
    request_id = submit(world, sampler_id)
    world.finish(request_id, b"1" * 2000, sample=1)
    ref = world.operation(request_id).result_ref
    assert ref is not None
    poll(world, sampler_id, retrieved_request_ids=["unknown"])
    assert world.service.blobs.exists(ref)
    poll(world, sampler_id, retrieved_request_ids=[request_id])
    assert not world.service.blobs.exists(ref)
    assert world.outcome(request_id).status_code == 410


def test_results_that_cannot_be_dropped_now_disturb_no_poll(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(_ref: str) -> None:
        raise StoreAway("the server's object store does not answer (Unreachable)")

    sampler_id = sampler(world, world.session())
    request_id = submit(world, sampler_id)
    world.finish(request_id, b"1" * 2000, sample=1)
    monkeypatch.setattr(world.service.blobs, "delete", away)
    assert poll(world, sampler_id, retrieved_request_ids=[request_id])["completions"] == [finished(request_id, 2000)]


def test_after_a_restart_the_cursor_still_holds(world: World) -> None:
    sampler_id = sampler(world, world.session())
    first, second = submit(world, sampler_id, 0), submit(world, sampler_id, 1)
    poll(world, sampler_id)
    world.finish(first, b"1", sample=1)
    cursor = poll(world, sampler_id)["cursor"]
    world.finish(second, b"2", sample=1)
    world.journal.completions = LocalFeeds()
    told = [completion["request_id"] for completion in poll(world, sampler_id, cursor)["completions"]]
    assert second in told


def test_a_restart_with_a_clock_that_was_set_back_hides_nothing(world: World) -> None:
    """The client's cursor is ahead of the clock then: it waited until the clock had come that far."""
    sampler_id = sampler(world, world.session())
    first, second, third = (submit(world, sampler_id, seq) for seq in range(3))
    world.finish(first, b"1", sample=1)
    ahead = (time.time_ns() // 1000) + 600 * 10**6
    told = poll(world, sampler_id, ahead)
    assert told["completions"] == [finished(first, 1)]
    world.finish(second, b"2", sample=1)
    assert poll(world, sampler_id, ahead)["completions"][1:] == [finished(second, 1)]  # whose first answer was lost
    world.finish(third, b"3", sample=1)
    assert [one["request_id"] for one in poll(world, sampler_id, told["cursor"])["completions"]] == [second, third]


def test_what_ended_before_is_told_though_the_first_poll_failed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the database is away after a restart: the next poll waited for ever for what had ended."""
    sampler_id = sampler(world, world.session())
    request_id = submit(world, sampler_id)
    world.finish(request_id, b"1", sample=1)
    reads, read = iter((False, True)), world.service.database.read

    def away() -> Any:
        if next(reads, False):  # the sampler is found; what its feed missed is not
            raise OperationalError("SELECT", {}, Exception("connection refused"))
        return read()

    monkeypatch.setattr(world.service.database, "read", away)
    body = {"target": {"type": "sampling_session", "sampling_session_id": sampler_id}, "timeout": 0}
    assert world.call("POST", "retrieve_futures", json=body).status_code == 503
    assert poll(world, sampler_id)["completions"] == [finished(request_id, 1)]


def test_polls_that_come_while_a_feed_is_looked_up_are_told_all_of_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client asks again, because its first poll broke off, and hears of what ends meanwhile: what had ended before
    was then behind its cursor, and it waited for that for ever."""
    sampler_id = sampler(world, world.session())
    before, meanwhile = submit(world, sampler_id, 0), submit(world, sampler_id, 1)
    world.finish(before, b"x", sample=1)
    stamps = SharedFeeds(lambda count: 1_000_000)  # like a replica that has followed nothing yet
    monkeypatch.setattr(world.journal, "completions", stamps)
    read, looking, go = world.service.database.read, threading.Event(), threading.Event()

    @contextmanager
    def slow() -> Iterator[Any]:
        if stamps.follows(key):
            looking.set()
            assert go.wait(30)
        with read() as session:
            yield session

    key = FeedKey(world.operation(before).org_id, sampler_id, 0)
    monkeypatch.setattr(world.service.database, "read", slow)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(poll, world, sampler_id, timeout=None)
        assert looking.wait(30)
        second = pool.submit(poll, world, sampler_id, timeout=None)
        time.sleep(0.05)
        portal: Any = world.http.portal
        portal.call(stamps.heard, key, Completion(meanwhile, 1), 2_000_000)
        time.sleep(0.05)
        go.set()
        first.result()
        answer = second.result()
    told = answer["completions"] + poll(world, sampler_id, answer["cursor"])["completions"]
    assert told == [finished(before, 1), finished(meanwhile, 1)]


def test_foreign_and_unknown_targets(world: World) -> None:
    sampler_id = sampler(world, world.session())
    poll(world, sampler_id)
    body = {"target": {"type": "sampling_session", "sampling_session_id": sampler_id}, "timeout": 0}
    world.post("retrieve_futures", body, key=world.other_key, status=404)
    world.post("join_sampling_session", {"sampling_session_id": sampler_id}, key=world.other_key, status=404)
    world.post("retrieve_futures", {"target": {"sampling_session_id": "none"}}, status=404)


@pytest.mark.parametrize("wrong", [{"target": {}}, {"prev_cursor": -1}, {"more": 1}])
def test_mistakes(world: World, wrong: dict[str, Any]) -> None:
    sampler_id = sampler(world, world.session())
    body = {"target": {"sampling_session_id": sampler_id}, "timeout": 0} | wrong
    world.post("retrieve_futures", body, status=422)


def test_a_stopping_server_answers_at_once(world: World) -> None:
    sampler_id = sampler(world, world.session())
    world.service.polls.release()
    assert poll(world, sampler_id, timeout=None) == {"completions": [], "cursor": 0}
