"""The links of workers over a real Redis: messages, signs of life, and answers that come too late."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from api.state.rates import Charge
from api.state.shared_rates import SharedRates
from scheduler.cluster.shared_limits import BacklogBoard
from scheduler.links import (
    broadcasts as broadcast_module,
    leading,
    redis_queue,
    sample_link as sample_links,
    train_link,
)
from scheduler.links.broadcasts import Accepted, Broadcasts, Ended, Listener, ToWorker
from scheduler.links.contract import LEFT_S, LIVES, Item, QueueUnreachable
from scheduler.links.large_results import INLINE_BYTES, parcel_of, whole
from scheduler.links.messages import (
    FORM,
    Cancel,
    Declined,
    Done,
    Drain,
    Failure,
    Pass,
    PassOver,
    PolicyMoved,
    PullPass,
    PullSamples,
    SampleOp,
    SampleWork,
    TrainOp,
    form_of,
)
from scheduler.links.redis_queue import MOST_CALLS, SAMPLES, RedisQueue
from scheduler.links.sample_link import LOOK_EVERY_S, SampleLink
from scheduler.links.train_link import Joining, LeaderLink, TrainerLink
from store.blobs.contract import StoreAway
from store.blobs.folder import FolderBlobs
from tests.scheduler.jobs.proxy import Proxy, proxy
from tests.servers import OwnRedis, redis_server


@pytest.fixture(autouse=True)
def empty(url: str) -> None:
    redis.Redis.from_url(url).flushall()


@pytest.fixture
def sample_link(url: str, blobs: FolderBlobs) -> Iterator[SampleLink]:
    link = SampleLink(url, blobs)
    assert link._listener.connected.wait(10)
    yield link
    link.close()


def push(queue: RedisQueue, name: str, adapter: str = "") -> None:
    body = msgspec.msgpack.encode(SampleOp(name, "m", f"ops/{name}", 2))
    assert queue.push(Item(name, ("m", "org", "interactive", "lane"), 10, body, slots=2, adapter=adapter))


def eventually(holds: Callable[[], Any], within_s: float = 20.0) -> Any:
    deadline = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


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
    assert [answer.id for answer in eventually(lambda: queue.answered("c", 1))] == ["b"]
    assert tried.wait(20)
    there.set()
    (answer,) = eventually(lambda: queue.answered("c", 1))
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


def test_what_a_generator_lost_is_cancelled_and_its_answer_dropped(
    url: str, sample_link: SampleLink, blobs: FolderBlobs
) -> None:
    queue = RedisQueue(url)
    push(queue, "a")
    sample_link.send(PullSamples(["m"], 4))
    assert isinstance(sample_link.recv(10), SampleWork)
    redis.Redis.from_url(url).flushall()
    assert eventually(lambda: sample_link.recv(0.1)) == Cancel("a")
    push(queue, "a")  # as the leader does
    assert eventually(lambda: queue.holder("a") or sample_link.recv(0.05)) == sample_link.name
    assert sample_link.recv(0.05) is None  # while it is still being cancelled here
    sample_link.send(Done("a", b"cut short"))
    work = eventually(lambda: sample_link.recv(0.1))
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
    assert isinstance(eventually(lambda: sample_link.recv(0.5)), SampleWork)
    broadcasts.cancel(sample_link.name, "a")
    assert eventually(lambda: sample_link.recv(0.5)) == Cancel("a")
    queue.close()
    broadcasts.close()


def with_trainer(
    url: str, blobs: FolderBlobs, scenario: Callable[[TrainerLink, LeaderLink], Awaitable[None]], of_leader: str = ""
) -> None:
    """Run `scenario` between a trainer that has joined and its leader, which may have a URL of its own."""

    async def run() -> None:
        joining = Joining(url, uuid.uuid4().hex)
        joining.lead(60)
        trainer = await asyncio.to_thread(TrainerLink, url, blobs)
        name = await asyncio.to_thread(joining.next, 5)
        assert name is not None
        leader = LeaderLink(of_leader or url, name, blobs)
        try:
            await scenario(trainer, leader)
        finally:
            leader.close()
            trainer.close()
            joining.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_messages_go_both_ways_in_order_and_a_goodbye_ends_the_link(url: str, blobs: FolderBlobs) -> None:
    async def scenario(trainer: TrainerLink, leader: LeaderLink) -> None:
        large = Done("op", b"x" * (INLINE_BYTES + 1))
        for message in (PullPass(["m"]), large, Done("last")):
            trainer.send(message)
        leader.send(Pass(1, "m", []))
        leader.send(Drain())
        assert await asyncio.to_thread(trainer.recv, 10) == Pass(1, "m", [])
        assert await asyncio.to_thread(trainer.recv, 10) == Drain()
        trainer.close()
        assert [message async for message in leader.messages()] == [PullPass(["m"]), large, Done("last")]

    with_trainer(url, blobs, scenario)
    assert list(blobs.path("handoff").iterdir()) == []


def test_a_trainer_that_is_silent_is_gone(url: str, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_link, "LEASE_S", 1.5)
    monkeypatch.setattr(TrainerLink, "_beat", lambda self: None)

    async def scenario(trainer: TrainerLink, leader: LeaderLink) -> None:
        trainer.send(PullPass(["m"]))
        assert [message async for message in leader.messages()] == [PullPass(["m"])]

    with_trainer(url, blobs, scenario)


def test_a_trainer_that_is_given_up_hears_of_it_and_what_it_sent_is_read(url: str, blobs: FolderBlobs) -> None:
    async def scenario(trainer: TrainerLink, leader: LeaderLink) -> None:
        trainer.send(PullPass(["m"]))
        leader.hang_up()
        assert [message async for message in leader.messages()] == [PullPass(["m"])]
        with pytest.raises(EOFError):
            await asyncio.to_thread(trainer.recv, 20)

    with_trainer(url, blobs, scenario)


#: A trainer that joins with a lease longer than any test, says so, and works on.
TRAINER = """
import sys, time
from pathlib import Path
from scheduler.links import train_link
from scheduler.links.messages import PullPass
from store.blobs.contract import StoreAway
from store.blobs.folder import FolderBlobs
train_link.LEASE_S = 3600
link = train_link.TrainerLink(sys.argv[1], FolderBlobs(Path(sys.argv[2])))
link.send(PullPass(["m"]))
time.sleep(3600)
"""


def test_a_trainer_that_is_killed_is_gone_before_its_lease_is(url: str, blobs: FolderBlobs) -> None:
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, url, str(blobs.root)])

    async def run() -> None:
        joining = Joining(url, uuid.uuid4().hex)
        joining.lead(60)
        try:
            name = None
            while name is None:
                name = await asyncio.to_thread(joining.next, 5)
            leader = LeaderLink(url, name, blobs)
            found = []
            async for message in leader.messages():
                found.append(message)
                trainer.kill()
            assert found == [PullPass(["m"])]
            assert redis.Redis.from_url(url).pttl(train_link._key("alive", name)) > 600_000
            leader.close()
        finally:
            trainer.kill()
            trainer.wait()
            joining.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_trainer_that_loses_its_connections_goes_on(
    url: str, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_link, "CLOSED_S", 10)

    async def scenario(trainer: TrainerLink, leader: LeaderLink) -> None:
        server, own = redis.Redis.from_url(url), trainer._held.client_id()
        reading = asyncio.create_task(anext(leader.messages()))
        await asyncio.sleep(1)  # a look or two at the connection
        server.client_kill_filter(_id=own)
        sign = train_link._key("alive", leader.name)
        await asyncio.to_thread(eventually, lambda: server.get(sign) not in (None, str(own).encode()))
        await asyncio.sleep(2)
        assert not reading.done()
        trainer.send(PullPass(["m"]))
        assert await reading == PullPass(["m"])

    with_trainer(url, blobs, scenario)


def test_a_trainer_whose_sign_of_life_has_ended_gives_up_though_it_cannot_ask(
    blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Told to stop while Redis is away, it would wait in order to say goodbye. It says why only once."""
    monkeypatch.setattr(train_link, "LEASE_S", 1.0)
    gone = OwnRedis()
    joining = Joining(gone.url, "leader")
    joining.lead(60)
    link = TrainerLink(gone.url, blobs)
    gone.stop()
    with pytest.raises(EOFError):
        link.send(PullPass([], 0))
    with pytest.raises(EOFError):
        link.recv(0.1)
    assert says_away(caplog) == 1
    link.close()
    joining.close()


