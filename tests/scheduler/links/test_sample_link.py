"""A generator's link over a real Redis: leases, answers, cancels."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import redis

from scheduler.links.broadcasts import Broadcasts
from scheduler.links.contract import LEFT_S, LIVES
from scheduler.links.large_results import INLINE_BYTES, parcel_of, whole
from scheduler.links.messages import Cancel, Declined, Done, Failure, PullSamples, SampleWork
from scheduler.links.redis_queue import RedisQueue
from scheduler.links.sample_link import LOOK_EVERY_S, SampleLink
from store.blobs.contract import StoreAway
from store.blobs.folder import FolderBlobs
from tests.scheduler.links.samples import push
from tests.waiting import until


@pytest.fixture
def sample_link(url: str, blobs: FolderBlobs) -> Iterator[SampleLink]:
    link = SampleLink(url, blobs)
    assert link._listener.connected.wait(10)
    yield link
    link.close()


def test_a_generator_leases_samples_and_its_answers_arrive_large_or_small(
    url: str, sample_link: SampleLink, blobs: FolderBlobs
) -> None:
    queue = RedisQueue(url)
    for name in ("a", "b", "c"):
        push(queue, name)
    sample_link.send(PullSamples(["m"], 4))
    work = sample_link.recv(10)
    assert isinstance(work, SampleWork)
    assert [op.op_id for op in work.ops] == ["a", "b"]
    assert sample_link.recv(0.05) is None  # its slots are taken
    payloads = {"a": b"small", "b": b"L" * (INLINE_BYTES + 1)}
    for op_id, payload in payloads.items():
        sample_link.send(Done(op_id, payload, {"sample": 3}))
    sample_link.recv(0.05)
    queue.answered("c", 0.01)
    answers = queue.answered("c", 2)
    for answer in answers:
        done, ref = whole(parcel_of(answer.result), blobs)
        assert isinstance(done, Done)
        assert (done.payload, bool(ref)) == (payloads[answer.id], answer.id == "b")
    assert {answer.id for answer in answers} == {"a", "b"}
    queue.close()


def test_a_large_answer_that_the_store_does_not_take_holds_up_neither_small_ones_nor_the_generator(
    url: str, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, there, tried = blobs.put, threading.Event(), threading.Event()

    def slow(ref: str, data: bytes) -> None:
        tried.set()
        if not there.wait(0.5):
            raise StoreAway("the server's object store does not answer (Unreachable)")
        put(ref, data)

    monkeypatch.setattr(blobs, "put", slow)
    queue, link, large = RedisQueue(url), SampleLink(url, blobs), b"L" * (INLINE_BYTES + 1)
    for name in ("a", "b", "c"):
        push(queue, name)
    link.send(PullSamples(["m"], 4))
    assert isinstance(link.recv(10), SampleWork)
    link.send(Done("a", large))
    link.send(Done("b", b"small"))
    link.send(PullSamples(["m"], 2))
    work = link.recv(10)
    assert isinstance(work, SampleWork)
    assert [op.op_id for op in work.ops] == ["c"]
    queue.answered("c", 0.01)
    assert [answer.id for answer in until(lambda: queue.answered("c", 1))] == ["b"]
    assert tried.wait(20)
    there.set()
    (answer,) = until(lambda: queue.answered("c", 1))
    done, _ = whole(parcel_of(answer.result), blobs)
    assert isinstance(done, Done)
    assert (done.op_id, done.payload) == ("a", large)
    link.close()
    queue.close()


def test_an_idle_generator_is_woken_by_work(url: str, sample_link: SampleLink) -> None:
    queue = RedisQueue(url)
    sample_link.send(PullSamples(["m"], 4))
    threading.Timer(0.3, push, (queue, "a")).start()
    began = time.monotonic()
    assert isinstance(sample_link.recv(20), SampleWork)
    assert time.monotonic() - began < 15
    queue.close()


def test_a_generator_that_waits_gets_what_needs_its_adapter_and_nobody_waits_for_one_that_does_not_come(
    url: str, blobs: FolderBlobs
) -> None:
    queue, holder, other = RedisQueue(url), SampleLink(url, blobs), SampleLink(url, blobs)
    push(queue, "first", "x")
    for link in (holder, other):
        link.send(PullSamples(["m"], 16))  # with two of them busy the holder stays within the other's HEAD_START
        link.recv(0.05)
    assert queue.holder("first") == holder.name
    time.sleep(LOOK_EVERY_S)  # so that the other looks
    came: list[str] = []
    waits = threading.Thread(target=lambda: came.extend(op.op_id for op in holder.recv(30).ops))  # type: ignore[union-attr]
    waits.start()
    began = time.monotonic()
    push(queue, "a", "x")
    if other.recv(0) is not None:  # on so busy a machine that it was anybody's by then
        assert time.monotonic() - began > LEFT_S
        other.send(Done("a", b"result"))
        push(queue, "a2", "x")
    waits.join()
    assert came in (["a"], ["a2"])
    push(queue, "b", "x")  # and now the holder is busy, too
    work = other.recv(30)
    assert isinstance(work, SampleWork)
    assert [op.op_id for op in work.ops] == ["b"]
    for end in (queue, holder, other):
        end.close()


def test_a_drained_generator_takes_nothing_more(url: str, sample_link: SampleLink) -> None:
    queue = RedisQueue(url)
    sample_link.send(PullSamples(["m"], 4))
    sample_link.drain()
    push(queue, "a")
    assert sample_link.recv(0.3) is None
    assert queue.ahead("a") == 0
    queue.close()


@pytest.mark.parametrize("why", ["draining", "short of memory"])
def test_nobody_waits_for_slots_that_a_generator_offers_no_more(url: str, sample_link: SampleLink, why: str) -> None:
    """A full generator takes newcomers unless another has slots free."""
    queue = RedisQueue(url)
    sample_link.send(PullSamples(["m"], 4))
    push(queue, "a")
    assert sample_link.recv(1) is not None
    push(queue, "b", org="new")
    assert queue.lease("full", ["m"], 0, 60, yields=1) == []
    if why == "draining":
        sample_link.drain()
    else:
        sample_link.send(PullSamples(["m"], 0))
    assert sample_link.recv(0) is None
    assert [lease.id for lease in queue.lease("full", ["m"], 0, 60, yields=1)] == ["b"]
    queue.close()


def test_what_a_generator_lost_is_cancelled_and_its_answer_dropped(
    url: str, sample_link: SampleLink, blobs: FolderBlobs
) -> None:
    queue = RedisQueue(url)
    push(queue, "a")
    sample_link.send(PullSamples(["m"], 4))
    assert isinstance(sample_link.recv(10), SampleWork)
    redis.Redis.from_url(url).flushall()
    assert until(lambda: sample_link.recv(0.1)) == Cancel("a")
    push(queue, "a")  # as the leader does
    assert until(lambda: queue.holder("a") or sample_link.recv(0.05)) == sample_link.name
    assert sample_link.recv(0.05) is None  # while it is still being cancelled here
    sample_link.send(Done("a", b"cut short"))
    work = until(lambda: sample_link.recv(0.1))
    assert [op.op_id for op in work.ops] == ["a"]
    sample_link.send(Done("a", b"whole"))
    sample_link.recv(0.05)
    queue.answered("c", 0.01)
    results = [whole(parcel_of(answer.result), blobs)[0] for answer in queue.answered("c", 2)]
    assert results == [Done("a", b"whole")]
    queue.close()


def test_a_running_sample_is_cancelled(url: str, sample_link: SampleLink) -> None:
    queue, broadcasts = RedisQueue(url), Broadcasts(url)
    push(queue, "a")
    sample_link.send(PullSamples(["m"], 4))
    assert isinstance(until(lambda: sample_link.recv(0.5)), SampleWork)
    broadcasts.cancel(sample_link.name, "a")
    assert until(lambda: sample_link.recv(0.5)) == Cancel("a")
    queue.close()
    broadcasts.close()


def test_a_sample_whose_engine_died_is_handed_over_again_and_at_last_fails(
    url: str, sample_link: SampleLink, blobs: FolderBlobs
) -> None:
    queue = RedisQueue(url)
    push(queue, "deadly")
    for life in range(LIVES):
        sample_link.send(PullSamples(["m"], 4))
        work = until(lambda: sample_link.recv(0.2))
        assert [op.op_id for op in work.ops] == ["deadly"]
        assert queue.holder("deadly") == sample_link.name, life
        sample_link.send(Declined("deadly", "vLLM was lost", lost=True))
    sample_link.recv(0)
    assert queue.expire().given_up == ["deadly"]
    queue.close()


def test_another_generator_goes_on_with_what_an_engine_died_over(
    url: str, sample_link: SampleLink, blobs: FolderBlobs
) -> None:
    queue, other = RedisQueue(url), SampleLink(url, blobs)
    push(queue, "a")
    sample_link.send(PullSamples(["m"], 4))
    assert isinstance(sample_link.recv(10), SampleWork)
    sample_link.send(Declined("a", "vLLM was lost", lost=True))
    sample_link.send(PullSamples(["m"], 0))
    sample_link.recv(0)
    other.send(PullSamples(["m"], 4))
    assert isinstance(other.recv(10), SampleWork)
    assert queue.holder("a") == other.name
    for end in (queue, other):
        end.close()


def test_what_one_engine_cannot_serve_goes_to_another_and_fails_when_none_can(
    url: str, sample_link: SampleLink, blobs: FolderBlobs
) -> None:
    queue, other = RedisQueue(url), SampleLink(url, blobs)
    for link in (sample_link, other):
        link.send(PullSamples(["m"], 2))
        assert link.recv(0) is None

    def taken(link: SampleLink) -> list[str]:
        work = until(lambda: link.recv(0.2))
        assert isinstance(work, SampleWork)
        return [op.op_id for op in work.ops]

    push(queue, "a")
    assert taken(sample_link) == ["a"]
    sample_link.send(Declined("a", "no routes here"))
    sample_link.send(PullSamples(["m"], 2))
    assert sample_link.recv(0) is None
    assert taken(other) == ["a"]
    other.send(Done("a", b"whole"))
    other.send(PullSamples(["m"], 2))
    assert other.recv(0) is None
    push(queue, "b")
    assert taken(other) == ["b"]
    other.send(Declined("b", "too long", adapter=True))
    assert other.recv(0) is None
    assert taken(sample_link) == ["b"]
    sample_link.send(Declined("b", "no routes here"))
    sample_link.recv(0)
    results = []
    while len(results) < 2:
        results += [whole(parcel_of(answer.result), blobs)[0] for answer in queue.answered("c", 5)]
    assert results == [Done("a", b"whole"), Done("b", failure=Failure("no routes here; too long", "user"))]
    other.close()
    queue.close()
