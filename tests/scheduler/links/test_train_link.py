"""A trainer's link over a real Redis: messages, signs of life, and how it joins its leader."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import redis

from scheduler.links import train_link
from scheduler.links.contract import QueueUnreachable
from scheduler.links.large_results import INLINE_BYTES
from scheduler.links.messages import Done, Drain, Pass, PassOver, PullPass
from scheduler.links.train_link import Joining, LeaderLink, TrainerLink
from store.blobs.folder import FolderBlobs
from tests.scheduler.jobs.proxy import Proxy, proxy
from tests.servers import OwnRedis
from tests.waiting import until


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
        await asyncio.to_thread(until, lambda: server.get(sign) not in (None, str(own).encode()))
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
            assert await asyncio.to_thread(until, lambda: not through.losing)
        assert await asyncio.to_thread(trainer.recv, 0.2) is None
        trainer.send(PullPass(["m"]))
        assert await anext(messages) == PullPass(["m"])

    with proxy(int(url.rsplit(":", 1)[1].split("/")[0])) as through:
        far = f"redis://127.0.0.1:{through.port}/0"
        ends = (far, url) if behind == "trainer" else (url, far)
        with_trainer(ends[0], blobs, partial(scenario, through), of_leader=ends[1])


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