def says_away(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.message.startswith("Redis cannot be reached") for record in caplog.records)


def test_a_trainer_that_looks_for_a_leader_waits_for_a_redis_that_is_away(
    blobs: FolderBlobs, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer that ended instead would have to read its models again. It says once what it waits for."""
    away = OwnRedis()
    away.stop()
    with ThreadPoolExecutor(1) as pool:
        link = pool.submit(TrainerLink, away.url, blobs)
        with pytest.raises(TimeoutError):
            link.result(0.5)
        assert says_away(caplog) == 1
        away.start()
        joining = Joining(away.url, "leader")
        joining.lead(60)
        link.result(20).close()
    joining.close()
    away.stop()


@pytest.mark.parametrize("behind", ["trainer", "leader"])
def test_whatever_reply_is_lost_each_message_arrives_once_and_in_order(
    url: str, blobs: FolderBlobs, behind: str
) -> None:
    async def scenario(through: Proxy, trainer: TrainerLink, leader: LeaderLink) -> None:
        messages = aiter(leader.messages())
        ups = [Done(f"up {number}") for number in range(4)]
        downs = [Pass(number, f"down {number}", []) for number in range(4)]
        for number in range(4):
            reading = asyncio.ensure_future(anext(messages))
            through.losing = b"up 1" if number == 1 else b""
            await asyncio.to_thread(trainer.send, ups[number])
            assert await reading == ups[number]
            through.losing = b"down 1" if number == 1 else b""
            receiving = asyncio.create_task(asyncio.to_thread(trainer.recv, 20))
            leader.send(downs[number])
            assert await receiving == downs[number]
            # The message may be there before its reply is lost.
            assert await asyncio.to_thread(eventually, lambda: not through.losing)
        assert await asyncio.to_thread(trainer.recv, 0.2) is None
        trainer.send(PullPass(["m"]))
        assert await anext(messages) == PullPass(["m"])

    with proxy(int(url.rsplit(":", 1)[1].split("/")[0])) as through:
        far = f"redis://127.0.0.1:{through.port}/0"
        ends = (far, url) if behind == "trainer" else (url, far)
        with_trainer(ends[0], blobs, partial(scenario, through), of_leader=ends[1])


def test_workers_of_another_version_get_nothing_and_say_so(
    url: str, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They would not know all fields of a message, such as one not to take a step."""
    joining, newer = Joining(url, "token"), RedisQueue(url)
    joining.lead(60)
    push(newer, "s")
    older = msgspec.defstruct("TrainOp", [("op_id", str), ("run_id", str)])
    other = form_of([older], [])
    assert other not in (FORM, form_of([TrainOp], []), form_of([older], ["create"]))
    theirs = SAMPLES.replace(FORM, other)
    with monkeypatch.context() as patch:
        for link in (train_link, redis_queue):
            patch.setattr(link, "LEADER", leading.LEADER.replace(FORM, other))
        patch.setattr(train_link, "TRAINERS", leading.TRAINERS.replace(FORM, other))
        patch.setattr(sample_links, "RedisQueue", partial(RedisQueue, name=theirs))
        patch.setattr(sample_links, "BEAT_S", 0.01)
        patch.setattr(leading, "LATE_S", 0.0)
        with pytest.raises(EOFError, match="before there was a leader"):
            TrainerLink(url, blobs, iter([False, False, True]).__next__)
        generator = SampleLink(url, blobs)
        generator.send(PullSamples(["m"], 2))
        assert eventually(lambda: len(caplog.records) == 2 and newer.strangers() == [generator.name])
        generator.close()
    assert [record.message for record in caplog.records] == 2 * [leading.NO_LEADER]
    assert joining.next(0.1) is None
    generators = RedisQueue(url, theirs)
    assert generators.lease("generator", ["m"], 2, 60) == []
    assert [lease.id for lease in newer.lease("generator", ["m"], 2, 60)] == ["s"]
    for end in (joining, newer, generators):
        end.close()


def test_a_trainer_joins_once_though_it_said_so_twice_and_the_leader_missed_it(url: str, blobs: FolderBlobs) -> None:
    token = uuid.uuid4().hex
    with proxy(int(url.rsplit(":", 1)[1].split("/")[0])) as through:
        joining, there = Joining(f"redis://127.0.0.1:{through.port}/0", token), redis.Redis.from_url(url)
        joining.lead(60)
        assert joining.next(0.1) is None
        trainer = TrainerLink(url, blobs)
        there.rpush(train_link._key("joining", token), trainer._link)
        through.losing = trainer._link.encode()
        with pytest.raises(QueueUnreachable):
            joining.next(5)
        assert joining.next(5) == trainer._link
        assert joining.next(0.1) is None
        there.rpush(train_link._key("joining", token), trainer._link)
        assert joining.next(0.1) is None
        assert there.llen(train_link._key("joining", token)) <= 1
        for end in (trainer, joining, there):
            end.close()


def test_a_lease_whose_reply_was_lost_comes_with_the_next(url: str) -> None:
    with proxy(int(url.rsplit(":", 1)[1].split("/")[0])) as through:
        name, there = uuid.uuid4().hex, RedisQueue(url)
        queue = RedisQueue(f"redis://127.0.0.1:{through.port}/0")
        for op_id in ("known", f"lost {name}", "next"):
            push(there, op_id)
        assert [lease.id for lease in queue.lease("w", ["m"], 2, 60)] == ["known"]
        through.losing = name.encode()
        assert [lease.id for lease in queue.lease("w", ["m"], 2, 60)] == [f"lost {name}"]
        assert through.losing == b""
        assert queue.lease("w", ["m"], 0, 60, most=0) == []
        (lease,) = queue.lease("w", ["m"], 2, 60)
        assert lease.id == "next"
        assert there.answer(lease.id, lease.epoch, b"result")
        for end in (queue, there):
            end.close()


def test_calls_that_travel_together_do_what_each_does_alone(url: str) -> None:
    queue, many = RedisQueue(url, uuid.uuid4().hex), 3 * MOST_CALLS
    items = [Item(f"i{number}", ("m", "org", "interactive", "lane"), 10, b"\x00\xff body") for number in range(many)]
    assert queue.answered("settler", 0.01) == []
    queue.push_all(items)
    assert queue.known([item.id for item in items]) == {item.id for item in items}
    leases = queue.lease("w", ["m"], many, 60)
    assert [(lease.id, lease.body) for lease in leases] == [(item.id, item.body) for item in items]
    late = leases[0].epoch - 1  # from an earlier life: it changes nothing
    queue.answer_all((lease.id, late if place == 0 else lease.epoch, b"\xfe") for place, lease in enumerate(leases))
    answers = queue.answered("settler", 5)
    answers += queue.answered("settler", 5)
    assert [answer.id for answer in answers] == [item.id for item in items[1:]]
    assert {answer.result for answer in answers} == {b"\xfe"}
    settled = [(answer.id, answer.receipt, items[0].path, -10) for answer in answers]
    queue.settle(settled)
    assert queue.known([item.id for item in items]) == {"i0"}
    queue.push_all([])
    there = redis.Redis.from_url(url)
    before = {key: there.dump(key) for key in there.scan_iter()}
    queue.settle(settled)  # whose reply was lost: it is sent again
    assert {key: there.dump(key) for key in there.scan_iter()} == before
    there.close()
    queue.close()


def untold(client: redis.Redis, key: str) -> int:
    """Messages that were sent there and not taken yet."""
    return sum(len(fields) for _, fields in client.xrange(key))  # type: ignore[union-attr]


def test_the_end_of_a_pass_travels_with_what_comes_next(url: str, blobs: FolderBlobs) -> None:
    over, waiting = PassOver(1, 10, 1, 0.1), redis.Redis.from_url(url)

    async def scenario(trainer: TrainerLink, leader: LeaderLink) -> None:
        key, messages = train_link._key("up", leader.name), aiter(leader.messages())
        trainer.send(over)
        assert not untold(waiting, key)
        trainer.send(PullPass(["m"]))
        assert [await anext(messages), await anext(messages)] == [over, PullPass(["m"])]
        trainer.send(over)
        assert await asyncio.to_thread(trainer.recv, 0.01) is None  # nothing else comes
        assert await anext(messages) == over

    with_trainer(url, blobs, scenario)
    waiting.close()


def test_what_is_done_in_little_time_travels_together(
    url: str, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = redis.Redis.from_url(url)

    async def scenario(trainer: TrainerLink, leader: LeaderLink) -> None:
        key, done = train_link._key("up", leader.name), [Done(str(number)) for number in range(4)]
        monkeypatch.setattr(train_link, "APART_S", 3600)
        for message in done[:3]:
            trainer.send(message)
        assert untold(waiting, key) == 1  # the first
        assert await asyncio.to_thread(trainer.recv, 0.01) is None  # a trainer that waits has told all
        assert untold(waiting, key) == 3
        trainer.send(done[3])
        trainer.close()
        assert [message async for message in leader.messages()] == done

    with_trainer(url, blobs, scenario)
    waiting.close()


def test_what_is_done_is_told_soon_though_the_trainer_works_on(url: str, blobs: FolderBlobs) -> None:
    async def scenario(trainer: TrainerLink, leader: LeaderLink) -> None:
        for number in range(10):
            trainer.send(Done(str(number)))
        messages = aiter(leader.messages())
        assert [(await anext(messages)).op_id for _ in range(10)] == [str(number) for number in range(10)]

    with_trainer(url, blobs, scenario)


def test_a_trainer_notices_another_leader(url: str, blobs: FolderBlobs) -> None:
    async def scenario(trainer: TrainerLink, leader: LeaderLink) -> None:
        Joining(url, "another").lead(60)
        with pytest.raises(EOFError):
            await asyncio.to_thread(trainer.recv, 20)
        with pytest.raises(EOFError):
            trainer.send(PullPass(["m"]))

    with_trainer(url, blobs, scenario)


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
    eventually(lambda: all(len(found) == 4 for found in heard))
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
    eventually(lambda: not listener.connected.is_set())
    listener.stop()


def busy(client: Any) -> bool:
    try:
        return not client.ping()
    except redis.ResponseError:
        return True


@pytest.mark.parametrize("why", ["memory", "disk", "a script"])
def test_a_redis_that_is_full_or_busy_is_away_until_it_is_not(tmp_path: Path, why: str) -> None:
    """Otherwise workers would die of it, tasks of servers would end, and rate-limited requests would fail."""
    folder = tmp_path / "redis"
    folder.mkdir()
    options = ("--save", "3600 1", "--dir", str(folder), "--busy-reply-threshold", "50")
    with redis_server(*options) as own, ExitStack() as end:
        client, queue, told, board = redis.Redis.from_url(own), RedisQueue(own), Broadcasts(own), BacklogBoard(own)
        limits, limit = SharedRates(own), Charge("organisation", "o", "requests_per_minute", 1, 1)
        if why == "memory":
            client.config_set("maxmemory", 1)
        elif why == "a script":
            script = end.enter_context(ThreadPoolExecutor()).submit(client.eval, "while true do end", 0)
            while not busy(client):
                time.sleep(0.01)
        else:
            folder.rmdir()
            client.bgsave()
            while client.info()["rdb_last_bgsave_status"] == "ok":  # type: ignore[index]
                time.sleep(0.01)
        for call in (
            partial(queue.push, Item("a", ("m", "o", "interactive", "l"), 1)),
            partial(told.accepted, [Accepted("a")]),
            partial(told.count, {"lost": 1}),
            partial(told.reserve, 1),
            partial(board.exchange, "one", {}),
        ):
            with pytest.raises(QueueUnreachable):
                call()
        assert [limits._take([limit]) for _ in range(2)] == [None, None]
        if why == "a script":
            client.script_kill()
            assert isinstance(script.exception(), redis.ResponseError)
        client.config_set("maxmemory", 0)
        client.config_set("stop-writes-on-bgsave-error", "no")
        assert queue.push(Item("a", ("m", "o", "interactive", "l"), 1))
        assert board.exchange("one", {}) == []


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
    eventually(lambda: heard == [moved])
    assert len(gaps) == 3
    listener.stop()
    there.close()


def test_answers_survive_that_redis_loses_everything_while_somebody_waits(url: str) -> None:
    queue, found = RedisQueue(url, "flushed"), []
    queue.answered("c", 0.01)
    waiting = threading.Thread(target=lambda: found.append(queue.answered("c", 4)))
    waiting.start()
    time.sleep(0.2)
    other = RedisQueue(url, "flushed")
    redis.Redis.from_url(url).flushall()
    waiting.join(20)
    assert found == [[]]
    other.push(Item("a", ("m", "o", "interactive", "l"), 1))
    (lease,) = other.lease("w", ["m"], 1, 60)
    assert other.answer("a", lease.epoch, b"again")
    assert eventually(lambda: queue.answered("c", 1))[0].result == b"again"
    queue.close()
    other.close()


def test_a_sample_whose_engine_died_is_handed_over_again_and_at_last_fails(
    url: str, sample_link: SampleLink, blobs: FolderBlobs
) -> None:
    queue = RedisQueue(url)
    push(queue, "deadly")
    for life in range(LIVES):
        sample_link.send(PullSamples(["m"], 4))
        work = eventually(lambda: sample_link.recv(0.2))
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
        work = eventually(lambda: link.recv(0.2))
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
