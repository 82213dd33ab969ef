"""The queue of samples on a real Redis that loses replies or data, is full, or busy."""

from __future__ import annotations

import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from api.state.rates import Charge
from api.state.shared_rates import SharedRates
from scheduler.cluster.shared_limits import BacklogBoard
from scheduler.links.broadcasts import Accepted, Broadcasts
from scheduler.links.contract import Item, QueueUnreachable
from scheduler.links.redis_queue import MOST_CALLS, RedisQueue
from tests.scheduler.jobs.proxy import proxy
from tests.scheduler.links.samples import push
from tests.servers import redis_server
from tests.waiting import until


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
    assert until(lambda: queue.answered("c", 1))[0].result == b"again"
    queue.close()
    other.close()
